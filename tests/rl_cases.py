"""A run without sandboxes, for tests of the loop: a random model, tasks that are names, and a verifier that counts a token."""

from dataclasses import asdict
from pathlib import Path

from rl import workers
from rl.config import RunConfig
from rl.harness.builtin import SamplerModel
from rl.harness.toolsets import tool_set
from rl.loop import Loop
from rl.prompts import Family
from rl.rewards import Reward
from rl.rollout import Rollout
from rl.segments import segments_of
from rl.tasks.task import Task
from training.checkpoint import Checkpoints
from training.config import Config, flat
from training.model import Model, ModelConfig

MODEL = dict(
    vocab_size=64, dim=32, num_layers=2, num_heads=2, dense_dim=64, num_experts=4, top_k=2, expert_dim=32, kv_lora_rank=16,
    qk_nope_dim=8, qk_rope_dim=8, v_dim=8, recipe="fp32",
)  # fmt: skip
GOOD = 7  # the token that earns
STEPS = dict(group_size=4, groups_per_step=2, workers=8, slots=8, capacity=64, eval_every=0, heldout_tasks=0, trackers="", lr=3e-3)


class Digits:
    """A dialect of token ids alone."""

    turn = 1
    stop = frozenset((1,))

    def prompt(self, messages, tools):
        return [2, *(3 + int(digit) for digit in messages[0]["content"])]

    def more(self, messages):
        return [3]

    def parsed(self, ids):
        return "", "", []

    def text(self, ids):
        return ""


def make_base(directory: Path, **changes) -> Path:
    """A checkpoint of random weights."""
    model = Model(ModelConfig(**MODEL | changes), seed=0)
    values = {"config": flat(Config()), "model_config": asdict(model.config)}
    return Checkpoints(directory / "checkpoints").save(0, {"model": model.state_dict(), **values})


def counted(task, model: SamplerModel, sandboxes, tools, settings, weights, *, on_end, verify, hinting) -> Rollout:
    """Two replies, and the share of good tokens in them as the result."""
    messages = [{"role": "user", "content": task.instruction}]
    for _ in range(2):
        messages.append(model.reply(messages, [], 6, 30.0).message)
        messages.append({"role": "tool", "content": "", "tool_call_id": "x"})
    on_end()
    ids = [token for answer in model.answers for token in answer.ids]
    solved = sum(token == GOOD for token in ids) / len(ids)
    trajectory = {"steps": [{"source": "agent"}, {"source": "agent"}]}
    return Rollout(task.name, segments_of(model.answers), Reward({"solved": solved}), solved, "resolved", trajectory)


class NoSandboxes:
    """In place of `Environments`."""

    renewals = 0

    def __init__(self, *_):
        self.backend = self

    def current(self):
        return self

    def alive(self):
        return True

    def close(self):
        pass


def task_of(seed: int, level: int) -> Task:
    return Task(name=f"digits/{level}-{seed}", instruction=str(seed))


def make_loop(monkeypatch, run_dir: Path, base: Path, *, carry_out=counted, on_step=lambda values: None, **changes) -> Loop:
    monkeypatch.setattr(workers, "roll_out", carry_out)
    monkeypatch.setattr("rl.loop.Environments", NoSandboxes)
    config = RunConfig(**STEPS | {"run_dir": str(run_dir), "place": "inline"} | changes)
    heldout = [task_of(i, 0) for i in range(1000, 1004)]
    return Loop(config, base, Family(task_of, 2), heldout, Digits(), tool_set([]), on_step=on_step)
