"""Builds the compiled core (CMake) as the extension mxmoe._C; no torch needed at build time."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def require_writable_tree():
    """setuptools writes metadata beside setup.py, so a read-only tree fails first and obscurely; say it here."""
    try:
        with tempfile.TemporaryFile(dir=ROOT):
            pass
    except OSError as error:
        sys.exit(
            f"mxmoe: the source tree {ROOT} is not writable ({error.strerror}). Copy it to a writable directory and "
            "install from there, or build a wheel elsewhere and install that."
        )


def cmake_program() -> str:
    """The cmake of the build environment's package, else the one on PATH."""
    if importlib.util.find_spec("cmake"):
        import cmake

        return str(Path(cmake.CMAKE_BIN_DIR) / "cmake")
    found = shutil.which("cmake")
    if not found:
        sys.exit(
            "mxmoe: cmake is missing. Install it (`pip install cmake ninja pybind11`) or install without --no-build-isolation."
        )
    return found


def compiler() -> str:
    """The C++ compiler CMake will use: $CXX, else c++ / g++ / clang++."""
    asked = os.environ.get("CXX")
    names = [asked.split()[0]] if asked and asked.strip() else ["c++", "g++", "clang++"]
    for name in names:
        if shutil.which(name):
            return asked or name
    sys.exit(
        f"mxmoe: no C++ compiler found (looked for {', '.join(names)}). Install one (Debian: `apt install g++`), set "
        "CXX, or install a prebuilt wheel of mxmoe."
    )


class CMakeBuild(build_ext):
    """Runs cmake for the one extension; an interrupted build is simply run again."""

    def build_extension(self, ext):
        import pybind11

        compiler()
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_dir = Path(self.build_temp).resolve() / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        cmake = cmake_program()
        configure = [
            cmake, "-S", str(ROOT), "-B", str(build_dir), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target.parent}",
        ]  # fmt: skip
        if importlib.util.find_spec("ninja") or shutil.which("ninja"):
            configure += ["-G", "Ninja"]
        if os.environ.get("MXMOE_SANITIZE"):
            configure += ["-DMXMOE_SANITIZE=ON"]
        jobs = str(self.parallel or os.cpu_count() or 1)
        build = [cmake, "--build", str(build_dir), "--target", "_C", "--parallel", jobs]
        if not self.configure(configure, build_dir):
            sys.exit("mxmoe: cmake could not configure the build; its message is above.")
        if subprocess.run(build).returncode:
            sys.exit("mxmoe: the C++ core did not compile; the compiler's message is above.")

    @staticmethod
    def configure(command, build_dir) -> bool:
        """Configure; a cache left by another generator, path or interrupted run is dropped once and configured anew."""
        if subprocess.run(command).returncode == 0:
            return True
        shutil.rmtree(build_dir)
        build_dir.mkdir(parents=True)
        return subprocess.run(command).returncode == 0


require_writable_tree()
setup(ext_modules=[Extension("mxmoe._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
