"""Real tasks: from one release of a package to a later one.

The work directory is the older source distribution, the reference change what the later one changed outside of tests, the hidden
tests are the later one's. Which of them the change makes pass is found by running them. A release says more than one request can:
`only` keeps those fail-to-pass tests that the request is about.

The catalogue (catalogue.json) holds recipes and hashes, no source: files come from the index, lists of tests from two runs.
"""

import configparser
import difflib
import fnmatch
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from email import message_from_bytes
from pathlib import Path

from rl.harness.patch import changed_lines, headers
from rl.tasks.assemble import python_task
from rl.tasks.logs import PASSED, XFAIL, Results
from rl.tasks.pypi import Registry, normalized
from rl.tasks.task import Provenance, Task, TaskError
from rl.tasks.verification import observe
from rl.tasks.workspace import Entry, Sandboxes, difference

CATALOGUE = Path(__file__).with_name("catalogue.json")
# Not part of a package: neither shown by the reference change nor asked for.
AROUND = re.compile(
    r"(docs?|examples?|benchmarks?|scripts?|tools?|requirements|bin|ci|\.[^/]*)/|[^/]*$|.*(_version\.py|\.pyc|\.so)$"
)
TEST = re.compile(r"(.*/)?(tests?/.*|conftest\.py|test_[^/]*\.py|[^/]*_test\.py)$|testing/.*")
CHANGES = re.compile(r"(docs?/(source/)?)?(changes|changelog|history|news|release[-_]?notes|whatsnew)[^/]*$", re.IGNORECASE)
INI = (
    "markers",
    "asyncio_mode",
    "python_files",
    "python_classes",
    "python_functions",
    "usefixtures",
    "asyncio_default_fixture_loop_scope",
)


@dataclass(frozen=True)
class Release:
    """A recipe. The last six fields are what was found when it was made; `build` checks them."""

    package: str
    old: str
    new: str
    request: str = ""
    slug: str = ""  # tells tasks of one release apart
    only: tuple[str, ...] = ()  # patterns of fail-to-pass tests that the request is about; none: all
    exclude: tuple[str, ...] = ()  # patterns of tests that are left out: flaky, or of what no request can say
    pypi: tuple[str, ...] = ()  # what the tests need beside pytest
    sha256: tuple[str, ...] = ()  # of the two source distributions
    lists: str = ""  # sha256 of the two lists of tests
    counts: tuple[int, ...] = ()  # of fail-to-pass and pass-to-pass tests
    files: int = 0  # that the reference change touches
    lines: int = 0  # that it adds and removes
    licence: str = ""

    @property
    def name(self) -> str:
        return f"release/{self.package}-{self.new}{'-' * bool(self.slug)}{self.slug}"


def catalogue(path: Path = CATALOGUE) -> list[Release]:
    return [Release(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in json.loads(path.read_text())]


def write_catalogue(releases: Iterable[Release], path: Path = CATALOGUE) -> None:
    rows = [{k: v for k, v in asdict(r).items() if v not in ("", ())} for r in releases]
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def sources(files: dict[str, bytes]) -> dict[str, bytes]:
    """What of a distribution is the package itself: neither tests nor documentation nor packaging."""
    return {
        path: data for path, data in files.items() if not TEST.match(path) and not AROUND.match(path) and ".egg-info" not in path
    }


def tests(files: dict[str, bytes]) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if TEST.match(path)}


def settings_of_pytest(files: dict[str, bytes]) -> str:
    """The project's settings of pytest that tests depend on, as pytest.ini; not what else it makes pytest do."""
    found: dict = {}
    if text := files.get("pyproject.toml"):
        table = tomllib.loads(text.decode()).get("tool", {}).get("pytest", {})
        found = table.get("ini_options", table)
    for name, section in (("setup.cfg", "tool:pytest"), ("tox.ini", "pytest"), ("pytest.ini", "pytest")):
        if not found and name in files:
            parser = configparser.RawConfigParser()
            parser.read_string(files[name].decode())
            found = dict(parser[section]) if parser.has_section(section) else {}
    lines = ["[pytest]"]
    for key in INI:
        if value := found.get(key):
            values = value if isinstance(value, list) else value.strip().splitlines()
            lines.append(f"{key} =" + "".join(f"\n    {str(v).strip()}" for v in values))
    return "\n".join(lines) + "\n"


def requirements(files: dict[str, bytes]) -> list[str]:
    """What the package itself needs, without extras."""
    needed = message_from_bytes(files.get("PKG-INFO", b"")).get_all("Requires-Dist", [])
    return [requirement for requirement in needed if not re.search(r"extra\s*==", requirement)]


def licence(files: dict[str, bytes]) -> str:
    """A short name of the licence that a distribution's metadata states."""
    about = message_from_bytes(files.get("PKG-INFO", b""))
    classified = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    stated = (about.get("License") or "").strip().partition("\n")[0][:60]
    return about.get("License-Expression") or next(iter(classified), stated)


def change_log(old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """What the later release's change log says that the earlier one's does not."""
    added = []
    for path in sorted(path for path in new if CHANGES.match(path)):
        before, after = (side.get(path, b"").decode(errors="replace").split("\n") for side in (old, new))
        added += [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")] if len(after) < 9000 else []
    return "\n".join(added)


def task_of(release: Release, old: dict[str, bytes], new: dict[str, bytes]) -> Task:
    """The task without its lists of tests."""
    workspace = {p: d for p, d in old.items() if ".egg-info" not in p and p != "PKG-INFO"}
    top = "src" if any(path.startswith("src/") for path in new) else "."
    place = f"{top}/{normalized(release.package).replace('-', '_')}.egg-info/PKG-INFO".removeprefix("./")
    workspace[place] = f"Metadata-Version: 2.1\nName: {release.package}\nVersion: {release.old}\n".encode()
    patch = difference(*({p: Entry(0o100644, d) for p, d in side.items()} for side in (sources(old), sources(new))))
    provenance = Provenance(
        source=f"pypi {release.package} {release.old} -> {release.new}",
        licence=licence(new),
        digest=hashlib.sha256("".join(release.sha256).encode()).hexdigest(),
        kind="release",
        changed_files=len(headers(patch)),
        changed_lines=changed_lines(patch),
    )
    request = release.request or f"{release.package} {release.new}"
    return python_task(
        release.name, request, workspace, tests(new), patch, provenance, pypi=release.pypi, ini=settings_of_pytest(new)
    )


def passed(results: Results) -> set[str]:
    return {name for name, status in results.items() if status in (PASSED, XFAIL)}


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern) for pattern in patterns)


def lists_of(release: Release, before: Results, after: Results) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fail-to-pass and pass-to-pass tests."""
    kept = {name for name in passed(after) if not matches(name, release.exclude)}
    fail_to_pass = {name for name in kept - passed(before) if not release.only or matches(name, release.only)}
    return tuple(sorted(fail_to_pass)), tuple(sorted(kept & passed(before)))


def digest(*lists: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([list(names) for names in lists]).encode()).hexdigest()


def gold(task: Task) -> str:
    return task.files["solution/gold.patch"].decode("utf-8", "surrogateescape")


def mine(release: Release, registry: Registry, sandboxes: Sandboxes, times: int = 2) -> tuple[Release, Task, str]:
    """Fills in what a recipe leaves open: hashes, lists, flaky tests. Gives it, the task, and what the change log says.

    Raises TaskError where the pair makes no task: no source change, no test that the change makes pass, none that it keeps.
    """
    (old, sha_old), (new, sha_new) = (registry.sdist(release.package, version) for version in (release.old, release.new))
    if not release.pypi:
        release = replace(release, pypi=tuple(requirements(new)))
    release = replace(release, sha256=(sha_old, sha_new))
    task = task_of(release, old, new)
    if not task.provenance.changed_files or not tests(new):
        raise TaskError(f"{release.name}: expected tests and a change of sources, got {len(tests(new))} test files")
    runs = [observe(task, gold(task), sandboxes) for _ in range(times)]
    flaky = set.union(*map(passed, runs)) - set.intersection(*map(passed, runs))
    # with all of its parameters: what races with one races with the next, and some have another name in each run
    flaky = {name.partition("[")[0] + "[" * ("[" in name) for name in flaky}
    release = replace(release, exclude=tuple(sorted({*release.exclude, *flaky})))
    return (*finished(release, task, observe(task, "", sandboxes), runs[0]), change_log(old, new))


def finished(release: Release, task: Task, before: Results, after: Results) -> tuple[Release, Task]:
    """The recipe with what was found, and the task with its lists."""
    fail_to_pass, pass_to_pass = lists_of(release, before, after)
    if not fail_to_pass or not pass_to_pass:
        raise TaskError(
            f"{release.name}: expected tests that the change makes pass and keeps, got {len(fail_to_pass)}, {len(pass_to_pass)}"
        )
    release = replace(
        release,
        lists=digest(fail_to_pass, pass_to_pass),
        counts=(len(fail_to_pass), len(pass_to_pass)),
        files=task.provenance.changed_files,
        lines=task.provenance.changed_lines,
        licence=task.provenance.licence,
    )
    return release, replace(task, verifier=replace(task.verifier, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass))


def build(release: Release, registry: Registry, sandboxes: Sandboxes) -> Task:
    """The task of a recipe. Raises TaskError where its lists of tests are not those that the recipe was made with."""
    versions = zip((release.old, release.new), release.sha256, strict=True)
    task = task_of(release, *(registry.sdist(release.package, version, sha256)[0] for version, sha256 in versions))
    found, task = finished(release, task, observe(task, "", sandboxes), observe(task, gold(task), sandboxes))
    if found != release:
        expected, got = (f"{r.counts} tests, digest {r.lists[:12]}" for r in (release, found))
        raise TaskError(f"{release.name}: expected {expected}, got {got}")
    return task
