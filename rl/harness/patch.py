"""Unified diffs: parsed, and applied as a whole or not at all.

Models count lines badly: a hunk is put where its context stands, nearest to where it says. Trailing white space and the kind of
line end of a patch need not be the file's; the file's are kept.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Hunk:
    start: int  # line of the old file, from 1, as the patch says
    old: list[str] = field(default_factory=list)  # lines without their ends
    new: list[str] = field(default_factory=list)
    kept: list[int | None] = field(default_factory=list)  # of each new line: its index in `old`, None: added
    bare_end: bool = False  # the new file's last line has no line end
    ends_old: bool = False  # the hunk's last line belongs to the old file only


@dataclass
class Change:
    """What a patch does to one file; None for a side that is not there."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)
    mode: int | None = None  # git's, where the patch says one
    keeps: bool = False  # a copy: the old file stays
    line_end: str = "\n"  # of the patch itself: what a file without any takes


def line_end(text: str) -> str:
    """The kind of line end that most lines have; LF for none."""
    crlf = text.count("\r\n")
    return "\r\n" if crlf > text.count("\n") - crlf else "\n"


def meant_line_end(patch: str) -> str:
    """CRLF where only the lines that a patch adds have it; a patch that is CRLF throughout was just sent so."""
    lines = patch.split("\n")
    bare = [after.startswith("\\") for after in [*lines[1:], ""]]  # such a line has no end to judge by
    added = [line for line, none in zip(lines, bare, strict=True) if line.startswith("+") and not none]
    headers = [line for line in added if line.startswith("+++ ")]
    crlf = [line for line in added if line.endswith("\r")]
    return "\r\n" if len(crlf) == len(added) - len(headers) and not set(crlf) & set(headers) and crlf else "\n"


ESCAPE = re.compile(r"\\([0-7]{1,3}|.)")
ESCAPED = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}


def unquoted(name: str) -> str:
    """A name as git quotes it: `"caf\\303\\251"`, bytes in octal."""
    if len(name) < 2 or not (name.startswith('"') and name.endswith('"')):
        return name.strip('"')

    def byte(found: re.Match[str]) -> str:
        code = found[1]
        value = int(code, 8) & 0xFF if code.isdigit() else ESCAPED.get(code, ord(code))
        return bytes([value]).decode("utf-8", "surrogateescape") if value < 256 else code

    return ESCAPE.sub(byte, name[1:-1]).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def name_of(header: str) -> str | None:
    name, tab, _ = header.partition("\t")
    name = unquoted(name if tab else name.strip())  # behind a name with spaces git puts a tab
    if name == "/dev/null":
        return None
    name = re.sub(r"^[ab]/", "", name)
    if not name or name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"expected a path inside the work directory, got {name!r}")
    return name


def same_name(both: str) -> str | None:
    """The name behind "diff --git"; None where the two differ, for then other lines tell them."""
    middle = len(both) // 2
    old, new = (re.sub('^("?)[ab]/', r"\1", name) for name in (both[:middle], both[middle + 1 :]))
    return name_of(f"{both[middle + 1 :]}\t") if old == new else None


def headers(patch: str) -> list[str]:
    """What stands behind each "diff --git": one for every file that a patch of git's changes."""
    return [line.removeprefix("diff --git ") for line in patch.split("\n") if line.startswith("diff --git ")]


def changed_lines(patch: str) -> int:
    """Lines that a unified diff adds and removes."""
    return sum(line[:1] in ("+", "-") and not line.startswith(("+++ ", "--- ")) for line in patch.split("\n"))


def regular(mode: str) -> int:
    if not re.fullmatch("100[0-7]{3}", mode.strip()):
        raise ValueError(f"expected files of mode 100644 or 100755, got {mode.strip()[:20]} (links are made by commands)")
    return int(mode, 8)


def parse(patch: str) -> list[Change]:
    """The changes of a unified diff, file by file. Raises ValueError for what is none."""
    changes: list[Change] = []
    lines = iter([line.removesuffix("\r") for line in patch.removesuffix("\n").split("\n")])
    end = meant_line_end(patch)
    source = mode = name = None
    for line in lines:
        if line.startswith("diff --git "):
            source = mode = None
            name = same_name(line.removeprefix("diff --git "))
        elif found := re.fullmatch(r"(new file|deleted file|new) mode (\d+)", line):
            mode = regular(found[2])
            if name:
                old, new = {"new file": (None, name), "deleted file": (name, None), "new": (name, name)}[found[1]]
                changes.append(Change(old, new, mode=mode, line_end=end))
        elif found := re.fullmatch(r"index [0-9a-f]+\.\.[0-9a-f]+ (\d+)", line):
            regular(found[1])
        elif found := re.match(r"(rename|copy) from ", line):
            source = name_of(line[found.end() :])
        elif found := re.match(r"(rename|copy) to ", line):
            changes.append(Change(source, name_of(line[found.end() :]), mode=mode, keeps=found[1] == "copy", line_end=end))
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise ValueError("expected a patch of text files, got a binary one")
        elif line.startswith("--- "):
            header = next(lines, "")
            if not header.startswith("+++ "):
                raise ValueError(f"expected '+++ file' after {line[:60]!r}, got {header[:60]!r}")
            old, new = name_of(line[4:]), name_of(header[4:])
            if old is None and new is None:
                raise ValueError("expected a file on one side, got /dev/null on both")
            if not (changes and (changes[-1].old, changes[-1].new) == (old, new) and not changes[-1].hunks):
                changes.append(Change(old, new, line_end=end))
        elif line.startswith("@@"):
            if not changes:
                raise ValueError("expected '--- file' and '+++ file' before the first @@")
            changes[-1].hunks.append(hunk(line, lines))
        elif line.startswith("\\") and changes and changes[-1].hunks:
            last = changes[-1].hunks[-1]
            last.bare_end = last.bare_end or not last.ends_old
        elif line.startswith(("+", "-")) and line != "-- " and changes and changes[-1].hunks:  # "-- " ends a mail
            raise ValueError(f"expected no more lines of a hunk than its @@ counts, got {line[:60]!r}")
    if not changes:
        raise ValueError("expected a unified diff ('--- file', '+++ file', '@@ ... @@'), got none")
    for change in changes:
        if not change.hunks and change.old == change.new and change.mode is None:
            raise ValueError(f"expected a hunk (@@ ... @@) for {change.new}, got none")
    return changes


def hunk(header: str, lines: Iterator[str]) -> Hunk:
    """One hunk; its header's counts say where it ends."""
    counts = re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", header)
    if not counts:
        raise ValueError(f"expected '@@ -line,count +line,count @@', got {header[:60]!r}")
    wanted_old, wanted_new = int(counts[2] or 1), int(counts[4] or 1)
    found = Hunk(int(counts[1]))
    while len(found.old) < wanted_old or len(found.new) < wanted_new:
        line = next(lines, None)
        if line is None:
            raise ValueError(
                f"{header}: expected {wanted_old} old and {wanted_new} new lines, got {len(found.old)} and {len(found.new)}"
            )
        sign, text = line[:1] or " ", line[1:]  # an empty line is a context line whose space was cut
        if sign in " -":
            found.old.append(text)
        if sign in " +":
            found.kept.append(len(found.old) - 1 if sign == " " else None)
            found.new.append(text)
        if sign == "\\":  # of the line before: an old one, for new ones of a whole hunk would come after it
            found.bare_end = not found.ends_old
            continue
        if sign not in " +-":
            raise ValueError(f"{header}: expected lines that begin with ' ', '+' or '-', got {line[:60]!r}")
        found.ends_old = sign == "-"
    return found


def place(lines: list[str], hunk: Hunk, offset: int, first: int) -> int:
    """The line, from 0, where a hunk's old lines stand, nearest to where it says and not before `first`."""
    wanted = max(hunk.start - 1 + offset, first) if hunk.old else min(max(hunk.start + offset, first), len(lines))
    if not hunk.old:
        return wanted
    last = len(lines) - len(hunk.old)
    for tidy in (str, str.rstrip):
        old = [tidy(line) for line in hunk.old]
        for at in sorted(range(first, last + 1), key=lambda at: abs(at - wanted)):
            if [tidy(line) for line in lines[at : at + len(old)]] == old:
                return at
    missing = next((line for line in hunk.old if line.strip()), "")
    raise ValueError(f"the lines of the hunk at line {hunk.start} do not stand there; they begin with {missing.strip()[:80]!r}")


def applied(text: str, change: Change) -> str:
    """The new text of a file. Raises ValueError where a hunk does not fit."""
    end = line_end(text) if "\n" in text else change.line_end
    parts = re.split(r"(\r?\n)", text)
    lines, ends = parts[::2], [*parts[1::2], ""]
    if lines[-1] == "":
        lines, ends = lines[:-1], ends[:-1]
    out: list[str] = []
    done = offset = 0
    for hunk in change.hunks:
        at = place(lines, hunk, offset, done)
        offset = at - (hunk.start - 1) if hunk.old else offset
        out += [line + e for line, e in zip(lines[done:at], ends[done:at], strict=True)]
        for line, kept in zip(hunk.new, hunk.kept, strict=True):
            out.append(line + end if kept is None else lines[at + kept] + ends[at + kept])
        if hunk.bare_end and out:
            out[-1] = out[-1].removesuffix("\n").removesuffix("\r")
        done = at + len(hunk.old)
    out += [line + e for line, e in zip(lines[done:], ends[done:], strict=True)]
    # only the last line may be without an end
    out[:-1] = [line if line.endswith("\n") else line + end for line in out[:-1]]
    return "".join(out)
