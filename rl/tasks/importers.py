"""Tasks of others: Terminal-Bench 1 directories, SWE-bench rows and task repositories in; SWE-bench predictions out.

Harbor's directories need no import: the native format is a subset (`task.load`).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rl.harness.patch import changed_lines, headers
from rl.tasks.task import Environment, Provenance, Task, TaskError, Verifier

# SWE-bench's parser: ours. Those of single repositories with a format of their own are not read.
SWEBENCH_PARSERS = {
    **dict.fromkeys(("parse_log_pytest", "parse_log_pytest_v2"), "pytest"),
    **{f"parse_log_{name}": "pytest" for name in ("astroid", "astropy", "flask", "marshmallow", "pvlib", "pyvista", "scikit")},
    **{f"parse_log_{name}": "pytest" for name in ("sphinx", "sqlfluff", "xarray")},
    **{f"parse_log_{name}": "pytest_short_paths" for name in ("pytest_options", "pydicom", "requests", "pylint")},
    "parse_log_matplotlib": "pytest_mouse_buttons",
    "parse_log_django": "unittest",
    "parse_log_seaborn": "seaborn",
    "parse_log_sympy": "sympy",
    "parse_log_jest": "jest",
    "parse_log_jest_json": "jest_json",
    **{f"parse_log_{name}": "jest_files" for name in ("carbon", "grommet", "react_pdf")},
    "parse_log_vitest": "vitest",
    "parse_log_tap": "tap",
    "parse_log_karma": "karma",
    "parse_log_gotest": "gotest",
    "parse_log_cargo": "cargo",
    "parse_log_maven": "maven",
    "parse_log_gradle_custom": "gradle",
    "parse_log_ant": "ant",
    "parse_log_googletest": "googletest",
    "parse_log_doctest": "doctest_cpp",
    "parse_log_redis": "tcl",
    "parse_log_jq": "automake",
    "parse_log_micropython_test": "micropython",
    "parse_log_minitest": "minitest",
    "parse_log_cucumber": "cucumber",
    "parse_log_ruby_unit": "test_unit",
    "parse_log_rspec_transformed_json": "rspec",
    "parse_log_phpunit": "phpunit",
}
ROW = ("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
APPLY = "#!/bin/bash\nset -e\ngit apply --whitespace=nowarn - < /solution/gold.patch\n"


def names(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of test names; rows hold it as a list or as JSON text."""
    value = row[key]
    try:
        found = json.loads(value) if isinstance(value, str) else list(value)
    except (TypeError, ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise TaskError(f"{row['instance_id']}: {key}: expected a list of test names or its JSON, got {str(value)[:60]!r}")
    return tuple(dict.fromkeys(found))


def swebench_row(row: Mapping[str, Any], *, test_command: str | None = None, parser: str | None = None) -> Task:
    """A task from one row of SWE-bench (Verified, Multilingual, ...) or of a set with the same columns (SWE-Gym, SWE-rebench, R2E).

    row           columns as published; version 5 adds image, eval_script, log_parser, eval_type; others install_config
    test_command  runs the tests, where the row does not say how
    parser        of its output (`logs.PARSERS` or SWE-bench's name), where the row does not say
    Raises TaskError for a missing column, an unknown parser, and a row that does not say how its tests are run.
    """
    if not isinstance(row, Mapping):
        raise TaskError(f"row: expected a mapping of columns, got {type(row).__name__}")
    row = {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()}  # pandas' None
    missing = [key for key in ROW if row.get(key) is None]
    if missing:
        raise TaskError(f"{row.get('instance_id', 'row')}: expected the columns {', '.join(ROW)}, missing {', '.join(missing)}")
    texts = ("instance_id", "problem_statement", "patch", "test_patch", "eval_script", "log_parser", "license")
    for key in texts:
        if not isinstance(row.get(key) or "", str):
            raise TaskError(f"{row['instance_id']}: {key}: expected a text, got {str(row[key])[:60]!r}")
    fail_to_pass, pass_to_pass = names(row, "FAIL_TO_PASS"), names(row, "PASS_TO_PASS")
    if not fail_to_pass:  # would be graded by its script's exit status, which is that of a clean-up
        raise TaskError(f"{row['instance_id']}: FAIL_TO_PASS: expected at least one test, got none")
    install = row.get("install_config") or {}
    if not isinstance(install, Mapping):
        raise TaskError(f"{row['instance_id']}: install_config: expected a mapping, got {str(install)[:60]!r}")
    theirs = str(parser or row.get("log_parser") or install.get("log_parser") or "parse_log_pytest")
    ours = SWEBENCH_PARSERS.get(theirs, theirs)
    command = test_command or install.get("test_cmd")
    if row.get("eval_script"):
        script = row["eval_script"]
    elif command:
        script = f"#!/bin/bash\ngit apply --whitespace=nowarn /tests/test.patch || exit 125\n{command}\n"
    else:
        raise TaskError(
            f"{row['instance_id']}: expected a column eval_script or install_config.test_cmd, or an argument test_command"
        )
    patch = row["patch"]
    return Task(
        name=f"swe-bench/{row['instance_id']}",
        instruction=row["problem_statement"],
        environment=Environment(image=row.get("image") or row.get("image_name") or row.get("docker_image"), workdir="/testbed"),
        verifier=Verifier(
            parser=ours,
            report=None,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            fail_only=row.get("eval_type") == "fail_only",
        ),
        provenance=Provenance(
            source=f"{row['repo']}@{row['base_commit']}",
            licence=row.get("license") or "",
            changed_files=len(headers(patch)),
            changed_lines=changed_lines(patch),
        ),
        files={
            "tests/test.sh": script.encode(),
            "tests/test.patch": row["test_patch"].encode(),
            "solution/gold.patch": patch.encode(),
            "solution/solve.sh": APPLY.encode(),
        },
    )


def mapping(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{file}: expected a file, found none") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"{file}: expected YAML in UTF-8, got {error}") from None
    if not isinstance(found, dict):
        raise TaskError(f"{file}: expected a mapping, got {type(found).__name__}")
    return found


def text(file: Path) -> str:
    """A file as it is: CRLF inside a patch survives."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise TaskError(f"{file}: expected a file, found none") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}: expected UTF-8, got {error}") from None


def swebench_tasks(repository: str | Path) -> list[Task]:
    """The tasks of a SWE-bench task repository (its version 5 form: `sweb.yaml` and `tasks/<id>/`), by id.

    Tasks of a split that `sweb.yaml` does not publish are left out. Raises TaskError for a missing or malformed file.
    """
    root = Path(repository)
    published = mapping(root / "sweb.yaml").get("splits", ["test"])
    if not isinstance(published, list) or not published:
        raise TaskError(f"{root / 'sweb.yaml'}: splits: expected a list of names, got {published!r}")
    tasks = []
    for directory in sorted(file.parent for file in root.glob("tasks/*/task.yaml")):
        row = mapping(directory / "task.yaml")
        if row.get("split", published[0]) not in published:
            continue
        try:
            tests = json.loads(text(directory / "tests.json"))
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{directory / 'tests.json'}: expected JSON, got {error}") from None
        if not isinstance(tests, dict):
            raise TaskError(f"{directory / 'tests.json'}: expected an object, got {type(tests).__name__}")
        columns = {
            "patch": "gold.patch",
            "test_patch": "test.patch",
            "eval_script": "eval.sh",
            "problem_statement": "problem_statement.md",
        }
        row |= tests | {column: text(directory / file) for column, file in columns.items()}
        task = swebench_row({"instance_id": directory.name} | row)
        assets = {path: path.relative_to(directory).as_posix() for path in directory.glob("test_assets/**/*") if path.is_file()}
        task.files.update({f"tests/{name}": path.read_bytes() for path, name in assets.items()})
        if (directory / "Dockerfile").is_file():
            task.files["environment/Dockerfile"] = (directory / "Dockerfile").read_bytes()
        tasks.append(task)
    return tasks


def terminal_bench(directory: str | Path) -> Task:
    """A task from a Terminal-Bench 1 directory (task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh).

    It is graded by the exit status of its tests, all of which must pass. Raises TaskError for a missing or malformed file and
    for tasks of several containers.
    """
    root = Path(directory)
    config = mapping(root / "task.yaml")
    described = config.get("descriptions")
    first = described[0] if isinstance(described, list) and described and isinstance(described[0], dict) else {}
    instruction = config.get("instruction") or first.get("description")
    if not isinstance(instruction, str):
        raise TaskError(f"{root / 'task.yaml'}: instruction: expected a text, got {instruction!r}")
    compose = root / "docker-compose.yaml"
    services = list(mapping(compose).get("services") or {}) if compose.is_file() else ["client"]
    if len(services) != 1:
        raise TaskError(f"{compose}: expected one service, got {', '.join(map(str, services)) or 'none'}")

    def seconds(key: str, default: float) -> float:
        value = config.get(key, default)
        if type(value) not in (int, float):
            raise TaskError(f"{root / 'task.yaml'}: {key}: expected a number, got {value!r}")
        return float(value)

    files = {"tests/run-tests.sh": text(root / "run-tests.sh").encode()}
    files["tests/test.sh"] = b'#!/bin/bash\nTEST_DIR=/tests exec bash /tests/run-tests.sh "$@"\n'
    if (root / "solution.sh").is_file():
        files["solution/solve.sh"] = (root / "solution.sh").read_bytes()
    apart = {"task.yaml", "docker-compose.yaml", "run-tests.sh", "solution.sh", "solution.yaml"}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if not path.resolve().is_relative_to(root.resolve()):
            raise TaskError(f"{path}: expected a file inside the task, got a link to {path.resolve()}")
        name = path.relative_to(root).as_posix()
        if name not in apart:  # what is neither test nor solution is context of the Dockerfile
            files[name if name.startswith("tests/") else f"environment/{name}"] = path.read_bytes()
    return Task(
        name=f"terminal-bench/{root.resolve().name}",
        instruction=instruction,
        environment=Environment(workdir="/app", network="public"),
        verifier=Verifier(parser="pytest", report=None, timeout_sec=seconds("max_test_timeout_sec", 180.0)),
        provenance=Provenance(
            source="terminal-bench", difficulty={"easy": 0.2, "medium": 0.5, "hard": 0.8}.get(str(config.get("difficulty")))
        ),
        agent_timeout_sec=seconds("max_agent_timeout_sec", 360.0),
        files=files,
    )


def write_predictions(patches: Mapping[str, str], model: str, file: str | Path) -> None:
    """Writes SWE-bench predictions, one JSON line per task: `patches` holds unified diffs by task name or instance id."""
    Path(file).write_text("".join(prediction_lines(patches, model)), "utf-8")


def prediction_lines(patches: Mapping[str, str], model: str) -> Iterable[str]:
    for name, patch in sorted(patches.items()):
        row = {"instance_id": name.rpartition("/")[2], "model_name_or_path": model, "model_patch": patch}
        yield json.dumps(row, ensure_ascii=False) + "\n"
