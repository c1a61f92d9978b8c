"""How a conversation becomes tokens, and a reply's tokens calls.

    ids = dialect.prompt(messages, tools)      # up to where the reply begins
    ids += reply                               # as it was sampled, its end included
    ids += dialect.more(new_messages)          # goes on behind it, up to where the next reply begins
    text, thinking, calls = dialect.parsed(reply)

`ChatDialect` is the tokenizer's own format of conversations with calls as JSON. `TerseDialect` is for models of a million
parameters: the same tools with the same arguments, spelt in a few tokens.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rl.harness import prompt
from rl.harness.schema import JSON_TYPES, Tool
from rl.harness.toolsets import tool_set
from training.data.encode import render
from training.data.tokenizer import Vocabulary

Message = dict[str, Any]
Parsed = tuple[str, str, list[tuple[str, str]]]
TERSE = {"read": "read_file", "edit": "edit_line", "test": "run_check", "done": "finish"}


class Dialect(Protocol):
    """stop: ids that end a reply. turn: the one of them that belongs behind a reply that was cut."""

    stop: frozenset[int]
    turn: int

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation, up to where the reply begins."""

    def more(self, messages: Sequence[Message]) -> list[int]:
        """Ids of messages that follow a reply which ended with one of `stop`, up to where the next reply begins."""

    def parsed(self, ids: Sequence[int]) -> Parsed:
        """What a reply says, thinks and calls: (text, thinking, [(name, arguments as JSON text)]), as `prompt.parsed`."""

    def text(self, ids: Sequence[int]) -> str:
        """What a reply says where no tools are offered: a summary."""


class ChatDialect:
    """The tokenizer's own format (training.data), tools described in the first message, calls as JSON."""

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        after = vocabulary.encode_template(vocabulary.family.messages["assistant"][1])
        self.turn, self._rest = after[0], after[1:]
        self.stop = frozenset((self.turn, vocabulary.eos))

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return self._render(prompt.with_tools(messages, tools))

    def more(self, messages: Sequence[Message]) -> list[int]:
        return [*self._rest, *self._render(messages)[1:]]  # without the token that begins a document

    def parsed(self, ids: Sequence[int]) -> Parsed:
        return prompt.parsed(self._text(ids))

    def text(self, ids: Sequence[int]) -> str:
        return self.parsed(ids)[0]

    def _render(self, messages: Sequence[Message]) -> list[int]:
        fine = [m | {"tool_calls": [c for c in m["tool_calls"] if is_call(c)]} if "tool_calls" in m else m for m in messages]
        return render(fine, self.vocabulary, reply=True)[0]

    def _text(self, ids: Sequence[int]) -> str:
        """A reply's text with calls between the tags of `prompt`, whatever the tokenizer's own are."""
        opening, closing = (self.vocabulary.encode_template(mark.strip())[:1] for mark in self.vocabulary.family.messages["call"])
        out, part, is_call = "", [], False
        for token in [*ids, self.turn]:
            ends = token in self.stop
            if [token] in (opening, closing) or ends:
                out += self.vocabulary.decode(part) + ("</tool_call>" if is_call else "")
                part, is_call = [], [token] == opening
                out += "<tool_call>" if is_call else ""
            else:
                part.append(token)
        return out


class TerseDialect:
    """A view of the tools' schema: a reply is one call, its verb and then its arguments in the schema's order, one space between.

        edit kobi.py 3 x = sorted(x)

    The last argument is all that is left, line ends included; optional ones may be left out from the end. What is no such call is a
    call of no tool, or one with arguments that its schema refuses: both are answered with an error. A reply that was cut is a text.
    verbs: verb -> tool. The tools are told to no model: what it was trained on has shown them; nor are system messages.
    """

    def __init__(self, vocabulary: Vocabulary, verbs: Mapping[str, str] = TERSE):
        tools = tool_set(list(verbs.values())).tools
        self.vocabulary = vocabulary
        self.verbs: dict[str, Tool] = {verb: tools[name] for verb, name in verbs.items()}
        self.verb_of = {name: verb for verb, name in verbs.items()}
        self._marks = {
            role: vocabulary.encode_template(vocabulary.family.messages[role][0]) for role in ("user", "assistant", "tool")
        }
        after = vocabulary.encode_template(vocabulary.family.messages["assistant"][1])
        self.turn, self._rest = after[0], after[1:]
        self.stop = frozenset((self.turn, vocabulary.eos))

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        return [self.vocabulary.bos, *self._rendered(messages)]

    def more(self, messages: Sequence[Message]) -> list[int]:
        return [*self._rest, *self._rendered(messages)]

    def _rendered(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message["role"] == "system":
                continue
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
            text = "\n".join(spelt(self.verb_of, *call) for call in calls) if calls else message.get("content") or ""
            ids += [*self._marks[message["role"]], *self.vocabulary.encode(text), self.turn, *self._rest]
        return ids + self._marks["assistant"]

    def parsed(self, ids: Sequence[int]) -> Parsed:
        if not ids or ids[-1] not in self.stop:
            return self.vocabulary.decode(ids), "", []
        text = self.vocabulary.decode(ids[:-1])
        verb, _, rest = text.partition(" ")
        if verb not in self.verbs:
            return "", "", [(verb, json.dumps({"text": text}))]
        tool = self.verbs[verb]
        properties = tool.parameters["properties"]
        parts = rest.split(" ", len(properties) - 1) if rest else []
        values = {name: _value(part, properties[name]) for name, part in zip(properties, parts, strict=False)}
        return "", "", [(tool.name, json.dumps(values))]

    def text(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids).strip()


def spelt(verb_of: Mapping[str, str], name: str, arguments: str) -> str:
    """A call as the terse dialect writes it, and reads it where no argument but the last has a space.

    verb_of: tool -> verb. arguments: JSON text.
    """
    try:
        values = [value if isinstance(value, str) else json.dumps(value) for value in json.loads(arguments or "{}").values()]
    except (ValueError, AttributeError):
        values = [arguments]
    return " ".join([verb_of.get(name, name), *values])


def _value(text: str, schema: dict[str, Any]) -> Any:
    """A text as its argument's type; where it is none, the text, which the schema refuses."""
    if schema["type"] == JSON_TYPES[str]:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def is_call(call: dict[str, Any]) -> bool:
    """Whether a call of a conversation can be written in the tokenizer's format: its arguments are JSON."""
    try:
        return bool(call["function"]["name"]) and isinstance(json.loads(call["function"]["arguments"] or "{}"), dict)
    except ValueError:
        return False
