"""The shape of the repository: which way imports go, how long files are, and that the README's map is true."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.tree  # reads the repository, not the installed package
ROOT = Path(__file__).parents[1]
FACTS = {"mxmoe.casts", "mxmoe.checks", "mxmoe.formats", "mxmoe.layout", "mxmoe.recipes", "mxmoe.routing"}
CORES = {"mxmoe._C": "host", "mxmoe._interp": "interpreter", "mxmoe._cuda": "cuda"}  # extension -> the backend that loads it
SHARED = ("mxmoe.backends.moe_decode", "mxmoe.backends.device")  # what backends are made of, for several of them
LINES = 600


@cache
def tracked() -> tuple[Path, ...]:
    """Files of the repository, also new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return tuple(path for name in names if (path := Path(name)).parts and (ROOT / path).is_file())


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in tracked() if path.suffix == ".py"}


def imported(path: Path) -> set[str]:
    """Every module of this repository that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.add(whole if whole in MODULES or whole in CORES else node.module)
    return {name for name in names if name.split(".")[0] in ("mxmoe", "training", "rl")}


IMPORTS = {name: imported(path) for name, path in MODULES.items() if path.parts[0] in ("mxmoe", "training", "rl")}


def backend_of(module: str) -> str | None:
    """ "host" of mxmoe.backends.host.gemm; None of what is no backend's own."""
    parts = module.split(".")
    package = ".".join(parts[:3])
    if package in SHARED or not package.startswith("mxmoe.backends."):
        return None
    return parts[2] if MODULES[package].name == "__init__.py" else None


def arrows():
    return [(module, name) for module, names in IMPORTS.items() for name in sorted(names)]


def test_packages_import_downwards_only():
    order = {"mxmoe": 0, "training": 1, "rl": 2}
    assert not [a for a in arrows() if order[a[1].split(".")[0]] > order[a[0].split(".")[0]]]


def test_backends_never_import_each_other():
    assert not [(a, b) for a, b in arrows() if b in MODULES and backend_of(a) and backend_of(b) not in (None, backend_of(a))]


def test_backends_import_facts_and_the_core_only():
    for a, b in arrows():
        if backend_of(a) or a.startswith(SHARED):
            assert b in FACTS | {*CORES} or b.startswith((*SHARED, f"mxmoe.backends.{backend_of(a)}")), f"{a} imports {b}"


def test_the_core_is_loaded_by_its_backend_and_by_info_only():
    assert not [a for a, b in arrows() if b in CORES and backend_of(a) != CORES[b] and a != "mxmoe.info"]


def test_layer_calls_ops_and_ops_call_backends():
    above = ("mxmoe.layer", "mxmoe.experts", "mxmoe.autograd", "mxmoe.linear", "mxmoe.module")
    for a, b in arrows():
        if a in above:
            assert not b.startswith("mxmoe.backends."), f"{a} imports {b}: go through mxmoe.ops"
        if a.startswith("mxmoe.ops") or a in FACTS:
            assert b not in above, f"{a} imports {b}"
        if a.startswith("mxmoe.ops"):
            assert not b.startswith("mxmoe.backends."), f"{a} imports {b}: ask mxmoe.backends.get for it"


def test_facts_import_facts_only():
    carriers = {"mxmoe.formats", "mxmoe.routing"}  # their methods may call verbs and storage
    convenience = {"mxmoe.ops", "mxmoe.storage"}
    assert not [(a, b) for a, b in arrows() if a in FACTS and b not in FACTS and not (a in carriers and b in convenience)]


def test_ray_is_imported_by_files_that_start_actors_only():
    users = [name for name, path in MODULES.items() if re.search(r"^\s*(import|from) ray\b", (ROOT / path).read_text(), re.M)]
    assert not [name for name in users if not name.startswith("rl")]


def test_files_are_short():
    code = (".py", ".cpp", ".h", ".cu", ".cuh")
    lengths = {path: (ROOT / path).read_text().count("\n") for path in tracked() if path.suffix in code}
    assert not {str(path): lines for path, lines in lengths.items() if lines > LINES}


def test_no_path_of_a_machine():
    pattern = re.compile(r"(?<![\w.])/(home|root|work|Users|mnt|opt)/\w")
    text = [path for path in tracked() if path.suffix != ".png"]
    assert not [str(path) for path in text if path != Path("tests/test_structure.py") and pattern.search((ROOT / path).read_text())]


def readme_map() -> set[str]:
    block = re.search(r"<!-- map -->\n```\n(.*?)\n```\n<!-- end -->", (ROOT / "README.md").read_text(), re.S)
    assert block, "README.md must have the map between its markers"
    return {line.split()[0] for line in block[1].splitlines()}


def test_readme_map_names_what_exists():
    assert not [name for name in readme_map() if not (ROOT / name).exists()]


def test_readme_map_is_complete():
    expected = {path.parts[0] for path in tracked()}
    for package in ("mxmoe", "training"):
        inside = [path for path in tracked() if path.parts[0] == package]
        expected |= {str(path) for path in inside if len(path.parts) == 2}
        expected |= {f"{package}/{path.parts[1]}" for path in inside if len(path.parts) > 2}
    expected |= {f"mxmoe/backends/{name}" for module in MODULES if (name := backend_of(module))}
    assert not expected - readme_map()


def test_links_in_documents_resolve():
    for path in tracked():
        if path.suffix == ".md":
            for link in re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / path).read_text()):
                assert (ROOT / path.parent / link).exists(), f"{path} links to {link}"
