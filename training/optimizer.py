"""AdamW, its schedule, and a step that one bad gradient cannot spoil."""

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)


def learning_rate(step: int, peak: float, warmup_steps: int, steps: int) -> float:
    """Of optimizer step `step` (from 0): linear warm-up, then half a cosine from `peak` to 0. A function of the step
    alone, so that there is no schedule state to save."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices; norm weights (one-dimensional) do not decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


def guarded_step(optimizer: torch.optim.Optimizer, lr: float, clip_norm: float) -> tuple[Tensor, bool]:
    """Clips the gradient to clip_norm, steps and clears it; returns its norm before clipping and whether the step was
    made.

    A gradient with a NaN or Inf anywhere is dropped: parameters and moments keep their values.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    finite = bool(norm.isfinite())
    if finite:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return norm, finite
