"""A task of a Python project, put together: work directory, hidden tests for the runner, reference change."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from rl.tasks.task import Environment, Provenance, Task, Verifier
from rl.tasks.workspace import WORKSPACE

PYTEST = "pytest==8.4.2"
WORKDIR = "/workspace"
SECONDS = 10.0  # of one test


def roots(paths: Iterable[str]) -> list[str]:
    """The uppermost test directories, and test files outside of them."""
    found = set()
    for path in paths:
        inside = re.match(r"((?:.*?/)?tests?|testing)/", path)
        found.add(inside[1] if inside else path)
    return sorted(found)


def python_task(
    name: str,
    request: str,
    workspace: Mapping[str, bytes],
    hidden: Mapping[str, bytes],
    patch: str,
    provenance: Provenance,
    *,
    pypi: Sequence[str] = (),
    ini: str = "[pytest]\n",
    seconds: float = SECONDS,
) -> Task:
    """The task, without its lists of tests.

    workspace  files of the work directory; with a directory src, modules are found there, too
    hidden     files of tests, which replace those of the work directory where a change is graded
    patch      the reference change
    pypi       what the tests need beside pytest
    """
    top = [f"{WORKDIR}/src"] if any(path.startswith("src/") for path in workspace) else []
    settings = {
        "workdir": WORKDIR,
        "paths": [*top, WORKDIR],
        "tests": roots(path for path in hidden if path.endswith(".py")),
        "is_test": roots(hidden),
        "seconds": seconds,
    }
    recipe = {"base": "git", "pypi": [PYTEST, *pypi]}
    return Task(
        name=name,
        instruction=request,
        environment=Environment(workdir=WORKDIR, memory_mb=1024, storage_mb=256),
        verifier=Verifier(parser="runner", report=None, timeout_sec=240.0),
        provenance=provenance,
        files={f"{WORKSPACE}{path}": data for path, data in workspace.items()}
        | {f"tests/files/{path}": data for path, data in hidden.items()}
        | {
            "environment/recipe.toml": "".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items()).encode(),
            "tests/test.sh": b"exec python3 -I /tests/runner.py\n",
            "tests/pytest.ini": ini.encode(),
            "tests/runner.json": json.dumps(settings).encode(),
            "solution/gold.patch": patch.encode("utf-8", "surrogateescape"),
            "solution/solve.sh": b"git apply --whitespace=nowarn /solution/gold.patch\n",
        },
    )
