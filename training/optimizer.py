"""AdamW and Muon, the schedules of their learning rate, and a step that one bad gradient cannot spoil.

Parameters are FP32: they are their own master weights. What computes in BF16 or lower rounds a copy of them at each use.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
SCHEDULES = ("cosine", "wsd", "linear", "constant")


def learning_rate(
    step: int, peak: float, warmup_steps: int, steps: int, schedule: str = "cosine", decay: float = 0.2, final: float = 0.0
) -> float:
    """Of optimizer step `step` (from 0): linear warm-up, then from `peak` to final * peak. A function of the step alone, so that
    there is no schedule state to save.

    cosine: half a cosine. linear: a line. constant: the peak. wsd (warm-up, stable, decay; arXiv 2404.06395): the peak, then over
    the last `decay` of the steps down by 1 - sqrt(progress) (arXiv 2405.18392), so that the stable part can be prolonged.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    start = warmup_steps if schedule != "wsd" else max(warmup_steps, steps - round(decay * steps))
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    shape = {
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": 1.0 - math.sqrt(progress),
        "linear": 1.0 - progress,
    }[schedule]
    return peak * (final + (1.0 - final) * shape)


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices; norm weights (one-dimensional) do not decay."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


class Muon(torch.optim.Optimizer):
    """SGD with momentum whose step is made nearly orthogonal, for matrices and stacks of them (experts: one by one); Keller Jordan
    et al., https://kellerjordan.github.io/posts/muon. Scaled to AdamW's usual step size (arXiv 2502.16982), without decay.

    torch.optim.Muon takes plain matrices only.
    """

    def __init__(self, params, lr: float = 0.0, momentum: float = 0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() < 2:
                    raise ValueError(f"Muon takes matrices and stacks of them, got a parameter of shape {tuple(p.shape)}")
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalized(p.grad.lerp(momentum, group["momentum"]))  # Nesterov's
                p.add_(update, alpha=-0.2 * group["lr"] * max(p.shape[-2:]) ** 0.5)


def orthogonalized(x: Tensor, steps: int = 5) -> Tensor:
    """(..., m, n) with all singular values near 1 (0.7 to 1.2): Newton-Schulz iteration with a quintic."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def named_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Gradients that there are, with their parameters' names (places, where the optimizer was given none)."""
    found = []
    for i, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {i}, parameter {j}" for j in range(len(group["params"]))]
        found += [(name, p.grad) for name, p in zip(names, group["params"], strict=True) if p.grad is not None]
    return found


def moments(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> its state; {} before its first step."""
    named = [pair for g in optimizer.param_groups for pair in zip(g["param_names"], g["params"], strict=True)]
    return {name: dict(optimizer.state[p]) for name, p in named if p in optimizer.state}


@torch.no_grad()
def load_moments(optimizer: torch.optim.Optimizer, saved: dict[str, dict[str, Tensor]]) -> None:
    """The inverse of `moments`. KeyError for a name that the optimizer does not have."""
    parameters = {n: p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"], strict=True)}
    optimizer.state.clear()
    for name, state in saved.items():
        optimizer.state[parameters[name]] = dict(state)


def guarded_step(
    optimizer: torch.optim.Optimizer, lr: float, clip_norm: float, on_bad: Callable[[], None] | None = None
) -> tuple[Tensor, bool]:
    """Clips the gradient to clip_norm, steps and clears it; returns its norm before clipping and whether the step was
    made.

    A gradient with a NaN or Inf anywhere is dropped: parameters and moments keep their values; `on_bad` may look at it before.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    finite = bool(norm.isfinite())
    if finite:
        nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    elif on_bad is not None:
        on_bad()
    optimizer.zero_grad()
    return norm, finite
