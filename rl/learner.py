"""The learner: a step over one batch of groups, in micro-batches of packed segments, then new weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.objective import Correction, LossReport, group_advantages, pack_by_cost, policy_loss, token_log_probs
from rl.segments import Segment
from training.model import Model
from training.optimizer import guarded_step


@dataclass(frozen=True)
class TrainSample:
    """A run that is trained on. reward: None for one that counts for nothing (see `rl.rewards.Reward.valid`)."""

    segments: list[Segment]
    reward: float | None


@dataclass(frozen=True)
class StepReport:
    """Of one step. tokens: trained. skipped: it had no gradient or one that was not finite, and the weights are as before.

    mismatch: mean of r - 1 - log r between sampler and learner; staleness: of the oldest trained token, in versions.
    """

    loss: float
    tokens: int
    gradient_norm: float
    skipped: bool
    mismatch: float
    dropped: int
    nonfinite: int
    largest_log_ratio: float
    staleness: int
    mean_reward: float
    invalid: int


class Learner:
    """Owns the weights. version: of them; a step makes the next.

    micro_tokens: of a micro-batch, about; a longer segment is one by itself. temperature: the sampler's. correction: see
    `rl.objective.Correction`. replay: train with the experts that the sampler recorded, those below `replay_threshold` of the
    router's own replaced. attention_cost: of a token pair against a token, to even out micro-batches.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        *,
        lr: float,
        clip_norm: float = 1.0,
        temperature: float = 1.0,
        correction: Correction | None = None,
        standardize: bool = False,
        replay: bool = True,
        replay_threshold: float | None = None,
        micro_tokens: int = 4096,
        attention_cost: float = 1e-3,
        version: int = 0,
    ):
        if micro_tokens < 1:
            raise ValueError(f"micro_tokens must be at least 1, got {micro_tokens}")
        self.model, self.optimizer, self.lr, self.clip_norm = model.train(), optimizer, lr, clip_norm
        self.temperature, self.correction, self.standardize = temperature, correction or Correction(), standardize
        self.replay, self.micro_tokens, self.attention_cost, self.version = replay, micro_tokens, attention_cost, version
        for layer in model.moe_layers:
            layer.replay_threshold = replay_threshold

    def step(self, groups: Sequence[Sequence[TrainSample]]) -> StepReport:
        """One optimiser step over a batch; every group's rewards make its baseline. The version grows, whether or not it moved."""
        parts: list[tuple[Segment, float]] = []
        rewards, invalid = [], 0
        for group in groups:
            advantages, counts = group_advantages([sample.reward for sample in group], standardize=self.standardize)
            rewards += [sample.reward for sample, c in zip(group, counts, strict=True) if c]
            invalid += len(group) - int(counts.sum())
            for sample, advantage, c in zip(group, advantages.tolist(), counts.tolist(), strict=True):
                parts += [(segment, advantage) for segment in sample.segments] if c else []
        oldest = [v for segment, _ in parts if (v := segment.oldest) is not None]
        num_tokens = sum(sum(segment.mask) for segment, _ in parts)
        # A segment of advantage zero has no gradient: its tokens count, but need not be computed.
        moving = [(segment, advantage) for segment, advantage in parts if advantage and any(segment.mask)]
        loss, reports = self._backward(moving, num_tokens)
        norm, moved = torch.zeros(()), False
        if moving:
            norm, moved = guarded_step(self.optimizer, self.lr, self.clip_norm)
        staleness = self.version - min(oldest, default=self.version)
        self.version += 1
        seen = sum(r.tokens for r in reports)
        return StepReport(
            loss=loss,
            tokens=num_tokens,
            gradient_norm=float(norm),
            skipped=not moved,
            mismatch=sum(r.mismatch for r in reports) / max(seen, 1),
            dropped=sum(r.dropped for r in reports),
            nonfinite=sum(r.nonfinite for r in reports),
            largest_log_ratio=max((r.largest_log_ratio for r in reports), default=0.0),
            staleness=staleness,
            mean_reward=math.fsum(rewards) / len(rewards) if rewards else math.nan,
            invalid=invalid,
        )

    def _backward(self, parts: list[tuple[Segment, float]], num_tokens: int) -> tuple[float, list[LossReport]]:
        lengths = [len(segment.ids) for segment, _ in parts]
        bins = pack_by_cost(lengths, max(1, -(-sum(lengths) // self.micro_tokens)), self.attention_cost)
        total, reports = 0.0, []
        for indices in bins:
            if not indices:
                continue
            loss, report = self._loss([parts[i] for i in indices], num_tokens)
            loss.backward()
            total += float(loss.detach())
            reports.append(report)
        return total, reports

    def _loss(self, parts: list[tuple[Segment, float]], num_tokens: int) -> tuple[Tensor, LossReport]:
        """Of segments laid end to end: token i is predicted where i - 1 was read, the first of each by nothing."""
        segments = [segment for segment, _ in parts]
        lengths = [len(segment.ids) for segment in segments]
        ids = torch.tensor([token for segment in segments for token in segment.ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        own = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(lengths))
        advantages = torch.tensor([advantage for _, advantage in parts], dtype=torch.float32)[own]
        mask = torch.tensor([m for segment in segments for m in segment.mask]) & (positions > 0)
        behaviour = torch.tensor([p for segment in segments for p in segment.log_probs], dtype=torch.float32)
        trained = mask.nonzero()[:, 0]
        x_TD, _ = self.model.trunk(ids[None], positions[None], replay=self._recorded(segments))
        log_probs = token_log_probs(self.model.head(x_TD[trained - 1]), ids[trained], self.temperature)
        chosen = behaviour[trained], advantages[trained], mask[trained], own[trained]
        return policy_loss(log_probs, *chosen, num_tokens, self.correction)

    def _recorded(self, segments: list[Segment]) -> list[Tensor] | None:
        """(T, K) of every MoE layer; None: no replay, or not recorded."""
        if not self.replay or not self.model.moe_layers or any(segment.experts is None for segment in segments):
            return None
        experts = np.concatenate([segment.experts for segment in segments]).astype(np.int32)
        return [torch.from_numpy(np.ascontiguousarray(experts[:, layer])) for layer in range(experts.shape[1])]
