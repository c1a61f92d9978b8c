"""One source for every tool: a typed Python function with a docstring is its JSON schema, its help and its argument check.

    @tool
    def read_file(session: Session, path: str, offset: int = 1, limit: int = 2000) -> str:
        \"""Reads a file.

        path    relative to the work directory, or absolute
        offset  first line, counted from 1
        limit   number of lines
        \"""

The text up to the first blank line is what the model is told, the table behind it describes the arguments. Arguments may be
str, int, float, bool, a Literal of strings, list[str] or list[dict]; those with a default are optional. A call never raises:
whatever goes wrong is text for the model, and `ToolResult.kind` tells a call that the model got wrong ("invalid") from one that
the world refused ("error") and from a broken sandbox, which is the one thing that does raise (`SandboxError`).
"""

import contextlib
import difflib
import hashlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl.environments.sandbox import SandboxError

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
NAMES = {
    "string": "a string without NUL and halves of characters",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
}

UNUSABLE = re.compile("[\0\ud800-\udc7f]")  # U+DC80 to U+DCFF stand for bytes that are no UTF-8


class ToolError(Exception):
    """A refusal that the model reads: says what was expected and what was found."""


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `text` is what the model sees."""

    text: str
    kind: Literal["ok", "error", "invalid"] = "ok"


@dataclass(frozen=True)
class Tool:
    """A tool: its function takes the session and then the arguments by name."""

    name: str
    description: str
    parameters: dict[str, Any]  # JSON schema of the arguments
    run: Callable[..., str]

    @property
    def schema(self) -> dict[str, Any]:
        """As OpenAI-compatible servers take it."""
        return {"type": "function", "function": {"name": self.name, "description": self.description, "parameters": self.parameters}}


def schema_of(hint: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is Literal:
        return {"type": "string", "enum": list(args)}
    if origin in (types.UnionType, typing.Union):  # X | None: an optional argument
        return schema_of(next(arg for arg in args if arg is not type(None)))
    if origin is list:
        return {"type": "array", "items": {"type": "object"} if args[0] is dict else schema_of(args[0])}
    raise TypeError(f"argument type: expected str, int, float, bool, Literal or a list of them, got {hint}")


def tool(function: Callable[..., str]) -> Tool:
    """Makes a tool of a function; TypeError where its signature or docstring cannot be told to a model."""
    description, _, table = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    about: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith(" ") and about:
            about[next(reversed(about))] += " " + line.strip()
        elif line.strip():
            name, _, text = line.partition(" ")
            about[name] = text.strip()
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if not description or list(about) != [p.name for p in parameters]:
        raise TypeError(
            f"{function.__name__}: expected a docstring that describes {[p.name for p in parameters]}, got {list(about)}"
        )
    properties = {}
    for p in parameters:
        properties[p.name] = schema_of(hints[p.name]) | {"description": about[p.name]}
        if p.default not in (inspect.Parameter.empty, None):
            properties[p.name]["default"] = p.default
    schema = {
        "type": "object",
        "properties": properties,
        "required": [p.name for p in parameters if p.default is inspect.Parameter.empty],
        "additionalProperties": False,
    }
    return Tool(function.__name__, " ".join(description.split()), schema, function)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
    if kind == "object":
        return isinstance(value, dict)
    if kind == "string":  # NUL ends a path or an argument before its end, half a character is no byte: no tool takes them
        return isinstance(value, str) and not UNUSABLE.search(value) and value in schema.get("enum", [value])
    if kind == "boolean":
        return isinstance(value, bool)
    return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)


def converted(value: Any, schema: dict[str, Any]) -> Any:
    """What a lenient check makes of a value of another type: "5" for 5, "true" for true, one string for a list of one."""
    kind = schema["type"]
    if kind in ("integer", "number", "boolean", "array") and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value.strip().lower() if kind == "boolean" else value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool) and "enum" not in schema:
        return json.dumps(value)
    if kind == "array" and not isinstance(value, list) and fits(value, schema["items"]):
        return [value]
    return value


def checked(tool: Tool, arguments: Any, strict: bool) -> dict[str, Any]:
    """The arguments as the tool takes them; ToolError for what does not fit its schema."""
    properties, required = tool.parameters["properties"], tool.parameters["required"]
    if not isinstance(arguments, dict):
        raise ToolError(f"{tool.name}: expected an object of arguments, got {type(arguments).__name__}")
    if not strict:
        arguments = {k: v for k, v in arguments.items() if v is not None and k in properties}
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ToolError(f"{tool.name}: missing argument{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for name, value in arguments.items():
        if name not in properties:
            raise ToolError(f"{tool.name}: unknown argument {name!r}; it takes {', '.join(properties) or 'none'}")
        value = value if strict else converted(value, properties[name])
        if not fits(value, properties[name]):
            expected = " or ".join(map(repr, properties[name].get("enum", ()))) or NAMES.get(properties[name]["type"], "an object")
            raise ToolError(f"{tool.name}: {name}: expected {expected}, got {json.dumps(value, default=str)[:80]}")
        arguments = arguments | {name: value}
    return arguments


class ToolSet:
    """The tools of one environment. `strict` refuses unknown arguments and wrong types; lenient drops and converts them."""

    def __init__(self, tools: Iterable[Tool], *, strict: bool = True):
        self.tools = {tool.name: tool for tool in tools}
        self.strict = strict

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    @property
    def digest(self) -> str:
        """sha256 of all that a model is told of the tools; stands in every trajectory."""
        told = json.dumps([self.schemas, self.strict], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(told.encode()).hexdigest()

    def subset(self, names: Sequence[str]) -> "ToolSet":
        """A view with these tools only; KeyError for an unknown one."""
        return ToolSet([self.tools[name] for name in names], strict=self.strict)

    def call(self, session: Any, name: str, arguments: str | dict[str, Any]) -> ToolResult:
        """Runs one call with arguments as an object or as the model's JSON text. Raises SandboxError only."""
        result = self._called(session, name, arguments)
        return ToolResult(re.sub("[\ud800-\udfff]", "\ufffd", result.text), result.kind)  # what any server takes

    def _called(self, session: Any, name: str, arguments: str | dict[str, Any]) -> ToolResult:
        found = self.tools.get(name)
        if found is None:
            near = difflib.get_close_matches(str(name), self.tools, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            return ToolResult(f"Error: no tool {str(name)[:60]!r}{hint} Tools: {', '.join(self.tools)}", "invalid")
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments or "{}")
            arguments = checked(found, arguments, self.strict)
        except ToolError as error:
            return ToolResult(f"Error: {error}", "invalid")
        except (ValueError, RecursionError) as error:
            return ToolResult(f"Error: {name}: arguments are not JSON: {error}", "invalid")
        try:
            return ToolResult(found.run(session, **arguments))
        except SandboxError:
            raise
        except ToolError as error:
            return ToolResult(f"Error: {error}", "error")
        except OSError as error:
            return ToolResult(f"Error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", "error")
        except Exception as error:  # a fault of the tool itself must not end a rollout, and must show
            session.faults.append(f"{name}: {type(error).__name__}: {error}")
            return ToolResult(f"Error: {name} failed: {type(error).__name__}: {error}", "error")
