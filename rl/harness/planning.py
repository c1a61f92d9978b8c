"""Tools that act on the run itself: to-dos, lints, the summary of a long run, questions, the end; the web, behind a provider."""

import shlex

from rl.harness.schema import ToolError, tool
from rl.harness.session import Session

STATES = ("pending", "in_progress", "completed", "cancelled")
LINTS = """if command -v ruff > /dev/null
then ruff check --no-cache --output-format concise -- {paths}
else python3 -m compileall -q {paths}
fi"""


@tool
def todo_write(session: Session, todos: list[dict]) -> str:
    """Replaces the list of things to do. Every entry has content, and status: pending, in_progress, completed or cancelled.

    todos  the whole list
    """
    entries = []
    for i, entry in enumerate(todos):
        text, status = entry.get("content"), entry.get("status", "pending")
        if not isinstance(text, str) or not text.strip():
            raise ToolError(f"todos[{i}]: content: expected a text, got {text!r}")
        if status not in STATES:
            raise ToolError(f"todos[{i}]: status: expected {', '.join(STATES)}, got {status!r}")
        entries.append({"content": text, "status": status})
    session.todos = entries
    done = sum(entry["status"] in ("completed", "cancelled") for entry in entries)
    return f"{len(entries)} to-dos, {len(entries) - done} open"


@tool
def read_lints(session: Session, paths: list[str]) -> str:
    """Checks files and gives what a linter says about them.

    paths  files or directories, relative to the work directory
    """
    if not paths:
        raise ToolError("paths: expected at least one")
    command = LINTS.format(paths=" ".join(shlex.quote(session.argument(path)) for path in paths))
    result = session.sandbox.exec(command, cwd=session.workdir, timeout_s=60)
    return session.text(result.text.strip()) or "Nothing found"


@tool
def summarize(session: Session) -> str:
    """Asks to go on from a summary: you will be asked for one, and what came before it is dropped."""
    session.summary_wanted = True
    return "Write the summary now"


@tool
def finish(session: Session, answer: str = "") -> str:
    """Ends the work.

    answer  what was done, or the answer to a question
    """
    session.answer = answer
    return "Finished"


@tool
def ask_user(session: Session, question: str) -> str:
    """Asks the user a question and waits for the answer.

    question  what is unclear
    """
    if session.ask is None:
        raise ToolError("there is nobody to ask: decide, and say what you decided")
    return session.text(session.ask(question))


@tool
def web_search(session: Session, query: str) -> str:
    """Searches the web; gives titles, addresses and excerpts.

    query  what to look for
    """
    if session.web is None:
        raise ToolError("this environment has no access to the web")
    return session.text(session.web.search(query))


@tool
def web_fetch(session: Session, url: str) -> str:
    """Gives the text of a page.

    url  its address, http or https
    """
    if session.web is None:
        raise ToolError("this environment has no access to the web")
    if not url.startswith(("http://", "https://")):
        raise ToolError(f"url: expected http:// or https://, got {url[:60]!r}")
    return session.text(session.web.fetch(url))


PLANNING_TOOLS = (todo_write, read_lints, summarize, finish)
OPTIONAL_PLANNING_TOOLS = (ask_user, web_search, web_fetch)
