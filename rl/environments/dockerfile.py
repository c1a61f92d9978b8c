"""A subset of Dockerfile as a recipe: FROM (a name that a Debian base stands for), RUN, COPY, WORKDIR, ENV, ARG, USER root, and
what has no effect on files (CMD, ENTRYPOINT, EXPOSE, LABEL). Everything else is refused by name, never skipped.

Nothing has a network while it runs here, so packages are taken out of RUN lines: `apt-get update`, `apt-get install -y A B` and
`pip install A B` become the recipe's lists, in front of all other steps. Files are copied in front of them, too.
"""

import posixpath
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
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
APT = re.compile(r"(?:sudo\s+)?apt(?:-get)?\s((?:\s*-\S+\s+)*)(update|install|upgrade|clean)\b(.*)", re.DOTALL)
PIP = re.compile(r"(?:python3?\s+-m\s+)?pip3?\s+()(install)\b(.*)", re.DOTALL)
# Options that change nothing of what is installed here.
APT_OPTION = re.compile(r"-[yq]+|--(?:yes|assume-yes|quiet|no-install-(?:recommends|suggests)|fix-missing)")
PIP_OPTION = re.compile(r"-[qU]+|--(?:quiet|upgrade|no-cache-dir|no-input|disable-pip-version-check|break-system-packages)")
PIECE = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\s+|(?:\\.|[^\s'"\\])+|.""", re.DOTALL)
VARIABLE = re.compile(r"\\(.)|\$\{(\w+)(?::([-+])([^}]*))?\}|\$(\w+)|(\$\{)", re.DOTALL)


def parse_dockerfile(text: str, context: Path | None = None) -> tuple[Recipe, dict[str, str], str]:
    """(recipe, environment, working directory) of a Dockerfile; ImageError names the line that is not understood."""
    packages: list[str] = []
    pypi: list[str] = []
    files: dict[str, str] = {}
    steps: list[str] = []
    variables: dict[str, str] = {}
    arguments: dict[str, str] = {}
    workdir, directories, has_base = "/", {"/"}, False
    for number, line in _lines(text):
        verb, _, rest = line.partition(" ")
        verb, rest = verb.upper(), rest.strip()
        if verb in WITHOUT_EFFECT:
            continue
        known = {"PATH": PATH} | arguments | variables
        if verb == "RUN":
            steps += _run_step(number, rest, workdir, known, packages, pypi)
            continue
        words = _words(number, rest, known)
        if verb == "FROM":
            name = words[0].rsplit("/", 1)[-1].split(":")[0].split("@")[0] if words else ""
            if has_base or name not in BASES or (len(words), words[1:2]) not in ((1, []), (3, ["AS"]), (3, ["as"])):
                raise ImageError(f"line {number}: FROM must be once and one of {', '.join(BASES)}, got {rest}")
            has_base = True
            packages += BASES[name]
        elif verb in ("ENV", "ARG"):
            told = _assignments(number, verb, words)
            (variables if verb == "ENV" else arguments).update(told)
            steps += [
                f"export {name}={shlex.quote(value)}" for name, value in told.items() if verb == "ENV" or name not in variables
            ]
        elif verb == "WORKDIR" and len(words) == 1:
            workdir = posixpath.normpath(posixpath.join(workdir, words[0]))
            directories.add(workdir)
            steps.append(f"mkdir -p {shlex.quote(workdir)}")
        elif verb == "COPY":
            copied, executable = _copied(number, words, workdir, directories, context)
            files |= copied
            steps += [f"chmod 755 {shlex.quote(path)}" for path in executable]
        elif verb != "USER" or words not in (["root"], ["0"]):
            raise ImageError(f"line {number}: {verb} {rest} is not among FROM, RUN, COPY, WORKDIR, ENV, ARG, USER root")
    if not has_base:
        raise ImageError("a Dockerfile begins with FROM")
    acts = any(not step.startswith("export ") for step in steps)
    setup = "\n".join(["set -e", *steps]) if acts else ""
    return Recipe(debian=tuple(dict.fromkeys(packages)), pypi=tuple(pypi), files=files, setup=setup), variables, workdir


def _lines(text: str):
    """(number, instruction) with continuations joined and comments left out."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if re.match(r"#\s*escape\s*=\s*[^\\\s]", stripped, re.IGNORECASE):
            raise ImageError(f"line {number}: {stripped} is not supported: a line goes on behind a backslash")
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


def _run_step(number: int, rest: str, workdir: str, known: dict[str, str], packages: list[str], pypi: list[str]) -> list[str]:
    if not rest or rest.startswith(("--", "[")) or re.search(r"<<-?\s*[\w'\"\\]", rest):
        raise ImageError(f"line {number}: RUN with nothing, with options, here-documents or an array is not supported")
    kept = []
    for command in re.split(r"\s*&&\s*", rest):
        if found := APT.fullmatch(command):
            names = _packages(number, command, found, APT_OPTION, known)
            packages += names if found[2] == "install" else []
        elif found := PIP.fullmatch(command):
            pypi += _packages(number, command, found, PIP_OPTION, known)
        elif not re.fullmatch(r"rm -rf /var/lib/apt/lists(/\*|/)?", command):
            kept.append(command)
    return [f"(cd {shlex.quote(workdir)} && {' && '.join(kept)})"] if kept else []


def _packages(number: int, command: str, found: re.Match[str], option: re.Pattern[str], known: dict[str, str]) -> list[str]:
    """The names that a command installs; ImageError for one that does something else, too."""
    bare = "".join(piece for piece in PIECE.findall(command) if piece[0] not in "'\"")
    words = _words(number, found[1] + " " + found[3], known)
    names = [word for word in words if not option.fullmatch(word)]
    if odd := re.search(r"[;|&<>()`]", bare):
        raise ImageError(f"line {number}: expected packages to be installed by a command of its own, got {odd[0]!r} in {command}")
    if odd := [name for name in names if name.startswith(("-", ".")) or "/" in name]:
        raise ImageError(f"line {number}: {found[2]} takes package names here, got {odd[0]} in {command}")
    return names


def _words(number: int, text: str, known: dict[str, str]) -> list[str]:
    """Words without their quotes, with variables put in but between single quotes; one that is not known is empty."""
    words: list[str] = []
    inside = False
    for piece in PIECE.findall(text):
        if piece.isspace():
            inside = False
            continue
        if piece in ("'", '"', "\\"):
            raise ImageError(f"line {number}: expected an end of what {piece} begins, got {text}")
        quote = piece[0] if piece[0] in "'\"" else ""
        part = piece[1:-1] if quote else piece
        part = part if quote == "'" else VARIABLE.sub(lambda found, quote=quote: _value(number, found, quote, known), part)
        if inside:
            words[-1] += part
        else:
            words.append(part)
        inside = True
    return words


def _value(number: int, found: re.Match[str], quote: str, known: dict[str, str]) -> str:
    escaped, name, sign, other, plain, unknown = found.groups()
    if unknown:
        raise ImageError(f"line {number}: expected $NAME, ${{NAME}}, ${{NAME:-text}} or ${{NAME:+text}}, got {found.string}")
    if escaped:
        return escaped if not quote or escaped in '"\\$' else found[0]
    value = known.get(name or plain, "")
    if sign == "-":
        return value or other
    return (other if value else "") if sign == "+" else value


def _assignments(number: int, verb: str, words: list[str]) -> dict[str, str]:
    if verb == "ENV" and len(words) > 1 and "=" not in words[0]:  # ENV NAME some text
        words = [f"{words[0]}={' '.join(words[1:])}"]
    elif verb == "ARG":
        words = [word if "=" in word else f"{word}=" for word in words]
    found = dict(word.partition("=")[::2] for word in words if "=" in word)
    if not words or len(found) < len(words) or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in found):
        raise ImageError(f"line {number}: {verb} takes NAME=value, got {' '.join(words)!r}")
    return found


def _copied(
    number: int, words: list[str], workdir: str, directories: set[str], context: Path | None
) -> tuple[dict[str, str], list[str]]:
    """Texts by path, and which of them are programs."""
    if context is None or len(words) != 2 or words[0].startswith(("--", "[", "<<")):
        raise ImageError(f"line {number}: COPY takes one source in a context directory and one target, got {' '.join(words)}")
    source = context / words[0].lstrip("/")
    if not source.resolve().is_relative_to(context.resolve()) or not source.exists():
        raise ImageError(f"line {number}: {words[0]} is not in the context")
    target = posixpath.normpath(posixpath.join(workdir, words[1]))
    if source.is_dir():
        if (context / ".dockerignore").exists():
            raise ImageError(f"line {number}: COPY of a directory with a .dockerignore is not supported")
        places = {posixpath.join(target, path.relative_to(source).as_posix()): path for path in sorted(source.rglob("*"))}
    elif words[1].endswith(("/", "/.")) or words[1] == "." or target in directories:
        places = {posixpath.join(target, source.name): source}
    else:
        places = {target: source}
    files, executable = {}, []
    for place, path in places.items():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ImageError(f"line {number}: COPY takes files and directories, got another kind: {path.relative_to(context)}")
        if path.is_file():
            try:
                files[place] = path.read_bytes().decode()
            except UnicodeDecodeError:
                raise ImageError(f"line {number}: COPY takes texts in UTF-8, got {path.relative_to(context)}") from None
            executable += [place] * bool(path.stat().st_mode & 0o100)
    return files, executable
