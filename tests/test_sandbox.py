"""The contract of a sandbox, for every backend that runs here: commands, files, deadlines, output, snapshots, leases, errors."""

import errno
import sys
import threading
import time

import pytest

from rl.environments import open_backend
from rl.environments.node import PROGRAM
from rl.environments.sandbox import (
    CannotIsolate,
    ImageError,
    LeaseExpired,
    Limits,
    SandboxLost,
    SandboxSpec,
    SnapshotError,
    Unsupported,
)
from rl.environments.session import Session
from tests.hosted_server import Service
from tests.sandbox_cases import SMALL, open_or_skip, runc, spec

BACKENDS = {"subprocess": {"allow": "all"}, "namespaces": {}, "bubblewrap": {"allow": "all"}, "oci": {"runtime": runc()}}


@pytest.fixture(scope="module", params=[*BACKENDS, "hosted"])
def backend(request):
    if request.param == "hosted":
        with open_or_skip("namespaces") as node:
            service = Service(node)
            with open_backend("hosted", **service.options()) as opened:
                yield opened
            service.close()
        return
    with open_or_skip(request.param, **BACKENDS[request.param]) as opened:
        yield opened


@pytest.fixture
def sandbox(backend):
    with backend.create(spec(backend)) as made:
        yield made


def isolated(backend) -> bool:
    return backend.capabilities.isolation != "none"


@pytest.mark.tree
@pytest.mark.skipif(sys.platform != "linux", reason="sandboxd is a Linux program")
def test_the_launcher_was_built():
    assert PROGRAM.exists(), "without it the tests of sandboxes are skipped; `make build` makes it"


# Commands


def test_exit_status_and_both_streams(sandbox):
    result = sandbox.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr, result.reason, result.ok) == (3, b"out\n", b"err\n", "exit", False)


def test_argv_is_taken_as_it_is(sandbox):
    assert sandbox.exec(["printf", "%s|", "a b", "$HOME", "*", ""]).stdout == b"a b|$HOME|*||"


def test_a_signal_is_told(sandbox):
    result = sandbox.exec("kill -TERM $$")
    assert (result.exit_code, result.reason) == (128 + 15, "signal")


def test_programs_that_are_missing_or_no_programs(sandbox):
    assert sandbox.exec(["no-such-program"]).exit_code == 127
    sandbox.write("/tmp/text", b"text")
    assert sandbox.exec(["./tmp/text"], cwd="/").exit_code == 126


def test_environment_directory_and_stdin(backend):
    with backend.create(spec(backend, env={"A": "1", "B": "1"})) as sandbox:
        sandbox.write("/tmp/d/file", b"")
        result = sandbox.exec('echo "$A$B"; ls; cat', cwd="/tmp/d", env={"B": "2"}, stdin=b"in" * 100_000)
    assert result.stdout.startswith(b"12\nfile\nin")


def test_what_waits_for_input_gets_its_end(sandbox):
    assert sandbox.exec("cat", timeout_s=5).ok
    assert b"EOFError" in sandbox.exec(["python3", "-c", "input()"], timeout_s=10).stderr
    assert sandbox.exec("read x", timeout_s=5).exit_code == 1


def test_a_timeout_kills_the_whole_tree(sandbox):
    start = time.monotonic()
    result = sandbox.exec("sleep 300 & (sleep 2; touch late) & wait", timeout_s=0.2)
    assert time.monotonic() - start < 1.5
    assert (result.exit_code, result.reason) == (124, "timeout")
    while isolated(sandbox._backend) and b"sleep" in sandbox.exec("cat /proc/[0-9]*/comm").stdout:  # dead, and not reaped yet
        assert time.monotonic() - start < 2.5
        time.sleep(0.05)
    time.sleep(2.2)
    with pytest.raises(FileNotFoundError):
        sandbox.read("late")


def test_daemons_of_a_command_that_is_too_late_die_with_it(sandbox):
    daemon = "import os,time\nif os.fork(): time.sleep(60)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(1)\nopen('late','w')"
    assert sandbox.exec(["python3", "-c", daemon], timeout_s=0.5).reason == "timeout"
    time.sleep(1.2)
    with pytest.raises(FileNotFoundError):
        sandbox.read("late")


def test_silence_is_a_deadline_of_its_own(sandbox):
    result = sandbox.exec("for i in 1 2 3 4; do echo $i; sleep 0.1; done; sleep 60", idle_s=1.5, timeout_s=40)
    assert (result.stdout, result.reason, result.exit_code) == (b"1\n2\n3\n4\n", "idle", 124)


def test_commands_run_side_by_side(sandbox):
    start, ended = time.monotonic(), []
    threads = [threading.Thread(target=lambda: ended.append(sandbox.exec("sleep 1").ok)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 4
    assert time.monotonic() - start < 3.8


def test_the_background_lives_on_and_holds_nothing_up(sandbox):
    start = time.monotonic()
    assert sandbox.exec("(sleep 2; echo late > done) & echo started").stdout == b"started\n"
    assert time.monotonic() - start < 1.9
    time.sleep(2.2)
    assert sandbox.exec("until [ -s done ]; do sleep 0.1; done; cat done", cwd="/tmp", timeout_s=20).stdout == b"late\n"


def test_orphans_are_reaped(sandbox):
    for _ in range(3):
        assert sandbox.exec(
            "i=0; while [ $i -lt 200 ]; do (sleep 0.01 &); i=$((i+1)); [ $((i%40)) = 0 ] && sleep 0.1; done; true"
        ).ok
    end = time.monotonic() + 2
    while isolated(sandbox._backend):
        states = sandbox.exec("cat /proc/[0-9]*/stat").stdout
        if states.count(b") Z ") == 0 and states.count(b"\n") < 8:
            break
        assert time.monotonic() < end, states
        time.sleep(0.1)
    assert sandbox.exec("true").ok


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("cat <<'EOF'\nhi\nEOF", b"hi\n", 0),
        ("echo a # note", b"a\n", 0),
        ("exit 7", b"", 7),
        ("echo 'open", b"", 2),
        ("cd /nowhere", b"", None),
    ],
)
def test_a_session_takes_any_text(sandbox, command, output, code):
    session = Session(sandbox)
    session.run("cd /; X=1; export Y='two words'")
    result = session.run(command)
    assert result.stdout == output
    assert result.exit_code == code if code is not None else result.exit_code
    assert session.run('pwd; echo "$Y"').stdout == b"/\ntwo words\n"


# Output


def test_too_much_output_keeps_both_ends(sandbox):
    result = sandbox.exec("seq 1 1000000; echo ERR_TAIL; exit 3", output_bytes=64 << 10)
    assert result.stdout.startswith(b"1\n2\n")
    assert result.stdout.endswith(b"ERR_TAIL\n")
    assert result.exit_code == 3
    assert b"bytes dropped ...]" in result.stdout
    assert 0 < result.dropped < 7_000_000
    assert len(result.stdout) < 66_000


def test_characters_stay_whole(sandbox):
    whole = b"a" * 4094 + "\N{RIGHT-POINTING MAGNIFYING GLASS}".encode()
    assert sandbox.exec("cat", stdin=whole, output_bytes=1 << 20).stdout == whole
    for cap in range(20, 28):
        cut = sandbox.exec("cat", stdin="\N{RIGHT-POINTING MAGNIFYING GLASS}".encode() * 40, output_bytes=cap).stdout
        cut.decode()


def test_output_of_megabytes_arrives(sandbox):
    assert sandbox.exec("head -c 3000000 /dev/zero", output_bytes=4 << 20).stdout == bytes(3_000_000)


# Files


def test_files_keep_every_byte(sandbox):
    data = bytes(range(256)) * 5000 + b"x\r\ny\nprog 1\rprog 2\nz\n"
    sandbox.write("/tmp/new/dir/file", data, mode=0o755)
    assert sandbox.read("/tmp/new/dir/file") == data
    assert sandbox.exec("ls -l tmp/new/dir/file || ls -l /tmp/new/dir/file", cwd="/").stdout.startswith(b"-rwxr-xr-x")
    sandbox.write("/tmp/new/dir/file", data[-21:].replace(b"z", b"Z"))
    assert sandbox.read("/tmp/new/dir/file") == b"x\r\ny\nprog 1\rprog 2\nZ\n"


def test_errors_of_files_are_those_of_the_system(sandbox):
    sandbox.write("/tmp/file", b"12345")
    for call, code in (
        (lambda: sandbox.read("/tmp/none"), errno.ENOENT),
        (lambda: sandbox.read("/tmp"), errno.EISDIR),
        (lambda: sandbox.write("/tmp", b""), errno.EISDIR),
        (lambda: sandbox.read("/tmp/file", max_bytes=4), errno.EFBIG),
        (lambda: sandbox.write("/tmp/file/below", b""), errno.ENOTDIR),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011
            call()
        assert caught.value.errno == code


def test_a_fifo_does_not_hold_up_a_read(sandbox):
    sandbox.exec("mkfifo pipe", cwd="/tmp")
    with pytest.raises(OSError, match="Invalid argument"):
        sandbox.read("/tmp/pipe")


def test_links_do_not_lead_out(sandbox, tmp_path):
    (tmp_path / "secret").write_text("host")
    sandbox.exec(
        f"ln -s {tmp_path} out; ln -s {tmp_path}/new dangling; mkdir in; ln -s in link; ln -s {tmp_path}/a/b repo", cwd="/tmp"
    )
    for call in (
        lambda: sandbox.read("/tmp/out/secret"),
        lambda: sandbox.write("/tmp/dangling", b""),
        lambda: sandbox.read("/tmp/repo/../../secret"),
    ):
        with pytest.raises(OSError):  # noqa: PT011
            call()
    if not isolated(sandbox._backend):
        with pytest.raises(OSError):  # noqa: PT011
            sandbox.write("/tmp/out/new", b"")
    sandbox.write("/tmp/link/file", b"inside")
    assert sandbox.read("/tmp/in/file") == b"inside"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_directories_go_in_and_out(sandbox, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/run").write_text("#!/bin/sh\necho ran\n")
    (source / "sub/run").chmod(0o755)
    (source / "link").symlink_to("sub/run")
    sandbox.upload(source, "/tmp/tree")
    assert sandbox.exec(["sh", "-c", "cd tree && ./link"], cwd="/tmp").stdout == b"ran\n"
    sandbox.download("/tmp/tree", tmp_path / "back")
    assert (tmp_path / "back/link").readlink().name == "run"
    assert (tmp_path / "back/sub/run").stat().st_mode & 0o777 == 0o755
    sandbox.download("/tmp/tree/sub/run", tmp_path / "one")
    assert (tmp_path / "one").read_text() == (source / "sub/run").read_text()


# Snapshots


def test_snapshot_rollback_and_fork(backend, sandbox):
    if not backend.capabilities.snapshot:
        with pytest.raises(Unsupported):
            sandbox.snapshot()
        return
    sandbox.write("/tmp/a", b"1")
    sandbox.write("/tmp/gone", b"1")
    first = sandbox.snapshot()
    sandbox.exec("rm gone; echo 2 > a; mkdir -p new/deep", cwd="/tmp")
    with sandbox.fork() as fork, backend.create(spec(backend, image=first)) as again:
        fork.write("/tmp/a", b"fork")
        assert sandbox.read("/tmp/a") == b"2\n"
        assert again.read("/tmp/a") == again.read("/tmp/gone") == b"1"
        with pytest.raises(FileNotFoundError):
            fork.read("/tmp/gone")
        sandbox.rollback(first)
        assert sandbox.read("/tmp/gone") == b"1"
        assert not sandbox.exec("test -d new", cwd="/tmp").ok
        assert fork.read("/tmp/a") == b"fork"
    assert first.durable() == first.durable()
    first.drop()
    with pytest.raises(SnapshotError):
        backend.create(spec(backend, image=first))
    assert sandbox.read("/tmp/a") == b"1"


def test_equal_files_have_equal_digests(backend):
    if not (backend.capabilities.snapshot and backend.capabilities.digests):
        return  # the test above says that it is refused
    digests = []
    for text in (b"1", b"1", b"2"):
        with backend.create(spec(backend)) as sandbox:
            sandbox.write("/tmp/d/a", text)
            digests.append(sandbox.snapshot().durable())
    assert digests[0] == digests[1] != digests[2]


# Lives and ends


def test_destroying_twice_and_using_what_is_gone(backend):
    sandbox = backend.create(spec(backend))
    sandbox.exec("setsid sleep 300 & exit")
    sandbox.destroy()
    sandbox.destroy()
    for call in (lambda: sandbox.exec("true"), lambda: sandbox.read("/tmp/x"), sandbox.check, lambda: sandbox.renew(1)):
        with pytest.raises(SandboxLost):
            call()
    assert sandbox not in backend.sandboxes()


def test_destroying_ends_a_command_that_runs(backend):
    sandbox, ended = backend.create(spec(backend)), []

    def run():
        try:
            sandbox.exec("sleep 60")
        except SandboxLost:
            ended.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    sandbox.destroy()
    thread.join(5)
    assert ended
    assert ended[0] - start < 2


def test_a_lease_is_hard_and_can_be_renewed(backend):
    short, renewed = (backend.create(spec(backend, lease_s=0.5)) for _ in range(2))
    renewed.renew(60)
    time.sleep(1.2)
    with pytest.raises(LeaseExpired):
        short.exec("true")
    assert renewed.exec("true").ok
    renewed.destroy()


def test_a_lease_does_not_look_at_the_wall_clock(backend, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with backend.create(spec(backend, lease_s=30)) as sandbox:
        time.sleep(0.5)
        sandbox.check()


def test_images_that_do_not_exist(backend, tmp_path):
    with pytest.raises(ImageError):
        backend.create(SandboxSpec(image=tmp_path / "none", limits=SMALL))


def test_closing_a_backend_ends_what_it_made():
    opened = open_or_skip("subprocess", allow="all")
    sandbox = opened.create(spec(opened))
    opened.close()
    opened.close()
    with pytest.raises(SandboxLost):
        sandbox.exec("true")


def test_promises_are_refused_or_waived_by_name():
    with pytest.raises(CannotIsolate, match="disk_limit"):
        open_backend("subprocess")
    with pytest.raises(CannotIsolate) as caught:
        open_backend("subprocess", allow=["memory_limit"])
    assert "memory_limit" not in caught.value.missing
    with pytest.raises(ValueError, match="backend must be one of"):
        open_backend("none")


@pytest.mark.parametrize("field", ["memory_bytes", "pids", "cpus", "disk_bytes", "exec_s"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=f"{field} must be positive"):
        Limits(**{field: 0})
