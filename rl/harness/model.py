"""What the loop needs of a model, and what gives it: OpenAI-compatible servers, of chats or of completions, and a script.

`builtin.SamplerModel` is one more, over a model of this project.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import httpx

from rl.harness import prompt

Message = dict[str, Any]  # as OpenAI-compatible servers take it


class ModelError(Exception):
    """The model gave no reply: the server refused, broke off, or is gone."""


class ContextFull(ModelError):
    """The conversation has grown longer than the model can read: the work's own end, no failure of the server."""


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it; `arguments` is JSON text, perhaps malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One reply. Token ids and log-probs are there where the server says them."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thinking: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"  # "length": cut at the token limit
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    seconds: float = 0.0

    @property
    def message(self) -> Message:
        """As it stands in the conversation."""
        calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.calls]
        return {"role": "assistant", "content": self.text} | ({"tool_calls": calls} if calls else {})


class Model(Protocol):
    name: str

    def reply(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], max_tokens: int, timeout_s: float) -> Reply:
        """The next reply; ModelError where there is none in time."""


@dataclass
class ScriptedModel:
    """Replies written beforehand, for tests and for replaying a trajectory."""

    replies: Sequence[Reply]
    name: str = "scripted"
    seen: list[list[Message]] = field(default_factory=list)

    def reply(self, messages, tools, max_tokens, timeout_s):
        self.seen.append([dict(message) for message in messages])
        if len(self.seen) > len(self.replies):
            raise ModelError(f"the script has {len(self.replies)} replies, asked for one more")
        return self.replies[len(self.seen) - 1]


RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


class ChatServer:
    """A model behind `/chat/completions` of an OpenAI-compatible server (vLLM, SGLang, llama.cpp, transformers serve, ...)."""

    path = "chat/completions"

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key: str = "",
        stream: bool = True,
        retries: int = 4,
        on_text: Callable[[str], None] = lambda piece: None,
        **options: Any,
    ):
        """`url` ends before /chat/completions, usually in /v1; `on_text` is told the pieces of a streamed reply as they come;
        `options` (temperature, seed, ...) go into every request."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: expected http:// or https://, got {url!r}")
        self.name, self.stream, self.retries, self.on_text, self.options = name, stream, retries, on_text, options
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers)

    def close(self) -> None:
        self.client.close()

    def asked(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What a request has of its own."""
        return {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})

    def understood(self, reply: "Reply") -> "Reply":
        return reply

    def reply(self, messages, tools, max_tokens, timeout_s):
        body = {"model": self.name, **self.asked(messages, tools), "max_tokens": max_tokens, **self.options}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        for attempt in range(self.retries + 1):
            left = timeout_s - (time.monotonic() - start)
            if left <= 0:
                raise ModelError(f"{self.name}: no reply in {timeout_s:.0f} s")
            try:
                chunks = list(self.request(body, start + timeout_s, left))
                return self.understood(merged(chunks, time.monotonic() - start))
            except httpx.HTTPStatusError as error:
                said = error.response.text[:300]
                if error.response.status_code not in RETRIED or attempt == self.retries:
                    raise ModelError(f"{self.name}: status {error.response.status_code}: {said}") from None
            except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                if attempt == self.retries:
                    raise ModelError(f"{self.name}: {type(error).__name__}: {error}") from None
            time.sleep(min(0.5 * 2**attempt, 8.0, max(left, 0)))
        raise AssertionError("unreachable")

    def request(self, body: dict[str, Any], end: float, left: float) -> Iterator[dict[str, Any]]:
        """The parts of one reply: chunks of a stream, or the whole."""
        with self.client.stream("POST", self.path, json=body, timeout=left) as response:
            if response.is_error:
                response.read()
                response.raise_for_status()
            if "text/event-stream" not in response.headers.get("content-type", ""):
                yield json.loads(response.read())
                return
            for line in response.iter_lines():
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the stream did not end in time")
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                chunk = json.loads(line[5:])
                if "error" in chunk:
                    raise ValueError(str(chunk["error"])[:300])
                for choice in chunk.get("choices", [])[:1]:
                    if piece := (choice.get("delta") or {}).get("content") or choice.get("text"):
                        self.on_text(piece)
                yield chunk


class CompletionServer(ChatServer):
    """A model behind `/completions`: the conversation is written here (`prompt.chatml`), and calls are read from the text."""

    path = "completions"

    def asked(self, messages, tools):
        return {"prompt": prompt.chatml(prompt.with_tools(messages, tools)), "stop": [prompt.END]}

    def understood(self, reply):
        text, thinking, calls = prompt.parsed(reply.text)
        made = tuple(Call(f"call_{i}", name, arguments) for i, (name, arguments) in enumerate(calls))
        return replace(reply, text=text, thinking=reply.thinking or thinking, calls=made)


def served_name(url: str, key: str = "") -> str:
    """The first model that a server lists. Raises ModelError where it lists none."""
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx.get(url.rstrip("/") + "/models", headers=headers, timeout=10).raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{url}: no list of models: {type(error).__name__}: {error}") from None


def whole(text: str) -> str:
    """The text with its surrogates as the characters they are halves of, which servers may send in two parts; U+FFFD for one
    alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def merged(chunks: Sequence[dict[str, Any]], seconds: float) -> Reply:
    """One reply out of the chunks of a stream, or out of one whole response. Fields that servers add (token_ids) are kept."""
    text = thinking = ""
    finish, usage, prompt_ids = "stop", {}, None
    calls: dict[int, dict[str, str]] = {}
    ids: list[int] = []
    logprobs: list[float] = []
    if not any(chunk.get("choices") for chunk in chunks):
        raise ValueError("a response without choices")
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
        for choice in chunk.get("choices", [])[:1]:
            part = choice.get("delta") or choice.get("message") or {}
            text += part.get("content") or choice.get("text") or ""
            thinking += part.get("reasoning_content") or part.get("reasoning") or ""
            finish = choice.get("finish_reason") or finish
            ids += choice.get("token_ids") or []
            said = choice.get("logprobs") or {}
            logprobs += [entry["logprob"] for entry in said.get("content") or []] + list(said.get("token_logprobs") or [])
            prompt_ids = choice.get("prompt_token_ids") or prompt_ids
            for position, call in enumerate(part.get("tool_calls") or []):
                index = call.get("index", position)
                slot = calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
                function = call.get("function") or {}
                slot["id"] = call.get("id") or slot["id"]
                slot["name"] += function.get("name") or ""
                arguments = function.get("arguments") or ""
                slot["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)
    made = tuple(Call(whole(c["id"]) or f"call_{i}", whole(c["name"]), whole(c["arguments"])) for i, c in sorted(calls.items()))
    return Reply(
        text=whole(text),
        calls=made,
        thinking=whole(thinking),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", len(ids)),
        finish_reason=finish,
        prompt_token_ids=tuple(prompt_ids) if prompt_ids else None,
        completion_token_ids=tuple(ids) or None,
        logprobs=tuple(logprobs) or None,
        seconds=seconds,
    )
