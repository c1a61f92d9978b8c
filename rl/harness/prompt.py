"""A conversation as text, for models that only continue text: ChatML with calls as JSON between tags, as Qwen and Hermes have it.

<|im_start|>assistant
I look.<tool_call>
{"name": "read_file", "arguments": {"path": "a.py"}}
</tool_call><|im_end|>
"""

import json
import re
from collections.abc import Sequence
from typing import Any

END = "<|im_end|>"
CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
THINKING = re.compile(r"^\s*<think>(.*?)(?:</think>|$)\s*", re.DOTALL)
TOOLS = """

You have these tools:
{tools}
Call one by writing <tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>, several by writing several of these."""


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools described at the end of its first message."""
    if not tools:
        return list(messages)
    told = TOOLS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [messages[0] | {"content": ((messages[0]["content"] or "") + told).strip()}, *messages[1:]]


def chatml(messages: Sequence[dict[str, Any]]) -> str:
    """The conversation as text, up to where the next reply begins. What a message says cannot end it."""
    out = ""
    for message in messages:
        text = (message.get("content") or "").replace("<|im_", "<|im\u200b_")
        for call in message.get("tool_calls") or ():
            text += "<tool_call>\n" + called(call["function"]) + "\n</tool_call>"
        out += f"<|im_start|>{message['role']}\n{text}{END}\n"
    return out + "<|im_start|>assistant\n"


def called(function: dict[str, Any]) -> str:
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]  # as it was written, so that the model sees it
    return json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)


def parsed(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    """What a reply says, thought, and calls: (text, thinking, [(name, arguments as JSON text)]).

    A call that is no JSON object with a name has the name "" and what was written as its arguments: it is answered with an error.
    """
    thinking = THINKING.match(text)
    text = THINKING.sub("", text, count=1)
    calls = []
    for written in CALL.findall(text):
        try:
            call = json.loads(written)
            name, arguments = call["name"], call.get("arguments", {})
            calls.append((str(name), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            calls.append(("", written))
    return CALL.sub("", text).split(END)[0].strip(), thinking[1].strip() if thinking else "", calls
