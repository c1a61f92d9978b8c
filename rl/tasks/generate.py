"""Generated tasks: from any package with tests, by taking something away or breaking it.

    project = Project("shop", files)                         # sources and tests by path
    task = generate(project, "feature", seed, sandboxes)     # validated: the tests that the change breaks are its lists

Kinds: "feature" (functions lose their bodies, and the tests that need them are hidden: bring them back), "bug" (an operator or a
number is another one), "diagnosis" (the same, and all that is told is a log of the failure), "merge" (a conflict with markers),
"refactor" (a helper gets a new name everywhere; the tests must go on passing), "question" (nothing to change: who calls what).
Difficulty, 0 to 1: more functions, fewer tests that show the fault, more files.
"""

import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rl.harness.files import lines_of
from rl.harness.patch import changed_lines, headers
from rl.tasks.assemble import python_task
from rl.tasks.check import difference_of
from rl.tasks.logs import PASSED, XFAIL, Results
from rl.tasks.release import TEST, tests
from rl.tasks.task import Provenance, Task, TaskError, Verifier
from rl.tasks.verification import observe, run_tests
from rl.tasks.workspace import Sandboxes

GENERATED = ("feature", "bug", "diagnosis", "merge", "refactor", "question")
TRIES = 12  # mutations until one is seen by a test
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.And: "or",
    ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Project:
    """A package with tests. `files`: texts by path; `pypi`: what its tests need beside pytest."""

    name: str
    files: dict[str, str]
    pypi: tuple[str, ...] = ()
    licence: str = ""

    @property
    def sources(self) -> dict[str, str]:
        return {path: text for path, text in self.files.items() if path.endswith(".py") and not TEST.match(path) and "/" in path}


@dataclass(frozen=True)
class Function:
    """A function or method of a file: its lines, from 0, and where its body without the docstring begins."""

    path: str
    name: str
    first: int
    body: int
    end: int
    indent: int


def functions(sources: dict[str, str]) -> list[Function]:
    """Functions with at least two statements of body, in the order of files and lines."""
    found = []
    for path, text in sorted(sources.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if len(body) >= 2 or (body and body[0].end_lineno > body[0].lineno):
                    first = body[0]
                    start = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
                    found.append(Function(path, node.name, node.lineno - 1, start - 1, node.end_lineno, first.col_offset))
    return sorted(found, key=lambda f: (f.path, f.first))


def without_body(text: str, function: Function) -> str:
    lines = lines_of(text)
    return "".join([*lines[: function.body], " " * function.indent + "raise NotImplementedError\n", *lines[function.end :]])


def mutations(text: str) -> Iterator[tuple[int, str]]:
    """(line, text with one operator or number replaced), one after the other."""
    lines = lines_of(text)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = text.encode()

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int]:
        return starts[left.end_lineno - 1] + left.end_col_offset, starts[right.lineno - 1] + right.col_offset

    for node in ast.walk(ast.parse(text)):
        places = []
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            places = [(*between(node.left, node.comparators[0]), node.ops[0])]
        elif isinstance(node, ast.BinOp):
            places = [(*between(node.left, node.right), node.op)]
        elif isinstance(node, ast.BoolOp):
            places = [(*between(node.values[0], node.values[1]), node.op)]
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.lineno == node.end_lineno:
            start = starts[node.lineno - 1] + node.col_offset
            places = [(start, start + node.end_col_offset - node.col_offset, None)]
        for start, end, operator in places:
            new = str(node.value + 1) if operator is None else SWAPS.get(type(operator))
            gap = data[start:end].decode()
            if new is None or (operator is not None and (set(gap) & set("()#\\\n") or not gap.strip())):
                continue
            yield node.lineno, (data[:start] + (new if operator is None else f" {new} ").encode() + data[end:]).decode()


def broken(project: Project, r: random.Random, count: int = 1) -> dict[str, str]:
    """The sources with `count` mutations inside of functions."""
    changed = dict(project.sources)
    for _ in range(count):
        f = r.choice(functions(changed))
        inside = [text for line, text in mutations(changed[f.path]) if f.body < line <= f.end]
        if inside:
            changed[f.path] = r.choice(inside)
    return changed


def renamed(project: Project, r: random.Random) -> tuple[str, str, dict[str, str]]:
    """(old name, new name, sources) of a private helper that is used at least twice and that no test names."""
    sources = project.sources
    tested = "\n".join(text for path, text in project.files.items() if TEST.match(path))
    names = sorted({f.name for f in functions(sources) if f.name.startswith("_") and not f.name.startswith("__")})
    text = "\n".join(sources.values())
    known = [n for n in names if len(re.findall(rf"\b{n}\b", text)) >= 2 and not re.search(rf"\b{n}\b", tested)]
    if not known:
        raise TaskError(f"{project.name}: expected a private helper that is used and not named by a test, got none")
    old = r.choice(known)
    new = f"{old}_{r.choice(('value', 'impl', 'result', 'part'))}"
    return old, new, {path: re.sub(rf"\b{old}\b", new, text) for path, text in sources.items()}


def callers(project: Project) -> dict[str, set[str]]:
    """name of a function of the project: names of those that call it by that name."""
    own, found = {f.name for f in functions(project.sources)}, {}
    for text in project.sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in ast.walk(node):
                    if isinstance(call, ast.Call):
                        name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
                        if name in own and name != node.name:
                            found.setdefault(name, set()).add(node.name)
    return found


def generate(project: Project, kind: str, seed: int, sandboxes: Sandboxes, difficulty: float = 0.3) -> Task:
    """A validated task. The same arguments give the same task, as far as the tests are deterministic.

    Raises ValueError for an unknown kind, TaskError where the project gives no task of the kind within TRIES mutations.
    """
    if kind not in GENERATED:
        raise ValueError(f"kind: expected one of {GENERATED}, got {kind!r}")
    r = random.Random(f"{project.name} {kind} {seed}")
    name = f"generated/{project.name}-{kind}-{seed}"
    if kind == "question":
        return question(project, r, name)
    right = assembled(project, name, project.sources, {}, "x", kind)
    good = observe(right, "", sandboxes)
    for _ in range(TRIES):
        request, before, after, extra = change(project, kind, r, difficulty)
        task = assembled(project, name, before, after, request, kind, extra)
        if not task.provenance.changed_files:
            continue
        if kind in ("refactor", "merge"):
            good = observe(task, task.files["solution/gold.patch"].decode(), sandboxes)
        if made := listed(task, observe(task, "", sandboxes), good, difficulty):
            return diagnosed(made, sandboxes) if kind == "diagnosis" else made
    raise TaskError(f"{name}: no test sees any of {TRIES} changes")


def change(project: Project, kind: str, r: random.Random, difficulty: float):
    """(request, sources that the agent finds, sources that are right, more hidden tests)."""
    sources, count = project.sources, 1 + round(2 * difficulty)
    if kind == "feature":
        chosen = r.sample(functions(sources), min(count, len(functions(sources))))
        before = dict(sources)
        for f in sorted(chosen, key=lambda f: -f.first):  # from below: lines above keep their numbers
            before[f.path] = without_body(before[f.path], f)
        gone = ", ".join(f"{f.name} ({f.path})" for f in chosen)
        return (
            f"We lost {gone} in a bad merge. Bring it back, it did what its name, docstring and callers say.",
            before,
            sources,
            {},
        )
    if kind in ("bug", "diagnosis"):
        return f"Something in {project.name} gives wrong results since yesterday. Find it.", broken(project, r, count), sources, {}
    if kind == "merge":
        theirs = broken(project, r)
        path = next((p for p in sources if theirs[p] != sources[p]), None)
        if path is None:
            return "", sources, sources, {}
        conflict = conflicted(sources[path], theirs[path])
        request = f"Merging `experiment` stopped with a conflict in {path}. Resolve it; what main does is tested, theirs is older."
        return request, sources | {path: conflict}, sources, {}
    old, new, after = renamed(project, r)
    test = f"""import pathlib
import re

def test_the_new_name_is_used_everywhere():
    texts = [p.read_text() for top in {sorted({p.split("/")[0] for p in sources})!r} for p in pathlib.Path(top).rglob("*.py")]
    assert not any(re.search(r"\\b{old}\\b", text) for text in texts)
    assert any(re.search(r"def {new}\\b", text) for text in texts)
"""
    place = f"{sorted(path.split('/')[0] for path in project.files if TEST.match(path))[0]}/test_name_of_helper.py"
    return f"Rename {old} to {new}, everywhere. Nothing else may change.", sources, after, {place: test.encode()}


def conflicted(ours: str, theirs: str) -> str:
    """A file as a merge leaves it."""
    a, b = lines_of(ours), lines_of(theirs)
    first = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    last = next(i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y)
    middle = ["<<<<<<< main\n", *a[first : len(a) - last], "=======\n", *b[first : len(b) - last], ">>>>>>> experiment\n"]
    return "".join([*a[:first], *middle, *a[len(a) - last :]])


def assembled(
    project: Project,
    name: str,
    before: dict[str, str],
    after: dict[str, str],
    request: str,
    kind: str,
    extra: dict[str, bytes] | None = None,
) -> Task:
    files = {path: text.encode() for path, text in (project.files | before).items()}
    patch = difference_of(before, after) if after else ""
    provenance = Provenance(
        source=f"generated from {project.name}",
        licence=project.licence,
        kind=kind,
        changed_files=len(headers(patch)),
        changed_lines=changed_lines(patch),
    )
    return python_task(name, request, files, tests(files) | (extra or {}), patch, provenance, pypi=project.pypi)


def listed(task: Task, before: Results, good: Results, difficulty: float) -> Task | None:
    """The task with its lists; without the test files that show what is to be done. None where no test sees the change."""

    def passed(results: Results) -> set[str]:
        return {name for name, status in results.items() if status in (PASSED, XFAIL)}

    fail_to_pass = tuple(sorted(passed(good) - passed(before)))
    pass_to_pass = tuple(sorted(passed(good) & passed(before)))
    if not fail_to_pass:
        return None
    telling = {test.split("::")[0] for test in fail_to_pass}
    files = {path: data for path, data in task.files.items() if path.removeprefix("environment/workspace/") not in telling}
    unseen = 1 - min(1.0, len(fail_to_pass) / 20)
    graded = round((difficulty + unseen + min(1.0, task.provenance.changed_files / 4)) / 3, 2)
    return replace(
        task,
        files=files,
        verifier=replace(task.verifier, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass),
        provenance=replace(task.provenance, difficulty=graded),
    )


def diagnosed(task: Task, sandboxes: Sandboxes) -> Task:
    """The task whose work directory has a log of the failure, and nothing else to go by."""
    with sandboxes.start(task) as sandbox:
        log = run_tests(task, sandbox).stderr.decode(errors="replace")
    shown = re.sub(r"(?m)^.*(/tests/|@value|^[.FEsx]+ *\[).*\n?", "", log)[:4000]
    files = task.files | {"environment/workspace/ci.log": shown.encode()}
    return replace(task, files=files, instruction="CI is red, the log is in ci.log. Please fix the cause, not the symptom.")


def question(project: Project, r: random.Random, name: str) -> Task:
    """Who calls a function? Graded by the names in the answer; functions that do not call it must not be in it."""
    known = {called: by for called, by in sorted(callers(project).items()) if 1 <= len(by) <= 4}
    if not known:
        raise TaskError(f"{name}: expected a function that one to four others call, got none")
    called = r.choice(sorted(known))
    others = sorted({f.name for f in functions(project.sources)} - known[called] - {called})
    wrong = r.sample(others, min(5, len(others)))
    settings = {"has": sorted(known[called]), "has_not": wrong}
    task = python_task(
        name,
        f"Don't change anything. Which functions call {called}? Just their names.",
        {path: text.encode() for path, text in project.files.items()},
        {},
        "",
        Provenance(source=f"generated from {project.name}", kind="question", difficulty=round(len(known[called]) / 4, 2)),
        pypi=project.pypi,
    )
    files = {path: data for path, data in task.files.items() if not path.startswith(("tests/", "solution/"))}
    return replace(
        task,
        verifier=Verifier(parser="answer", report=None),
        files=files | {"tests/answer.json": json.dumps(settings).encode()},
    )
