"""Environments without a person: from a source tree to a recipe in which its own commands work, or nothing.

Propose commands that a maintainer would run; choose three; make them pass in at most five tries, each of which may change the
recipe by what the failure says; else discard the tree. The rules below stand for an agent; `repair` lets one take their place.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl.environments.sandbox import ImageError
from rl.tasks.assemble import PYTEST, WORKDIR
from rl.tasks.release import TEST, requirements
from rl.tasks.task import Environment, Task
from rl.tasks.workspace import WORKSPACE, Sandboxes

TRIES, CHOSEN = 5, 3
SECONDS = 120.0
# Modules whose distribution has another name; fixtures and options, and the plugin that has them.
DISTRIBUTIONS = {
    "yaml": "pyyaml", "dateutil": "python-dateutil", "attr": "attrs", "PIL": "pillow", "bs4": "beautifulsoup4",
    "cv2": "opencv-python", "sklearn": "scikit-learn", "dotenv": "python-dotenv", "jwt": "pyjwt", "OpenSSL": "pyopenssl",
}  # fmt: skip
FIXTURES = {
    "mocker": "pytest-mock",
    "benchmark": "pytest-benchmark",
    "httpserver": "pytest-httpserver",
    "freezer": "pytest-freezer",
}
OPTIONS = {"--cov": "pytest-cov", "-n": "pytest-xdist", "--timeout": "pytest-timeout", "--randomly-seed": "pytest-randomly"}


@dataclass(frozen=True)
class Attempt:
    """One try: the packages, and of each chosen command whether it worked and what it said."""

    pypi: tuple[str, ...]
    results: tuple[tuple[str, bool, str], ...]

    @property
    def works(self) -> bool:
        return bool(self.results) and all(fine for _, fine, _ in self.results)


@dataclass(frozen=True)
class Installed:
    """What `install` found: `attempts` end with the one that worked, or `reason` says why there is none."""

    commands: tuple[str, ...]
    attempts: list[Attempt] = field(default_factory=list)
    reason: str = ""

    @property
    def pypi(self) -> tuple[str, ...] | None:
        """The packages of the environment; None: discard the tree."""
        return self.attempts[-1].pypi if self.attempts and self.attempts[-1].works else None


Repair = Callable[[Mapping[str, bytes], Attempt], Sequence[str] | None]  # the next packages, or None to give up


def packages(files: Mapping[str, bytes]) -> list[str]:
    """Importable names at the top of the tree or of src/."""
    found = {re.match(r"(?:src/)?(\w+)/__init__\.py$", path) for path in files}
    return sorted({m[1] for m in found if m} - {"tests", "test", "docs", "examples"})


def propose(files: Mapping[str, bytes]) -> list[str]:
    """Up to ten commands, the most telling first."""
    names, test_files = packages(files), sorted(path for path in files if TEST.match(path) and path.endswith(".py"))
    tops = sorted({path.split("/")[0] for path in test_files})
    commands = [f"python3 -m pytest -q -x {' '.join(map(shlex.quote, tops))}"] if test_files else []
    commands += [f"python3 -c 'import {name}'" for name in names[:2]]
    commands += [f"python3 -m {name} --help" for name in names if any(path.endswith(f"{name}/__main__.py") for path in files)]
    commands += [
        f"python3 -m compileall -q {name}"
        for name in sorted({path.split("/")[0] for path in files if path.endswith("__init__.py")})
    ]
    commands += [
        f"python3 -m pytest -q {shlex.quote(path)}" for path in test_files[:3] if not path.endswith(("conftest.py", "__init__.py"))
    ]
    makefile = files.get("Makefile", b"").decode(errors="replace")
    commands += [f"make {target}" for target in ("check", "test", "lint") if re.search(rf"^{target}:", makefile, re.MULTILINE)]
    return list(dict.fromkeys(commands))[:10]


def next_packages(files: Mapping[str, bytes], attempt: Attempt) -> list[str] | None:
    """The rules: what a failure's output says is missing. None where it says nothing new."""
    text = "\n".join(said for _, fine, said in attempt.results if not fine)
    own = set(packages(files))
    found = [
        DISTRIBUTIONS.get(m, m.split(".")[0]) for m in re.findall(r"No module named '([\w.]+)'", text) if m.split(".")[0] not in own
    ]
    found += [FIXTURES[name] for name in re.findall(r"fixture '(\w+)' not found", text) if name in FIXTURES]
    found += [plugin for option, plugin in OPTIONS.items() if re.search(rf"unrecognized arguments:.*{option}", text)]
    found += ["pytest-asyncio"] if "async def functions are not natively supported" in text else []
    found += ["tzdata"] if "No time zone found" in text else []
    new = [package for package in dict.fromkeys(found) if package not in attempt.pypi]
    return [*attempt.pypi, *new] if new else None


def install(files: Mapping[str, bytes], sandboxes: Sandboxes, repair: Repair = next_packages) -> Installed:
    """Finds packages with which three commands of a source tree work. Raises SandboxError where the machinery fails."""
    commands = tuple(propose(files)[:CHOSEN])
    if len(commands) < CHOSEN:
        return Installed(commands, reason=f"expected {CHOSEN} commands to try, found {len(commands)}")
    found, pypi = Installed(commands), tuple(requirements(dict(files)))
    for _ in range(TRIES):
        try:
            attempt = tried(files, pypi, commands, sandboxes)
        except ImageError as error:
            return Installed(commands, found.attempts, f"the packages {', '.join(pypi)} cannot be installed: {error}")
        found.attempts.append(attempt)
        if attempt.works:
            return found
        more = repair(files, attempt)
        if more is None:
            return Installed(commands, found.attempts, "the failure names nothing that is missing")
        pypi = tuple(more)
    return Installed(commands, found.attempts, f"not in {TRIES} tries")


def tried(files: Mapping[str, bytes], pypi: tuple[str, ...], commands: Sequence[str], sandboxes: Sandboxes) -> Attempt:
    """Runs the commands in a fresh sandbox each: none works because of another."""
    recipe = f'base = "git"\npypi = [{", ".join(repr(p) for p in (PYTEST, *pypi))}]\n'
    task = Task(
        name="autoinstall/tree",
        instruction="-",
        environment=Environment(workdir=WORKDIR),
        files={"environment/recipe.toml": recipe.encode()} | {WORKSPACE + path: data for path, data in files.items()},
    )
    results = []
    for command in commands:
        with sandboxes.start(task) as sandbox:
            env = {"PYTHONPATH": f"{WORKDIR}/src:{WORKDIR}", "PYTHONDONTWRITEBYTECODE": "1"}
            done = sandbox.exec(["sh", "-c", command], cwd=WORKDIR, env=env, timeout_s=SECONDS)
            results.append((command, done.ok, done.text[-4000:]))
    return Attempt(pypi, tuple(results))
