"""Random calls of every tool, for the fuzz test and its bar: right and wrong arguments, paths that lead out, text that is none."""

import json
import random

from rl.harness.session import Session

TREE = r"""set -e
mkdir -p sub/deep; printf 'one\ntwo\nthree\n' > a.txt; printf 'x = 1\r\ny = 2\r\n' > sub/b.py; printf '\0\1\2' > sub/c.bin
printf 'caf\351\n' > latin; : > empty; head -c 300000 /dev/zero | tr '\0' z > long; mkfifo pipe
ln -s /etc out; ln -s ../../etc/passwd sub/secret; ln -s /tmp/outside/new dangling; ln -s . loop; ln -s a.txt inside
"""
PATHS = (
    *("a.txt", "sub/b.py", "sub/c.bin", "latin", "empty", "long", "pipe", "sub", ".", "", "loop/loop/a.txt", "inside", "new/file"),
    *("out/passwd", "out/new", "sub/secret", "dangling", "../../etc/passwd", "/etc/passwd", "/etc/new", "/tmp/outside/x", "out"),
    *("loop/out/hosts", "sub/../out/../x", "-rf", "--help", "a b", "ü", "\n", "a\0b", "x" * 5000, "~", "$HOME", "*", "sub/b.py/x"),
)
TEXTS = (
    "one",
    "two\n",
    "",
    "\r\n",
    "x = 1\r\ny",
    "\udcff",
    "\u2028",
    "🔍" * 9,
    "z" * 40000,
    "\0",
    "--",
    "(",
    "[a",
    "(a|b)*c",
    "**/*.py",
)
COMMANDS = (
    "ls -la",
    "echo hi",
    "cat a.txt",
    "exit 3",
    "seq 1 50000",
    "cd sub",
    "export A=1",
    "'",
    "cat <<E\nhi",
    "sleep 0",
    "kill $$",
    "",
)


def random_path(r: random.Random) -> str:
    return r.choice(PATHS)


def patch(r: random.Random) -> str:
    old, new = random_path(r), random_path(r)
    body = r.choice(("@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n", "@@ -0,0 +1 @@\n+x\n", "@@\n", "", "@@ -1 +0,0 @@\n-one\n"))
    return f"--- {r.choice((f'a/{old}', '/dev/null'))}\n+++ {r.choice((f'b/{old}', f'b/{new}', '/dev/null'))}\n{body}"


def value(r: random.Random, name: str, schema: dict):
    if r.random() < 0.1:
        return r.choice((None, 3, -1, 1e300, True, "x", [], {}, [1], {"a": 1}, "9" * 400))
    kind = schema["type"]
    if name == "patch":
        return patch(r)
    if name == "command":
        return r.choice(COMMANDS)
    if kind == "integer":
        return r.choice((0, 1, 2, 3, -1, 10**9, 100))
    if kind == "boolean":
        return r.random() < 0.5 and name != "background"
    if name == "todos":
        return [{"content": r.choice(TEXTS), "status": r.choice(("pending", "completed", "odd"))} for _ in range(r.randrange(3))]
    if kind == "array":
        return [random_path(r) for _ in range(r.randrange(3))]
    if name in ("path", "cwd"):
        return random_path(r)
    return r.choice(TEXTS)


def calls(tools, count: int, seed: int = 0):
    """(name, arguments as JSON text) of `count` calls."""
    r = random.Random(seed)
    names = [*tools.tools, "read_file", "edit_file", "write_file", "apply_patch", "no_such"]
    for _ in range(count):
        name = r.choice(names)
        properties = tools.tools[name].parameters["properties"] if name in tools.tools else {}
        required = tools.tools[name].parameters["required"] if name in tools.tools else []
        chosen = {k: value(r, k, v) for k, v in properties.items() if k in required or r.random() < 0.5}
        if "timeout_s" in chosen and isinstance(chosen["timeout_s"], int):
            chosen["timeout_s"] = min(chosen["timeout_s"], 2)
        if "wait_s" in chosen:
            chosen["wait_s"] = 0
        text = json.dumps(chosen)
        yield name, text if r.random() < 0.95 else text[: r.randrange(len(text) + 1)]


OUTSIDE = (
    "find / -xdev -path /workspace -prune -o -path /proc -prune -o -path '*/.shell*' -prune -o -printf '%p %y %s %m %T@\\n' | sort"
)


def faults_of(sandbox, tools, count: int, seed: int = 0) -> list[str]:
    """What was wrong with any of `count` random calls in a sandbox: exceptions, faults, too long results, changes outside."""
    sandbox.exec("mkdir -p /workspace /tmp/outside /root/.shell")
    sandbox.exec(TREE, cwd="/workspace")
    session = Session(sandbox, "/workspace", max_text=20_000)
    before = sandbox.exec(OUTSIDE, output_bytes=16 << 20).stdout
    wrong = []
    for name, arguments in calls(tools, count, seed):
        try:
            result = tools.call(session, name, arguments)
        except Exception as error:
            wrong.append(f"{name} {arguments[:200]}: raised {type(error).__name__}: {error}")
            break
        if len(result.text) > session.max_text + 100:
            wrong.append(f"{name} {arguments[:200]}: {len(result.text)} characters")
    after = sandbox.exec(OUTSIDE, output_bytes=16 << 20).stdout
    gone = {*before.splitlines()} ^ {*after.splitlines()}
    return wrong + session.faults + [f"changed outside: {line.decode(errors='replace')}" for line in sorted(gone)]
