"""The task format: one directory per task, a subset of Harbor's (schema 1.4) that Harbor itself can load.

    task.toml            name, limits, environment, and under [metadata.mxmoe] how to grade and where the task comes from
    instruction.md       the request, all that the agent is told
    environment/         Dockerfile or recipe.toml; what else is there may be copied by them
    tests/               test.sh and what it needs: hidden from the agent, mounted where its change is graded
    tests/f2p.json       names of the tests that fail without the change and pass with it; p2p.json: that pass both ways
    solution/solve.sh    makes a change that is graded as resolved; may be missing

Harbor's own verifiers write a reward to a file that the agent's processes can reach; here `test.sh` only runs tests, and what
they did is graded outside (`grading`). A task whose lists are missing is graded by `test.sh`'s exit status.
"""

import hashlib
import io
import json
import math
import re
import shutil
import tomllib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from rl.tasks.logs import PARSERS

SCHEMA_VERSION = "1.4"
NETWORKS = ("no-network", "allowlist", "public")
KINDS = ("release", "feature", "bug", "refactor", "merge", "diagnosis", "question", "tiny", "imported")
GRADED_OUTSIDE = ("runner", "outputs", "answer")  # parsers of reports that verification.py reads itself
UNITS = {"": 1, "K": 2**-10, "M": 1, "G": 2**10, "T": 2**20}  # to MiB; a bare number is MiB


class TaskError(ValueError):
    """A task that cannot be used: names the file, what was expected and what was found."""


@dataclass(frozen=True)
class Environment:
    """What the work directory lives in; limits are None where the task leaves them to the machine."""

    image: str | None = None  # of a registry; None: built from `environment/`
    workdir: str = "/workspace"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: str = "no-network"
    allowed_hosts: tuple[str, ...] = ()  # with network "allowlist"
    env: dict[str, str] = field(default_factory=dict)
    build_timeout_sec: float = 600.0


@dataclass(frozen=True)
class Verifier:
    """How a result is graded."""

    parser: str = "junit"  # of the report or the output: `logs.PARSERS`, or one of GRADED_OUTSIDE
    report: str | None = "/logs/report.xml"  # where test.sh writes it; None: its output is parsed
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    fail_only: bool = False
    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """Where a task comes from and how hard it is."""

    source: str = ""  # a package and its versions, a repository and its commit
    licence: str = ""
    digest: str = ""  # of the sources it is made from, sha256
    kind: str = "imported"
    difficulty: float | None = None  # 0 (easy) to 1
    changed_files: int | None = None  # by the reference change
    changed_lines: int | None = None


@dataclass(frozen=True)
class Task:
    """One task. `files` holds environment/, tests/ and solution/ by relative path, without the two lists."""

    name: str  # "origin/name"
    instruction: str
    environment: Environment = Environment()
    verifier: Verifier = Verifier()
    provenance: Provenance = Provenance()
    agent_timeout_sec: float = 1800.0
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises TaskError for what no environment or grader could work with."""

        def need(fine: bool, what: str, expected: str, got: Any) -> None:
            if not fine:
                raise TaskError(f"task {self.name!r}: {what}: expected {expected}, got {got!r}")

        e, v = self.environment, self.verifier
        need(re.fullmatch(r"[\w.-]+/[\w.+-]+", self.name) is not None, "name", "origin/name", self.name)
        need(bool(self.instruction.strip()), "instruction", "a text", self.instruction)
        need(not re.search("[\ud800-\udfff]", self.instruction), "instruction", "whole characters", self.instruction[:60])
        need(e.network in NETWORKS, "network", " or ".join(NETWORKS), e.network)
        need(e.network == "allowlist" or not e.allowed_hosts, "allowed_hosts", "none without network allowlist", e.allowed_hosts)
        need(e.workdir.startswith("/") and "\0" not in e.workdir, "workdir", "an absolute path", e.workdir)
        need(v.report is None or str(v.report).startswith("/"), "report", "an absolute path or none", v.report)
        need(isinstance(v.fail_only, bool), "fail_only", "true or false", v.fail_only)
        need(e.image is None or isinstance(e.image, str), "docker_image", "a name", e.image)
        for what, env in (("environment", e.env), ("verifier", v.env)):
            need(all(isinstance(value, str) for value in env.values()), f"{what}.env", "texts", env)
        for what, limit in (("cpus", e.cpus), ("memory_mb", e.memory_mb), ("storage_mb", e.storage_mb)):
            need(limit is None or (math.isfinite(limit) and limit > 0), what, "a positive number", limit)
        for what, seconds in (("agent", self.agent_timeout_sec), ("verifier", v.timeout_sec), ("build", e.build_timeout_sec)):
            need(math.isfinite(seconds) and seconds > 0, f"{what} timeout_sec", "a positive number", seconds)
        need(v.parser in (*PARSERS, *GRADED_OUTSIDE), "parser", f"one of {sorted(PARSERS)} or {GRADED_OUTSIDE}", v.parser)
        need(self.provenance.kind in KINDS, "kind", f"one of {KINDS}", self.provenance.kind)
        need(bool(v.fail_to_pass) or not v.pass_to_pass, "fail_to_pass", "at least one test beside those of pass_to_pass", [])
        both = sorted(set(v.fail_to_pass) & set(v.pass_to_pass))
        need(not both, "pass_to_pass", "no test of fail_to_pass", both[:1])
        for path in self.files:
            parts = Path(path).parts
            need(parts[0] in ("environment", "tests", "solution") and ".." not in parts, "files", "paths of the format", path)

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that a result depends on; pins a task in a report. `files` does not change after it is asked."""
        content = hashlib.sha256(rendered(self).encode())
        for path, data in sorted({**self.files, "instruction.md": self.instruction.encode(), **lists(self.verifier)}.items()):
            content.update(f"{path}\0{len(data)}\0".encode() + data)
        return content.hexdigest()


def lists(verifier: Verifier) -> dict[str, bytes]:
    if not verifier.fail_to_pass:
        return {}
    both = {"tests/f2p.json": verifier.fail_to_pass, "tests/p2p.json": verifier.pass_to_pass}
    return {path: (json.dumps(list(names), indent=1, ensure_ascii=False) + "\n").encode() for path, names in both.items()}


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None and value != {} and value != ()}


def rendered(task: Task) -> str:
    """The text of task.toml."""
    e, v = task.environment, task.verifier
    environment = asdict(e) | {"docker_image": e.image, "network_mode": e.network, "allowed_hosts": list(e.allowed_hosts) or None}
    grading = {"parser": v.parser, "report": v.report, "fail_only": v.fail_only or None}
    return tomli_w.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "task": {"name": task.name},
            "metadata": {"mxmoe": without_none(asdict(task.provenance)) | {"grading": without_none(grading)}},
            "agent": {"timeout_sec": task.agent_timeout_sec},
            "verifier": without_none({"timeout_sec": v.timeout_sec, "env": v.env}),
            "environment": without_none({k: x for k, x in environment.items() if k not in ("image", "network")}),
        }
    )


def megabytes(size: int | float | str) -> int:
    """A size as Harbor's older schemas write it ("2G", "512M", 512) in MiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(size), re.IGNORECASE)
    if not found:
        raise ValueError(f"expected a size such as 512, 512M or 2G, got {size!r}")
    return max(1, math.ceil(float(found[1]) * UNITS[found[2].upper()]))


def names_of(file: Path) -> tuple[str, ...]:
    try:
        names = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file}: expected JSON, got {error}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TaskError(f"{file}: expected a list of test names, got {type(names).__name__}")
    return tuple(names)


def load(directory: str | Path) -> Task:
    """Reads a task directory: this project's, or Harbor's of schema 1.0 to 1.4 with one step and one container.

    Raises TaskError for a missing or malformed file, for a value outside its range, and for what cannot be kept as promised here
    (several steps, other containers, GPUs, symbolic links out of the directory).
    """
    root = Path(directory)
    file = root / "task.toml"
    try:
        config, told = tomllib.loads(file.read_text("utf-8")), (root / "instruction.md").read_bytes()
    except FileNotFoundError as error:
        raise TaskError(f"{error.filename}: expected a file, found none") from None
    except NotADirectoryError:
        raise TaskError(f"{root}: expected a directory, got a file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"{file}: expected TOML in UTF-8, got {error}") from None
    try:
        instruction = io.TextIOWrapper(io.BytesIO(told), "utf-8").read()
    except UnicodeDecodeError as error:
        raise TaskError(f"{root / 'instruction.md'}: expected UTF-8, got {error}") from None
    try:
        return parsed(root, config, instruction)
    except TaskError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TaskError(f"{file}: {type(error).__name__}: {error}") from None


def parsed(root: Path, config: dict[str, Any], instruction: str) -> Task:
    table, metadata = config.get("environment", {}), config.get("metadata", {}).get("mxmoe", {})
    for key, what in (("steps", "one step"), ("artifacts", "no artifacts")):
        if config.get(key):
            raise TaskError(f"{root / 'task.toml'}: {key}: expected {what}, got {config[key]!r}")
    for key in ("gpus", "tpu", "mcp_servers"):
        if table.get(key):
            raise TaskError(f"{root / 'task.toml'}: environment.{key}: expected none, got {table[key]!r}")
    network = table.get("network_mode") or ("public" if table.get("allow_internet", True) else "no-network")
    if not isinstance(table.get("allowed_hosts") or [], list):
        raise TaskError(f"{root / 'task.toml'}: environment.allowed_hosts: expected a list, got {table['allowed_hosts']!r}")
    memory, storage = (table.get(f"{key}_mb", table.get(key)) for key in ("memory", "storage"))
    environment = Environment(
        image=table.get("docker_image"),
        workdir=table.get("workdir", Environment.workdir),
        cpus=table.get("cpus"),
        memory_mb=None if memory is None else megabytes(memory),
        storage_mb=None if storage is None else megabytes(storage),
        network=network,
        allowed_hosts=tuple(table.get("allowed_hosts") or ()),
        env=dict(table.get("env", {})),
        build_timeout_sec=float(table.get("build_timeout_sec", 600.0)),
    )
    files = files_of(root)
    listed = {
        key: names_of(root / f"tests/{key}.json") for key in ("f2p", "p2p") if files.pop(f"tests/{key}.json", None) is not None
    }
    if listed and not listed.get("f2p"):  # without lists its exit status would be the grade
        raise TaskError(f"{root / 'tests/f2p.json'}: expected at least one test, got none")
    grading, verifier = metadata.get("grading", {}), config.get("verifier", {})
    return Task(
        name=config.get("task", {}).get("name") or f"local/{root.resolve().name}",
        instruction=instruction,
        environment=environment,
        verifier=Verifier(
            parser=grading.get("parser", Verifier.parser),
            report=grading.get("report", None if grading else Verifier.report),
            fail_to_pass=listed.get("f2p", ()),
            pass_to_pass=listed.get("p2p", ()),
            fail_only=grading.get("fail_only", False),
            timeout_sec=float(verifier.get("timeout_sec", 600.0)),
            env=dict(verifier.get("env", {})),
        ),
        provenance=Provenance(**{key: value for key, value in metadata.items() if key != "grading"}),
        agent_timeout_sec=float(config.get("agent", {}).get("timeout_sec") or 1800.0),
        files=files,
    )


def files_of(root: Path) -> dict[str, bytes]:
    """Everything below environment/, tests/ and solution/."""
    files = {}
    for path in sorted(path for part in ("environment", "tests", "solution") for path in (root / part).rglob("*")):
        if not path.resolve().is_relative_to(root.resolve()):
            raise TaskError(f"{path}: expected a file inside the task, got a link to {path.resolve()}")
        if path.is_file():
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def save(task: Task, directory: str | Path) -> None:
    """Writes a task directory; what was there of an older one is removed first. Raises OSError as the file system does."""
    root = Path(directory)
    for part in ("environment", "tests", "solution"):
        shutil.rmtree(root / part, ignore_errors=True)
    content = {
        "task.toml": rendered(task).encode(),
        "instruction.md": task.instruction.encode(),
        **lists(task.verifier),
        **task.files,
    }
    for path, data in content.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        if file.suffix == ".sh":
            file.chmod(0o755)
