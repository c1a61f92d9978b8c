"""The agent loop: ask the model, run its calls, show it what they gave; until it is done or a limit is reached."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rl.environments.sandbox import SandboxError
from rl.harness.model import ContextFull, Message, Model, ModelError, Reply
from rl.harness.schema import ToolResult, ToolSet
from rl.harness.session import Session
from rl.harness.toolsets import READERS
from rl.harness.trajectory import Step, Trajectory

SYSTEM = """You are a coding agent. You work in the directory {workdir} of a sandbox, with tools only.
Look before you change, keep to what is asked, and check what you changed. You have {seconds} seconds and {turns} replies.
When the work is done, {done}."""
SUMMARY = """Summarize the work so far for yourself: the request, what you found, what you changed and where, what is left.
You go on from this summary alone."""
CONTINUE = "Go on. Your summary of the work so far:\n\n{summary}"
CUT = "Your reply was cut at the token limit. Go on in smaller steps."
MAX_PARALLEL = 8


@dataclass(frozen=True)
class LoopLimits:
    """When a run ends by itself, and when it is asked to summarize."""

    turns: int = 100
    seconds: float = 1800.0
    tokens: int = 1_000_000  # of all replies
    reply_tokens: int = 4096
    context_tokens: int = 0  # a prompt longer than this is summarized; 0: never


def run(
    model: Model,
    session: Session,
    tools: ToolSet,
    instruction: str,
    limits: LoopLimits = LoopLimits(),
    *,
    inbox: Callable[[], Sequence[str]] = tuple,
    stopped: Callable[[], bool] = lambda: False,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Trajectory:
    """Runs an agent to its end. Raises nothing that model, tools or sandbox do: `Trajectory.end` and `.error` say it.

    inbox    gives what the user has said since it was asked last: shown to the model before its next reply
    stopped  true ends the run before its next reply
    on_step  is told every step when it is over
    """
    trajectory = Trajectory(model.name, tools.schemas, tools.digest, faults=session.faults)
    done = "call finish" if "finish" in tools.tools else "say so"
    system = SYSTEM.format(workdir=session.workdir, seconds=int(limits.seconds), turns=limits.turns, done=done)
    messages: list[Message] = []
    deadline, segment = time.monotonic() + limits.seconds, 0

    def say(source: str, text: str) -> None:
        messages.append({"role": source, "content": text})
        note(Step(source, Reply(text=text), segment=segment))

    def note(step: Step) -> None:
        trajectory.steps.append(step)
        on_step(step)

    def end(reason: str, error: str = "") -> Trajectory:
        trajectory.end, trajectory.error, trajectory.todos = reason, error, session.todos
        return trajectory

    say("system", system)
    say("user", instruction)
    for _ in range(limits.turns):
        for text in inbox():
            say("user", text)
        if stopped():
            return end("stopped")
        left = deadline - time.monotonic()
        if left <= 0:
            return end("time")
        budget = min(limits.reply_tokens, limits.tokens - trajectory.completion_tokens)
        if budget <= 0:
            return end("tokens")
        try:
            reply = model.reply(messages, tools.schemas, budget, left)
        except ContextFull as error:
            return end("tokens", str(error))
        except ModelError as error:
            return end("time" if time.monotonic() >= deadline else "model_error", str(error))
        messages.append(reply.message)
        start = time.monotonic()
        try:
            results = run_calls(session, tools, reply, deadline)
        except SandboxError as error:
            note(Step("agent", reply, (), segment))
            return end("sandbox_error", f"{type(error).__name__}: {error}")
        note(Step("agent", reply, results, segment, time.monotonic() - start))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": r.text} for c, r in zip(reply.calls, results, strict=True)]
        if session.answer is not None:
            return end("finished")
        if not reply.calls and reply.finish_reason == "length":
            say("user", CUT)
        elif not reply.calls:
            return end("answered")
        if session.summary_wanted or 0 < limits.context_tokens < reply.prompt_tokens + reply.completion_tokens:
            session.summary_wanted = False
            say("user", SUMMARY)
            try:
                summary = model.reply(messages, [], limits.reply_tokens, max(deadline - time.monotonic(), 1.0))
            except ContextFull as error:
                return end("tokens", str(error))
            except ModelError as error:
                return end("model_error", str(error))
            note(Step("agent", summary, segment=segment))
            segment += 1
            messages.clear()
            say("system", system)
            say("user", instruction)
            say("user", CONTINUE.format(summary=summary.text))
    return end("turns")


def run_calls(session: Session, tools: ToolSet, reply: Reply, deadline: float) -> tuple[ToolResult, ...]:
    """What the calls of one reply give, in their order; calls that only read run side by side."""

    def one(call) -> ToolResult:
        if time.monotonic() >= deadline:
            return ToolResult("Error: the time is over", "error")
        return tools.call(session, call.name, call.arguments)

    calls = reply.calls
    if len(calls) > 1 and all(call.name in READERS for call in calls):
        with ThreadPoolExecutor(min(MAX_PARALLEL, len(calls))) as pool:
            return tuple(pool.map(one, calls))
    return tuple(one(call) for call in calls)
