"""Checkpoints of runs: whole or absent, whatever happens while they are written."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.test_train import assert_same_state, cache_dir, config, corpus  # noqa: F401
from training.checkpoint import Checkpoints, read_state
from training.config import changed
from training.train import Trainer


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def data_file(path: Path) -> Path:
    return path / "__0_0.distcp"


def test_state_round_trips(tmp_path):
    state = {
        "config": {"lr": 0.1, "corpus": "x"}, "step": 3, "order": [1, 2],
        "model": {"layers.0.w": torch.randn(3, 4), "half": torch.randn(5).bfloat16(), "none": torch.empty(0)},
        "optimizer": {"layers.0.w": {"step": torch.tensor(7.0), "exp_avg": torch.randn(3, 4)}}, "moments": {},
    }  # fmt: skip
    path = Checkpoints(tmp_path).save(3, state)
    assert_same_state(Checkpoints(tmp_path).load(), state)
    own = torch.zeros(3, 4)
    loaded = read_state(path, {"model": {"layers.0.w": own, "half": torch.zeros(5)}}, only="model")
    assert loaded.keys() == {"model"}
    assert loaded["model"]["layers.0.w"].data_ptr() == own.data_ptr()
    assert loaded["model"]["half"].dtype == torch.bfloat16  # of the file: the target did not fit
    assert_same_state(loaded["model"], state["model"])


def test_saving_in_the_background_keeps_the_values_of_the_call(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    x = torch.zeros(1_000_000)
    path = checkpoints.save(1, {"x": x}, background=True)
    x += 1.0
    checkpoints.wait()
    assert float(read_state(path)["x"].abs().max()) == 0.0


def test_t17_truncated_newest_checkpoint_gives_way_to_the_one_before(config):  # noqa: F811
    trainer = Trainer.start(config)
    trainer.train_step()
    good = trainer.save()
    kept = {name: v.clone() for name, v in trainer.model.state_dict().items()}
    good_bytes = contents(good)
    trainer.train_step()
    damaged = trainer.save()
    data_file(damaged).write_bytes(data_file(damaged).read_bytes()[:-1000])
    truncated = contents(damaged)
    with pytest.warns(UserWarning, match=f"damaged checkpoint left untouched: {damaged}"):
        resumed = Trainer.resume(config.run_dir)
    assert resumed.step == 1
    assert_same_state(dict(resumed.model.state_dict()), kept)
    assert (contents(good), contents(damaged)) == (good_bytes, truncated)
    resumed.train_step()
    assert resumed.save() == damaged  # step 2 again: the new one takes the name, the damaged bytes are kept beside it
    assert contents(damaged.with_suffix(".damaged")) == truncated
    assert Trainer.resume(config.run_dir).step == 2


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "sha256.json"])
@pytest.mark.parametrize("damage", ["flip", "empty", "text", "missing"])
def test_t17_any_damage_is_noticed(tmp_path, name, damage):
    path = Checkpoints(tmp_path).save(3, {"x": torch.arange(10000), "step": 3})
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes({"flip": bytes(data), "empty": b"", "text": b"not a checkpoint"}[damage])
    with pytest.raises(ValueError, match=f"every checkpoint is damaged; left untouched: {path}"):
        Checkpoints(tmp_path).load()
    assert path.exists()


def test_t17_killed_while_saving(tmp_path):
    """A temporary directory of a save that never finished is not a checkpoint, and the next save removes it."""
    Checkpoints(tmp_path).save(10, {"step": 10})
    (tmp_path / "step-00000020.tmp").mkdir()
    (tmp_path / "step-00000020.tmp" / "__0_0.distcp").write_bytes(b"half")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load() == {"step": 10}
    checkpoints.save(20, {"step": 20})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_t17_full_disk_leaves_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, {"step": 10})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step-00000020 cannot be written: File too large"):
            checkpoints.save(20, {"x": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert Checkpoints(tmp_path).load() == {"step": 10}


def test_a_failed_background_save_is_reported_by_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path / "x")
    (tmp_path / "x").write_text("in the way")
    checkpoints.save(1, {"step": 1}, background=True)
    with pytest.raises(OSError, match=r"step-00000001 cannot be written|File exists"):
        checkpoints.save(2, {"step": 2})


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"step": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert Checkpoints(tmp_path).load() == {"step": 4}


# --- kill -9 ---------------------------------------------------------------------------------------------------------

CALLS = ("fsync", "rename", "mkdir", "replace", "unlink", "rmdir")  # of the operating system, before which a save may be killed


def killed_save(directory: Path, step: int, state: dict, call: int) -> bool:
    """Saves in a child that is killed before its `call`-th such call; whether the child was."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def before(function):
            def counted(*args, **kwargs):
                nonlocal count
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1
                return function(*args, **kwargs)

            return counted

        for name in CALLS:
            setattr(os, name, before(getattr(os, name)))
        checkpoints = Checkpoints(directory)
        checkpoints.newest()
        checkpoints.save(step, state)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_t17_killed_before_every_system_call_of_a_save(tmp_path):
    states = {step: {"x": torch.full((1000,), float(step)), "step": step} for step in (1, 2, 3)}
    newest = set()
    for call in range(100):
        directory = tmp_path / str(call)
        checkpoints = Checkpoints(directory)
        for step in (1, 2):
            checkpoints.save(step, states[step])
        was_killed = killed_save(directory, 3, states[3], call)
        loaded = Checkpoints(directory).load()
        assert_same_state(loaded, states[loaded["step"]])
        newest.add(loaded["step"])
        after = Checkpoints(directory)
        after.newest()
        after.save(4, {"step": 4})
        assert Checkpoints(directory).load() == {"step": 4}
        if not was_killed:
            break
    assert newest == {2, 3}
    assert call > 8


def ranks(rank: int, directory: str, port: int) -> None:
    """Two ranks save what each holds and read it back."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    group = torch.distributed.new_group(backend="gloo")
    checkpoints = Checkpoints(Path(directory), group=group)
    checkpoints.save(5, {"step": 5, f"of{rank}": {"x": torch.full((3,), float(rank))}, "both": torch.arange(4)}, background=True)
    checkpoints.wait()
    state = Checkpoints(Path(directory), group=group).load()
    assert state["step"] == 5
    assert [state[f"of{r}"]["x"].tolist() for r in (0, 1)] == [[0.0] * 3, [1.0] * 3]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_ranks_save_and_one_reads(tmp_path):
    with __import__("socket").socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(ranks, (str(tmp_path), port), nprocs=2, start_method="fork")
    state = Checkpoints(tmp_path).load()
    assert state["both"].tolist() == [0, 1, 2, 3]
    assert len(json.loads((tmp_path / "step-00000005" / "sha256.json").read_text())) == 4


# --- whole runs, killed ----------------------------------------------------------------------------------------------


def in_child(function) -> int:
    """Process id of a child that runs the function on one thread."""
    pid = os.fork()
    if pid == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        try:
            function()
        finally:
            os._exit(0)
    return pid


def test_run_killed_at_random_moments_goes_on_bitwise(config, tmp_path):  # noqa: F811
    steps, rng = 30, random.Random(0)
    killed = changed(config, steps=steps, save_every=1, trackers="", run_dir=str(tmp_path / "killed"), recipe="mxfp8")

    def whole():
        trainer = Trainer.start(changed(killed, run_dir=str(tmp_path / "whole"), keep=steps + 1))
        for _ in range(steps):
            trainer.train_step()
            trainer.save()

    os.waitpid(in_child(whole), 0)
    checkpoints = Checkpoints(Path(killed.run_dir, "checkpoints"))

    def run():
        (Trainer.resume(killed.run_dir) if checkpoints.paths() else Trainer.start(killed, overwrite=True)).run("")

    def check():
        newest = checkpoints.newest()
        assert_same_state(read_state(newest), read_state(tmp_path / "whole" / "checkpoints" / newest.name))
        return newest.name

    for _ in range(4):
        pid, before, deadline = in_child(run), checkpoints.paths()[:1], time.monotonic() + 60
        while checkpoints.paths()[:1] == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check()
    os.waitpid(in_child(run), 0)
    assert check() == f"step-{steps:08d}"
