"""Runs hidden tests, as the only trusted program of the sandbox in which a change is graded. Standard library only.

    python3 -I runner.py settings.json      stdout: one JSON object, written at the end (`Report` of verification.py)

Two processes. The parent is root, never imports anything of the work directory, and alone holds stdout, which is the caller's pipe.
The child is an ordinary user without a way to the parent; it imports the code under test and says through a pipe what each test
did. Whoever writes to that pipe without the token, which is made anew for each run, is found out.

Code under test runs in the process that judges it, so it may lie there. Against that: tests that must fail, of every kind and under
random names, run before and after the others (whatever makes all tests pass makes these pass); pytest's and Python's own functions
are compared with what they were before the code was imported; an object that claims to equal everything is no answer. Code that
knows this file can still lie. Where that matters, let the outputs be compared outside (`"calls"` in the settings).
"""

import json
import os
import resource
import select
import signal
import stat
import sys
import time
import types

USER = 1000
PROCESSES = 128  # of the child: below the sandbox's limit, so that a fork bomb leaves the parent some
HIDDEN = os.path.dirname(os.path.abspath(__file__))
MAX_EVENTS = 32 << 20  # bytes
# Loaded by pytest from anywhere in the tree, or by Python itself: only hidden ones count.
LOADED = ("conftest.py", "sitecustomize.py", "usercustomize.py")
MUST_FAIL = """
import unittest
import pytest

def test_{0}():
    assert False

def test_{1}():
    assert 1 == 2

def test_{2}():
    raise ValueError

def test_{3}():
    pytest.fail("no")

class Test{5}(unittest.TestCase):
    def test(self):
        self.assertEqual(1, 2)

@pytest.fixture
def broken():
    raise KeyError

def test_{4}(broken):
    pass
"""


def place(workdir: str, hidden: str, is_test: "list[str]") -> None:
    """Puts the hidden files where the work directory's own tests are, which go. No link is followed."""
    names = []
    for top, _, files in os.walk(hidden):
        names += [os.path.relpath(os.path.join(top, name), hidden) for name in files]
    for top, directories, files in os.walk(workdir):
        inside = os.path.relpath(top, workdir)
        for name in [*files, *(d for d in directories if os.path.islink(os.path.join(top, d)))]:
            path = os.path.normpath(os.path.join(inside, name))
            roots = tuple(f"{root}/" for root in is_test)
            if name in LOADED or path in is_test or f"{path}/".startswith(roots):
                os.unlink(os.path.join(top, name))
    for name in names:
        at = workdir
        for part in os.path.dirname(name).split("/") if os.path.dirname(name) else []:
            at = os.path.join(at, part)
            if os.path.lexists(at) and not stat.S_ISDIR(os.lstat(at).st_mode):
                os.unlink(at)
            if not os.path.lexists(at):
                os.mkdir(at, 0o755)
        target = os.path.join(at, os.path.basename(name))
        if os.path.lexists(target):
            os.unlink(target)
        with open(os.path.join(hidden, name), "rb") as source, open(target, "xb") as file:
            file.write(source.read())
        os.chmod(target, os.stat(os.path.join(hidden, name)).st_mode & 0o755 | 0o444)


def become_user() -> None:
    """Gives up all rights over the parent. What is printed from here on is a log."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.umask(0o022)


class Limit:
    """Raises in whatever runs longer than `seconds`, again each second after, for code that swallows it."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self):
        def late(*_):
            raise TimeoutError(f"not done after {self.seconds} s")

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, self.seconds, 1.0)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def call_function(settings: dict, tell) -> None:
    """Calls one function with each list of arguments; tells its results as JSON."""
    path = os.path.join(settings["workdir"], settings["file"])
    sys.path.insert(0, os.path.dirname(path))
    with open(path, encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("answer")
    module.__file__ = path
    sys.modules["answer"] = module
    with Limit(settings["seconds"]):
        exec(compile(source, path, "exec"), module.__dict__)
    function = getattr(module, settings["function"])
    for i, arguments in enumerate(settings["calls"]):
        try:
            with Limit(settings["seconds"]):
                tell({"call": i, "output": function(*arguments)})
        except Exception as error:
            tell({"call": i, "error": type(error).__name__})
            if isinstance(error, TimeoutError):  # the others would not end either
                break


def run_tests(settings: dict, tell, canaries: "list[str]") -> None:
    import pytest

    from_here = os.path.realpath(settings["workdir"])
    os.environ.update(settings.get("env", {}), PYTHONPATH=":".join(settings["paths"]), HOME="/tmp", PYTHONDONTWRITEBYTECODE="1")
    sys.path[:0] = settings["paths"]
    os.chdir(from_here)
    distrust_equality(from_here)
    known = fingerprint()

    class Reporter:
        def __init__(self):
            self.done = {}

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            place = {canaries[0]: 0, canaries[1]: 2}
            items.sort(key=lambda item: place.get(str(item.path), 1))

        # around each phase and not around the whole: pytest's own work, such as a traceback, must not be interrupted
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(self, item):
            with Limit(settings["seconds"]):
                return (yield)

        pytest_runtest_setup = pytest_runtest_teardown = pytest_runtest_call

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_make_collect_report(self, collector):
            with Limit(settings.get("collect_seconds", 60.0)):
                return (yield)

        def pytest_collectreport(self, report):
            if report.failed:
                tell({"test": report.nodeid, "status": "ERROR"})

        def pytest_runtest_logreport(self, report):
            was = self.done.get(report.nodeid)
            if report.skipped:
                status = "XFAIL" if hasattr(report, "wasxfail") else "SKIPPED"
            elif report.failed:
                status = "FAILED" if report.when == "call" else "ERROR"
            else:
                status = "PASSED" if report.when == "call" else None
            self.done[report.nodeid] = status if was in (None, "PASSED") and status else was

        def pytest_runtest_logfinish(self, nodeid):
            tell({"test": nodeid, "status": self.done.pop(nodeid, None) or "ERROR"})
            if changed := changes(known):
                tell({"changed": changed})

    arguments = ["-c", f"{HIDDEN}/pytest.ini", f"--rootdir={from_here}", f"--confcutdir={from_here}", "-p", "no:cacheprovider"]
    arguments += ["-q", "--tb=short", "--continue-on-collection-errors", "-W", "ignore", *settings.get("arguments", [])]
    code = pytest.main([*arguments, *settings["tests"], *canaries], plugins=[Reporter()])
    if changed := changes(known):
        tell({"changed": changed})
    tell({"end": int(code)})


def fingerprint() -> dict:
    """Functions that must be after a test what they were before: Python's, pytest's, unittest's."""
    import builtins
    import time
    import unittest.case

    found = {}
    ours = [m for name, m in sys.modules.items() if name.split(".")[0] in ("_pytest", "pluggy") and m is not None]
    for module in [builtins, time, unittest.case, *ours]:
        for name, value in list(vars(module).items()):
            if callable(value) and name != "_":
                found[module, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__ and module is not builtins:
                found |= {(value, key): entry for key, entry in list(vars(value).items()) if callable(entry)}
    # pytest replaces this one itself, when it is configured
    return {key: value for key, value in found.items() if key[1] != "_getini_unknown_type"}


def changes(known: dict) -> str:
    """The first function that is another one now."""
    for (owner, name), value in known.items():
        if vars(owner).get(name) is not value:
            return f"{owner.__name__}.{name}"
    return ""


def distrust_equality(workdir: str) -> None:
    """Assertions refuse objects of the code under test that equal everything."""
    import ast
    import builtins
    import unittest.case

    from _pytest.assertion import rewrite

    class Nothing:
        pass

    def value(x):
        file = getattr(sys.modules.get(type(x).__module__), "__file__", None) or ""
        if file.startswith(workdir + "/"):
            try:
                lies = (x == Nothing()) is True  # whatever != says: that of a subclass of int goes its own way
            except Exception:
                lies = False
            if lies:
                raise AssertionError("an object that equals everything is no answer")
        return x

    class Wrap(ast.NodeTransformer):
        def visit_Compare(self, node):
            self.generic_visit(node)
            if any(isinstance(op, (ast.Eq, ast.In)) for op in node.ops):
                sides = [ast.Call(ast.Name("@value", ast.Load()), [side], []) for side in (node.left, *node.comparators)]
                for side in sides:
                    ast.copy_location(side, node)
                    ast.fix_missing_locations(side)
                node.left, node.comparators = sides[0], sides[1:]
            return node

    rewrite_asserts, equal = rewrite.rewrite_asserts, unittest.case.TestCase._baseAssertEqual

    def rewritten(tree, *arguments, **options):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                node.test = Wrap().visit(node.test)
        return rewrite_asserts(tree, *arguments, **options)

    def assert_equal(self, first, second, msg=None):
        equal(self, value(first), value(second), msg)

    setattr(builtins, "@value", value)
    rewrite.rewrite_asserts = rewritten
    unittest.case.TestCase._baseAssertEqual = assert_equal


def child(settings: dict, token: str, pipe: int, canaries: "list[str]") -> None:
    sys.dont_write_bytecode = True
    become_user()

    def tell(event: dict, write=os.write, dumps=json.dumps):
        line = (dumps([token, event]) + "\n").encode()
        while line:
            line = line[write(pipe, line) :]

    if "calls" in settings:
        call_function(settings, tell)
    else:
        run_tests(settings, tell, canaries)


def listen(pipe: int, pid: int, deadline: float) -> bytes:
    """All that comes until the child ends. A grandchild may hold the pipe's other end."""
    data, ended = bytearray(), False
    while len(data) < MAX_EVENTS and time.monotonic() < deadline:
        ready, _, _ = select.select([pipe], [], [], 0 if ended else 0.2)
        part = os.read(pipe, 1 << 16) if ready else b""
        if (ready and not part) or (ended and not ready):
            break
        data += part
        if not ready:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return bytes(data)


def judged(data: bytes, token: str, must_fail: "set[str]") -> dict:
    """The report: what each test did, the outputs of calls, and why nothing of that can be believed."""
    report = {"results": {}, "outputs": {}, "end": None, "tampered": ""}
    for line in data.splitlines():
        try:
            found, event = json.loads(line)
        except ValueError:
            found, event = None, {}
        if found != token:
            report["tampered"] = "the pipe of results was written to by others"
            break
        if "test" in event:
            name, status = event["test"], event["status"]
            if report["results"].setdefault(name, status) != status:
                report["tampered"] = f"{name} has two results"
        elif "call" in event:
            report["outputs"].setdefault(str(event["call"]), event)
        elif "changed" in event:
            report["tampered"] = f"{event['changed']} was replaced"
        elif "end" in event:
            report["end"] = event["end"]
    found = {name: report["results"].pop(name) for name in list(report["results"]) if name.partition("::")[2] in must_fail}
    if any(status not in ("FAILED", "ERROR") for status in found.values()):
        report["tampered"] = "tests that must fail passed"
    elif report["end"] is not None and len(found) != len(must_fail):
        report["tampered"] = "tests that must fail did not run"
    return report


def end_user() -> None:
    """Kills every process of the child's user, as that user: root's would be killed too."""
    pid = os.fork()
    if pid == 0:
        os.setresuid(USER, USER, USER)
        os.kill(-1, signal.SIGKILL)  # all but this one, as long as they do not fork on: the limit on processes ends that
        os._exit(0)
    os.waitpid(pid, 0)


def main(settings: dict) -> None:
    start = time.monotonic()
    if "tests" in settings:
        place(settings["workdir"], f"{HIDDEN}/files", settings["is_test"])
    token, canaries, must_fail = os.urandom(16).hex(), [], set()
    for _ in range(2 if "tests" in settings else 0):
        names = [os.urandom(4).hex() for _ in range(6)]
        must_fail |= {f"test_{name}" for name in names[:5]} | {f"Test{names[5]}::test"}
        canaries.append(f"{HIDDEN}/test_{os.urandom(4).hex()}.py")
        with open(canaries[-1], "w") as file:
            file.write(MUST_FAIL.format(*names))
    receive, give = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.close(receive)
            child(settings, token, give, canaries)
            sys.stdout.flush()
            sys.stderr.flush()
            code = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        finally:
            os._exit(code)
    os.close(give)
    data = listen(receive, pid, start + float(os.environ.get("RUNNER_SECONDS", "inf")))
    end_user()
    os.waitpid(pid, 0)
    json.dump(judged(data, token, must_fail), sys.stdout)


if __name__ == "__main__":
    with open(os.path.join(HIDDEN, "runner.json"), encoding="utf-8") as file:
        main(json.load(file))
