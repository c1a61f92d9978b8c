"""Images: recipes, the cache, the Dockerfile subset; the journal."""

import contextlib
import shutil
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.environments.dockerfile import parse_dockerfile
from rl.environments.images import ImageStore, Recipe
from rl.environments.journal import Journal
from rl.environments.sandbox import ImageError, SandboxSpec, SnapshotError
from tests.sandbox_cases import open_or_skip, spec

TINY = ("sh", "cat", "ls", "mkdir", "tar", "test", "rm")


def test_a_recipe_is_built_once_and_found_again(tmp_path):
    store, built = ImageStore(tmp_path), []
    recipe = Recipe(programs=TINY, files={"/etc/motd": "hello\n"})
    threads = [threading.Thread(target=lambda: built.append(store.build(recipe))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(built)) == 1
    assert (built[0] / "etc/motd").read_text() == "hello\n"
    assert store.build(Recipe(programs=TINY, files={"/etc/motd": "other\n"})) != built[0]


def test_recipes_that_cannot_be_built(tmp_path):
    store = ImageStore(tmp_path)
    for recipe, message in (
        (Recipe(programs=("no-such-program",)), "has no no-such-program"),
        (Recipe(programs=TINY, files={"/../out": ""}), "leaves the image"),
        (Recipe(programs=TINY, setup="true"), "needs ImageStore"),
        (Recipe(programs=TINY, pypi=("x",)), "need a Python"),
    ):
        with pytest.raises(ImageError, match=message):
            store.build(recipe)
    assert not [entry for entry in tmp_path.iterdir() if not entry.name.startswith(".")]


def test_set_up_runs_inside_and_its_files_are_the_image(tmp_path):
    with open_or_skip("namespaces") as backend:
        store = ImageStore(tmp_path, lambda: open_or_skip("namespaces"))
        root = store.build(Recipe(programs=TINY, files={"/old": "x"}, setup="rm /old; mkdir /made; ls / > /made/list"))
        with backend.create(SandboxSpec(root)) as sandbox:
            assert b"etc" in sandbox.read("/made/list")
            assert not sandbox.exec("test -e /old").ok
        with pytest.raises(ImageError, match="set-up ended with 3"):
            store.build(Recipe(programs=TINY, setup="exit 3"))


@pytest.mark.slow
def test_debian_image(tmp_path):
    if not shutil.which("apt-get"):
        pytest.skip("no apt-get")
    with open_or_skip("namespaces") as backend:
        root = ImageStore(tmp_path, lambda: open_or_skip("namespaces")).build(Recipe(debian=("git",)))
        with backend.create(SandboxSpec(root)) as sandbox:
            assert sandbox.exec("git init /tmp/x && dpkg --audit").ok


def test_dockerfile(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app/main.py").write_text("print(1)")
    recipe, environment, workdir = parse_dockerfile(
        "# syntax\nARG V=1.2\nFROM docker.io/library/python:3.11-slim\nENV A=1 B='two words'\nWORKDIR /app\n"
        "RUN apt-get update && apt-get install -y --no-install-recommends git \\\n  make && rm -rf /var/lib/apt/lists/*\n"
        "RUN pip install --no-cache-dir pytest==8.3.4\nCOPY app .\n"
        'RUN echo $V > version && chmod +x main.py\nUSER root\nCMD ["x"]\n',
        tmp_path,
    )
    assert recipe.debian == ("python3", "python3-pip", "python3-venv", "git", "make")
    assert recipe.pypi == ("pytest==8.3.4",)
    assert recipe.files == {"/app/main.py": "print(1)"}
    assert (environment, workdir) == ({"A": "1", "B": "two words"}, "/app")
    assert recipe.setup.startswith("set -e\nexport V=1.2\nexport A=1\nexport B='two words'\nmkdir -p /app\n")
    assert recipe.setup.endswith("\n(cd /app && echo $V > version && chmod +x main.py)")


def test_variables_of_a_dockerfile():
    recipe, environment, workdir = parse_dockerfile(
        "ARG BASE=debian\nFROM $BASE AS one\nENV PATH=/usr/x/bin:$PATH\nENV A=\"$NONE x\" B='$A' C=\\$A D=${A:-n}${NO:-m}${A:+p}\n"
        "ENV OLD some  'old text'\nARG A=argument\nARG V\nWORKDIR /a\nWORKDIR ../b/$V\nRUN A=2 && echo '$A' \"$A\"\n"
        'RUN pip install -q "x[y]>=1,<2" z==$V1\nENV V1=3\n'
    )
    assert environment == {
        **{"PATH": "/usr/x/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "A": " x", "B": "$A", "C": "$A"},
        **{"D": "nm", "OLD": "some old text", "V1": "3"},
    }
    assert (workdir, recipe.pypi) == ("/b", ("x[y]>=1,<2", "z=="))
    assert "(cd /b && A=2 && echo '$A' \"$A\")" in recipe.setup  # the shell's, not ours
    assert "argument" not in recipe.setup  # ENV before ARG
    assert recipe.setup.index("echo") < recipe.setup.index("V1=3")
    assert parse_dockerfile("FROM debian\nENV A=1")[0].setup == ""


def test_copies_of_a_dockerfile(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/run").write_bytes(b"#!/bin/sh\r\n")
    (tmp_path / "d/run").chmod(0o755)
    (tmp_path / "a.txt").write_text("a")
    text = "FROM debian\nWORKDIR /w\nCOPY a.txt .\nCOPY a.txt b.txt\nCOPY a.txt /w\nCOPY a.txt /x/\nCOPY /d ./d\n"
    recipe = parse_dockerfile(text, tmp_path)[0]
    assert recipe.files == {"/w/a.txt": "a", "/w/b.txt": "a", "/x/a.txt": "a", "/w/d/run": "#!/bin/sh\r\n"}
    assert recipe.setup.endswith("chmod 755 /w/d/run")
    (tmp_path / "d/secret").symlink_to("/etc/passwd")
    with pytest.raises(ImageError, match=r"line 7: COPY takes files .* d/secret"):
        parse_dockerfile(text, tmp_path)
    (tmp_path / "d/secret").unlink()
    (tmp_path / "d/binary").write_bytes(b"\xff")
    with pytest.raises(ImageError, match=r"COPY takes texts in UTF-8, got d/binary"):
        parse_dockerfile(text, tmp_path)
    (tmp_path / ".dockerignore").write_text("d")
    with pytest.raises(ImageError, match=r"\.dockerignore"):
        parse_dockerfile(text, tmp_path)


@given(st.text("FROMdebianRUNVAG =$'\"\\{}:-+;&<>#\n/.\0é", max_size=60))
def test_any_text_is_a_dockerfile_or_refused(text):
    for dockerfile in (text, f"FROM debian\nENV {text}", f"FROM debian\nRUN apt-get install {text}"):
        with contextlib.suppress(ImageError):
            parse_dockerfile(dockerfile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM alpine", "FROM must be once"),
        ("RUN true", "begins with FROM"),
        ("FROM debian\nADD http://x /x", "line 2: ADD"),
        ("FROM debian\nVOLUME /x", "line 2: VOLUME"),
        ("FROM debian\nUSER app", "line 2: USER"),
        ("FROM debian\nRUN pip install -r requirements.txt", "takes package names"),
        ("FROM debian\nRUN --mount=type=cache true", "with options"),
        ("FROM debian\nCOPY ../x /x", "not in the context"),
        ("FROM debian\nFROM debian", "FROM must be once"),
        ("FROM", "FROM must be once"),
        ("FROM debian\nENV A='x", "line 2: expected an end of what ' begins"),
        ("FROM debian\nENV A=1 B", "line 2: ENV takes NAME=value"),
        ("FROM debian\nENV A=${B:?x}", r"line 2: expected \$NAME"),
        ("FROM debian\nRUN", "line 2: RUN with nothing"),
        ("FROM debian\nRUN cat <<E > /x\nUSER root\nE", "line 2: RUN with nothing, with options, here"),
        ("FROM debian\nRUN apt-get update; apt-get install -y git", "line 2: expected packages .* got ';'"),
        ("FROM debian\nRUN apt-get install -y git || true", "a command of its own"),
        ("FROM debian\nRUN apt-get install -t sid git", "install takes package names here, got -t"),
        ("FROM debian\nRUN pip install --target /x y", "got --target"),
        ("FROM debian\nRUN pip install git+https://x/y", "takes package names"),
        ("# escape=`\nFROM debian", "line 1: .* not supported"),
        ("FROM debian\nWORKDIR", "line 2: WORKDIR"),
        ('FROM debian\nCOPY ["a", "b"]', "COPY takes one source"),
    ],
)
def test_what_a_dockerfile_may_not_say(text, message, tmp_path):
    with pytest.raises(ImageError, match=message):
        parse_dockerfile(text, tmp_path)


def test_a_journal_brings_files_and_processes_back(tmp_path):
    with open_or_skip("namespaces") as backend:
        sandbox = backend.create(spec(backend))
        journal = Journal(sandbox, tmp_path / "journal")
        journal.exec("sleep 300 & echo started > /tmp/log", background=True)
        journal.write("/tmp/a", b"1")
        journal.snapshot()
        journal.exec("cat >> /tmp/a", stdin=b"2")
        sandbox.destroy()
        with journal.resume(backend) as again:
            assert again.read("/tmp/a") == b"12"
            assert b"sleep" in again.exec("cat /proc/[0-9]*/comm").stdout
            journal.exec("test -e /tmp/log")
            again.exec("true")
        (tmp_path / "journal").write_text((tmp_path / "journal").read_text().replace('"exit": 0', '"exit": 9'))
        with pytest.raises(SnapshotError, match="replayed"):
            journal.resume(backend)
        assert not backend.sandboxes()
