"""What an agent did: the steps of a run, written as ATIF (Agent Trajectory Interchange Format 1.7, as Harbor reads it)."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.harness.model import Call, Reply
from rl.harness.schema import ToolResult

SCHEMA_VERSION = "ATIF-v1.7"
End = Literal["finished", "answered", "turns", "time", "tokens", "model_error", "sandbox_error", "stopped"]


@dataclass(frozen=True)
class Step:
    """One message: the user's or the system's text, or a reply with what its calls gave."""

    source: Literal["system", "user", "agent"]
    reply: Reply
    results: tuple[ToolResult, ...] = ()
    segment: int = 0  # 0, then one more behind every summary
    seconds: float = 0.0  # of the tools


@dataclass
class Trajectory:
    """A run. `end` says why it ended; "finished" by the tool, "answered" by a reply without calls."""

    model: str
    tools: list[dict[str, Any]]
    tools_digest: str
    steps: list[Step] = field(default_factory=list)
    end: End = "stopped"
    error: str = ""
    todos: list[dict[str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def replies(self) -> list[Reply]:
        return [step.reply for step in self.steps if step.source == "agent"]

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    @property
    def calls(self) -> list[tuple[Call, ToolResult]]:
        return [pair for step in self.steps for pair in zip(step.reply.calls, step.results, strict=False)]

    def atif(self) -> dict[str, Any]:
        """The run as an ATIF object."""
        totals = {
            "total_prompt_tokens": sum(reply.prompt_tokens for reply in self.replies),
            "total_completion_tokens": self.completion_tokens,
            "total_steps": len(self.steps),
        }
        extra = {
            "end": self.end,
            "error": self.error,
            "todos": self.todos,
            "faults": self.faults,
            "tools_digest": self.tools_digest,
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "agent": {"name": "mxmoe", "version": "1", "model_name": self.model, "tool_definitions": self.tools},
            "steps": [step_of(i, step) for i, step in enumerate(self.steps, 1)],
            "final_metrics": totals,
            "extra": extra,
        }

    def save(self, file: str | Path) -> None:
        Path(file).write_text(dumped(self.atif(), indent=1) + "\n", "utf-8")


def dumped(content: Any, **options: Any) -> str:
    """JSON that UTF-8 takes: halves of characters, which models write, as escapes."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", json.dumps(content, ensure_ascii=False, **options))


def step_of(number: int, step: Step) -> dict[str, Any]:
    reply = step.reply
    out: dict[str, Any] = {"step_id": number, "source": step.source, "message": reply.text, "extra": {"segment": step.segment}}
    if step.source != "agent":
        return out
    if reply.thinking:
        out["reasoning_content"] = reply.thinking
    if reply.calls:
        out["tool_calls"] = [call_of(call) for call in reply.calls]
        out["observation"] = {
            "results": [
                {"source_call_id": call.id, "content": result.text, "extra": {"kind": result.kind}}
                for call, result in zip(reply.calls, step.results, strict=False)
            ]
        }
    out["metrics"] = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
    for key in ("prompt_token_ids", "completion_token_ids", "logprobs"):
        if getattr(reply, key) is not None:
            out["metrics"][key] = list(getattr(reply, key))
    out["extra"] |= {"finish_reason": reply.finish_reason, "model_seconds": reply.seconds, "tool_seconds": step.seconds}
    return out


def call_of(call: Call) -> dict[str, Any]:
    """A call; arguments that are no JSON object are kept as they were written."""
    try:
        arguments = json.loads(call.arguments or "{}")
        json.dumps(arguments, indent=1)  # is deeper than what reads it
    except (ValueError, RecursionError):
        arguments = None
    fine = isinstance(arguments, dict)
    out = {"tool_call_id": call.id, "function_name": call.name, "arguments": arguments if fine else {}}
    return out if fine else out | {"extra": {"malformed": call.arguments}}


def replies_of(atif: dict[str, Any]) -> list[Reply]:
    """The replies of a stored run, to be replayed; ValueError for what is no ATIF."""
    try:
        return [reply_of(step) for step in atif["steps"] if step["source"] == "agent"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"trajectory: expected ATIF, got {type(error).__name__}: {error}") from None


def reply_of(step: dict[str, Any]) -> Reply:
    metrics = step.get("metrics") or {}
    ids = {
        key: tuple(metrics[key]) for key in ("prompt_token_ids", "completion_token_ids", "logprobs") if metrics.get(key) is not None
    }
    calls = []
    for call in step.get("tool_calls") or []:
        malformed = (call.get("extra") or {}).get("malformed")
        arguments = json.dumps(call["arguments"], ensure_ascii=False) if malformed is None else malformed
        calls.append(Call(call["tool_call_id"], call["function_name"], arguments))
    return Reply(
        text=step["message"],
        calls=tuple(calls),
        thinking=step.get("reasoning_content") or "",
        prompt_tokens=metrics.get("prompt_tokens", 0),
        completion_tokens=metrics.get("completion_tokens", 0),
        finish_reason=(step.get("extra") or {}).get("finish_reason", "stop"),
        **ids,
    )
