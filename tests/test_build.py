"""Building and installing: the messages of setup.py, what the core links, a core that does not load; real builds are `slow`."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = sysconfig.get_path("purelib")
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def run(*command, cwd, fails=False, **environment) -> str:
    """Output of a program; environment variables given as None are absent."""
    variables = {k: v for k, v in (os.environ | environment).items() if v is not None}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=variables, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert bool(done.returncode) == fails, output
    return output


def copy_tree(to: Path) -> Path:
    """The files of the repository, without what was built."""
    for name in ("mxmoe", "training", "rl", "csrc"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


# The messages of setup.py


@pytest.fixture
def setup_script():
    spec = importlib.util.spec_from_file_location("mxmoe_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.tree
def test_missing_compiler(setup_script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler found \(looked for c\+\+, g\+\+, clang\+\+\)"):
        setup_script.require_compiler()


@pytest.mark.tree
def test_cxx_names_no_program(setup_script, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(SystemExit, match=r"looked for no-such-compiler, the value of CXX"):
        setup_script.require_compiler()


@pytest.mark.tree
def test_cxx_with_options_is_accepted(setup_script, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -g")
    assert setup_script.require_compiler() == "g++ -g"


@pytest.mark.tree
def test_missing_cmake(setup_script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"cmake is missing. Install it"):
        setup_script.require_program("cmake")


@pytest.mark.tree
def test_read_only_tree(setup_script):
    with pytest.raises(SystemExit, match="the source tree /proc is not writable"):
        setup_script.require_writable(Path("/proc"))


@pytest.mark.tree
def test_broken_compiler_is_named(tmp_path):
    tree = copy_tree(tmp_path)
    output = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, fails=True, CXX=shutil.which("false"))
    assert re.search(r"mxmoe: cmake could not configure the build \(compiler: .*false\)", output)
    assert "Traceback" not in output


# The core


@pytest.mark.tree
def test_kernel_objects_define_nothing_outside_their_isa():
    """A shared (weak) function compiled for AVX-512 could be the copy that an older CPU runs."""
    directory = ROOT / "build" / f"cmake-{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "CMakeFiles"
    objects = sorted(directory.glob("host_*.dir/**/*_kernel.cpp.o"))
    assert objects, f"no objects in {directory}: `make build` first"
    for path in objects:
        isa = path.relative_to(directory).parts[0].removeprefix("host_").removesuffix(".dir")
        symbols = run("nm", "-C", "--defined-only", "--extern-only", path, cwd=ROOT).splitlines()
        assert symbols
        assert not [line for line in symbols if f"mxmoe::host::{isa}::" not in line], path


def test_core_links_the_system_only():
    from mxmoe import _C

    needed = set(re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", _C.__file__, cwd=ROOT)))
    names = {name.partition(".so")[0] for name in needed}
    assert names <= {
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "libpthread",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
        "libasan",
        "libubsan",
    }


B05 = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in f.__module__]  # it would find the core of the tree
import torch, mxmoe
x = torch.ones(2, 32)
assert mxmoe.quantize(x, "mxfp8", backend="reference").scales.view(torch.uint8).tolist() == [[119], [119]]
for backend in ("host", "auto"):
    try:
        mxmoe.quantize(x, "mxfp8", backend=backend)
    except ImportError as error:
        print(error)
    else:
        raise SystemExit("fell back")
from mxmoe.info import report
print(report())
"""


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("_C.py", "raise ImportError('undefined symbol: _ZN5mxmoe4stubEv')", "undefined symbol: _ZN5mxmoe4stubEv"),
        (f"_C{SUFFIX}", "not a shared object, but long enough to be read as one" * 4, "invalid ELF header"),
        ("no_core", "", "not built"),
    ],
    ids=["raises", "damaged", "missing"],
)
def test_b05_core_that_does_not_load(tmp_path, name, content, reason):
    package = tmp_path / "mxmoe"
    shutil.copytree(
        Path(importlib.util.find_spec("mxmoe").origin).parent, package, ignore=shutil.ignore_patterns("_C*", "_interp*")
    )
    (package / name).write_text(content)
    output = run(sys.executable, "-c", B05, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert output.count("the host backend needs the compiled core mxmoe._C") == 3  # host, auto, and in the report
    assert output.count(reason) >= 3
    assert name == "no_core" or output.count(str(package / name)) >= 3
    assert "R reference, C cuda, T triton, - none" in output  # whether the GPU kernels are built, a line above tells


# Real builds, in an order in which each uses what the one before compiled

USE = """
import mxmoe, rl, torch, training
from mxmoe import _C
print(mxmoe.__file__, training.__file__, rl.__file__, _C.__file__)
assert mxmoe.quantize(torch.ones(2, 32), "mxfp8", backend="host").scales.view(torch.uint8).tolist() == [[119], [119]]
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("source with spaces"))


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory):
    """A virtual environment without torch: its python."""
    directory = tmp_path_factory.mktemp("bare") / "environment"
    run(sys.executable, "-m", "venv", directory, cwd=ROOT)
    return directory / "bin" / "python"


@pytest.mark.slow
@pytest.mark.tree
def test_interrupted_build_is_rerun(tree):
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    process = subprocess.Popen(build, cwd=tree, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (objects := sorted(tree.glob("build/cmake-*/CMakeFiles/**/*.o"))):
        assert process.poll() is None, "the build ended early"
        assert time.monotonic() < deadline, "nothing was compiled"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    os.truncate(objects[0], 100)
    run(*build, cwd=tree)
    assert str(tree) in run(sys.executable, "-c", USE, cwd=tree)


@pytest.mark.slow
@pytest.mark.tree
def test_cache_of_another_place_is_made_anew(tree, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(tree, moved)
    (moved / "csrc" / "bindings.cpp").write_text("not C++\n")  # stops early: what matters is that cmake went on
    output = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=moved, fails=True)
    assert "mxmoe: the C++ core did not compile" in output
    assert str(moved) in (next(moved.glob("build/cmake-*")) / "CMakeCache.txt").read_text()


@pytest.mark.slow
@pytest.mark.tree
def test_b09_editable_install_imports_from_elsewhere(tree, bare_environment, tmp_path):
    tools = {"PYTHONPATH": SITE}  # this environment's setuptools, cmake, pybind11, torch
    pip = [bare_environment, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]
    run(*pip, cwd=tree, **tools)
    own = bare_environment.parents[1] / Path(SITE).relative_to(sys.prefix)  # first: ours may have a finder of the same name
    output = run(bare_environment, "-c", USE, cwd=tmp_path, PYTHONPATH=f"{own}{os.pathsep}{SITE}")
    assert output.count(str(tree)) == 4
    run(bare_environment, "-m", "pip", "uninstall", "-y", "mxmoe", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.tree
@pytest.mark.parametrize("cuda_home", ["/nonexistent", ""])
def test_b01_built_whatever_cuda_home_is(tree, cuda_home):
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tree, CUDA_HOME=cuda_home, CUDA_PATH=cuda_home)
    assert str(tree) in run(sys.executable, "-c", USE, cwd=tree)


@pytest.mark.slow
@pytest.mark.tree
def test_b01_b03_wheel_is_built_without_torch(tree, bare_environment, tmp_path):
    run(bare_environment, "-c", "import torch", cwd=tmp_path, fails=True)
    odd = ":/usr/local/cuda"
    environment = {"CUDA_HOME": odd, "CUDA_PATH": odd, "PYTHONPATH": None}
    run(bare_environment, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, ".", cwd=tree, **environment)
    (wheel,) = tmp_path.glob("mxmoe-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"mxmoe", "training", "rl"}
    sources = {str(p.relative_to(tree)) for package in ("mxmoe", "training", "rl") for p in (tree / package).rglob("*.py")}
    assert sources | {f"mxmoe/_C{SUFFIX}", f"mxmoe/_interp{SUFFIX}"} <= set(names)
    check_installed_wheel(wheel, tmp_path)


def check_installed_wheel(wheel: Path, directory: Path):
    """B07: tests against the installed wheel, from elsewhere, with no compiler on PATH."""
    installed, elsewhere = directory / "installed", directory / "elsewhere"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", installed, wheel, cwd=directory)
    shutil.copytree(ROOT / "tests", elsewhere / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", elsewhere)
    environment = {"PYTHONPATH": str(installed), "PATH": str(directory)}
    assert run(sys.executable, "-c", USE, cwd=elsewhere, **environment).count(str(installed)) == 4
    tests = [f"tests/test_{name}.py" for name in ("formats", "quantize_reference", "routing", "swiglu")]
    run(sys.executable, "-m", "pytest", *tests, "-m", "not slow and not tree", cwd=elsewhere, **environment)
