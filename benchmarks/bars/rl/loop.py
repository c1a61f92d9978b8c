"""The asynchronous loop: against its synchronous mode, under kills, what waits for what, and what Ray costs."""

import copy
import math
import random
import statistics
import tempfile
import threading
import time
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks import timing
from benchmarks.bars.harness import Bar, NotMeasured, Run
from rl import actors
from rl.learning import LearnerActor
from rl.rollout import read_batch
from rl.sampler import Sampler
from rl.weights import Publisher, Receiver, Store
from tests.rl_cases import counted, make_base, make_loop
from tests.rl_kills import killed_run
from training.model import Model, ModelConfig

P50_S, P99_S = 0.05, 2.0  # of a tool's latency
SIGMA = math.log(P99_S / P50_S) / statistics.NormalDist().inv_cdf(0.99)
SAMPLES = dict(group_size=8, groups_per_step=4, workers=64, slots=32)
DEMO = dict(
    vocab_size=512, dim=128, num_layers=4, num_heads=4, dense_dim=288, num_experts=8, expert_dim=96, kv_lora_rank=64,
    qk_nope_dim=16, qk_rope_dim=16, v_dim=32,
)  # fmt: skip
HUNDRED_MILLION = dict(
    vocab_size=8192, dim=512, num_layers=4, num_heads=8, dense_dim=2048, num_experts=24, top_k=2, expert_dim=768,
    kv_lora_rank=128, qk_nope_dim=32, qk_rope_dim=32, v_dim=64,
)  # fmt: skip


class Patched:
    """What `make_loop` changes of modules, undone at the end."""

    def __init__(self):
        self.undo = []

    def setattr(self, target, name, value=None):
        if isinstance(target, str):
            module, _, attribute = target.rpartition(".")
            target, name, value = __import__(module, fromlist=["x"]), attribute, name
        self.undo.append((target, name, getattr(target, name)))
        setattr(target, name, value)


@contextmanager
def patched():
    found = Patched()
    try:
        yield found
    finally:
        for target, name, value in reversed(found.undo):
            setattr(target, name, value)


def with_latency(task, model, *args, **kwargs):
    """A rollout whose two tool calls take a time from the log-normal distribution, asleep; keyed by the task and the sample."""
    draw = random.Random(f"{task.name} {model.sample}")
    for _ in range(2):
        time.sleep(min(P50_S * math.exp(SIGMA * draw.gauss(0, 1)), 10.0))
    return counted(task, model, *args, **kwargs)


@cache
def run_of(staleness: int, latency: bool, steps: int) -> tuple[float, list[dict], int]:
    """(samples a second, the steps' numbers, finished samples that were not trained on)."""
    seen: list[dict] = []
    with tempfile.TemporaryDirectory() as directory, patched() as patch:
        base = make_base(Path(directory) / "base", **DEMO)
        carry_out = with_latency if latency else counted
        options = SAMPLES | {"steps": steps, "max_staleness": staleness, "place": "ray"}
        with make_loop(patch, Path(directory) / "run", base, carry_out=carry_out, on_step=seen.append, **options) as loop:
            start = time.monotonic()
            loop.run()
            seconds = time.monotonic() - start
            files = {str(path) for path in (Path(directory) / "run" / "rollouts").rglob("*.safetensors")}
            trained = sum(len(group) for step in range(steps) for group in read_batch(Path(directory) / "run", step))
    return trained / seconds, seen, len(files) - trained


def asynchrony(run: Run) -> float:
    """Samples a second against those of max_staleness=0; without latency in the note."""
    steps = run.count(16, 2)
    fast, slow = (run_of(staleness, True, steps)[0] for staleness in (2, 0))
    plain, synchronous = (run_of(staleness, False, steps)[0] for staleness in (2, 0))
    run.note(f"{fast:.1f} samples/s against {slow:.1f}; without latency {plain:.1f} against {synchronous:.1f}")
    return fast / slow


def too_old(run: Run) -> float:
    """Steps of 512 real samples with a token older than the bound, and finished samples that were thrown away."""
    _, seen, discarded = run_of(2, True, run.count(16, 2))
    run.note(f"{sum(values['samples'] for values in seen)} samples, staleness up to {max(v['staleness'] for v in seen)}")
    return sum(values["staleness"] > 2 for values in seen) + discarded


def waiting(run: Run) -> float:
    """Share of the learner's step in which it waits for the weights to be handed to the publisher."""
    _, seen, _ = run_of(2, True, run.count(16, 2))
    return 100 * sum(v["publish_s"] for v in seen) / sum(v["read_s"] + v["train_s"] + v["publish_s"] for v in seen)


def pause(run: Run) -> float:
    """Milliseconds for which the sampler of 100 M parameters stands still, the longest of several updates at lr 2e-6's density."""
    scale = 1 if not run.quick else 8
    sizes = HUNDRED_MILLION | {"dim": 512 // scale, "expert_dim": 768 // scale}
    model = Model(ModelConfig(**sizes), 0).to(torch.bfloat16)
    state = {name: p.data for name, p in model.named_parameters()}
    run.note(f"{sum(t.numel() for t in state.values()) / 1e6:.0f} M parameters in BF16")
    sampler = Sampler(model, num_slots=2, capacity=32)
    learner = copy.deepcopy(state)
    times = []
    with tempfile.TemporaryDirectory() as directory, Publisher(Store(directory)) as publisher:
        receiver = Receiver(Store(directory), state)
        for version in range(6):
            publisher.publish(learner, version).result()
            update = receiver.fetch()
            times.append(timing.once(partial(sampler.update, partial(receiver.apply, update), version)))
            for t in learner.values():
                moved = torch.rand(t.shape) < 0.02
                t.copy_(torch.where(moved, t * 1.01, t))
    return 1e3 * max(times[1:])


def ray_overhead(run: Run) -> float:
    """Per cent that a call through Ray adds to a step of 32 samples and to its exchanges, over the time between steps."""
    _, seen, _ = run_of(2, True, run.count(16, 2))
    inside = sum(v["read_s"] + v["train_s"] + v["publish_s"] for v in seen)
    outside = sum(v["step_s"] for v in seen)
    seconds = seen[-1]["seconds"] - seen[0]["seconds"] or math.inf
    actor = actors.start(Echo, on="ray")
    count = run.count(300, 20)
    per_call = timing.once(lambda: [actor.ask("pid") for _ in range(count)]) / count
    actor.end()
    calls = 1 / 0.05  # exchanges a second, one under way at a time; each waits up to 50 ms for answers
    run.note(f"{1e3 * per_call:.2f} ms a call, {1e3 * (outside - inside) / len(seen):.1f} ms a step beside the learner's own time")
    return 100 * ((outside - inside) / seconds + calls * per_call)


class Echo:
    """An actor that does nothing."""

    def pid(self) -> int:
        return threading.get_native_id()

    def close(self) -> None:
        pass


def broken_by_kills(run: Run) -> float:
    """Samples lost or trained twice, bad weights, processes and files left over, after 40 kills -9."""
    kills = run.count(40, 2)
    with tempfile.TemporaryDirectory() as directory:
        found = killed_run(Path(directory), kills, 4 * kills, seed=3)
    run.note(", ".join(f"{name} {count}" for name, count in found.pop("kills").items()))
    run.note(", ".join(f"{name} {count}" for name, count in found.items() if count) or "nothing amiss")
    return sum(found.values())


def differing_after_resume(run: Run) -> float:
    """Tensors of weights that differ between a run and one that was ended at half of its steps and gone on with."""
    steps = run.count(8, 2)
    weights = []
    with tempfile.TemporaryDirectory() as directory, patched() as patch:
        base = make_base(Path(directory) / "base")
        for name, cuts in (("whole", [steps]), ("cut", [steps // 2, steps])):
            for cut in cuts:
                options = dict(steps=cut, max_staleness=0, deterministic=True, save_every=3, place="inline")
                with make_loop(patch, Path(directory) / name, base, **options) as loop:
                    loop.run()
            place = Path(directory) / name
            actor = LearnerActor(str(base), str(place), str(place / "weights"), step=steps, lr=3e-3)
            weights.append({name: p.detach().clone() for name, p in actor.learner.model.named_parameters()})
            actor.close()
    whole, cut = weights
    return sum(not torch.equal(whole[name], cut[name]) for name in whole)


def with_ray(measure):
    def measured(run: Run) -> float:
        try:
            actors.connect()
        except ImportError:
            raise NotMeasured("Ray is not installed") from None
        return measure(run)

    return measured


BARS = [
    Bar("samples/s against max_staleness=0, with tools' latency", ">=", 1.4, "x", with_ray(asynchrony), "ratio"),
    Bar("512 real samples: beyond the bound, or discarded", "<=", 0, "steps and samples", with_ray(too_old)),
    Bar("learner waits for weight sync", "<", 1, "% of its step", with_ray(waiting)),
    Bar("sampler's pause for new weights, 100 M parameters", "<", 200, "ms", pause),
    Bar("Ray's overhead", "<", 5, "% of the time", with_ray(ray_overhead)),
    Bar("40 kills -9 of learner, sampler, sandboxes, reconciler", "<=", 0, "faults", broken_by_kills, long=True),
    Bar("resumed run against a whole one, deterministic mode", "<=", 0, "differing tensors", differing_after_resume),
]
