"""Nothing is left of sandboxes, whoever is killed; and what happens on a node that is full, slow or gone."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.environments import cgroups
from rl.environments.node import Node, is_alive
from rl.environments.sandbox import Limits, NoCapacity, SandboxLost, SnapshotError, StartTimeout
from tests.sandbox_cases import image, open_or_skip, spec

CLIENT = """
import sys, threading, time
from rl.environments import open_backend
from rl.environments.sandbox import Limits, SandboxSpec
backend = open_backend("namespaces")
limits = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20)
sandboxes = [backend.create(SandboxSpec(sys.argv[1], limits)) for _ in range(int(sys.argv[2]))]
for sandbox in sandboxes:
    sandbox.exec("setsid sleep 600 & echo x > /tmp/file")
    print(sandbox.host_pid)
print("ready", backend.node.name, backend.node.process.pid, flush=True)
time.sleep(600)
"""


def descendants_of_cgroups(node: str) -> list[Path]:
    return [path for mount in set(cgroups.find().mounts.values()) for path in (mount / cgroups.TOP / node).glob("**/cgroup.procs")]


def leftovers(node: str, top: Path) -> dict[str, list]:
    """What there still is of a node."""
    groups = descendants_of_cgroups(node)
    return {
        "cgroups": groups,
        "processes": [pid for group in groups for pid in group.read_text().split()],
        "directories": list(top.glob(f"{node}*")),
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if node in line],
    }


def start_client(count: int) -> tuple[subprocess.Popen, str, int, list[int]]:
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(image()), str(count)], stdout=subprocess.PIPE, text=True)
    pids = []
    for line in client.stdout:
        if line.startswith("ready"):
            _, node, daemon = line.split()
            return client, node, int(daemon), pids
        pids.append(int(line))
    raise AssertionError("the client did not start")


def gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def kill_and_reap(count: int, who: str) -> None:
    open_or_skip("namespaces").close()
    client, node, daemon, pids = start_client(count)
    chosen = random.Random(count).sample(pids, len(pids) // 2)
    victims = {"client": [client.pid], "daemon": [daemon], "first": [*chosen, client.pid], "both": [daemon, client.pid]}[who]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    if who == "daemon":
        time.sleep(0.2)
        client.kill()
    client.wait()
    client.stdout.close()
    assert gone(daemon)
    assert all(gone(pid) for pid in pids)
    reaper = Node()
    top = reaper.top
    reaper.close()
    assert not is_alive(node)
    assert not any(leftovers(node, top).values()), leftovers(node, top)


@pytest.mark.parametrize("who", ["client", "daemon", "first", "both"])
def test_nothing_is_left_whoever_is_killed(who):
    kill_and_reap(8, who)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["client", "daemon", "first", "both"])
def test_nothing_is_left_of_a_thousand(who):
    kill_and_reap(250, who)


def test_closing_leaves_nothing():
    with open_or_skip("namespaces") as backend:
        node, top = backend.node.name, backend.node.top
        for _ in range(3):
            backend.create(spec(backend)).exec("sleep 100 &")
        assert any(leftovers(node, top).values())
    assert not any(leftovers(node, top).values())


def test_a_create_that_fails_leaves_nothing():
    with open_or_skip("namespaces") as backend:
        for options in ({"start_s": 1e-4}, {"limits": Limits(memory_bytes=4096, disk_bytes=4096)}):
            with pytest.raises((StartTimeout, NoCapacity)):
                backend.create(spec(backend, **options))
        assert not backend.sandboxes()
        assert [path.parent.name for path in descendants_of_cgroups(backend.node.name)].count(backend.node.name) == len(
            descendants_of_cgroups(backend.node.name)
        )
        with backend.create(spec(backend)) as sandbox:
            assert sandbox.exec("true").ok


def test_a_node_that_is_lost_is_told_and_others_go_on():
    with open_or_skip("namespaces") as lost, open_or_skip("namespaces") as other:
        sandbox, neighbour = lost.create(spec(lost)), other.create(spec(other))
        lost.node.process.kill()
        with pytest.raises(SandboxLost):
            sandbox.exec("sleep 5")
        with pytest.raises(SandboxLost):
            lost.create(spec(lost))
        assert neighbour.exec("true").ok


def test_the_first_process_killed_is_a_lost_sandbox_only():
    with open_or_skip("namespaces") as backend, backend.create(spec(backend)) as neighbour:
        sandbox = backend.create(spec(backend))
        os.kill(sandbox.host_pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            sandbox.exec("sleep 5")
        assert neighbour.exec("true").ok
        assert sandbox not in backend.sandboxes()


def test_exhausted_processes_end_the_command_and_not_the_sandbox():
    limits = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, pids=8)
    with open_or_skip("namespaces") as backend, backend.create(spec(backend, limits=limits)) as sandbox:
        assert not sandbox.exec("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 3 & done; wait", timeout_s=1).ok
        assert sandbox.exec("echo again").ok


def test_snapshots_outlive_the_backend_in_a_store_and_are_checked(tmp_path):
    with open_or_skip("namespaces", store=tmp_path) as backend, backend.create(spec(backend)) as sandbox:
        sandbox.exec("echo kept > /tmp/file; rm /etc/hosts; mkdir -p /tmp/d; chown 1000 /tmp/d")
        digest = sandbox.snapshot().durable()
    with open_or_skip("namespaces", store=tmp_path) as backend:
        snapshot = backend.restore(digest)
        with backend.create(spec(backend, image=snapshot)) as sandbox:
            assert sandbox.exec("cat /tmp/file; ls /etc/hosts; stat -c %u /tmp/d").stdout == b"kept\n1000\n"
        assert snapshot.durable() == digest
        archive = next(tmp_path.glob("*.tar"))
        archive.write_bytes(archive.read_bytes().replace(b"kept\n", b"lost\n"))
        with pytest.raises(SnapshotError, match="damaged"):
            backend.restore(digest)


def test_a_live_snapshot_copies_while_processes_stand_still():
    with open_or_skip("namespaces") as backend, backend.create(spec(backend)) as sandbox:
        sandbox.exec("(i=0; while true; do i=$((i+1)); echo $i > /tmp/a; echo $i > /tmp/b; done) &")
        for _ in range(3):
            snapshot = sandbox.snapshot()
            with backend.create(spec(backend, image=snapshot)) as copy:
                a, b = (copy.read(f"/tmp/{name}").split() for name in "ab")
                assert a == b or not a or not b or int(a[0]) - int(b[0]) == 1
        assert sandbox.exec("true").ok


V1 = "cgroup {0}/memory cgroup rw,memory 0 0\ncgroup {0}/pids cgroup rw,pids 0 0\ncgroup {0}/cpu cgroup rw,cpu,cpuacct 0 0\n"


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_files_of_both_versions(version, tmp_path):
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    names = ("memory", "pids", "cpu") if version == 1 else (".",)
    for name in names:
        (tmp_path / name).mkdir(exist_ok=True)
    layout = cgroups.find(V1.format(tmp_path) if version == 1 else f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert layout.version == version
    assert not layout.missing()
    layout = layout.with_node("1-2-3")
    fields = layout.fields("7", Limits(memory_bytes=1000, disk_bytes=24, pids=10, cpus=0.5))
    groups = [field for field in fields if field.startswith("c:")]
    assert len(groups) == len(set(groups)) == len(names)
    expected = {
        1: ["s:memory.limit_in_bytes=1024", "s:pids.max=12", "s:cpu.cfs_quota_us=50000"],
        2: ["s:memory.max=1024", "s:pids.max=12", "s:cpu.max=50000 100000"],
    }
    assert sorted(field for field in fields if field.startswith("s:")) == sorted(expected[version])
    group = layout.group("memory", "7")
    group.mkdir(parents=True)
    (group / ("memory.oom_control" if version == 1 else "memory.events")).write_text("oom_kill_disable 0\noom_kill 3\n")
    assert layout.oom_kills("7") == 3


def test_missing_controllers_are_named():
    assert set(cgroups.find("proc /proc proc rw 0 0\n").missing()) == {"memory_limit", "pids_limit", "cpu_limit"}


def test_names_of_nodes_say_whether_they_live():
    with open_or_skip("namespaces") as backend:
        assert is_alive(backend.node.name)
    for name in ("1-1-0", f"{os.getpid()}-1-0", "x", "99999999-1-1"):
        assert not is_alive(name)
