"""Root file systems from recipes, cached by content. Nothing comes from an image hub.

    images = ImageStore(directory)
    root = images.build(Recipe(programs=BASIC, python=True))                       # from this machine's own files: a second
    root = images.build(Recipe(debian=("git", "ripgrep"), pypi=("pytest==8.3.4",), setup="git config --system user.name x"))

Programs of this machine come with the libraries they link; Debian packages by apt, unpacked here and configured inside a sandbox;
PyPI packages as wheels and npm packages without their scripts, so that nobody's code runs outside. `setup` runs in a sandbox
without network, as root there. The same recipe is built once, also when many ask at the same time.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl.environments.sandbox import ImageError, Limits, SandboxBackend, SandboxSpec

_BASIC = """
sh bash env true false test expr printf echo cat ls cp mv rm ln mkdir rmdir touch chmod chown stat readlink realpath head tail
sort uniq wc cut tr tee seq sleep date id hostname uname nproc df du dd find xargs grep sed awk diff patch tar gzip ps kill setsid
timeout mktemp md5sum sha256sum basename dirname pwd yes mknod mkfifo fallocate truncate mount umount nohup
"""
BASIC = tuple(_BASIC.split())
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
DIRECTORIES = (
    "proc",
    "dev",
    "sys",
    "run",
    "root",
    "home",
    "etc",
    "var/tmp",
    "var/log",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib64",
)
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\nuser:x:1000:1000:user:/home:/bin/sh\n",
    "group": "root:x:0:\ntty:x:5:\nnogroup:x:65534:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
}
NOT_OF_STDLIB = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "ensurepip",
    "config-*",
)
UNNEEDED = ("./usr/share/doc/*", "./usr/share/man/*", "./usr/share/locale/*", "./usr/share/info/*", "./usr/share/lintian/*")
BUILD_LIMITS = Limits(memory_bytes=2 << 30, disk_bytes=2 << 30, inodes=500_000, pids=1024, cpus=4, exec_s=600)


@dataclass(frozen=True)
class Recipe:
    """What is in an image. Without `debian` its base is this machine's `programs`, and its interpreter if `python`."""

    programs: tuple[str, ...] = ()
    python: bool = False
    debian: tuple[str, ...] = ()
    pypi: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)  # path: text
    setup: str = ""

    def digest(self) -> str:
        """Of the recipe, and of what it takes from this machine."""
        here = {name: _stamp(shutil.which(name)) for name in self.programs} | ({"python": sys.version} if self.python else {})
        return hashlib.sha256(json.dumps([asdict(self), here], sort_keys=True).encode()).hexdigest()


def _stamp(path: str | None) -> str:
    if path is None:
        return ""
    status = os.stat(path)
    return f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


class ImageStore:
    """`directory/<digest>/rootfs`. `backend`: where setup scripts run; recipes without one need none."""

    def __init__(self, directory: Path, backend: Callable[[], SandboxBackend] | None = None):
        self.directory, self._backend = Path(directory), backend
        self.directory.mkdir(parents=True, exist_ok=True)

    def build(self, recipe: Recipe) -> Path:
        """The root file system of a recipe; ImageError says what failed."""
        target = self.directory / recipe.digest()
        with self._only_one(target.name):
            if not (target / "rootfs").is_dir():
                with tempfile.TemporaryDirectory(dir=self.directory, prefix=".building-") as building:
                    root = Path(building) / "rootfs"
                    root.mkdir(mode=0o755)
                    self._build(recipe, root)
                    (Path(building) / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1))
                    final = Path(building) / "final"
                    final.mkdir()
                    for name in ("rootfs", "recipe.json"):
                        os.rename(Path(building) / name, final / name)
                    os.rename(final, target)
        return target / "rootfs"

    @contextmanager
    def _only_one(self, name: str):
        with open(self.directory / f".{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _build(self, recipe: Recipe, root: Path) -> None:
        scripts = []
        if recipe.debian:
            unpack_debian(recipe.debian, root)
            scripts.append(CONFIGURE_DEBIAN)
        else:
            make_skeleton(root)
            copy_programs(recipe.programs, root)
        if recipe.python:
            copy_python(root)
        if recipe.pypi:
            install_pypi(recipe.pypi, root)
        if recipe.npm:
            _run(["npm", "install", "--global", "--ignore-scripts", "--no-audit", "--prefix", str(root / "usr/local"), *recipe.npm])
        for path, text in recipe.files.items():
            place = root / path.lstrip("/")
            if not place.resolve().is_relative_to(root.resolve()):
                raise ImageError(f"the file {path} of the recipe leaves the image")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        for script in [*scripts, recipe.setup]:
            if script:
                self._set_up(root, script)

    def _set_up(self, root: Path, script: str) -> None:
        """Run a script in a sandbox on the image, and put what comes out in its place."""
        if self._backend is None:
            raise ImageError("a recipe with Debian packages or a set-up script needs ImageStore(backend=...)")
        result = root.with_name("after")
        result.mkdir(mode=0o755)
        with self._backend() as backend, backend.create(SandboxSpec(root, BUILD_LIMITS)) as sandbox:
            done = sandbox.exec(script)
            if not done.ok:
                raise ImageError(f"set-up ended with {done.exit_code} ({done.reason}): {done.text[-2000:]}")
            archive = root.with_name("after.tar")
            sandbox.export_root(archive)
        _run(["tar", "-xpf", str(archive), "-C", str(result), "--numeric-owner"])
        archive.unlink()
        shutil.rmtree(root)
        os.rename(result, root)


def make_skeleton(root: Path) -> None:
    for directory in DIRECTORIES:
        (root / directory).mkdir(parents=True, exist_ok=True)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)


def copy_programs(names: tuple[str, ...], root: Path) -> None:
    """Programs of this machine under usr/bin, and the libraries they link where they look for them."""
    found = {name: shutil.which(name) for name in names}
    if missing := sorted(name for name, path in found.items() if path is None):
        raise ImageError(f"this machine has no {', '.join(missing)}")
    for name, path in found.items():
        shutil.copy2(os.path.realpath(path), root / "usr/bin" / name)
    copy_libraries([os.path.realpath(path) for path in found.values()], root)


def copy_libraries(files: list[str], root: Path) -> None:
    listed = subprocess.run(["ldd", *files], capture_output=True, text=True).stdout if files else ""
    for library in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listed, re.M))):
        place = root / library.lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(library), place)


def copy_python(root: Path) -> None:
    """This interpreter, without packages, at its own path and as usr/bin/python3."""
    stdlib, executable = Path(sysconfig.get_path("stdlib")), os.path.realpath(sys._base_executable)
    base = Path(sys.base_prefix)
    stdlib = base / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copytree(stdlib, root / str(stdlib).lstrip("/"), ignore=shutil.ignore_patterns(*NOT_OF_STDLIB), symlinks=True)
    place = root / "usr/bin/python3"
    if str(base) != "/usr":
        place = root / str(base).lstrip("/") / "bin/python3"
        place.parent.mkdir(parents=True, exist_ok=True)
        (root / "usr/bin/python3").unlink(missing_ok=True)
        (root / "usr/bin/python3").symlink_to(f"/{place.relative_to(root)}")
    shutil.copy2(executable, place)
    copy_libraries([executable, *map(str, (stdlib / "lib-dynload").glob("*.so"))], root)


def install_pypi(packages: tuple[str, ...], root: Path) -> None:
    """Wheels only: no code of a package runs here."""
    version = _python_version(root)
    debian = (root / "etc/debian_version").exists()
    target = root / (f"usr/local/lib/python{version}/dist-packages" if debian else _site_packages().lstrip("/"))
    _run([
        sys.executable, "-m", "pip", "install", "--quiet", "--no-compile" if debian else "--compile", "--only-binary=:all:",
        "--python-version", version, "--target", str(target), *packages,
    ])  # fmt: skip
    if not debian:
        copy_libraries([str(path) for path in target.rglob("*.so")], root)


def _site_packages() -> str:
    """Where the interpreter that `copy_python` copies looks for packages: Debian's own is not where others do."""
    command = [sys._base_executable, "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _python_version(root: Path) -> str:
    for lib in (root / "usr/lib", root / "usr/local/lib", root / str(sys.base_prefix).lstrip("/") / "lib"):
        for found in sorted(lib.glob("python3.*")):
            if (found / "os.py").exists():
                return found.name.removeprefix("python")
    raise ImageError("PyPI packages need a Python in the image: python=True, or the Debian package python3")


CONFIGURE_DEBIAN = r"""
set -e
export DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true PATH=/usr/sbin:/usr/bin:/sbin:/bin
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d
step() { dpkg --force-depends --force-unsafe-io "$@" > /tmp/log 2>&1 || { tail -50 /tmp/log; exit 1; }; }
step --install /var/cache/debs/base-passwd_*.deb /var/cache/debs/base-files_*.deb
step --unpack /var/cache/debs/*.deb
step --configure -a
rm -rf /var/cache/debs /tmp/log /usr/sbin/policy-rc.d
"""


def unpack_debian(packages: tuple[str, ...], root: Path) -> None:
    """Essential packages and these with what they depend on: downloaded by apt, unpacked; CONFIGURE_DEBIAN does the rest inside."""
    if not shutil.which("apt-get"):
        raise ImageError("Debian packages need apt-get on this machine")
    state = root.with_name("apt")
    debs = root / "var/cache/debs"
    for directory in (state / "lists/partial", debs / "partial"):
        directory.mkdir(parents=True)
    (state / "status").touch()
    apt = [
        "apt-get", "-qq", "-o", f"Dir::State={state}", "-o", f"Dir::State::status={state}/status", "-o", f"Dir::Cache={state}",
        "-o", f"Dir::Cache::archives={debs}", "-o", "APT::Install-Recommends=false", "-o", "APT::Sandbox::User=root",
    ]  # fmt: skip
    _run([*apt, "update"])
    _run([*apt, "--yes", "--download-only", "install", "?essential", *packages])
    excluded = [f"--exclude={pattern}" for pattern in UNNEEDED]
    for name, target in LINKS.items():
        (root / target).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    for deb in sorted(debs.glob("*.deb")):
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as unpacked:
            _run(["tar", "-xp", "--keep-directory-symlink", *excluded, "-C", str(root)], stdin=unpacked.stdout)
    for directory in ("proc", "dev", "sys", "tmp"):
        (root / directory).mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    if not (root / "usr/bin/awk").exists() and (root / "usr/bin/mawk").exists():
        (root / "usr/bin/awk").symlink_to("mawk")
    (root / "etc/dpkg/dpkg.cfg.d").mkdir(parents=True, exist_ok=True)
    lines = [f"path-exclude={pattern.removeprefix('.')}" for pattern in UNNEEDED]
    (root / "etc/dpkg/dpkg.cfg.d/small").write_text("\n".join(lines) + "\n")
    shutil.rmtree(state)


def _run(command: list[str], stdin=subprocess.DEVNULL) -> None:
    try:
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ImageError(f"this machine has no {command[0]}") from error
    if done.returncode:
        raise ImageError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-1000:]}")
