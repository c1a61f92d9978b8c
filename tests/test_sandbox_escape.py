"""Nothing gets out of a `namespaces` sandbox: attempts by kind (escape_cases.py), bombs, and what the neighbours notice of them."""

import ctypes
import os
import platform
import shutil
import socket
import subprocess
import sys
import time

import pytest

from rl.environments.sandbox import Limits
from tests.escape_cases import ATTEMPTS, script
from tests.sandbox_cases import open_or_skip, spec

IPC_CREAT, IPC_RMID = 0o1000, 0
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts use x86-64 system call numbers")


@pytest.fixture(scope="module")
def backend():
    with open_or_skip("namespaces") as opened:
        yield opened


@pytest.fixture(scope="module")
def sandbox(backend):
    with backend.create(spec(backend)) as made:
        yield made


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Things of the host that an attempt may try to reach."""
    directory = tmp_path_factory.mktemp("host")
    (directory / "secret").write_text("secret")
    libc, key = ctypes.CDLL(None), 0x41_0000 + os.getpid() % 65536
    shared = libc.shmget(key, 4096, IPC_CREAT | 0o600)
    sleeper = subprocess.Popen(["sleep", "600"])
    with (
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as tcp,
    ):
        named.bind(str(directory / "s"))
        abstract.bind(f"\0escape-{os.getpid()}")
        named.listen(), abstract.listen()
        yield {
            "SECRET": directory / "secret",
            "SOCKET": directory / "s",
            "ABSTRACT": f"escape-{os.getpid()}",
            "PORT": tcp.getsockname()[1],
            "KEY": key,
            "PID": sleeper.pid,
        }
    libc.shmctl(shared, IPC_RMID, None)
    sleeper.kill()
    sleeper.wait()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt(name, sandbox, host):
    program = script(ATTEMPTS[name], **host)
    private = [shutil.which("unshare"), "--mount", "--uts"]  # what changes something changes it for nobody
    outside = subprocess.run([*private, sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    inside = sandbox.exec(["python3", "-c", program], timeout_s=20)
    assert b"ESCAPED" not in inside.stdout, "it got out"
    assert b"Traceback" not in inside.stderr, inside.stderr
    if "ESCAPED" not in outside.stdout:
        pytest.skip(f"not possible outside either: {outside.stdout}{outside.stderr[-200:]}")


def test_there_are_enough_attempts():
    assert len(ATTEMPTS) >= 60


# Bombs, in a sandbox of their own; the machine and a neighbour go on


@pytest.fixture
def victim(backend):
    limits = Limits(memory_bytes=64 << 20, disk_bytes=16 << 20, inodes=500, pids=32, exec_s=10)
    with backend.create(spec(backend, limits=limits)) as made, backend.create(spec(backend)) as neighbour:
        yield made
        start = time.monotonic()
        assert neighbour.exec("echo alive").stdout == b"alive\n"
        assert time.monotonic() - start < 2


def test_fork_bomb(victim):
    result = victim.exec("b() { b | b & }; b; sleep 2", timeout_s=1)
    assert result.reason in ("timeout", "exit")
    assert victim.exec("echo still").exit_code is not None


def test_memory_bomb_is_told_from_other_kills(victim):
    result = victim.exec(["python3", "-c", "a = bytearray(2 << 30); a[::4096] = b'x' * len(a[::4096])"])
    assert (result.exit_code, result.reason) == (137, "oom")
    assert victim.exec("kill -9 $$").reason == "signal"


def test_disk_bomb_gets_no_space_and_spares_the_old_file(victim):
    victim.write("/tmp/old", b"old")
    result = victim.exec("fallocate -l 50G big || dd if=/dev/zero of=big bs=1M", cwd="/tmp")
    assert b"No space left" in result.stderr
    with pytest.raises(OSError, match="No space left"):
        victim.write("/tmp/old", bytes(1 << 20))
    assert victim.read("/tmp/old") == b"old"
    victim.exec("rm /tmp/big")
    victim.write("/tmp/old", bytes(1 << 20))


def test_inode_bomb(victim):
    assert b"No space left" in victim.exec("i=0; while [ $i -lt 2000 ]; do : > f$i || exit 1; i=$((i+1)); done", cwd="/tmp").stderr


def test_descriptor_bomb(victim):
    code = "import os\nfds = []\ntry:\n    while True: fds.append(os.open('/dev/null', 0))\nexcept OSError: print(len(fds))"
    assert int(victim.exec(["python3", "-c", code]).stdout) < 4096


def test_output_bomb(victim):
    result = victim.exec("yes", timeout_s=0.5)
    assert result.reason == "timeout"
    assert len(result.stdout) < 100_000


def test_signals_to_the_first_process_do_nothing(victim):
    victim.exec("kill -9 1; kill -STOP 1; kill -TERM 1; kill -9 -1", timeout_s=5)
    assert victim.exec("echo alive").stdout == b"alive\n"


def test_root_inside_is_nobody_outside(victim, backend):
    victim.exec("sleep 30 &")
    owners = {os.stat(f"/proc/{pid}").st_uid for pid in backend.node.cgroups.processes(str(victim.slot))}
    assert min(owners) == max(owners) >= 1 << 24
    victim.exec("cp /usr/bin/sh /tmp/suid; chmod 4755 /tmp/suid")
    files = backend.node.files(victim._layer)
    assert (files / "tmp/suid").exists()
    assert (files.parent.parent).stat().st_mode & 0o077 == 0


def test_names_do_not_leave_by_dns(victim):
    start = time.monotonic()
    code = "import socket\ntry: print(socket.gethostbyname('any.name.example'))\nexcept OSError as error: print('refused')"
    assert victim.exec(["python3", "-c", code]).stdout == b"refused\n"
    assert time.monotonic() - start < 2
