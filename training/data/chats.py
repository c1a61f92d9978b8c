"""The source `chats`: conversations and tool transcripts made from the standard library, so that the SFT phase runs offline.

Of every documented function: someone asks for it and gets it; someone asks what it does, the assistant reads the file and says; it
has lost its body in a file, the assistant reads, edits, runs a check and says so. The same conversations each time. A real run
takes transcripts of its own (a JSONL file with `messages`).
"""

import ast
from collections.abc import Iterator

LINES = (3, 30)  # of a function that is talked about
SYSTEM = "You are a coding assistant. Use the tools to read, edit and run files."


def _call(name: str, **arguments) -> dict:
    return {"function": {"name": name, "arguments": arguments}}


def _said(role: str, content: str, *calls: dict) -> dict:
    return {"role": role, "content": content} | ({"tool_calls": list(calls)} if calls else {})


def conversations(path: str, text: str) -> Iterator[list[dict]]:
    """About the documented top-level functions of one file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in tree.body:
        docstring = isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
        source = docstring and "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not source or not LINES[0] <= source.count("\n") <= LINES[1]:
            continue
        what = docstring.strip().splitlines()[0]
        head = f"def {node.name}({ast.unparse(node.args)}):"
        stub = f'{head}\n    """{what}"""\n    raise NotImplementedError\n'
        yield [
            _said("user", f"Write a function `{node.name}({ast.unparse(node.args)})`. {what}"),
            _said("assistant", f"```python\n{source}\n```"),
        ]
        yield [
            _said("system", SYSTEM),
            _said("user", f"What does `{node.name}` in {path} do?"),
            _said("assistant", "", _call("read_file", path=path)),
            _said("tool", source),
            _said("assistant", what),
        ]
        yield [
            _said("system", SYSTEM),
            _said("user", f"`{node.name}` in {path} is not implemented. Write it."),
            _said("assistant", f"I look at {path} first.", _call("read_file", path=path)),
            _said("tool", stub),
            _said("assistant", "", _call("edit_file", path=path, old=stub, new=source)),
            _said("tool", "edited"),
            _said("assistant", "", _call("run", command=f"python -m py_compile {path}")),
            _said("tool", ""),
            _said("assistant", f"`{node.name}` is implemented and the file compiles."),
        ]
