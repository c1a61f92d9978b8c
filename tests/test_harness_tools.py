"""The tools, in a directory of plain processes: what they do to files, what they say, and that no call raises."""

import subprocess
import threading
import time

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rl.environments import open_backend
from rl.environments.sandbox import SandboxLost, SandboxSpec
from rl.harness import patch as patches
from rl.harness.files import glob_pattern
from rl.harness.schema import Tool, ToolSet, tool
from rl.harness.session import Session
from rl.harness.toolsets import ALL, tool_set
from rl.tasks.workspace import Entry, difference


@pytest.fixture(scope="module")
def backend():
    with open_backend("subprocess", allow="all") as opened:
        yield opened


@pytest.fixture
def session(backend):
    with backend.create(SandboxSpec(workdir="/")) as sandbox:
        sandbox.write("/workspace/.keep", b"")
        yield Session(sandbox)


TOOLS = tool_set([each.name for each in ALL])


def call(session, name, **arguments):
    return TOOLS.call(session, name, arguments)


def put(session, path, data):
    session.sandbox.write(f"/workspace/{path}", data if isinstance(data, bytes) else data.encode())


def get(session, path):
    return session.sandbox.read(f"/workspace/{path}")


def says(session, name, kind="ok", **arguments):
    result = call(session, name, **arguments)
    assert result.kind == kind, result
    return result.text


# One source


def test_a_schema_is_what_the_signature_says():
    schema = TOOLS.tools["shell"].schema["function"]
    assert schema["parameters"]["required"] == ["command"]
    assert schema["parameters"]["properties"]["timeout_s"] == {
        "type": "integer",
        "description": "seconds until it is stopped, 1 to 600",
        "default": 60,
    }
    assert TOOLS.tools["todo_write"].parameters["properties"]["todos"]["items"] == {"type": "object"}


def test_a_tool_that_cannot_be_told_to_a_model_is_refused():
    def silent(session, path: str) -> str: ...

    def odd(session, path: bytes) -> str:
        """Reads.

        path  where
        """

    with pytest.raises(TypeError, match="expected a docstring that describes"):
        tool(silent)
    with pytest.raises(TypeError, match="argument type"):
        tool(odd)


def test_the_digest_changes_with_what_a_model_is_told():
    assert TOOLS.digest == tool_set([each.name for each in ALL]).digest
    assert len({TOOLS.digest, tool_set().digest, tool_set(strict=False).digest, tool_set(["shell"]).digest}) == 4
    with pytest.raises(KeyError):
        tool_set(["shel"])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("read_fil", {}, "no tool 'read_fil'; did you mean read_file?"),
        ("read_file", {}, "missing argument path"),
        ("read_file", {"path": 3}, "path: expected a string without NUL and halves of characters, got 3"),
        ("read_file", {"path": "a", "ofset": 3}, "unknown argument 'ofset'; it takes path, offset, limit"),
        ("read_file", {"path": "a", "offset": "3"}, 'offset: expected an integer, got "3"'),
        ("read_file", {"path": "a", "offset": True}, "expected an integer, got true"),
        ("read_file", "{", "arguments are not JSON"),
        ("read_file", "[1]", "expected an object of arguments, got list"),
        ("read_file", "[" * 100_000, "arguments are not JSON"),
        ("read_lints", {"paths": [1]}, "paths: expected a list"),
    ],
)
def test_invalid_calls_are_told(session, name, arguments, message):
    result = TOOLS.call(session, name, arguments)
    assert result.kind == "invalid"
    assert message in result.text


def test_lenient_checks_convert_and_drop(session):
    put(session, "a", "1\n2\n3\n")
    lenient = tool_set(strict=False)
    assert lenient.call(session, "read_file", {"path": "a", "offset": "2", "limit": 1.0, "why": "x"}).text == "2\t2\n(1 more lines)"
    assert lenient.call(session, "read_file", {"path": "a", "offset": None}).kind == "ok"
    assert lenient.call(session, "shell", {"command": "true", "background": "False"}).kind == "ok"
    assert lenient.call(session, "read_file", {"path": "a", "offset": "two"}).kind == "invalid"


def test_faults_of_tools_and_of_sandboxes_differ(backend):
    def broken(session) -> str:
        """Breaks."""
        raise RuntimeError("oops")

    with backend.create(SandboxSpec()) as sandbox:
        session = Session(sandbox)
        assert ToolSet([tool(broken)]).call(session, "broken", {}).kind == "error"
        assert session.faults == ["broken: RuntimeError: oops"]
    with pytest.raises(SandboxLost):
        call(session, "read_file", path="a")


# Files


def test_reading(session):
    put(session, "a", "one\r\ntwo\n" + "x" * 5000)
    text = says(session, "read_file", path="a")
    assert text.startswith("1\tone\n2\ttwo\n3\txxx")
    assert len(text) < 2100
    assert says(session, "read_file", path="a", offset=2, limit=1) == "2\ttwo\n(1 more lines)"
    assert "expected 1 to 3" in says(session, "read_file", "error", path="a", offset=4)
    assert "No such file" in says(session, "read_file", "error", path="b")
    assert "Is a directory" in says(session, "read_file", "error", path=".")
    put(session, "b", b"\0\1")
    assert "binary file of 2 bytes" in says(session, "read_file", "error", path="b")
    put(session, "c", b"caf\xe9\n")
    assert says(session, "read_file", path="c") == "1\tcaf�"
    put(session, "d", "")
    assert says(session, "read_file", path="d") == "d is empty"


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        ("a\nb\nc\n", "b\n", "x\ny\n", "a\nx\ny\nc\n"),
        ("a\r\nb\r\nc\r\n", "a\nb", "x\ny", "x\r\ny\r\nc\r\n"),
        ("a\nb", "a\r\nb", "x", "x"),
        (b"caf\xe9 b\n", "b", "c", b"caf\xe9 c\n"),
        ("\ufeffa\n", "a", "b", "\ufeffb\n"),
        ("a.b\n", "a.b", r"\1\g<0>", "\\1\\g<0>\n"),
    ],
)
def test_edits_keep_the_rest_of_a_file(session, before, old, new, after):
    put(session, "f", before)
    says(session, "edit_file", path="f", old=old, new=new)
    assert get(session, "f") == (after if isinstance(after, bytes) else after.encode())


def test_lines_end_where_all_else_says_so(session):
    """A form feed, U+2028 and their like stand within a line, as for grep, compilers and the hunks of a patch."""
    put(session, "f", "a\n\x0cb\x85\u2028c\nd = '\x0b'\n")
    assert says(session, "read_file", path="f") == "1\ta\n2\t\x0cb\x85\u2028c\n3\td = '\x0b'"
    assert says(session, "grep", pattern="d", path="f").startswith("f:3:")
    says(session, "edit_line", path="f", line=3, text="e")
    assert get(session, "f") == "a\n\x0cb\x85\u2028c\ne\n".encode()


def test_what_no_server_takes_is_not_said(session):
    for name, arguments in (("write_file", {"path": "f", "content": "\ud83d"}), ("shell", {"command": "echo \ud83d"})):
        assert "halves of characters" in says(session, name, "invalid", **arguments)
    assert says(session, "write_file", path="\udcff", content="\udcff") == "Wrote \ufffd: 1 lines"
    assert get(session, "\udcff") == b"\xff"
    assert session.faults == []


def test_edits_must_be_clear(session):
    put(session, "f", "a\n  b\na\n")
    assert "holds that piece 2 times" in says(session, "edit_file", "error", path="f", old="a", new="b")
    assert "its first line stands at line 2" in says(session, "edit_file", "error", path="f", old="b\nx", new="b")
    assert "equals the old one" in says(session, "edit_file", "error", path="f", old="b", new="b")
    assert "empty text" in says(session, "edit_file", "error", path="f", old="", new="b")
    assert get(session, "f") == b"a\n  b\na\n"
    says(session, "edit_file", path="f", old="a", new="c", replace_all=True)
    assert get(session, "f") == b"c\n  b\nc\n"
    put(session, "f", "a\nb\na\nb\na\n")
    assert "holds that piece 2 times" in says(session, "edit_file", "error", path="f", old="a\nb\na", new="x")  # they overlap


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        ("a\n  b\nc\n", 2, "x", "a\n  x\nc\n"),
        ("a\n\tb", 2, "x\ny", "a\n\tx\n\ty"),
        ("a\r\n  b\r\nc\r\n", 2, "x\ny", "a\r\n  x\r\n  y\r\nc\r\n"),
        ("a\n  b\nc\n", 2, "    if x:\n        y\n", "a\n  if x:\n      y\nc\n"),
        ("a\n  b\nc\n", 2, "x\n\ny", "a\n  x\n\n  y\nc\n"),
        ("a\n  b\nc\n", 2, "", "a\nc\n"),
        ("\ufeffa\nb\n", 1, "x", "\ufeffx\nb\n"),
        ("\ufeffa\nb\n", 1, "", "\ufeffb\n"),
        (b"caf\xe9\n  b\n", 2, "x", b"caf\xe9\n  x\n"),
        ("a\n\nc\n", 2, "b", "a\nb\nc\n"),
    ],
)
def test_a_line_keeps_its_indentation_and_its_end(session, before, line, text, after):
    put(session, "f", before)
    assert says(session, "edit_line", path="f", line=line, text=text) == f"Edited f: line {line}"
    assert get(session, "f") == (after if isinstance(after, bytes) else after.encode())


def test_line_edits_that_cannot_be(session):
    put(session, "f", "a\n  b\n")
    assert "no change" in says(session, "edit_line", "error", path="f", line=2, text="b")
    assert "expected 1 to 2, the number of lines of f, got 3" in says(session, "edit_line", "error", path="f", line=3, text="b")
    assert "expected 1 to 2" in says(session, "edit_line", "error", path="f", line=0, text="b")
    assert "expected an integer" in says(session, "edit_line", "invalid", path="f", line="2", text="b")
    assert "No such file" in says(session, "edit_line", "error", path="g", line=1, text="b")
    put(session, "empty", "")
    assert "empty is empty" in says(session, "edit_line", "error", path="empty", line=1, text="b")
    assert get(session, "f") == b"a\n  b\n"


def test_checks_are_run_as_the_files_are_now(session):
    put(session, "check.py", "from f import f\nprint(f())\n")
    for number in range(3):  # within a second, of one length: a compiled file would be taken for the new one
        put(session, "f.py", f"def f(): return {number}\n")
        assert says(session, "run_check") == str(number)
    put(session, "g.py", "raise SystemExit(3)\n")
    assert says(session, "run_check", path="g.py") == "(exit code 3)"
    assert "No such file" in says(session, "run_check", path="nothing.py")


def test_modes_and_directories(session):
    put(session, "run.sh", "echo 1\n")
    says(session, "shell", command="chmod 755 run.sh")
    says(session, "edit_file", path="run.sh", old="1", new="2")
    assert says(session, "shell", command="./run.sh") == "2"
    assert "new/dir/f: 1 line" in says(session, "write_file", path="new/dir/f", content="x\n")
    assert says(session, "list_dir", depth=3) == ".keep\nnew/\nnew/dir/\nnew/dir/f\nrun.sh"
    assert says(session, "glob", pattern="*.sh") == "run.sh"
    assert says(session, "delete_file", path="run.sh") == "Deleted run.sh"
    assert "irectory" in says(session, "delete_file", "error", path="new")
    assert "expected a directory" in says(session, "list_dir", "error", path="run.sh")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.py", ["a.py", "b/c.py"], ["a.pyc"]),
        ("src/**/t_*", ["src/t_a", "src/x/y/t_b"], ["t_a", "src/x/a"]),
        ("src/*", ["src/a"], ["src/a/b"]),
        ("[!a]?.c", ["bx.c"], ["ax.c", "b.c"]),
        ("./a+(b)", ["a+(b)"], ["aab"]),
        ("[", ["["], ["a"]),
    ],
)
def test_patterns(pattern, yes, no):
    matcher = glob_pattern(pattern)
    assert [name for name in yes + no if matcher.fullmatch(name)] == yes


# Patches

LINES = st.lists(st.sampled_from(["a", "b", "", "  x = 1", "}"]), max_size=12)


@settings(max_examples=100)
@example([], ["a", "a"], "\r\n", False, True, 0)
@given(LINES, LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans(), st.integers(0, 3))
def test_patches_of_git_apply(tmp_path_factory, before, after, end, bare_before, bare_after, context):
    root = tmp_path_factory.mktemp("patch")
    for name, lines, bare in (("old", before, bare_before), ("new", after, bare_after)):
        text = end.join(lines) + (end if lines and not bare else "")
        (root / name).write_bytes(text.encode())
    old, new = (root / "old").read_bytes(), (root / "new").read_bytes()
    if old == new:
        return
    diff = subprocess.run(
        ["git", "diff", "--no-index", f"-U{context}", "--no-color", "old", "new"], cwd=root, capture_output=True, check=False
    ).stdout.decode()
    (change,) = patches.parse(diff)
    assert patches.applied(old.decode(), change).encode() == new


def test_a_patch_finds_its_place(session):
    put(session, "f.py", "x\n" * 5 + "a\r\n".replace("\r", "") + "b  \nc\n")
    says(session, "apply_patch", patch="--- a/f.py\n+++ b/f.py\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n")
    assert get(session, "f.py") == b"x\n" * 5 + b"a\nB\nc\n"


def test_a_patch_is_applied_whole_or_not_at_all(session):
    put(session, "a", "1\n")
    put(session, "b", "2\n")
    patch = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+x\n--- a/b\n+++ b/b\n@@ -1 +1 @@\n-3\n+y\n"
    assert "b: the lines of the hunk at line 1 do not stand there" in says(session, "apply_patch", "error", patch=patch)
    assert get(session, "a") == b"1\n"
    says(session, "apply_patch", patch=patch.replace("-3", "-2") + "--- /dev/null\n+++ b/n/c\n@@ -0,0 +1 @@\n+new\n")
    assert (get(session, "a"), get(session, "b"), get(session, "n/c")) == (b"x\n", b"y\n", b"new\n")
    says(session, "apply_patch", patch="diff --git a/a b/m\nrename from a\nrename to m\n")
    assert get(session, "m") == b"x\n"
    onto = "diff --git a/m b/b\nrename from m\nrename to b\n"
    assert "b: expected no such file" in says(session, "apply_patch", "error", patch=onto)
    twice = "--- a/m\n+++ b/m\n@@ -1 +1 @@\n-x\n+z\n"
    assert "m: expected all changes of a file in one part" in says(session, "apply_patch", "error", patch=2 * twice)
    assert (get(session, "m"), get(session, "b")) == (b"x\n", b"y\n")
    says(session, "apply_patch", patch="--- a/b\n+++ /dev/null\n@@ -1 +0,0 @@\n-y\n")
    assert says(session, "glob", pattern="?") == "m\nn/c"


@given(st.lists(st.text(st.characters(blacklist_characters="\0/", codec="utf-8"), min_size=1, max_size=9), min_size=1, max_size=3))
@settings(max_examples=40)
def test_files_of_a_patch_have_the_names_that_git_gave_them(parts):
    assume(not {".", "..", ".git"} & set(parts))
    name = "/".join(parts)
    sides = {name: Entry(0o100644, b"1\x0c2\n")}, {name: Entry(0o100644, b"")}, {}
    for before, after, lines in ((0, 1, 1), (0, 2, 1), (1, 2, 0), (2, 0, 1)):
        patch = difference(sides[before], sides[after])
        assert [patches.same_name(header) for header in patches.headers(patch)] == [name]
        assert patches.changed_lines(patch) == lines


def test_headers_of_git(session):
    """Copies, modes, files without a line, and names in quotes: as git means them."""
    put(session, "a", "1\n")
    copy = "diff --git a/a b/{0}\ncopy from a\ncopy to {0}\n"
    changed = "--- a/a\n+++ b/c\n@@ -1 +1 @@\n-1\n+2\n"
    says(session, "apply_patch", patch=copy.format("b") + copy.format("c") + changed)
    assert [get(session, name) for name in "abc"] == [b"1\n", b"1\n", b"2\n"]
    added = "new file mode 100755\n--- /dev/null\n+++ {0}\n@@ -0,0 +1 @@\n+x\n"
    quoted = r'"b/\303\251 \"q\".sh"'
    empty = "diff --git a/a/e b/a/e\nnew file mode 100644\nindex 0000000..e69de29\n".replace("a/a", "a/d").replace("b/a", "b/d")
    says(session, "apply_patch", patch=f"diff --git {quoted.replace('b/', 'a/')} {quoted}\n" + added.format(quoted) + empty)
    says(session, "apply_patch", patch="diff --git a/a b/a\nold mode 100644\nnew mode 100755\n")
    assert says(session, "shell", command="stat -c '%a %n' a *.sh") == '755 a\n755 é "q".sh'
    assert get(session, "d/e") == b""
    says(session, "apply_patch", patch="diff --git a/d/e b/d/e\ndeleted file mode 100644\nindex e69de29..0000000\n")
    assert "No such file" in says(session, "read_file", "error", path="d/e")
    put(session, "a", "1\n2\n")
    part = "--- a/a\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n"
    assert "leave 1 lines" in says(session, "apply_patch", "error", patch=part)
    assert get(session, "a") == b"1\n2\n"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+x\n", "links are made by commands"),
        ("diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-x\n+y\n", "links are made by commands"),
        ('--- /dev/null\n+++ "b/a\\000b"\n@@ -0,0 +1 @@\n+x\n', "inside the work directory"),
        ('--- /dev/null\n+++ "b/\\056./x"\n@@ -0,0 +1 @@\n+x\n', "inside the work directory"),
        ("hello", "expected a unified diff"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+c\n", "expected no more lines of a hunk"),
        ("--- a/x\nhello", "expected '\\+\\+\\+ file'"),
        ("--- a/x\n+++ b/x\n", "expected a hunk"),
        ("--- a/x\n+++ b/x\n@@ x @@\n", "expected '@@ -line,count"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n", "expected 2 old and 2 new lines, got"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\nxx\n", "expected lines that begin with"),
        ("--- a/../../x\n+++ b/x\n", "inside the work directory"),
        ("--- /dev/null\n+++ /dev/null\n", "on both"),
        ("GIT binary patch", "a binary one"),
        ("@@ -1 +1 @@", "before the first @@"),
    ],
)
def test_bad_patches_are_told(patch, message):
    with pytest.raises(ValueError, match=message):
        patches.parse(patch)


# Search


def test_grep(session):
    put(session, "b.py", "import os\nOS = 1\n")
    put(session, "a/c.txt", "os\n" * 3 + "y" * 900 + "os")
    put(session, "bin", b"\0os")
    assert says(session, "grep", pattern="^os|import", glob="*.py") == "b.py:1:import os"
    assert says(session, "grep", pattern="os", limit=2).endswith("(3 more)")
    assert says(session, "grep", pattern="OS", ignore_case=True, path="b.py") == "b.py:1:import os\nb.py:2:OS = 1"
    assert says(session, "grep", pattern="-e x") == "Nothing matches"
    assert "grep" in says(session, "grep", "error", pattern="(")


def test_codebase_search_finds_names_and_words(session):
    put(session, "shop/cart.py", "class ShoppingCart:\n    def add_item(self, item):\n        self.items.append(item)\n")
    put(session, "shop/tax.py", "def value_added_tax(net):\n    return net * 0.19\n")
    put(session, "README", "A shop.\n" * 50)
    assert says(session, "codebase_search", query="where is an item added to the shopping cart?", limit=1).startswith(
        "shop/cart.py\n1\tclass"
    )
    assert says(session, "codebase_search", query="compute valueAddedTax", limit=1).startswith("shop/tax.py")
    assert says(session, "codebase_search", query="zebra") == "Nothing found"


# Terminal


def test_the_shell_remembers_directory_and_variables(session):
    says(session, "shell", command="mkdir -p d && cd d && export A='x y' && B=1")
    assert says(session, "shell", command='basename "$PWD"; echo "$A|$B"') == "d\nx y|"
    assert says(session, "shell", command='basename "$PWD"', cwd=".") == "workspace"
    assert says(session, "shell", command="exit 3") == "(exit code 3)"
    assert says(session, "shell", command="echo a >&2; false") == "a\n(exit code 1)"
    assert says(session, "shell", command="true") == "(no output)"
    assert says(session, "shell", command="cat") == "(no output)"  # its input is at its end
    assert "No such file" in says(session, "shell", command="echo", cwd="nowhere") or "can't cd" in says(
        session, "shell", command="echo", cwd="nowhere"
    )


def test_the_shell_survives_a_command_that_hangs(session):
    says(session, "shell", command="export A=1")
    start = time.monotonic()
    text = says(session, "shell", command="echo before; sleep 60 & sleep 60", timeout_s=1)
    assert time.monotonic() - start < 10
    assert text.startswith("before\n(stopped after")
    assert says(session, "shell", command="echo $A; ps -ef | grep -c '[s]leep 60' || true") in ("1\n0", "1\n0\n(exit code 1)")


def test_background_commands(session):
    assert says(session, "shell", command="echo a; sleep 0.3; echo b; exit 4", background=True) == "Started as job 1"
    assert says(session, "shell_output", job=1, wait_s=10) == "a\nb\n(ended with exit code 4)"
    assert says(session, "shell", command="echo on; sleep 60 & wait", background=True) == "Started as job 2"
    time.sleep(0.3)
    assert says(session, "shell_output", job=2) == "on\n(running)"
    assert says(session, "shell_kill", job=2) == "Ended job 2"
    assert says(session, "shell_output", job=2) == "on\n(ended with exit code 137)"
    assert says(session, "shell_kill", job=2) == "Job 2 had ended"
    assert "job: expected one of [1, 2], got 3" in says(session, "shell_output", "error", job=3)


def test_long_output_loses_its_middle(session):
    text = says(session, "shell", command="seq 1 100000")
    assert len(text) <= session.max_text
    assert text.startswith("1\n2\n")
    assert text.rstrip().endswith("100000") or "bytes of output were cut" in text
    assert "characters" in text


@given(st.text(alphabet="ab\n", max_size=400), st.integers(100, 200))
def test_cut_text_keeps_its_limit(text, limit):
    shown = Session(None).text(text, limit)
    assert len(shown) <= limit
    assert shown == text or "cut ...]" in shown


# The run


def test_planning(session):
    todos = [{"content": "a", "status": "completed"}, {"content": "b"}]
    assert says(session, "todo_write", todos=todos) == "2 to-dos, 1 open"
    assert session.todos[1] == {"content": "b", "status": "pending"}
    assert "status: expected" in says(session, "todo_write", "error", todos=[{"content": "a", "status": "x"}])
    put(session, "bad.py", "def f(:\n")
    assert "bad.py" in says(session, "read_lints", paths=["bad.py"])
    says(session, "finish", answer="done")
    assert session.answer == "done"
    assert "nobody to ask" in says(session, "ask_user", "error", question="?")
    assert "no access to the web" in says(session, "web_fetch", "error", url="http://x")


ODD = st.sampled_from(["a", "../workspace/a", "/etc/passwd", "link", "d/../a", "\0", "**", "["])
KEYS = st.sampled_from(["path", "content", "old", "new", "pattern", "query", "patch", "offset", "limit", "depth", "glob", "job"])
ARGUMENTS = st.dictionaries(KEYS, st.text(max_size=20) | ODD | st.integers(-5, 10**6), max_size=5)
FUZZED = [name for name in TOOLS.tools if not name.startswith("shell")]  # what a command does is its sandbox's business


def tree(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and not path.is_symlink()}


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(FUZZED), ARGUMENTS), max_size=4), st.booleans())
def test_no_call_raises_or_leaves_the_work_directory(session, tmp_path, calls, strict):
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "f").write_text("kept")
    tools = tool_set([each.name for each in ALL], strict=strict)
    put(session, "a", "a\nb\n")
    session.sandbox.exec(["ln", "-sfn", str(outside), "link"], cwd="/workspace")
    for name, arguments in calls:
        result = tools.call(session, name, arguments)
        assert len(result.text) <= session.max_text + 2000
        result.text.encode("utf-8")
    assert not session.faults
    assert tree(outside) == {outside / "f": b"kept"}


def test_tools_may_run_side_by_side(session):
    put(session, "a", "x\n")
    texts = []
    threads = [threading.Thread(target=lambda: texts.append(says(session, "read_file", path="a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == ["1\tx"] * 8


def test_every_tool_is_documented():
    for each in ALL:
        assert isinstance(each, Tool)
        assert each.description.endswith(".")
        assert all(p["description"] for p in each.parameters["properties"].values())
