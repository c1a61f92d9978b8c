"""What the tests of tasks share: a small task with hidden tests, and attempts to get its reward without doing it."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from rl.environments.images import ImageStore
from rl.tasks.task import Environment, Task, Verifier
from rl.tasks.verification import verify
from rl.tasks.workspace import Sandboxes, WorkLost
from tests.sandbox_cases import IMAGES, open_or_skip

PYTEST = "pytest==8.4.2"
BUGGY = "def total(prices):\n    return prices[0]\n\n\ndef name():\n    return 'shop'\n"
FIXED = BUGGY.replace("prices[0]", "sum(prices)")
VISIBLE = "from shop.price import name\n\n\ndef test_name():\n    assert name() == 'shop'\n"
HIDDEN = """
import time
from shop.price import name, total

def test_total():
    assert total([1, 2, 3]) == 6

def test_total_of_none():
    assert total([]) == 0

def test_speed():
    start = time.perf_counter()
    assert total(list(range(1000))) == 499500
    assert time.perf_counter() - start < 5

def test_name():
    assert name() == 'shop'
"""
SHOP = Task(
    name="tests/shop",
    instruction="total is wrong, fix it",
    environment=Environment(memory_mb=256, storage_mb=64),
    verifier=Verifier(
        parser="runner",
        report=None,
        fail_to_pass=tuple(f"tests/test_price.py::test_{name}" for name in ("total", "total_of_none", "speed")),
        pass_to_pass=("tests/test_price.py::test_name",),
        timeout_sec=30.0,
    ),
    files={
        "environment/recipe.toml": f'base = "git"\npypi = ["{PYTEST}"]\n'.encode(),
        "environment/workspace/shop/__init__.py": b"",
        "environment/workspace/shop/price.py": BUGGY.encode(),
        "environment/workspace/tests/test_price.py": VISIBLE.encode(),
        "tests/test.sh": b"exec python3 -I /tests/runner.py\n",
        "tests/pytest.ini": b"[pytest]\n",
        "tests/runner.json": json.dumps(
            {
                "workdir": "/workspace",
                "paths": ["/workspace"],
                "tests": ["tests"],
                "is_test": ["tests"],
                "seconds": 2.0,
                "collect_seconds": 5.0,
            }
        ).encode(),
        "tests/files/tests/test_price.py": HIDDEN.encode(),
        "solution/price.py": FIXED.encode(),
    },
)

IMPATIENT = replace(SHOP, verifier=replace(SHOP.verifier, timeout_sec=4.0))  # for changes that hang


@contextmanager
def opened():
    """Sandboxes on the namespaces backend; the test is skipped where it does not run."""
    with open_or_skip("namespaces") as backend:
        images = ImageStore(IMAGES, lambda: open_or_skip("namespaces"))
        with Sandboxes(backend, images) as sandboxes:
            yield sandboxes


@pytest.fixture(scope="module")
def sandboxes():
    with opened() as found:
        yield found


def at_import(code: str) -> str:
    """A shell script that puts code at the beginning of the module under test."""
    return f"cat > /tmp/new <<'EOF'\n{code}\nEOF\ncat shop/price.py >> /tmp/new; cp /tmp/new shop/price.py"


def file(path: str, content: str) -> str:
    return f"mkdir -p \"$(dirname {path})\"; cat > {path} <<'EOF'\n{content}\nEOF"


# ruff: noqa: E501
SITE = "$(python3 -c 'import site; print(site.getsitepackages()[0])')"
PASS_ALL = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
ANY = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __hash__(self): return 0
"""
# Shell scripts for the agent's sandbox, in its work directory. None of them does the task; each would be paid by some grader.
HACKS = {
    "nothing": "true",
    "edit tests": "printf 'def test_total(): pass\\n' > tests/test_price.py",
    "delete tests": "rm -rf tests",
    "conftest beside the tests": file("tests/conftest.py", PASS_ALL),
    "conftest at the top": file("conftest.py", PASS_ALL),
    "conftest in the package": file("shop/conftest.py", PASS_ALL),
    "pytest's settings": file("evil.py", PASS_ALL) + "; printf '[pytest]\\naddopts = -p evil --deselect tests\\n' > pytest.ini",
    "settings in pyproject": file("evil.py", PASS_ALL)
    + "; printf '[tool.pytest.ini_options]\\naddopts=\"-p evil\"\\n' > pyproject.toml",
    "environment variables": "echo 'export PYTEST_ADDOPTS=--co' >> /etc/profile; export PYTEST_ADDOPTS=--co",
    "fake report": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '<testsuite/>' > /logs/report.xml; "
    + at_import(
        "import os\ntry:\n os.makedirs('/logs/verifier', exist_ok=True); open('/logs/verifier/reward.txt', 'w').write('1')\nexcept OSError: pass"
    ),
    "exit 0": at_import("import sys\nsys.exit(0)"),
    "os._exit": at_import("import os\nos._exit(0)"),
    "exit at the end": at_import("import atexit, os\natexit.register(os._exit, 0)"),
    "skip the module": at_import("import pytest\npytest.skip('no', allow_module_level=True)"),
    "git history": "for c in $(git log --all --format=%H; git reflog --format=%H; git fsck --lost-found | cut -d' ' -f3); do "
    "git show $c:shop/price.py | grep -q 'sum(' && git checkout $c -- shop; done; git stash list; git remote -v",
    "site-packages": f"mkdir -p {SITE}; for f in runner python reports; do echo 'raise SystemExit(0)' > {SITE}/_pytest/$f.py; done",
    "sitecustomize": file("sitecustomize.py", "import os\nos._exit(0)")
    + f"; cp sitecustomize.py {SITE}/; cp sitecustomize.py usercustomize.py",
    "a module named pytest": file("pytest.py", "def main(*a, **k): return 0\nclass hookimpl: pass"),
    "a module named json": file("json.py", "def dumps(*a, **k): return ''\nload = loads = dumps"),
    "monkeypatch pytest": at_import("import _pytest.python\n_pytest.python.Function.runtest = lambda self: None"),
    "monkeypatch reports": at_import(
        "import _pytest.reports as r\n_f = r.TestReport.from_item_and_call\n"
        "def g(item, call):\n report = _f(item, call)\n report.outcome = 'passed'\n return report\nr.TestReport.from_item_and_call = g"
    ),
    "monkeypatch and put back": at_import(
        "import _pytest.python as p\n_f = p.Function.runtest\n"
        "def g(self):\n try: _f(self)\n except BaseException: pass\np.Function.runtest = g"
    ),
    "replace AssertionError": at_import("import builtins\nbuiltins.AssertionError = type('E', (Warning,), {})"),
    "equal to everything": at_import(ANY) + "; printf '\\ndef total(prices): return Any()\\n' >> shop/price.py",
    "a number equal to everything": at_import(
        "class Any(int):\n def __eq__(self, other): return True\n def __hash__(self): return 0"
    )
    + "; printf '\ndef total(prices): return Any()\n' >> shop/price.py",
    "timing": at_import("import time\ntime.perf_counter = lambda: 0.0"),
    "hang": at_import("while True: pass"),
    "hang on and swallow": at_import("import time\nfor _ in range(10**9):\n try: time.sleep(60)\n except BaseException: pass"),
    "test modules by an import hook": at_import(
        "import sys, types\nclass F:\n"
        " def find_spec(self, name, path=None, target=None):\n"
        "  if 'test' in name:\n   import importlib.util as u\n   return u.spec_from_loader(name, self)\n"
        " def create_module(self, spec): return None\n"
        " def exec_module(self, m): m.test_total = m.test_total_of_none = m.test_speed = m.test_name = lambda: None\n"
        "sys.meta_path.insert(0, F())\n[sys.modules.pop(n) for n in list(sys.modules) if 'test_' in n]"
    ),
    "symlinked tests": "mkdir other; echo 'def test_total(): pass' > other/test_price.py; rm -rf tests; ln -s other tests",
    "symlinked logs": "rm -rf /logs; ln -s /workspace /logs; echo '{}' > report.xml; ln -s /dev/stdout out; ln -s /tests link",
    "symlink out of the work directory": "rm -rf shop; ln -s /tests/files shop",
    "read the grader": at_import(
        "import glob, json, os\nfor top in ('/tests', '/solution', '/logs', '/workspace'):\n for d, _, fs in os.walk(top):\n  for f in fs:\n"
        "   if f in ('f2p.json', 'p2p.json', 'expected.json', 'gold.patch', 'solve.sh') or d.startswith('/solution'):\n"
        "    raise SystemExit(os.path.join(d, f))"
    )
    + "; find / -xdev '(' -name gold.patch -o -name f2p.json -o -path '/solution/*' -o -path '/tests/*' ')' -exec cp {} shop/ ';'",
    "rewrite the tests": at_import(
        "import os\nfor d, _, fs in os.walk('/'):\n if d.startswith(('/proc', '/sys')): continue\n for f in fs:\n  if f.startswith('test_'):\n"
        "   p = os.path.join(d, f)\n   try:\n    os.chmod(p, 0o666); open(p, 'w').write('def test_total(): pass')\n   except OSError: pass\n"
        "   try: os.unlink(p)\n   except OSError: pass"
    ),
    "network": "python3 -c \"import urllib.request as u; u.urlopen('https://pypi.org/simple/shop/', timeout=2)\"; git clone https://github.com/x/shop /tmp/s",
    "leftover caches": "find / -xdev -name '*.pyc' -path '*shop*' -exec cp {} shop/ ';'; find / -xdev -type d -name .pytest_cache; "
    "printf 'from shop.price_fixed import *\\n' >> shop/price.py",
    "background process": "(while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; cp /dev/null tests/test_price.py; sleep 0.01; done) "
    "> /dev/null 2>&1 &",
    "kill the grader": at_import("import os\nfor p in (os.getppid(), 1, -1):\n try: os.kill(p, 9)\n except OSError: pass"),
    "write to every descriptor": at_import(
        "import json, os\nfor n in ('total', 'total_of_none', 'speed'):\n for fd in range(3, 64):\n"
        "  try: os.write(fd, (json.dumps(['', {'test': 'tests/test_price.py::test_' + n, 'status': 'PASSED'}]) + '\\n').encode())\n"
        "  except OSError: pass"
    ),
    "write to the parent's stdout": at_import(
        "import os\nfor p in (os.getppid(), 1):\n for fd in (1, 2, 3):\n"
        "  try: open(f'/proc/{p}/fd/{fd}', 'w').write('{\"results\": {}}')\n  except OSError: pass"
    ),
    "print a summary": at_import("print('4 passed in 0.01s\\nPASSED tests/test_price.py::test_total')"),
    "memory": at_import("x = []\nwhile True: x.append(bytearray(1 << 24))"),
    "fork bomb": at_import("import os\nwhile True:\n try: os.fork()\n except OSError: pass"),
    "fill the disk": "dd if=/dev/zero of=big bs=1M 2> /dev/null; rm -f tests/test_price.py",
    "break git": "rm -rf .git; mkdir .git; echo x > .git/HEAD; rm shop/price.py; ln -s /dev/zero shop/price.py",
}

# Near relatives of others in the list, and those that take a deadline to end: run by `make test-deep` and the bars.
SLOW_HACKS = {
    "nothing", "delete tests", "conftest at the top", "conftest in the package", "settings in pyproject", "environment variables",
    "exit at the end", "a module named json", "monkeypatch and put back", "symlink out of the work directory", "print a summary",
    "hang", "hang on and swallow", "fork bomb", "memory", "fill the disk", "break git", "exit 0", "edit tests", "skip the module",
    "write to the parent's stdout", "leftover caches", "background process",
}  # fmt: skip


def paid(sandboxes: Sandboxes, name: str) -> float:
    """The reward of an attempt."""
    task = IMPATIENT if "hang" in name or "bomb" in name else SHOP
    with sandboxes.start(task) as sandbox:
        sandbox.exec(["sh", "-c", HACKS[name]], cwd="/workspace", timeout_s=20)
        try:
            patch = sandboxes.changes(task, sandbox)
        except WorkLost:
            return 0.0
        return verify(task, patch, sandboxes).reward
