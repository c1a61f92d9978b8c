"""File tools. They act inside the sandbox, so a link leads nowhere that the agent's own commands could not go.

Files are bytes: what is not UTF-8 survives an edit (surrogateescape), a line ends as its neighbours do, a byte-order mark stays,
and a file is replaced as a whole or not at all.
"""

import posixpath
import re
import textwrap
from dataclasses import dataclass

from rl.harness import patch as patches
from rl.harness.schema import ToolError, tool
from rl.harness.session import Session

MAX_BYTES = 8 << 20
MAX_LINE = 2000  # characters shown of one line
MAX_LISTED = 1000


def content(session: Session, path: str) -> str:
    """A file as text that encodes back to the same bytes; ToolError for a binary one."""
    data = session.sandbox.read(session.path(path), max_bytes=MAX_BYTES)
    if b"\0" in data[:8192]:
        raise ToolError(f"{path} is a binary file of {len(data)} bytes")
    return data.decode("utf-8", "surrogateescape")


def shown(text: str) -> str:
    """Text that any terminal or tokenizer takes: bytes that are no UTF-8 as U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def lines_of(text: str) -> list[str]:
    """The lines with their ends, as everything else that counts lines does: a form feed or U+2028 ends none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def bare(line: str) -> str:
    """A line without its end."""
    return line.removesuffix("\n").removesuffix("\r")


def store(session: Session, path: str, text: str) -> None:
    session.sandbox.write(session.path(path), text.encode("utf-8", "surrogateescape"), mode=mode_of(session, path))


WHERE = 'pwd -P; readlink -m -- "$1"; stat -L -c %a -- "$1"'


def mode_of(session: Session, path: str) -> int:
    """The mode that a replaced file keeps; ToolError for one that is outside of the work directory, links followed."""
    found = session.run("sh", "-c", WHERE, "sh", session.argument(path), output_bytes=16 << 10)
    top, place, *mode = found.stdout.decode("utf-8", "surrogateescape").split("\n")
    if not place.startswith(top.rstrip("/") + "/"):
        raise ToolError(f"{path} is outside of the work directory: files there are changed by commands only")
    return int(mode[0], 8) & 0o7777 if mode and mode[0] else 0o644


@tool
def read_file(session: Session, path: str, offset: int = 1, limit: int = 2000) -> str:
    """Reads a text file. Each line comes with its number.

    path    relative to the work directory, or absolute
    offset  first line to show, counted from 1
    limit   how many lines to show
    """
    if offset < 1 or limit < 1:
        raise ToolError(f"offset and limit: expected positive numbers, got {offset} and {limit}")
    lines = [bare(line) for line in lines_of(shown(content(session, path)).removeprefix("\ufeff"))]
    if not lines:
        return f"{path} is empty"
    if offset > len(lines):
        raise ToolError(f"offset: expected 1 to {len(lines)}, the number of lines of {path}, got {offset}")
    part = lines[offset - 1 : offset - 1 + limit]
    text = "\n".join(f"{offset + i}\t{line[:MAX_LINE]}{'…' * (len(line) > MAX_LINE)}" for i, line in enumerate(part))
    rest = len(lines) - (offset - 1 + len(part))
    return session.text(text) + (f"\n({rest} more lines)" if rest else "")


@tool
def write_file(session: Session, path: str, content: str) -> str:
    """Writes a file: makes it, with its directories, or replaces all of it.

    path     relative to the work directory, or absolute
    content  the whole new text
    """
    store(session, path, content)
    return f"Wrote {path}: {len(lines_of(content))} lines"


@dataclass(frozen=True)
class Found:
    text: str
    pattern: re.Pattern[str]
    line_end: str


def find(session: Session, path: str, old: str) -> Found:
    """A pattern of `old` in which a line end matches either kind."""
    text = content(session, path)
    parts = re.split(r"\r?\n", old)
    return Found(text, re.compile(r"\r?\n".join(map(re.escape, parts))), patches.line_end(text))


@tool
def edit_file(session: Session, path: str, old: str, new: str, replace_all: bool = False) -> str:
    """Replaces one piece of a file by another. The old piece must stand there exactly once, with its spaces and line ends.

    path         relative to the work directory, or absolute
    old          the piece to replace, with enough around it to be the only one
    new          what stands there afterwards
    replace_all  replace every such piece
    """
    if not old:
        raise ToolError("old: expected the piece to replace, got an empty text; write_file makes files")
    found = find(session, path, old)
    count = len(found.pattern.findall(found.text))
    overlapping = len(re.findall(f"(?={found.pattern.pattern})", found.text))
    if count == 0:
        raise ToolError(f"{path} does not hold that piece{near(found.text, old)}")
    if overlapping > 1 and not replace_all:
        raise ToolError(f"{path} holds that piece {overlapping} times; give more of what stands around it, or replace_all")
    new = re.sub(r"\r?\n", lambda _: found.line_end, new)
    changed = found.pattern.sub(lambda _: new, found.text)
    if changed == found.text:
        raise ToolError(f"{path}: the new piece equals the old one")
    line = found.text[: found.pattern.search(found.text).start()].count("\n") + 1
    store(session, path, changed)
    return f"Edited {path}: {count} place{'s' * (count > 1)}, line {line}"


def near(text: str, old: str) -> str:
    """Where the first line of a piece that was not found does stand, spaces aside."""
    first = next((line.strip() for line in old.splitlines() if line.strip()), "")
    numbers = [str(i) for i, line in enumerate(lines_of(text), 1) if first and line.strip() == first][:5]
    return f"; its first line stands at line {', '.join(numbers)}: look there" if numbers else "; read the file again"


@tool
def edit_line(session: Session, path: str, line: int, text: str) -> str:
    """Replaces one line of a file. What stands there afterwards is indented as the line was; an empty text removes it.

    path  relative to the work directory, or absolute
    line  its number, as read_file shows it
    text  one or more lines, without the old line's indentation
    """
    before = content(session, path)
    lines = lines_of(before)
    if not lines:
        raise ToolError(f"{path} is empty: write_file fills it")
    if not 1 <= line <= len(lines):
        raise ToolError(f"line: expected 1 to {len(lines)}, the number of lines of {path}, got {line}")
    old = lines[line - 1]
    indent, end = re.match(r"\ufeff?[ \t]*", old)[0], old[len(bare(old)) :]
    new = [indent + part if part.strip() else "" for part in re.split(r"\r?\n", textwrap.dedent(text).rstrip("\r\n"))]
    lines[line - 1] = (patches.line_end(before).join(new) + end) if text else indent[: indent.startswith("\ufeff")]
    after = "".join(lines)
    if after == before:
        raise ToolError(f"line {line} of {path} is that already: no change")
    store(session, path, after)
    return f"Edited {path}: line {line}"


@tool
def apply_patch(session: Session, patch: str) -> str:
    """Applies a unified diff to files of the work directory: all of it or, where a part does not fit, none of it.

    patch  as `git diff` prints it; /dev/null stands for a file that is not there
    """
    try:
        changes = patches.parse(patch)
    except ValueError as error:
        raise ToolError(f"patch: {error}") from None
    results: list[tuple[str, str | None, int]] = []
    for change in changes:
        source = change.old or change.new
        text, mode = "", mode_of(session, source)
        if change.old is not None:
            text = content(session, source)
        if change.mode is not None:
            mode = mode | 0o111 if change.mode & 0o111 else mode & ~0o111
        if change.new not in (None, change.old):
            mode_of(session, change.new)
            if session.run("test", "-e", session.argument(change.new)).ok:
                raise ToolError(f"patch: {change.new}: expected no such file, for the patch makes it")
        moved = change.old not in (None, change.new) and not change.keeps
        if moved:
            check_entry(session, change.old)
        try:
            text = patches.applied(text, change)
        except ValueError as error:
            raise ToolError(f"patch: {source}: {error}") from None
        if change.new is None and change.hunks and text:
            left = len(lines_of(text))
            raise ToolError(f"patch: {source}: expected hunks that remove all of the file, got some that leave {left} lines")
        if change.new is None:
            results.append((source, None, mode))
            continue
        results.append((change.new, text, mode))
        if moved and change.new is not None:
            results.append((change.old, None, mode))
    named = [session.argument(path) for path, _, _ in results]
    if twice := {path for path in named if named.count(path) > 1}:
        raise ToolError(f"patch: {min(twice)}: expected all changes of a file in one part")
    for path, text, mode in results:
        if text is None:
            remove(session, path)
        else:
            session.sandbox.write(session.path(path), text.encode("utf-8", "surrogateescape"), mode=mode)
    return "Patched " + ", ".join(path if text is not None else f"{path} (removed)" for path, text, _ in results)


def check_entry(session: Session, path: str) -> None:
    """ToolError for an entry of a directory outside of the work directory, wherever the entry itself leads."""
    mode_of(session, posixpath.join(posixpath.dirname(path), "x"))


def remove(session: Session, path: str) -> None:
    check_entry(session, path)
    result = session.run("rm", "--", session.argument(path))
    if not result.ok:
        raise ToolError(result.text.strip() or f"{path} could not be removed")


@tool
def delete_file(session: Session, path: str) -> str:
    """Deletes one file or link. Directories are left alone.

    path  relative to the work directory, or absolute
    """
    remove(session, path)
    return f"Deleted {path}"


def listed(session: Session, path: str, depth: int, directories: bool) -> list[str]:
    """Paths below a directory, relative to it, directories with a final slash; without what version control keeps."""
    if not session.run("test", "-d", session.argument(path)).ok:
        raise ToolError(f"{path}: expected a directory")
    limit = ["-maxdepth", str(depth)] if depth else []
    show = (
        ["-type", "d", "-exec", "printf", r"%s/\0", "{}", "+", "-o", "-print0"] if directories else ["!", "-type", "d", "-print0"]
    )
    command = ["find", ".", "-mindepth", "1", *limit, "-name", ".git", "-prune", "-o", *show]
    found = session.sandbox.exec(command, cwd=session.path(path), timeout_s=20, output_bytes=16 << 20)
    names = found.stdout.decode("utf-8", "replace").split("\0")
    return sorted(name.removeprefix("./") for name in names if name)


@tool
def list_dir(session: Session, path: str = ".", depth: int = 1) -> str:
    """Lists a directory; directories end with a slash.

    path   relative to the work directory, or absolute
    depth  how many levels to go down, 1 to 5
    """
    if not 1 <= depth <= 5:
        raise ToolError(f"depth: expected 1 to 5, got {depth}")
    return counted(session, listed(session, path, depth, True), f"{path} is empty")


def counted(session: Session, names: list[str], nothing: str) -> str:
    more = len(names) - MAX_LISTED
    text = "\n".join(names[:MAX_LISTED]) or nothing
    return session.text(text) + (f"\n({more} more)" if more > 0 else "")


def glob_pattern(pattern: str) -> re.Pattern[str]:
    """A path pattern: `*` and `?` within a name, `**` over directories, `[abc]`; one without a slash matches names anywhere."""
    pattern = pattern.removeprefix("./")
    if "/" not in pattern:
        pattern = "**/" + pattern
    out = ""
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]/]+\]|.", pattern, re.DOTALL):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        out += known.get(part) or (re.sub(r"^\[!", "[^", part.replace("\\", r"\\")) if len(part) > 1 else re.escape(part))
    try:
        return re.compile(out, re.DOTALL)
    except re.error as error:
        raise ToolError(f"pattern: {error}") from None


@tool
def glob(session: Session, pattern: str, path: str = ".") -> str:
    """Lists files whose path matches a pattern such as *.py or src/**/test_*.

    pattern  `*` within a name, `**` over directories; without a slash it matches names anywhere
    path     directory to look in
    """
    matcher = glob_pattern(pattern)
    return counted(session, [name for name in listed(session, path, 0, False) if matcher.fullmatch(name)], "No file matches")


OPTIONAL_FILE_TOOLS = (edit_line,)
FILE_TOOLS = (read_file, write_file, edit_file, apply_patch, delete_file, list_dir, glob)
