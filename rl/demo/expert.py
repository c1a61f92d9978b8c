"""The scripted expert: conversations with the tools of the terse dialect, with mistakes, tests and recovery, in known shares."""

import json
import random
import re

from rl.demo.recipe import Demonstrations
from rl.demo.rehearsal import Rehearsal
from rl.harness import patch
from rl.harness.dialect import TERSE
from rl.harness.schema import ToolSet
from rl.harness.session import Session
from rl.harness.toolsets import tool_set
from rl.tasks.task import Task
from rl.tasks.workspace import WORKSPACE

Message = dict
SWAPS = (
    ("== 0", "== 1"), ("== 1", "== 0"), (" > ", " >= "), (" > ", " < "), ("sorted(x)", "sorted(x, reverse=True)"),
    (", reverse=True", ""), ("lower", "upper"), ("upper", "lower"), ("title", "upper"), ("[::-1]", "[::1]"), ("max(", "min("),
    ("min(", "max("), ("sum(", "len("), ("len(", "sum("), ("v * v", "v + v"), ("abs(v)", "-v"), (" + ", " - "), (" * ", " + "),
    ("x.split()", "x"), ("strip()", "lstrip()"), ("''", "' '"), ("'-'", "'_'"), ("x[:", "x[1:"), ("list(dict.fromkeys(x))", "x"),
)  # fmt: skip


def demonstration(task: Task, r: random.Random, ways: Demonstrations) -> list[Message]:
    """The conversation of one run: the request, then calls and what they gave."""
    return _Run(task, r, ways).messages


def finished(task: Task) -> str:
    """The task's file as it should be in the end."""
    (change,) = patch.parse(task.files["solution/gold.patch"].decode())
    return patch.applied(task.files[WORKSPACE + change.old].decode(), change)


class _Run:
    def __init__(self, task: Task, r: random.Random, ways: Demonstrations):
        settings = json.loads(task.files["tests/runner.json"])
        files = {path.removeprefix(WORKSPACE): data for path, data in task.files.items() if path.startswith(WORKSPACE)}
        self.file, self.r = settings["file"], r
        self.after = finished(task).splitlines()
        self.session, self.tools = Session(Rehearsal(files)), TOOLS
        self.messages: list[Message] = [{"role": "user", "content": task.instruction}]
        self.call("read_file", path=self.file)
        if r.random() < ways.quits:
            pass
        elif r.random() < ways.careless:
            self.edit(wrong=r.random() < ways.careless_mistakes)
        else:
            for attempt in range(ways.attempts):
                last = attempt == ways.attempts - 1
                self.edit(wrong=not last and r.random() < ways.mistakes)
                if self.call("run_check") == "ok" or r.random() < ways.gives_up:
                    break
        self.call("finish")

    def call(self, name: str, **arguments) -> str:
        number = f"call_{len(self.messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        made = {"id": number, "type": "function", "function": function}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        text = self.tools.call(self.session, name, arguments).text
        self.messages.append({"role": "tool", "tool_call_id": number, "content": text})
        return text

    def edit(self, wrong: bool) -> None:
        """One edit that turns what is there into what should be, or that does not."""
        now = self.session.sandbox.read(f"/workspace/{self.file}").decode().splitlines()
        there = [line.strip() for line in now[2:]]
        right = [line.strip() for line in self.after[2:]]
        place = next((i for i, (a, b) in enumerate(zip(there, right, strict=False)) if a != b), len(there) - 1)
        more = len(right) - len(there)
        new = right[place : place + 1 + more] if more >= 0 else right[place : place + 1]
        if wrong:
            if not more and len(right) > 1 and self.r.random() < 0.3:  # another line, which was right
                place = self.r.choice([i for i in range(len(there)) if i != place])
                new = [there[place]]
            at = self.r.randrange(len(new))
            new[at] = mistaken(new[at], self.r, never=there[place] if len(new) == 1 else "")
        self.call("edit_line", path=self.file, line=place + 3, text="\n".join(new))


def mistaken(line: str, r: random.Random, never: str = "") -> str:
    """A line of code that looks like this one and is another, nor `never`."""
    ways = [line.replace(a, b, 1) for a, b in SWAPS if a in line]
    if digits := list(re.finditer(r"(?<!% )(?<!== )\b\d\b", line)):
        at = r.choice(digits)
        ways.append(line[: at.start()] + str(int(at[0]) + r.choice((-1, 1))) + line[at.end() :])
    ways = [way for way in ways if way not in (line, never)] or [line[: line.index("x")] + "x", line + ".copy()"]
    return r.choice([way for way in ways if way not in (line, never)])


TOOLS: ToolSet = tool_set(list(TERSE.values()))
