"""Builds the extensions mxmoe._C (the compiled core), mxmoe._interp (GPU kernels on the CPU) and, where there is nvcc,
mxmoe._cuda (GPU kernels) with CMake, and the program rl/environments/sandboxd. MXMOE_CUDA=ON | OFF decides otherwise. torch is not
looked at while building."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LAUNCHER = "rl/environments/sandboxd"


def require_writable(tree: Path) -> None:
    """setuptools writes metadata beside setup.py, so a read-only tree fails first and obscurely; say it here."""
    try:
        with tempfile.TemporaryFile(dir=tree):
            pass
    except OSError as error:
        sys.exit(
            f"mxmoe: the source tree {tree} is not writable ({error.strerror}). Copy it to a writable directory and install "
            "from there, or build a wheel elsewhere and install that."
        )


def require_compiler() -> str:
    """The C++ compiler CMake will use: $CXX, else c++ / g++ / clang++."""
    asked = os.environ.get("CXX", "").strip()
    names = [shlex.split(asked)[0]] if asked else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(name):
            return asked or name
    sys.exit(
        f"mxmoe: no C++ compiler found (looked for {', '.join(names)}{', the value of CXX' if asked else ''}). Install one "
        "(Debian: `apt install g++`), set CXX, or install a prebuilt wheel of mxmoe."
    )


def require_program(name: str) -> str:
    """cmake or ninja: of the build environment's package, else the one on PATH."""
    if importlib.util.find_spec(name):
        bin_dir = getattr(importlib.import_module(name), {"cmake": "CMAKE_BIN_DIR", "ninja": "BIN_DIR"}[name])
        return str(Path(bin_dir) / name)
    found = shutil.which(name)
    if not found:
        sys.exit(
            f"mxmoe: {name} is missing. Install it (`pip install cmake ninja pybind11`) or install without --no-build-isolation."
        )
    return found


def pybind11_dir() -> str:
    """Where pybind11's CMake files are."""
    if not importlib.util.find_spec("pybind11"):
        sys.exit("mxmoe: pybind11 is missing. Install it (`pip install pybind11`) or install without --no-build-isolation.")
    return importlib.import_module("pybind11").get_cmake_dir()


class CMakeBuild(build_ext):
    """Runs cmake once for all extensions.

    Objects stay in build/, one directory per interpreter, so that every way to install (in place, editable, wheel) reuses them.
    `built_with` there names the compiler and is written when a build ends: where it is missing (an earlier build was killed and
    may have left half an object) or names another compiler, everything is made anew.
    """

    def build_extensions(self):
        compiler, cmake = require_compiler(), require_program("cmake")
        targets = {ext.name.split(".")[-1]: Path(self.get_ext_fullpath(ext.name)).resolve() for ext in self.extensions}
        sanitize = bool(os.environ.get("MXMOE_SANITIZE"))
        kind = "sanitize-" if sanitize else ""
        directory = ROOT / "build" / f"cmake-{kind}{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        built_with = directory / "built_with"
        if directory.exists() and not (built_with.exists() and built_with.read_text() == compiler):
            shutil.rmtree(directory)
        directory.mkdir(parents=True, exist_ok=True)
        built_with.unlink(missing_ok=True)
        configure = [
            cmake, "-S", str(ROOT), "-B", str(directory), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={require_program('ninja')}",
            "-DCMAKE_BUILD_TYPE=Release", f"-DMXMOE_SANITIZE={'ON' if sanitize else 'OFF'}",
            f"-DMXMOE_CUDA={os.environ.get('MXMOE_CUDA', 'AUTO')}",
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11_dir()}",
        ]  # fmt: skip
        if not self.configure(configure, directory):
            sys.exit(f"mxmoe: cmake could not configure the build (compiler: {compiler}); its message is above.")
        jobs = str(self.parallel or len(os.sched_getaffinity(0)))
        failed = subprocess.run([cmake, "--build", str(directory), "--target", "all", "--parallel", jobs]).returncode
        built_with.write_text(compiler)
        if failed:
            sys.exit("mxmoe: the C++ core did not compile; the compiler's message is above.")
        for name, target in targets.items():
            built = next(directory.glob(f"{name}.*"), None)
            if built is None and name == "_cuda":  # no nvcc: what is left of another build is stale; a sanitized one is beside it
                for stale in (target, *([] if sanitize else [ROOT / "mxmoe" / target.name])):
                    stale.unlink(missing_ok=True)
                continue
            self.place(built, target)
        if (program := directory / "sandboxd").exists():  # Linux: the launcher of the sandboxes, an executable beside the modules
            self.place(program, targets["_C"].parents[1] / LAUNCHER)

    def copy_extensions_to_source(self):
        """In place: what build_extensions put below build/ goes into the tree, the launcher as well."""
        super().copy_extensions_to_source()
        program = Path(self.get_ext_fullpath("mxmoe._C")).resolve().parents[1] / LAUNCHER
        for built in (program, Path(self.build_lib).resolve() / LAUNCHER):
            if built.exists() and built != ROOT / LAUNCHER:
                self.place(built, ROOT / LAUNCHER)
                break

    @staticmethod
    def place(built: Path, target: Path) -> None:
        """Copy, renamed into place: never a half-written module."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            os.replace(shutil.copy(built, beside), target)

    @staticmethod
    def configure(command: list[str], directory: Path) -> bool:
        """Whether cmake accepts; a cache left by another source path or cmake is dropped once and made anew."""
        cached = (directory / "CMakeCache.txt").exists()
        if subprocess.run(command).returncode == 0:
            return True
        if not cached:
            return False
        shutil.rmtree(directory)
        directory.mkdir()
        return subprocess.run(command).returncode == 0


if __name__ == "__main__":
    require_writable(ROOT)
    modules = [Extension(f"mxmoe.{name}", sources=[], optional=name == "_cuda") for name in ("_C", "_interp", "_cuda")]
    setup(ext_modules=modules, cmdclass={"build_ext": CMakeBuild})
