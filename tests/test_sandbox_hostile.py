"""What an agent may leave behind to break whoever looks at it, and machinery that dies or fills up at a bad moment."""

import os
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from rl.environments.manifest import LARGE, manifest
from rl.environments.sandbox import SandboxError, SnapshotError
from tests.sandbox_cases import open_or_skip, spec

NAMES = ["-rf", "--", "a\nb", "a b", "'\"$(id)`", "*", "\\", "~", os.fsdecode(b"\xff\xfe"), "\N{SNOWMAN}", "x" * 255, "...", "\t"]


@pytest.fixture(scope="module")
def backend():
    with open_or_skip("namespaces") as opened:
        yield opened


@pytest.fixture
def sandbox(backend):
    with backend.create(spec(backend)) as made:
        yield made


def test_names(sandbox, tmp_path):
    for i, name in enumerate(NAMES):
        sandbox.write(f"/tmp/names/{name}", b"%d" % i)
    assert [sandbox.read(f"/tmp/names/{name}") for name in NAMES] == [b"%d" % i for i in range(len(NAMES))]
    sandbox.download("/tmp/names", tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(NAMES)
    assert len(sandbox.snapshot().durable()) == 64
    with pytest.raises(ValueError, match="NUL"):
        sandbox.write("/tmp/a\0b", b"")


def test_a_path_that_is_too_deep_is_a_typed_error_or_a_digest(sandbox):
    deep = "import os\nos.chdir('/tmp')\nfor i in range(1500):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
    assert sandbox.exec(["python3", "-c", deep]).ok
    with suppress(SnapshotError):
        assert len(sandbox.snapshot().durable()) == 64
    assert sandbox.exec("echo alive").stdout == b"alive\n"


def test_a_file_of_holes_takes_no_time(sandbox):
    assert sandbox.exec("truncate -s 4T /tmp/huge; echo x >> /tmp/huge").ok
    start = time.monotonic()
    snapshot = sandbox.snapshot()
    assert len(snapshot.durable()) == 64
    assert time.monotonic() - start < 5
    with pytest.raises(OSError, match="File too large"):
        sandbox.read("/tmp/huge")


def test_holes_and_zeros_are_the_same_bytes(tmp_path):
    size, entries = 3 * LARGE + 5, []
    for name, sparse in (("holes", True), ("zeros", False), ("other", True)):
        directory = tmp_path / name
        directory.mkdir()
        with open(directory / "file", "wb") as file:
            file.write(b"" if sparse else bytes(size))
            file.truncate(size)
            file.seek(LARGE + 77)
            file.write(b"data" if name != "other" else b"date")
        entries.append(manifest(directory))
    assert entries[0] == entries[1] != entries[2]


def test_links_that_change_while_they_are_followed(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("of the host")
    swap = f"mkdir -p t/d; echo inside > t/d/file; while :; do mv t/d t/e; ln -s {secret} t/d; rm t/d; mv t/e t/d; done"
    sandbox.exec(f"({swap}) > /dev/null 2>&1 &", cwd="/tmp")
    for i in range(15):
        try:
            sandbox.download("/tmp/t", tmp_path / f"out{i}")
            sandbox.write("/tmp/t/d/new", b"new")
            assert sandbox.read("/tmp/t/d/file") == b"inside\n"
        except OSError:
            pass  # it was not there at that moment
        if i % 5 == 0:
            with suppress(SnapshotError):  # processes that come and go too fast to be frozen on a busy machine
                sandbox.snapshot().drop()
    assert os.listdir(secret) == ["file"]
    copies = [path for path in tmp_path.glob("out*/**/file") if not path.parent.is_symlink()]
    assert all(path.read_text() == "inside\n" for path in copies)


def test_the_daemon_killed_while_a_snapshot_is_stored(backend, tmp_path):
    with open_or_skip("namespaces", store=tmp_path / "store") as lost:
        sandbox = lost.create(spec(lost))
        assert sandbox.exec("head -c 20000000 /dev/urandom > /tmp/big").ok
        snapshot = sandbox.snapshot()
        killer = threading.Timer(0.01, lost.node.process.kill)
        killer.start()
        try:
            digest = snapshot.durable()
        except SnapshotError:
            digest = None
        killer.join()
        with pytest.raises(SandboxError):
            lost.create(spec(lost))
    with open_or_skip("namespaces", store=tmp_path / "store") as again:
        assert not list((tmp_path / "store").glob("*.partial"))
        if digest:
            again.restore(digest)
        with again.create(spec(again)) as other:
            assert other.exec("true").ok


def test_a_store_without_room_is_told_and_the_sandbox_goes_on(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(store)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with open_or_skip("namespaces", store=store) as backend, backend.create(spec(backend)) as sandbox:
            sandbox.exec("head -c 5000000 /dev/urandom > /tmp/big")
            with pytest.raises(SnapshotError, match=r"Wrote only|No space left"):
                sandbox.snapshot().durable()
            assert not list(store.glob("*.partial"))
            sandbox.exec("rm /tmp/big")
            assert sandbox.exec("echo alive").stdout == b"alive\n"
    finally:
        subprocess.run(["umount", "--lazy", str(store)], check=True)
