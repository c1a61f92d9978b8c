"""The asynchronous loop, in one process and with Ray: it learns, keeps its bound, loses nothing, and goes on after any death."""

import json
import math
import os
import signal
import threading
import time
from dataclasses import fields

import pytest
import torch

from rl.actors import connect
from rl.config import RunConfig
from rl.environments.sandbox import SandboxLost
from rl.hints import HintedTurn
from rl.learning import LearnerActor
from rl.rewards import BEHAVIOURS, RewardWeights
from rl.rollout import Rollout, read_batch
from rl.sampling import SamplerClient
from rl.weights import Store
from tests.rl_cases import GOOD, counted, make_base, make_loop


@pytest.fixture(scope="module")
def ray_cluster():
    ray = pytest.importorskip("ray", reason="Ray is an extra")
    connect()
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


def weights_of(run_dir, base, step):
    """What a fresh learner of the run has."""
    actor = LearnerActor(str(base), str(run_dir), str(run_dir / "weights"), step=step, lr=3e-3)
    state = {name: p.detach().clone() for name, p in actor.learner.model.named_parameters()}
    actor.close()
    return state


def test_a_run_learns_and_keeps_its_bound(monkeypatch, tmp_path, base):
    seen = []
    with make_loop(monkeypatch, tmp_path / "run", base, steps=25, max_staleness=2, lr=1e-2, on_step=seen.append) as loop:
        assert loop.run()
        assert loop.reconciler.counts["done"] == 25 * 8
        assert not loop.reconciler.groups
    assert [values["step"] for values in seen] == list(range(1, 26))
    assert max(values["staleness"] for values in seen) <= 2
    first, last = (sum(v["solved"] for v in part) / 5 for part in (seen[:5], seen[-5:]))
    assert last > first + 0.1
    assert max(v["largest_log_ratio"] for v in seen[:1]) < 1e-4  # the first step trains what its own weights sampled


def test_every_trained_token_is_in_the_files_of_its_batch(monkeypatch, tmp_path, base):
    with make_loop(monkeypatch, tmp_path, base, steps=4) as loop:
        assert loop.run()
    files = [name for i in range(4) for group in json.loads((tmp_path / f"batches/{i:08d}.json").read_text()) for name in group]
    assert len(files) == len(set(files)) == 32
    for step in range(4):
        for group in read_batch(tmp_path, step):
            assert all(segment.oldest >= step - 2 for sample in group for segment in sample.segments)
    rollout = Rollout.load(tmp_path / files[0])
    assert rollout.solved == rollout.train_sample.reward
    assert rollout.where["group"] == 0


def test_synchronous_runs_are_the_same_bits_also_across_a_restart(monkeypatch, tmp_path, base):
    for name, cuts in (("whole", (6,)), ("cut", (2, 3, 6))):
        for steps in cuts:
            with make_loop(
                monkeypatch, tmp_path / name, base, steps=steps, max_staleness=0, deterministic=True, save_every=2
            ) as loop:
                assert loop.run()
                assert loop.reconciler.step == steps
    whole, cut = (weights_of(tmp_path / name, base, 6) for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_dead_actors_are_replaced_and_the_weights_are_those_of_a_quiet_run(monkeypatch, tmp_path, base, ray_cluster):
    options = dict(steps=6, max_staleness=0, deterministic=True, save_every=3)
    killed = []

    def kill():
        """The learner in two steps, the sampler in two others: while they work."""
        step = loop.reconciler.step
        if step in killed or loop.learner_busy != (step % 2 == 0):
            return
        if step < 4:
            killed.append(step)
            os.kill(loop.pids["learner" if step % 2 == 0 else "sampler-0"], signal.SIGKILL)

    with make_loop(monkeypatch, tmp_path / "killed", base, place="ray", **options) as loop:
        assert loop.run(on_tick=kill)
        assert killed == [0, 1, 2, 3]
        assert loop.learner_restarts == 2
        assert loop.clients[0].restarts == 2
    with make_loop(monkeypatch, tmp_path / "quiet", base, **options) as loop:
        assert loop.run()
    killed, quiet = (weights_of(tmp_path / name, base, 6) for name in ("killed", "quiet"))
    assert all(torch.equal(killed[name], quiet[name]) for name in quiet)


@pytest.mark.parametrize("dies", ["run", "node"])
def test_what_was_under_way_goes_on_from_its_answers(monkeypatch, tmp_path, base, dies):
    asked, begun, replied, go = [], [], [], threading.Event()
    real = SamplerClient.answer

    def answer(self, request, deadline):
        asked.append(request.sample)
        return real(self, request, deadline)

    def half(task, model, *arguments, **options):
        """Lost after its first reply, for the first eight."""
        if len(begun) >= 8:
            return counted(task, model, *arguments, **options)
        begun.append(task)
        replied.append(model.reply([{"role": "user", "content": task.instruction}], [], 6, 30.0))
        go.wait(30)
        raise SandboxLost("gone")

    monkeypatch.setattr(SamplerClient, "answer", answer)
    options = dict(steps=3, max_staleness=0)
    with make_loop(monkeypatch, tmp_path, base, carry_out=half, **options) as loop:
        if dies == "run":
            assert not loop.run(stopped=lambda: len(replied) == 8)
            loop.workers._closed.set()
        else:
            monkeypatch.setattr(loop.environments, "alive", lambda: False)
            monkeypatch.setattr(loop.environments, "renew", lambda dead: None, raising=False)
        go.set()
        if dies == "node":
            assert loop.run()
    if dies == "run":
        with make_loop(monkeypatch, tmp_path, base, **options) as loop:
            assert loop.run()
    assert len(asked) == 3 * 8 * 2
    assert len(set(asked)) == len(asked)
    assert not list((tmp_path / "underway").iterdir())


def test_an_outage_of_the_store_is_waited_out(monkeypatch, tmp_path, base):
    seen, refused = [], []

    def write(self, name, data):
        if loop.reconciler.step >= 2 and (not refused or time.monotonic() < refused[0] + 0.5):
            refused.append(time.monotonic())
            raise OSError(28, "No space left on device")
        return written(self, name, data)

    written = Store.write
    with make_loop(monkeypatch, tmp_path, base, steps=5, on_step=seen.append) as loop:
        monkeypatch.setattr(Store, "write", write)
        monkeypatch.setattr("rl.loop.LATE_S", 0.1)
        assert loop.run()
        loop.evaluate("after", loop.heldout, 1)  # waits for the last version
        assert min(loop.versions) == 5
    assert refused
    assert sum(values.get("sync_failures", 0) for values in seen) > 0
    assert max(values["staleness"] for values in seen if "staleness" in values) <= 2


def test_the_kl_from_the_base_begins_at_nothing(monkeypatch, tmp_path, base):
    """Across a restart, too: the reference stays the base. Rewards are what was solved less the weighted KL."""
    seen = []
    options = dict(max_staleness=0, deterministic=True, kl_weight=0.1, lr=1e-2, save_every=2, on_step=seen.append)
    for steps in (3, 6):
        with make_loop(monkeypatch, tmp_path, base, steps=steps, **options) as loop:
            assert loop.run()
    assert seen[0]["kl"] == 0
    assert seen[0]["reward"] == pytest.approx(seen[0]["solved"])
    assert seen[-1]["kl"] > 1e-3
    assert all(v["reward"] == pytest.approx(v["solved"] - 0.1 * v["kl"], abs=1e-6) for v in seen)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_hinted_turns_are_trained_on_where_asked_for(monkeypatch, tmp_path, base, weight):
    """Also in steps that are taken again after a restart."""

    def hinted(*args, hinting, **kwargs):
        rollout = counted(*args, hinting=hinting, **kwargs)
        ids = tuple(rollout.segments[0].ids)
        rollout.hints = (HintedTurn(ids, (ids[0], GOOD, *ids[1:]), 3),) if hinting else ()
        return rollout

    seen = []
    options = dict(carry_out=hinted, hint_weight=weight, save_every=10, on_step=seen.append)
    for steps in (2, 4):
        with make_loop(monkeypatch, tmp_path, base, steps=steps, **options) as loop:
            assert loop.run()
            assert loop.learner._made.replayed == (0 if steps == 2 else 2)
    assert [v.get("hint_kl", 0.0) > 0 for v in seen] == [weight > 0] * 4


def test_behaviours_are_told_and_change_no_reward(monkeypatch, tmp_path, base):
    def terminal(*args, **kwargs):
        rollout = counted(*args, **kwargs)
        rollout.behaviours = {"terminal_only": 1.0, "open_todos": 0.25}
        return rollout

    seen = []
    for steps in (5, 9):  # a restart forgets none
        with make_loop(monkeypatch, tmp_path, base, steps=steps, carry_out=terminal, on_step=seen.append) as loop:
            assert loop.run()
    assert all(
        (v["behaviour/terminal_only"], v["behaviour/open_todos"], v["behaviour/invalid_calls"]) == (1, 0.25, 0) for v in seen
    )
    alarm = "terminal_only: 1.00 of the last 64 runs, 1.00 of the first"
    assert [v["alarms"] for v in seen] == [""] * 7 + [alarm] * 2
    assert all(v["reward"] == pytest.approx(v["solved"]) for v in seen)


def test_weights_of_rewards_are_flat_fields():
    config = RunConfig(effort_weight=0.2, effort_k=2.0, effort_q=1.0, open_todos_weight=0.3, invalid_calls_weight=0.0)
    assert config.reward_weights == RewardWeights(0.2, 2.0, 1.0, {"open_todos": 0.3})
    assert {f"{name}_weight" for name in BEHAVIOURS} < {f.name for f in fields(RunConfig)}
    for wrong, said in (({"effort_k": 0.0}, "effort_k must be positive"), ({"kl_estimator": "k2"}, "kl_estimator must be one of")):
        with pytest.raises(ValueError, match=said):
            RunConfig(**wrong)
    with pytest.raises(ValueError, match="context_tokens must be less than capacity"):
        RunConfig(context_tokens=640)


def test_failures_of_the_machinery_are_no_rewards(monkeypatch, tmp_path, base):
    calls = []

    def sometimes(task, *args, **kwargs):
        calls.append(task.name)
        if len(calls) % 5 == 0:
            raise SandboxLost("gone")
        return counted(task, *args, **kwargs)

    seen = []
    with make_loop(monkeypatch, tmp_path, base, steps=3, carry_out=sometimes, on_step=seen.append) as loop:
        assert loop.run()
        assert len(loop.failures) >= 4
    assert sum(values["samples"] for values in seen) == 24
    assert all(math.isfinite(values["reward"]) for values in seen)


def test_a_fault_of_the_program_ends_the_run_with_its_error(monkeypatch, tmp_path, base):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a fault")

    with (
        make_loop(monkeypatch, tmp_path, base, steps=3, carry_out=broken) as loop,
        pytest.raises(ZeroDivisionError, match="a fault"),
    ):
        loop.run()


def test_groups_that_failed_are_left_out_and_a_step_without_any_sample_is_an_error(monkeypatch, tmp_path, base):
    def fails(wanted):
        def carry_out(task, *args, **kwargs):
            if wanted(int(task.instruction)):
                raise SandboxLost("gone")
            return counted(task, *args, **kwargs)

        return carry_out

    seen = []
    with make_loop(monkeypatch, tmp_path / "some", base, steps=3, carry_out=fails(lambda n: n == 1), on_step=seen.append) as loop:
        assert loop.run()
        assert loop.reconciler.counts["failed"] in (4, 8)  # of every level that came to its second prompt
    assert sum(values["samples"] for values in seen) == 24 - loop.reconciler.counts["failed"]
    loop = make_loop(monkeypatch, tmp_path / "all", base, steps=5, carry_out=fails(lambda n: True))
    with loop, pytest.raises(RuntimeError, match=r"no sample of 3 steps .* gone"):
        loop.run()


@pytest.mark.parametrize("save_every", [2, 8])  # on the way, and when the run is over
@pytest.mark.parametrize("fails", ["save", "_write"])  # at once, and in the background
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_nothing_is_lost(monkeypatch, tmp_path, base, save_every, fails):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, make_loop(patch, tmp_path, base, steps=8, save_every=save_every) as loop:
        patch.setattr(loop.learner._made.checkpoints, fails, full)
        with pytest.raises(OSError, match="No space left"):
            loop.run()
    with make_loop(monkeypatch, tmp_path, base, steps=8, save_every=save_every) as loop:
        assert loop.reconciler.step >= save_every  # from the batches: there is no checkpoint
        assert loop.run()
        assert loop.reconciler.step == 8


def test_a_directory_of_another_run_is_refused(monkeypatch, tmp_path, base):
    with make_loop(monkeypatch, tmp_path, base, steps=1) as loop:
        loop.run()
    with pytest.raises(ValueError, match="another group_size"):
        make_loop(monkeypatch, tmp_path, base, steps=1, group_size=8)


def test_evaluations(monkeypatch, tmp_path, base):
    seen = []
    with make_loop(monkeypatch, tmp_path, base, steps=4, eval_every=2, on_step=seen.append) as loop:
        before = loop.evaluate("before", loop.heldout, 3)
        assert loop.run()
        after = loop.evaluate("after", loop.heldout, 3)
    assert before["version"] == 0
    assert after["version"] == 4
    assert before["best"] >= before["mean"]
    assert {path.stem for path in (tmp_path / "evaluations").glob("*.json")} == {"before", "after", "step-00000002"}
    assert [v["step"] for v in seen if "heldout/mean" in v] == [0, 2, 4]
