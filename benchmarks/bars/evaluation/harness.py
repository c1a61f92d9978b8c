"""The harness: a task solved through the tools, its transcript replayed, what a call costs, random calls."""

import hashlib
import json
import statistics
import time
from contextlib import contextmanager
from functools import cache

from benchmarks.bars.harness import Bar, NotMeasured, Run
from benchmarks.machine import ROOT
from rl.environments import open_backend
from rl.environments.images import BASIC, ImageStore, Recipe
from rl.environments.sandbox import Limits, SandboxError, SandboxSpec
from rl.harness.loop import LoopLimits, run
from rl.harness.model import Call, Reply, ScriptedModel
from rl.harness.session import Session
from rl.harness.toolsets import ALL, tool_set
from rl.harness.trajectory import replies_of
from rl.tasks.workspace import tree
from tests import tool_calls

LIMITS = Limits(memory_bytes=512 << 20, disk_bytes=128 << 20, pids=128)
FILES = ("shop/price.py", "shop/cart.py", "shop/tax.py", "shop/bill.py", "main.py")


@contextmanager
def opened():
    try:
        backend = open_backend("namespaces")
    except SandboxError as error:
        raise NotMeasured(str(error)) from error
    with backend:
        yield backend, SandboxSpec(ImageStore(ROOT / "build" / "images").build(Recipe(programs=BASIC, python=True)), LIMITS)


def reply(*calls) -> Reply:
    return Reply(calls=tuple(Call(f"c{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(calls)))


SCRIPT = [
    reply(("list_dir", {"depth": 2}), ("grep", {"pattern": "price"})),
    reply(*(("read_file", {"path": path}) for path in FILES)),
    *(reply(("edit_file", {"path": path, "old": "price", "new": "amount", "replace_all": True})) for path in FILES),
    reply(("shell", {"command": "python3 -B main.py"})),
    reply(("finish", {"answer": "renamed"})),
]


def solved(backend, spec, replies) -> tuple[str, object]:
    """(digest of the tree at the end, the run) of a task over five files."""
    with backend.create(spec) as sandbox:
        for i, path in enumerate(FILES):
            text = (
                f"price = {i}\n"
                if path != "main.py"
                else "from shop import bill, cart, price, tax\nprint(bill.price + cart.price)\n"
            )
            sandbox.write(f"/workspace/{path}", (text + "# price\n").encode())
        sandbox.exec("cd /workspace/shop && mv price.py amount.py && printf 'price = 9\\n' > price.py")
        done = run(ScriptedModel(replies), Session(sandbox, "/workspace"), tool_set(), "Call prices amounts.")
        found = tree(sandbox, "/workspace")
    content = "".join(f"{path}\0{entry.mode}\0{hashlib.sha256(entry.data).hexdigest()}\n" for path, entry in sorted(found.items()))
    return hashlib.sha256(content.encode()).hexdigest(), done


def replays(bars_run: Run) -> float:
    """How many of 100 replays of a stored run end with its tree."""
    with opened() as (backend, spec):
        first, done = solved(backend, spec, SCRIPT)
        assert done.end == "finished", done.error
        assert done.calls[-2][1].kind == "ok"
        stored = replies_of(json.loads(json.dumps(done.atif())))
        count = bars_run.count(100, 3)
        same = sum(solved(backend, spec, stored)[0] == first for _ in bars_run.steps(range(count)))
    return 100 * same / count


@cache
def call_times(count: int) -> tuple[float, float]:
    """Median milliseconds of (a command in the sandbox, the harness's own part of a turn with one call)."""
    with opened() as (backend, spec), backend.create(spec) as sandbox:
        commands = []
        for _ in range(count):
            start = time.perf_counter()
            sandbox.exec(["true"])
            commands.append(time.perf_counter() - start)
        sandbox.write("/workspace/a", b"x\n" * 100)
        inside = []
        real = sandbox.read

        def timed(*arguments, **options):
            start = time.perf_counter()
            try:
                return real(*arguments, **options)
            finally:
                inside.append(time.perf_counter() - start)

        sandbox.read = timed
        times = []
        last = [time.perf_counter()]

        def step(_):
            now = time.perf_counter()
            times.append(now - last[0])
            last[0] = now

        run(
            ScriptedModel([reply(("read_file", {"path": "a"}))] * count), Session(sandbox, "/workspace"), tool_set(), "x",
            LoopLimits(turns=count), on_step=step,
        )  # fmt: skip
        own = [whole - part for whole, part in zip(times[2:], inside, strict=False)]
    return statistics.median(commands) * 1e3, statistics.median(own) * 1e3


def random_calls(bars_run: Run) -> float:
    """How many things go wrong in 10,000 random calls: exceptions, too long results, changes outside of the work directory."""
    wrong, each = [], 500
    with opened() as (backend, spec):
        for seed in bars_run.steps(range(bars_run.count(10_000, each) // each)):
            tools = tool_set([tool.name for tool in ALL], strict=bool(seed % 2))
            with backend.create(spec) as sandbox:
                wrong += tool_calls.faults_of(sandbox, tools, each, seed)
    for line in wrong[:3]:
        bars_run.note(line[:200])
    return len(wrong)


BARS = [
    Bar("replays of a five-file task with the same tree", ">=", 100, "%", replays),
    Bar("a command in a sandbox, median", "<=", 2, "ms", lambda r: call_times(r.count(1000, 20))[0], "time"),
    Bar("harness's own time for a call, median", "<=", 2, "ms", lambda r: call_times(r.count(1000, 20))[1], "time"),
    Bar("10,000 random calls, what goes wrong", "<=", 0, "", random_calls),
]
