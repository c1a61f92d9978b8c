"""Properties of the run's small parts: the curriculum, held-out evaluations, files of rollouts and batches."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rl.heldout import Evaluation, gain
from rl.hints import HintedTurn
from rl.prompts import Curriculum, level_of
from rl.rewards import Reward
from rl.rollout import Rollout, read_batch, write_batch
from rl.segments import Segment
from tests.rl_cases import task_of

FEW = settings(max_examples=40)


class Limited:
    """So many prompts at each level."""

    def __init__(self, counts):
        self.counts, self.levels = counts, len(counts)

    def name(self, level, number):
        return f"{level}:{number}" if number < self.counts[level] else None


@FEW
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 30), st.randoms(use_true_random=False)
)
def test_a_curriculum_gives_every_prompt_once_also_across_a_restart(counts, seed, cut, rng):
    def taken(curriculum, steps, rng):
        for _ in range(steps):
            name = curriculum.next()
            yield name
            if name is not None:
                curriculum.learned(level_of(name), rng.random())

    state = rng.getstate()
    whole = list(taken(Curriculum(Limited(counts), seed), sum(counts) + 2, rng))
    assert whole[-2:] == [None, None]
    assert sorted(whole[:-2]) == sorted(f"{level}:{i}" for level, n in enumerate(counts) for i in range(n))
    rng.setstate(state)
    first = Curriculum(Limited(counts), seed)
    cut = min(cut, sum(counts) + 2)
    part = list(taken(first, cut, rng))
    again = Curriculum(Limited(counts), seed)
    again.load_json(first.to_json())
    assert [*part, *taken(again, sum(counts) + 2 - cut, rng)] == whole
    with pytest.raises(ValueError, match="expected the state of"):
        Curriculum(Limited([*counts, 1])).load_json(first.to_json())


def evaluation(scores):
    tasks = [task_of(i, 0) for i in range(len(scores))]
    return Evaluation("e", 3, tasks, len(scores[0]))


def rollout_of(solved, kinds=()):
    results = [{"extra": {"kind": kind}} for kind in kinds]
    steps = [{"source": "user"}, {"source": "agent", "observation": {"results": results}}]
    segments = [Segment([1, 2], [False, True], [0.0, -1.0], [-1, 0])]
    return Rollout("0:1", segments, Reward({"solved": solved}), solved, "resolved", {"steps": steps})


@FEW
@given(st.integers(0, 2**31), st.integers(2, 7), st.integers(1, 4), st.floats(0, 0.9))
def test_an_evaluation_is_numpys_mean_and_scipys_paired_error(tmp_path_factory, seed, tasks, samples, failing):
    rng = np.random.default_rng(seed)
    lots = [(rng.random((tasks, samples)) < p).astype(float) for p in (0.3, 0.7)]
    saved = []
    for scores in lots:
        made = evaluation(scores)
        while (found := made.next()) is not None:
            assert not made.is_done
            if rng.random() < failing:
                made.again(*found)
            else:
                made.add(*found, rollout_of(scores[found], ["ok", "invalid", "ok"]))
        assert made.is_done
        report = made.report()
        for name, each in (("mean", scores.mean(1)), ("best", scores.max(1))):
            assert report[name] == pytest.approx(each.mean())
            assert report[f"{name}_error"] == pytest.approx(stats.sem(each))
        assert report["parsed"] == pytest.approx(2 / 3)
        assert (report["calls"], report["tokens"]) == (3, 1)
        directory = tmp_path_factory.mktemp("evaluation")
        made.save(directory)
        saved.append(json.loads((directory / "e.json").read_text()))
    found = gain(*saved)
    for name, of in (("mean", np.mean), ("best", np.max)):
        differences = of(lots[1], 1) - of(lots[0], 1)
        difference, error = found[name]
        assert difference == pytest.approx(differences.mean(), abs=1e-12)
        if error > 1e-9:
            paired = stats.ttest_rel(of(lots[1], 1), of(lots[0], 1))
            assert difference / error == pytest.approx(paired.statistic)
    del saved[1]["scores"][next(iter(saved[1]["scores"]))]
    with pytest.raises(ValueError, match="the same tasks"):
        gain(*saved)


def random_rollout(seed):
    rng = np.random.default_rng(seed)
    segments = []
    for _ in range(rng.integers(0, 4)):
        n = int(rng.integers(1, 20))
        mask = (rng.random(n) < 0.5).tolist()
        experts = rng.integers(-1, 99, (n, 2, 3)).astype(np.int16) if rng.random() < 0.5 else None
        log_probs = [float(np.float32(-rng.exponential())) if m else 0.0 for m in mask]
        segments.append(Segment(rng.integers(0, 2**17, n).tolist(), mask, log_probs, rng.integers(-1, 99, n).tolist(), experts))
    reward = Reward({"solved": float(rng.random()), "effort": -0.1}) if rng.random() < 0.8 else Reward({}, False, "gone")
    words = ["\U0001f600 \u2028 \udc80", "", "a\nb\0", "é"]
    text = words[rng.integers(4)]
    trajectory = {"steps": [{"source": "agent", "message": text}]}
    hints = (HintedTurn((5, 6, 7), (5, 2**17, 6, 7), 2),) * int(rng.integers(3))
    solved = None if rng.random() < 0.2 else 0.5
    return Rollout("1:2", segments, reward, solved, "x", trajectory, text, 1.5, {"a": 0.5}, hints, {"group": 3})


def same(a, b):
    for x, y in zip(a.segments, b.segments, strict=True):
        assert (x.ids, x.mask, x.log_probs, x.versions) == (y.ids, y.mask, y.log_probs, y.versions)
        assert (x.experts is None and y.experts is None) or np.array_equal(x.experts, y.experts)
    assert {k: v for k, v in vars(a).items() if k != "segments"} == {k: v for k, v in vars(b).items() if k != "segments"}


@FEW
@given(st.integers(0, 2**31), st.floats(0, 1), st.sampled_from(["cut", "flip", "empty", "gone"]))
def test_rollouts_and_batches_are_as_they_were_or_refused(tmp_path_factory, seed, where, damage):
    """A damaged file gives an error or what was saved, never something else silently shorter or a crash of another kind."""
    run_dir = tmp_path_factory.mktemp("run")
    rollouts = {f"rollouts/{i}.safetensors": random_rollout(seed + i) for i in range(3)}
    for name, rollout in rollouts.items():
        rollout.save(run_dir / name)
        same(Rollout.load(run_dir / name), rollout)
    names = list(rollouts)
    write_batch(run_dir, 4, [names[:2], names[2:], []])
    batch = read_batch(run_dir, 4)
    assert [len(group) for group in batch] == [2, 1]  # a group without a sample is none
    assert [(s.reward, s.hints) for group in batch for s in group] == [(r.reward.total, r.hints) for r in rollouts.values()]
    assert not list(run_dir.rglob("*.part"))
    rng = random.Random(seed)
    path = run_dir / (rng.choice(names) if rng.random() < 0.7 else "batches/00000004.json")
    data = bytearray(path.read_bytes())
    at = min(int(where * len(data)), len(data) - 2)  # a batch that lost its last line end has lost nothing
    if damage == "flip":
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data[:at] if damage == "cut" else data if damage == "flip" else b"")
    if damage == "gone":
        path.unlink()
    try:
        found = read_batch(run_dir, 4)
    except (ValueError, OSError):
        return
    assert damage == "flip"  # a bit of a value: still a batch, of whole tensors
    assert all(torch.tensor(segment.mask).numel() == len(segment.ids) for group in found for s in group for segment in s.segments)
