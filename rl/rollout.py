"""One sample from start to end: a sandbox, the agent in it, the tests in another, and what is kept of it.

    rollout = roll_out(task, model, sandboxes, tools, settings)      # raises SandboxError: the machinery's fault
    rollout.save(path); Rollout.load(path)

A file of a rollout is one safetensors file: tokens, masks, log-probabilities, versions and experts as tensors, the rest as JSON.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from rl.evals.runner import Settings, attempt
from rl.evals.suites import Entry
from rl.harness.builtin import SamplerModel
from rl.harness.schema import ToolSet
from rl.harness.trajectory import Trajectory
from rl.hints import HintedTurn, hints_of
from rl.learner import TrainSample
from rl.rewards import Effort, Reward, RewardWeights, behaviours_of, reward_of
from rl.segments import Segment, segments_of
from rl.tasks.task import Task
from rl.tasks.verification import Verdict, verify
from rl.tasks.workspace import Sandboxes


@dataclass
class Rollout:
    """What is kept of a sample. solved: the verifier's result; None: it gave none. trajectory: as ATIF."""

    prompt: str
    segments: list[Segment]
    reward: Reward
    solved: float | None
    status: str
    trajectory: dict = field(repr=False, default_factory=dict)
    patch: str = ""
    seconds: float = 0.0
    behaviours: dict[str, float] = field(default_factory=dict)  # shares, see rl.rewards
    hints: tuple[HintedTurn, ...] = ()
    where: dict = field(default_factory=dict)  # sample, group, attempt, worker: as the reconciler has them

    @property
    def train_sample(self) -> TrainSample:
        return TrainSample(self.segments, self.reward.total, self.hints)

    @property
    def calls(self) -> list[str]:
        """Kinds of what its calls gave: ok, error, invalid."""
        observed = (step.get("observation", {}).get("results", ()) for step in self.trajectory.get("steps", ()))
        return [result["extra"]["kind"] for results in observed for result in results]

    @property
    def tokens(self) -> int:
        """Those that the model chose."""
        return sum(sum(segment.mask) for segment in self.segments)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        tensors = {}
        for i, s in enumerate(self.segments):
            tensors |= {
                f"{i}.ids": torch.tensor(s.ids, dtype=torch.int32),
                f"{i}.mask": torch.tensor(s.mask, dtype=torch.bool),
                f"{i}.log_probs": torch.tensor(s.log_probs, dtype=torch.float64),
                f"{i}.versions": torch.tensor(s.versions, dtype=torch.int32),
            }
            if s.experts is not None:
                tensors[f"{i}.experts"] = torch.from_numpy(s.experts.copy())
        rest = {name: value for name, value in vars(self).items() if name not in ("segments", "reward")}
        rest |= {"reward": asdict(self.reward), "segments": len(self.segments), "hints": [asdict(turn) for turn in self.hints]}
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file(tensors, part, {"rollout": json.dumps(rest)})
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> "Rollout":
        """Raises ValueError for a file that is none, or a damaged one; FileNotFoundError where there is none."""
        try:
            with safetensors.safe_open(path, "pt") as file:
                rest = json.loads(file.metadata()["rollout"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            segments = []
            for i in range(rest.pop("segments")):
                lists = [tensors.pop(f"{i}.{name}").tolist() for name in ("ids", "mask", "log_probs", "versions")]
                experts = tensors.pop(f"{i}.experts", None)
                if len({*map(len, lists), len(lists[0] if experts is None else experts)}) > 1:
                    raise ValueError(f"segment {i} has lists of several lengths")
                segments.append(Segment(*lists, None if experts is None else experts.numpy()))
            if tensors:
                raise ValueError(f"it has more than {len(segments)} segments")
            hints = [HintedTurn(tuple(h["ids"]), tuple(h["hinted"]), h["length"]) for h in rest.pop("hints", ())]
            return cls(segments=segments, reward=Reward(**rest.pop("reward")), hints=tuple(hints), **rest)
        except (safetensors.SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no rollout: {error}") from None


def roll_out(
    task: Task,
    model: SamplerModel,
    sandboxes: Sandboxes,
    tools: ToolSet,
    settings: Settings,
    weights: RewardWeights,
    *,
    on_end: Callable[[], None] = lambda: None,
    verify: Callable[..., Verdict] = verify,
    hinting: bool = False,
) -> Rollout:
    """Works on a task and has the work verified. on_end: called when the work is over and its verification begins.

    hinting: turns with an invalid call become hinted ones (`rl.hints`).

    Raises SandboxError where the machinery failed.
    """
    result, trajectory, patch = attempt(Entry(task), 0, model, sandboxes, tools, settings, None, on_end=on_end, verify=verify)
    segments = segments_of(model.answers)
    reward = reward_of(trajectory, result.score, effort_of_tokens(segments, trajectory), weights, error=result.reason)
    behaviours = behaviours_of(trajectory)
    hints = hints_of(trajectory, model.dialect) if hinting else ()
    told = segments, reward, result.score, result.status, trajectory.atif(), patch, result.seconds, behaviours, hints
    return Rollout(task.name, *told)


def effort_of_tokens(segments: Sequence[Segment], trajectory: Trajectory) -> Effort:
    """As `rl.rewards.effort_of`, from tokens as they were sampled: a reply's are its calls', but for a last one without calls.

    What comes after a segment's first reply and is no reply counts as the tools' output.
    """
    replies = trajectory.replies
    own = sum(sum(s.mask) for s in segments)
    final = replies[-1].completion_tokens if replies and not replies[-1].calls else 0
    others = sum(s.mask[s.mask.index(True) :].count(False) for s in segments)
    return Effort(
        call_tokens=own - final, output_tokens=others, final_tokens=final, calls=len(trajectory.calls), turns=len(replies)
    )


def place(run_dir: Path, group: int, sample: int) -> Path:
    """Where a sample's file is, inside the run's directory."""
    return run_dir / "rollouts" / f"{group:06d}" / f"{sample:08d}.safetensors"


def write_batch(run_dir: Path, step: int, groups: Sequence[Sequence[str]]) -> None:
    """Which files a step trains on, group by group: written before the step."""
    path = run_dir / "batches" / f"{step:08d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps([list(group) for group in groups]) + "\n")
    os.replace(part, path)


def read_batch(run_dir: Path, step: int) -> list[list[TrainSample]]:
    """The samples of a step. Raises FileNotFoundError or ValueError where they are not there."""
    groups = json.loads((run_dir / "batches" / f"{step:08d}.json").read_text())
    return [[Rollout.load(run_dir / name).train_sample for name in group] for group in groups if group]
