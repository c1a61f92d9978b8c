"""The learner's objective: group policy gradient, as the report has it, over tokens laid end to end.

    loss = - 1/N sum_t  w_t A_t log pi(t)        N: all trained tokens of the step, over every micro-batch and rank

A_t is the reward of t's sample less the mean of its group: not divided by the group's deviation, nor by a length (Dr. GRPO,
arXiv:2503.20783). w_t corrects for tokens that older weights have sampled, see `Correction`; it carries no gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mxmoe.checks import check_choice, check_shape, check_tensor

Baseline = Literal["mean", "leave_one_out"]
Estimator = Literal["k1", "k3"]
LOG_RATIO_LIMIT = 20.0  # exp of it is finite in FP32; the raw log ratio is what is reported


def group_advantages(
    rewards: Sequence[float | None], baseline: Baseline = "mean", standardize: bool = False
) -> tuple[Tensor, Tensor]:
    """Advantages of the samples of one group, and which of them count.

    rewards: one per sample; None or NaN: an infrastructure failure, of no part in the baseline. baseline: the mean of all that
    count, or of the others. standardize: divide by the (others') standard deviation (ddof 1), where it is not zero: an ablation.
    Returns (advantages, counts): (G,) float64, bool. Where fewer than two count, and where all that count are equal, the advantages
    are exactly zero. Raises ValueError for an infinite reward, an empty group or an unknown baseline.
    """
    check_choice("baseline", baseline, ("mean", "leave_one_out"))
    r = torch.tensor([float("nan") if reward is None else reward for reward in rewards], dtype=torch.float64)
    if not r.numel():
        raise ValueError("rewards must be of at least one sample, got none")
    if r.isinf().any():
        raise ValueError(f"rewards must be finite, NaN or None, got {list(rewards)}")
    counts = ~r.isnan()
    advantages = torch.zeros_like(r)
    own = r[counts]
    if own.numel() < 2 or own.min() == own.max():
        return advantages, counts
    if baseline == "mean":
        centred, deviation = own - own.mean(), own.std().expand_as(own)
    else:
        others = own.expand(own.numel(), -1)[~torch.eye(own.numel(), dtype=torch.bool)].view(own.numel(), -1)
        centred = own - others.mean(1)
        equal = others.amin(1) == others.amax(1)  # exactly: a rounded deviation of equal values would not be zero
        deviation = others.std(1).masked_fill(equal, 0.0) if others.shape[1] > 1 else torch.zeros_like(own)
    advantages[counts] = centred / deviation.where(deviation > 0, 1.0) if standardize else centred
    return advantages, counts


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """(T,) FP32 log-probabilities of `ids` (T,) under `logits` (T, V) at the sampler's temperature.

    Sampler and learner both call this, so that their ratio is one where their logits are. Raises ValueError for a temperature that
    is not positive.
    """
    check_tensor("logits", logits, 2)
    check_tensor("ids", ids, 1, (torch.int32, torch.int64), logits)
    check_shape("ids", ids, (logits.shape[0],))
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    scaled = logits.float() / temperature
    return scaled.gather(1, ids.long()[:, None])[:, 0] - scaled.logsumexp(1)


@dataclass(frozen=True)
class Correction:
    """The weight of a token, out of r_t = exp(log pi(t) - log mu(t)), mu being what sampled it.

    name       weight
    none       1
    token_clip min(r_t, high)                                        truncated importance sampling (arXiv:2503.14286)
    token_mask r_t where low <= r_t <= high, else 0                  IcePop
    sequence_mask r_t where low <= exp(mean of log r) <= high over its sample, else 0   geometric rejection
    """

    name: Literal["none", "token_clip", "token_mask", "sequence_mask"] = "token_clip"
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self):
        check_choice("name", self.name, ("none", "token_clip", "token_mask", "sequence_mask"))
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(f"low and high must enclose 1, got {self.low} and {self.high}")

    def weights(self, log_ratio: Tensor, mask: Tensor, samples: Tensor) -> Tensor:
        """(T,) FP32 without gradient. samples: (T,) int64, of which sample each token is, from 0."""
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        if self.name == "none":
            return torch.ones_like(ratio)
        if self.name == "token_clip":
            return ratio.clamp(max=self.high)
        if self.name == "sequence_mask":
            sums = torch.zeros(2, int(samples.max()) + 1 if samples.numel() else 0, dtype=torch.float64)
            sums[0].index_add_(0, samples, log_ratio.double())
            sums[1].index_add_(0, samples, mask.double())
            judged = (sums[0] / sums[1].clamp(min=1)).exp()[samples]
        else:
            judged = ratio
        return ratio.where((judged >= self.low) & (judged <= self.high), torch.zeros_like(ratio))


@dataclass(frozen=True)
class LossReport:
    """Of the trained tokens of a call: sums that add over micro-batches, beside the largest |log ratio| before any limit.

    mismatch: sum of r - 1 - log r (k3), how far the weights that sampled are from those that train. dropped: tokens of weight 0 by
    the correction. nonfinite: tokens left out since a log-probability of theirs is not finite.
    """

    tokens: int
    mismatch: float
    dropped: int
    nonfinite: int
    largest_log_ratio: float


def policy_loss(
    log_probs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    samples: Tensor,
    num_tokens: int,
    correction: Correction | None = None,
) -> tuple[Tensor, LossReport]:
    """The loss of some of a step's tokens, and what there is to say of it.

    log_probs: (T,) FP32, the learner's, with gradient. behaviour: (T,) FP32, the sampler's. advantages: (T,).
    mask: (T,) bool, False: a prompt's or a tool's token; what the others hold there is never read.
    samples: (T,) int64, of which sample each token is. num_tokens: trained tokens of the whole step: losses of its micro-batches,
    however cut and packed, add up to the step's. 0: an empty step, whose loss is 0.
    Raises TypeError or ValueError for shapes, dtypes or a count that do not fit.
    """
    correction = correction or Correction()
    check_tensor("log_probs", log_probs, 1, (torch.float32, torch.float64))
    check_tensor("behaviour", behaviour, 1, (torch.float32, torch.float64), log_probs)
    check_tensor("advantages", advantages, 1, (torch.float32, torch.float64), log_probs)
    check_tensor("mask", mask, 1, (torch.bool,), log_probs)
    check_tensor("samples", samples, 1, (torch.int64,), log_probs)
    for name, t in (("behaviour", behaviour), ("advantages", advantages), ("mask", mask), ("samples", samples)):
        check_shape(name, t, tuple(log_probs.shape))
    if num_tokens < int(mask.sum()):
        raise ValueError(f"num_tokens must count all trained tokens of the step, got {num_tokens} with {int(mask.sum())} here")
    finite = log_probs.detach().isfinite() & behaviour.isfinite() & advantages.isfinite()
    trained = mask & finite
    zero = torch.zeros((), dtype=log_probs.dtype, device=log_probs.device)
    current = log_probs.where(trained, zero)  # where: NaN * 0 is NaN, forward and backward
    log_ratio = (current.detach() - behaviour.where(trained, zero)).where(trained, zero)
    weights = correction.weights(log_ratio, trained, samples).where(trained, zero)
    loss = -(weights * advantages.where(trained, zero) * current).sum() / max(num_tokens, 1)
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    report = LossReport(
        tokens=int(trained.sum()),
        mismatch=float((limited.exp() - 1 - limited).where(trained, zero).sum()),
        dropped=int((trained & (weights == 0)).sum()),
        nonfinite=int((mask & ~finite).sum()),
        largest_log_ratio=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    )
    return loss, report


def fresh_tokens(versions: Tensor, current: int, max_staleness: int) -> Tensor:
    """(T,) bool: tokens sampled by weights at most `max_staleness` versions older than `current`."""
    check_tensor("versions", versions, 1, (torch.int32, torch.int64))
    if versions.numel() and int(versions.max()) > current:
        raise ValueError(f"versions must not be later than current ({current}), got {int(versions.max())}")
    return versions >= current - max_staleness


def kl_penalty(behaviour: Tensor, reference: Tensor, mask: Tensor, estimator: Estimator = "k1") -> float:
    """An estimate of KL(sampler || reference) of one sample: a sum over its own tokens, of d = log mu - log ref.

    estimator: "k1": d. "k3": exp(-d) - 1 + d, never negative, but of a variance that explodes as the two part (|d| is limited as
    ratios are): an ablation. It goes into the reward, not into the loss: as a loss, the gradient of k1 has mean zero.
    """
    check_choice("estimator", estimator, Estimator.__args__)
    check_tensor("behaviour", behaviour, 1, (torch.float32, torch.float64))
    for name, t in (("reference", reference), ("mask", mask)):
        check_shape(name, t, tuple(behaviour.shape))
    d = (behaviour - reference).double()[mask]
    if estimator == "k3":
        limited = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        d = torch.expm1(-limited) + limited
    return float(d.sum())


def distillation_loss(logits: Tensor, teacher: Tensor, num_tokens: int, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher) of every token's distribution, over the whole vocabulary, summed and divided by `num_tokens`.

    logits: (T, V) with gradient; teacher: (T, V), a constant. The gradient of a token is p (log p - log q - KL) / temperature.
    """
    check_tensor("logits", logits, 2)
    check_shape("teacher", teacher, tuple(logits.shape))
    if num_tokens < logits.shape[0]:
        raise ValueError(f"num_tokens must count all tokens of the step, got {num_tokens} with {logits.shape[0]} here")
    own, other = ((x.float() / temperature).log_softmax(1) for x in (logits, teacher.detach()))
    return (own.exp() * (own - other)).sum() / max(num_tokens, 1)


def pack_by_cost(lengths: Sequence[int], num_bins: int, quadratic: float = 0.0) -> list[list[int]]:
    """Samples onto micro-batches of nearly equal cost: each, the dearest first, to the cheapest so far.

    lengths: tokens of each. The cost of one is length + quadratic * length**2 (attention). Returns the indices of each bin, those
    with the same arguments always the same. Raises ValueError for fewer than one bin or a negative length.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, got {num_bins}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths must not be negative, got {min(lengths)}")
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    costs = [0.0] * num_bins
    price = [length + quadratic * length * length for length in lengths]
    for i in sorted(range(len(lengths)), key=lambda i: (-price[i], i)):
        cheapest = min(range(num_bins), key=lambda b: (costs[b], b))
        bins[cheapest].append(i)
        costs[cheapest] += price[i]
    return [sorted(each) for each in bins]
