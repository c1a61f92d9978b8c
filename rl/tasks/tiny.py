"""The tiny family: one small function, three to five tool calls. For models of a few million parameters.

    task = instance(seed, split="train")     # the same seed and split give the same task, always

A function is a chain of one to four steps on a list of integers or on a text; its docstring says the steps in words. Kinds: "write"
(the body is missing), "fix" (one step is wrong), "extend" (one more step is asked for). There is no end of instances. The held-out
split shares nothing with the other: names, file names, chains of steps (a hash of name or chain decides) and seeds differ.

`check.py` in the work directory compares a few outputs with what they should be and prints "ok" or the first that differs. It is
the agent's to run (the tool `run_check`), and no part of the grade.

Graded outside: the sandbox gives the outputs of the function, which are compared here; nothing inside says what they should be.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, Literal

from rl.tasks.check import difference_of
from rl.tasks.task import Environment, Provenance, Task, Verifier

Split = Literal["train", "heldout"]
KINDS = ("write", "fix", "extend")
WORKDIR = "/workspace"
CASES = 12
SECONDS = 1.0  # of one call
SHOWN, SHOWN_LENGTH = 3, 18  # cases in check.py, characters of an argument there
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
CHECK = """try:
    from {module} import {name}
    for x, right in {cases}:
        y = {name}(x)
        if y != right:
            print(f"{name}({{x!r}}) gives {{y!r:.60}}, not {{right!r}}")
            break
    else:
        print("ok")
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@dataclass(frozen=True)
class Step:
    """One step: what the docstring says, the expression on `x`, and expressions that look alike and are wrong."""

    words: str
    code: str
    wrong: tuple[str, ...]


@lru_cache(maxsize=4096)
def function_of(code: str) -> Callable[[Any], Any]:
    return eval(f"lambda x: {code}")


def step(words: str, code: str, *wrong: str) -> Step:
    return Step(words, code, wrong)


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


def split_of(text: str) -> Split:
    """A tenth of all names, and of all chains of steps, is held out."""
    return "heldout" if hashlib.sha256(text.encode()).digest()[0] < 26 else "train"


def name_of(r: random.Random, split: Split) -> str:
    """A made-up name that belongs to the split, the same number of characters always."""
    while True:
        name = r.choice(SYLLABLES) + r.choice(SYLLABLES)
        if name not in ("list", "text", "data") and split_of(name) == split:
            return name


def says(chain: list[Step]) -> str:
    return "; ".join(s.words for s in chain)


def chain_of(r: random.Random, difficulty: int, split: Split) -> tuple[str, list[Step]]:
    """The kind of argument and `difficulty` steps that belong to the split."""
    while True:
        kind = r.choice(("list", "text"))
        steps, ends = (list_steps(r), list_ends(r)) if kind == "list" else (text_steps(r), text_ends(r))
        chain = [*r.sample(steps, difficulty - 1), r.choice(steps + ends)]
        if split_of(says(chain)) == split:
            return kind, chain


def outcome(chain: list[Step], argument: Any) -> Any:
    for s in chain:
        argument = function_of(s.code)(argument)
    return argument


def source(name: str, kind: str, chain: list[Step], body: list[str] | None) -> str:
    """The file: the function with its docstring, and its body or none."""
    hint = "x: list[int]" if kind == "list" else "x: str"
    lines = [f"    x = {code}" for code in body[:-1]] + [f"    return {body[-1]}"] if body else ["    raise NotImplementedError"]
    return f'def {name}({hint}):\n    """In this order: {says(chain)}."""\n' + "\n".join(lines) + "\n"


def instance(seed: int, split: Split = "train", difficulty: int | None = None, kinds: Sequence[str] = KINDS) -> Task:
    """A task; `difficulty` is the number of steps, 1 to 4, drawn where it is not given; `kinds` are those to draw from.

    Raises ValueError for an unknown split or kind, a difficulty outside of 1 to 4, or extending as the only kind of one step.
    """
    if split not in ("train", "heldout") or (difficulty is not None and not 1 <= difficulty <= 4):
        raise ValueError(f"expected split train or heldout and difficulty 1 to 4, got {split!r} and {difficulty!r}")
    if not kinds or set(kinds) - set(KINDS) or (set(kinds) == {"extend"} and difficulty == 1):
        raise ValueError(f"kinds must be of {', '.join(KINDS)}, with more than extend for one step, got {kinds!r}")
    r = random.Random(f"tiny {split} {seed}")
    steps = difficulty or r.randint(2 if set(kinds) == {"extend"} else 1, 4)
    kind = r.choice([kind for kind in kinds if steps > 1 or kind != "extend"])
    while True:
        argument, chain = chain_of(r, steps, split)
        right = [s.code for s in chain]
        before = starting_point(r, kind, chain)
        cases = [value(r, argument) for _ in range(CASES)]
        expected = [outcome(chain, case) for case in cases]
        if kind == "write" or differs(before, cases, expected):
            break
    name, module = name_of(r, split), name_of(r, split)
    file = f"{module}.py"
    told = chain[:-1] if kind == "extend" else chain
    start, end = source(name, argument, told, before), source(name, argument, chain, right)
    request = {
        "write": f"Write {name} in {file}.",
        "fix": f"Fix {name} in {file}: it does not do what it says.",
        "extend": f"Extend {name} in {file}: then {chain[-1].words}.",
    }[kind]
    shown = shown_cases(r, argument, chain, before, cases)
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
            "environment/workspace/check.py": CHECK.format(module=module, name=name, cases=shown).encode(),
            "tests/test.sh": b"exec python3 -I -S /tests/runner.py\n",
            "tests/runner.json": json.dumps(settings).encode(),
            "tests/expected.json": json.dumps(expected).encode(),
            "solution/gold.patch": difference_of({file: start}, {file: end}).encode(),
        },
    )


def shown_cases(r: random.Random, kind: str, chain: list[Step], before: list[str] | None, graded: list[Any]) -> list[tuple]:
    """Arguments and outputs for check.py, none of them graded: if there are any, such that tell the start from what is asked for;
    of middling length."""
    drawn = (value(r, kind) for _ in count())
    cases = [(case, outcome(chain, case)) for case in islice((case for case in drawn if case not in graded), CASES)]
    told = {i for i, (case, right) in enumerate(cases) if before is None or differs(before, [case], [right])}
    order = sorted(range(CASES), key=lambda i: (i not in told, abs(len(repr(cases[i][0])) - SHOWN_LENGTH)))
    return [cases[i] for i in order[:SHOWN]]


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
                x = function_of(code)(x)
        except Exception:
            return True
        if json.dumps(x) != json.dumps(right):
            return True
    return False


def solution_calls(task: Task) -> list[tuple[str, dict[str, Any]]]:
    """Tool calls of an agent that knows the answer: look, write, try, finish. For tests, and to measure what a rollout costs."""
    settings = json.loads(task.files["tests/runner.json"])
    return [
        ("read_file", {"path": settings["file"]}),
        ("apply_patch", {"patch": task.files["solution/gold.patch"].decode()}),
        ("shell", {"command": "python3 check.py"}),
        ("finish", {"answer": "done"}),
    ]
