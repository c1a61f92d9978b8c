"""The tiny family: one small function, three to five tool calls. For models of a few million parameters.

    task = instance(seed, split="train")     # the same seed and split give the same task, always

A function is a chain of one to four steps on a list of integers or on a text; its docstring says the steps in words. Kinds: "write"
(the body is missing), "fix" (one step is wrong), "extend" (one more step is asked for). There is no end of instances. The held-out
split shares nothing with the other: names, file names, chains of steps (a hash of the chain decides) and seeds differ.

Graded outside: the sandbox gives the outputs of the function, which are compared here; no expected value is ever inside.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from rl.tasks.check import difference_of
from rl.tasks.task import Environment, Provenance, Task, Verifier

Split = Literal["train", "heldout"]
KINDS = ("write", "fix", "extend")
WORKDIR = "/workspace"
CASES = 12
SECONDS = 1.0  # of one call
NAMES = {
    "train": ("clean", "collect", "convert", "merge", "reduce", "report", "select", "shape", "sift", "tidy", "total", "trim"),
    "heldout": ("adapt", "derive", "distill", "filter_in", "gather", "morph", "produce", "refine", "resolve", "winnow"),
}
FILES = {"train": ("tools", "items", "text", "data", "steps", "lists"), "heldout": ("kit", "engine", "parts", "flow")}


@dataclass(frozen=True)
class Step:
    """One step: what the docstring says, the expression on `x`, and expressions that look alike and are wrong."""

    words: str
    code: str
    wrong: tuple[str, ...]
    run: Callable[[Any], Any]


def step(words: str, code: str, *wrong: str) -> Step:
    return Step(words, code, wrong, eval(f"lambda x: {code}"))


def list_steps(r: random.Random) -> list[Step]:
    """Steps from a list of integers to one."""
    k, n, m = r.randint(2, 9), r.randint(1, 4), r.randint(2, 5)
    return [
        step("keep even numbers", "[v for v in x if v % 2 == 0]", "[v for v in x if v % 2 == 1]", "[v for v in x if v // 2 == 0]"),
        step("keep odd numbers", "[v for v in x if v % 2 == 1]", "[v for v in x if v % 2 == 0]"),
        step(f"add {k} to each", f"[v + {k} for v in x]", f"[v - {k} for v in x]", f"[v + {k + 1} for v in x]"),
        step(f"multiply each by {m}", f"[v * {m} for v in x]", f"[v + {m} for v in x]", f"[v ** {m} for v in x]"),
        step("sort from small to large", "sorted(x)", "sorted(x, reverse=True)", "x"),
        step("sort from large to small", "sorted(x, reverse=True)", "sorted(x)"),
        step("reverse the order", "x[::-1]", "x[::1]", "x[:-1]"),
        step(f"keep the first {n}", f"x[:{n}]", f"x[:{n + 1}]", f"x[{n}:]"),
        step(f"drop the first {n}", f"x[{n}:]", f"x[:{n}]", f"x[{n + 1}:]"),
        step(f"keep numbers above {k}", f"[v for v in x if v > {k}]", f"[v for v in x if v >= {k}]", f"[v for v in x if v < {k}]"),
        step("drop repeated numbers", "list(dict.fromkeys(x))", "list(dict.fromkeys(x))[1:]", "x"),
        step("replace each by its square", "[v * v for v in x]", "[v + v for v in x]"),
        step("replace each by its absolute value", "[abs(v) for v in x]", "[-v for v in x]"),
    ]


def list_ends(r: random.Random) -> list[Step]:
    """Steps from a list of integers to a number."""
    return [
        step("return the sum", "sum(x)", "len(x)", "sum(x[1:])"),
        step("return how many are left", "len(x)", "len(x) - 1", "sum(x)"),
        step("return the largest, or 0 if there is none", "max(x, default=0)", "min(x, default=0)", "max(x, default=1)"),
        step("return the smallest, or 0 if there is none", "min(x, default=0)", "max(x, default=0)"),
    ]


def text_steps(r: random.Random) -> list[Step]:
    """Steps from a text to one."""
    c, n = r.choice("aeiost"), r.randint(2, 4)
    return [
        step("make it lower case", "x.lower()", "x.upper()"),
        step("make it upper case", "x.upper()", "x.lower()", "x.title()"),
        step("reverse it", "x[::-1]", "x[::1]", "x[1:]"),
        step(f"remove every {c!r}", f"x.replace({c!r}, '')", f"x.replace({c!r}, '', 1)", f"x.replace({c!r}, ' ')"),
        step("strip spaces at both ends", "x.strip()", "x.lstrip()", "x.rstrip()"),
        step("replace spaces by dashes", "x.replace(' ', '-')", "x.replace(' ', '')", "x.replace(' ', '_')"),
        step(f"keep the first {n} words", f"' '.join(x.split()[:{n}])", f"' '.join(x.split()[{n}:])", f"x[:{n}]"),
        step("reverse the order of the words", "' '.join(x.split()[::-1])", "x[::-1]", "' '.join(x.split())"),
        step("sort the words", "' '.join(sorted(x.split()))", "''.join(sorted(x))", "' '.join(x.split())"),
        step("capitalize each word", "x.title()", "x.capitalize()"),
        step(f"repeat it {n} times", f"x * {n}", f"x * {n + 1}", f"x + '{n}'"),
    ]


def text_ends(r: random.Random) -> list[Step]:
    """Steps from a text to a number or words."""
    return [
        step("return its length", "len(x)", "len(x) - 1", "len(x.split())"),
        step("return the number of words", "len(x.split())", "len(x)", "x.count(' ')"),
        step("return the list of words", "x.split()", "list(x)"),
    ]


WORDS = ["the", "quick", "brown", "Fox", "jumps", "over", "a", "lazy", "dog", "Some", "east", "sea", "stone", "tree", "ice"]


def value(r: random.Random, kind: str) -> Any:
    """An argument."""
    if kind == "list":
        return [r.randint(-9, 20) for _ in range(r.choice((0, 1, 3, 5, 8)))]
    return " " * r.randint(0, 1) + " ".join(r.choices(WORDS, k=r.choice((0, 1, 2, 4, 6)))) + " " * r.randint(0, 2)


def split_of(chain: list[Step]) -> Split:
    """A tenth of all chains of steps is held out."""
    text = "|".join(s.words for s in chain)
    return "heldout" if hashlib.sha256(text.encode()).digest()[0] < 26 else "train"


def chain_of(r: random.Random, difficulty: int, split: Split) -> tuple[str, list[Step]]:
    """The kind of argument and `difficulty` steps that belong to the split."""
    while True:
        kind = r.choice(("list", "text"))
        steps, ends = (list_steps(r), list_ends(r)) if kind == "list" else (text_steps(r), text_ends(r))
        chain = [*r.sample(steps, difficulty - 1), r.choice(steps + ends)]
        if split_of(chain) == split:
            return kind, chain


def outcome(chain: list[Step], argument: Any) -> Any:
    for s in chain:
        argument = s.run(argument)
    return argument


def source(name: str, kind: str, chain: list[Step], body: list[str] | None) -> str:
    """The file: the function with its docstring, and its body or none."""
    says = "; ".join(s.words for s in chain)
    hint = "x: list[int]" if kind == "list" else "x: str"
    lines = [f"    x = {code}" for code in body[:-1]] + [f"    return {body[-1]}"] if body else ["    raise NotImplementedError"]
    return f'def {name}({hint}):\n    """In this order: {says}."""\n' + "\n".join(lines) + "\n"


def instance(seed: int, split: Split = "train", difficulty: int | None = None) -> Task:
    """A task; `difficulty` is the number of steps, 1 to 4, drawn where it is not given.

    Raises ValueError for an unknown split or a difficulty outside of 1 to 4.
    """
    if split not in NAMES or (difficulty is not None and not 1 <= difficulty <= 4):
        raise ValueError(f"expected split train or heldout and difficulty 1 to 4, got {split!r} and {difficulty!r}")
    r = random.Random(f"tiny {split} {seed}")
    steps = difficulty or r.randint(1, 4)
    kind = r.choice(KINDS if steps > 1 else KINDS[:2])
    while True:
        argument, chain = chain_of(r, steps, split)
        right = [s.code for s in chain]
        before = starting_point(r, kind, chain)
        cases = [value(r, argument) for _ in range(CASES)]
        expected = [outcome(chain, case) for case in cases]
        if kind == "write" or differs(before, cases, expected):
            break
    name, file = f"{r.choice(NAMES[split])}_{r.choice('abcdefgh')}{seed % 100}", f"{r.choice(FILES[split])}.py"
    told = chain[:-1] if kind == "extend" else chain
    start, end = source(name, argument, told, before), source(name, argument, chain, right)
    sizes = [len(f"{case!r}{right!r}") for case, right in zip(cases, expected, strict=True)]
    shown = max(range(CASES), key=lambda i: (sizes[i] < 160) * sizes[i])
    example = f"{name}({cases[shown]!r}) should be {expected[shown]!r}"
    request = {
        "write": f"Write {name} in {file}. {example}.",
        "fix": f"{name} in {file} does not do what it says. {example}.",
        "extend": f"{name} in {file} should then also {chain[-1].words}. {example}.",
    }[kind]
    settings = {"workdir": WORKDIR, "file": file, "function": name, "calls": [[case] for case in cases], "seconds": SECONDS}
    return Task(
        name=f"tiny/{split}-{seed}",
        instruction=request,
        environment=Environment(workdir=WORKDIR, memory_mb=128, storage_mb=16),
        verifier=Verifier(
            parser="outputs", report=None, fail_to_pass=tuple(f"call {i}" for i in range(CASES)), timeout_sec=CASES * SECONDS + 10
        ),
        provenance=Provenance(
            source=f"tiny {split} {seed}", kind="tiny", difficulty=(steps - 1) / 3, changed_files=1, changed_lines=len(right) + 1
        ),
        agent_timeout_sec=60.0,
        files={
            "environment/recipe.toml": b'base = "machine"\n',
            f"environment/workspace/{file}": start.encode(),
            "tests/test.sh": b"exec python3 -I -S /tests/runner.py\n",
            "tests/runner.json": json.dumps(settings).encode(),
            "tests/expected.json": json.dumps(expected).encode(),
            "solution/gold.patch": difference_of({file: start}, {file: end}).encode(),
        },
    )


def starting_point(r: random.Random, kind: str, chain: list[Step]) -> list[str] | None:
    """The body that the agent finds."""
    if kind == "write":
        return None
    codes = [s.code for s in chain]
    if kind == "extend":
        return codes[:-1]
    at = r.randrange(len(chain))
    return [*codes[:at], r.choice(chain[at].wrong), *codes[at + 1 :]]


def differs(body: list[str], cases: list[Any], expected: list[Any]) -> bool:
    """Whether a body is wrong for some case; one that raises is."""
    for case, right in zip(cases, expected, strict=True):
        x = case
        try:
            for code in body:
                x = eval(code, {"x": x})
        except Exception:
            return True
        if json.dumps(x) != json.dumps(right):
            return True
    return False


def solution_calls(task: Task) -> list[tuple[str, dict[str, Any]]]:
    """Tool calls of an agent that knows the answer: look, write, try, finish. For tests, and to measure what a rollout costs."""
    settings = json.loads(task.files["tests/runner.json"])
    file, name = settings["file"], settings["function"]
    patch = task.files["solution/gold.patch"].decode()
    case = settings["calls"][-1][0]
    module = file.removesuffix(".py")
    return [
        ("read_file", {"path": file}),
        ("apply_patch", {"patch": patch}),
        ("shell", {"command": f"python3 -c {json.dumps(f'from {module} import {name}; print({name}({case!r}))')}"}),
        ("finish", {"answer": "done"}),
    ]
