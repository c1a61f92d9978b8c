"""A subset of Dockerfile as a recipe: FROM (a name that a Debian base stands for), RUN, COPY, WORKDIR, ENV, ARG, USER root, and
what has no effect on files (CMD, ENTRYPOINT, EXPOSE, LABEL). Everything else is refused by name, never skipped.

Nothing has a network while it runs here, so packages are taken out of RUN lines: `apt-get update`, `apt-get install -y A B` and
`pip install A B` become the recipe's lists, in front of all other steps.
"""

import os
import re
import shlex
from pathlib import Path

from rl.environments.images import Recipe
from rl.environments.sandbox import ImageError

BASES = {
    "debian": (),
    "ubuntu": (),
    "buildpack-deps": ("git", "gcc", "make", "ca-certificates"),
    "python": ("python3", "python3-pip", "python3-venv"),
    "node": ("nodejs", "npm"),
}  # image name, whatever its tag: Debian packages
WITHOUT_EFFECT = {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"}
APT = re.compile(r"(?:sudo )?apt(?:-get)?\s+(?:-\S+\s+)*(update|install|upgrade|clean)\b(.*)")
PIP = re.compile(r"(?:python3? -m )?pip3?\s+install\b(.*)")


def parse_dockerfile(text: str, context: Path | None = None) -> tuple[Recipe, dict[str, str], str]:
    """(recipe, environment, working directory) of a Dockerfile; ImageError names the line that is not understood."""
    packages: list[str] = []
    pypi: list[str] = []
    files: dict[str, str] = {}
    steps, variables, arguments, workdir, has_base = [], {}, {}, "/", False
    for number, line in _lines(text):
        verb, _, rest = line.partition(" ")
        verb, rest = verb.upper(), _substituted(rest.strip(), variables | arguments)
        if verb == "FROM":
            name = rest.split()[0].rsplit("/", 1)[-1].split(":")[0].split("@")[0]
            if has_base or name not in BASES:
                raise ImageError(f"line {number}: FROM must be once and one of {', '.join(BASES)}, got {rest}")
            has_base = True
            packages += BASES[name]
        elif verb == "RUN":
            steps += _run_step(number, rest, workdir, variables, packages, pypi)
        elif verb in ("ENV", "ARG"):
            target = variables if verb == "ENV" else arguments
            target |= _assignments(rest)
        elif verb == "WORKDIR":
            workdir = rest if rest.startswith("/") else f"{workdir.rstrip('/')}/{rest}"
            steps.append(f"mkdir -p {shlex.quote(workdir)}")
        elif verb == "COPY":
            files |= _copied(number, rest, workdir, context)
        elif verb == "USER" and rest in ("root", "0"):
            pass
        elif verb not in WITHOUT_EFFECT:
            raise ImageError(f"line {number}: {verb} {rest} is not among FROM, RUN, COPY, WORKDIR, ENV, ARG, USER root")
    if not has_base:
        raise ImageError("a Dockerfile begins with FROM")
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    setup = "set -e\n" + exports + "\n".join(steps) if steps else ""
    return Recipe(debian=tuple(dict.fromkeys(packages)), pypi=tuple(pypi), files=files, setup=setup), variables, workdir


def _lines(text: str):
    """(number, instruction) with continuations joined and comments left out."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        first = first or number
        if stripped.endswith("\\"):
            joined += stripped[:-1] + " "
            continue
        yield first, joined + stripped
        joined, first = "", 0
    if joined:
        raise ImageError(f"line {first}: ends in a continuation")


def _run_step(number: int, rest: str, workdir: str, variables: dict, packages: list[str], pypi: list[str]) -> list[str]:
    if rest.startswith(("--", "<<", "[")):
        raise ImageError(f"line {number}: RUN with options, here-documents or an array is not supported")
    kept = []
    for command in re.split(r"\s*&&\s*", rest):
        if found := APT.fullmatch(command):
            if found[1] == "install":
                packages += [word for word in shlex.split(found[2]) if not word.startswith("-")]
        elif found := PIP.fullmatch(command):
            words = shlex.split(found[1])
            if any(word in ("-r", "-e", ".") or word.startswith("--index") for word in words):
                raise ImageError(f"line {number}: pip install takes package names here, got {found[1].strip()}")
            pypi += [word for word in words if not word.startswith("-")]
        elif not re.match(r"rm -rf /var/lib/apt/lists", command):
            kept.append(command)
    return [f"(cd {shlex.quote(workdir)} && {' && '.join(kept)})"] if kept else []


def _assignments(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    return dict(word.split("=", 1) for word in words)


def _substituted(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables.get(found[1] or found[2], found[0]), text)


def _copied(number: int, rest: str, workdir: str, context: Path | None) -> dict[str, str]:
    words = shlex.split(rest)
    if context is None or len(words) != 2 or words[0].startswith("--"):
        raise ImageError(f"line {number}: COPY takes one source in a context directory and one target, got {rest}")
    source = (context / words[0]).resolve()
    if not source.is_relative_to(context.resolve()) or not source.exists():
        raise ImageError(f"line {number}: {words[0]} is not in the context")
    target = words[1] if words[1].startswith("/") else f"{workdir.rstrip('/')}/{words[1]}"
    if source.is_file():
        return {target + source.name if target.endswith("/") else target: source.read_text()}
    target = os.path.normpath(target)
    return {f"{target}/{path.relative_to(source)}": path.read_text() for path in source.rglob("*") if path.is_file()}
