"""The arithmetic of one step: loss, gradient, balance of the experts, and where a number went bad."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxmoe.routing import Routing
from training.data import IGNORE


def loss_sum(model: nn.Module, ids: Tensor, targets: Tensor, positions: Tensor | None = None) -> tuple[Tensor, list[Routing]]:
    """Cross-entropy in nats, FP32, summed over the targets that are not IGNORE. All (B, S)."""
    logits, routings = model(ids) if positions is None else model(ids, positions)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"), routings


def forward_backward(
    model: nn.Module, micro_batches: list[tuple[Tensor, ...]], balance_loss: float = 0.0, z_loss: float = 0.0
) -> tuple[float, list[Tensor]]:
    """Accumulates the gradient of the mean loss over all targets of the micro-batches (not the mean of their means).

    Returns that mean and the load (rows per expert) of every MoE layer. balance_loss, z_loss: weights of the routers' losses,
    summed over layers. A batch without any target has loss 0.
    """
    num_targets = [int((targets != IGNORE).sum()) for _, targets, *_ in micro_batches]
    whole = max(1, sum(num_targets))
    total, loads = 0.0, None
    for batch, count in zip(micro_batches, num_targets, strict=True):
        loss, routings = loss_sum(model, *batch)
        loss = loss / whole
        total += float(loss.detach())
        share = count / whole
        if balance_loss:
            loss = loss + balance_loss * share * sum(routing.load_balance_loss() for routing in routings)
        if z_loss:
            loss = loss + z_loss * share * sum(routing.z_loss() for routing in routings)
        loss.backward()
        counts = [routing.counts for routing in routings]
        loads = counts if loads is None else [a + b for a, b in zip(loads, counts, strict=True)]
    return total, loads


def max_violation(loads: Iterable[Tensor]) -> float:
    """How much more than its fair share the busiest expert gets: max / mean - 1, averaged over layers (0 is
    balanced)."""
    violations = [float(load.max() / load.float().mean()) - 1.0 for load in loads]
    return sum(violations) / len(violations)


@torch.no_grad()
def first_bad_module(model: nn.Module, micro_batches: list[tuple[Tensor, ...]]) -> str | None:
    """'layers.3.mlp (output)': the first module, in the order of computation, that makes a NaN or Inf of these batches; None if
    none does. Runs the forward again."""
    found: list[str] = []

    def check(name: str):
        def hook(module, inputs, output):
            tensors = [t for t in (output if isinstance(output, tuple) else (output,)) if isinstance(t, Tensor)]
            if not found and any(t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors):
                found.append(f"{name} (output)")

        return hook

    hooks = [module.register_forward_hook(check(name)) for name, module in model.named_modules() if name]
    try:
        for ids, _, *positions in micro_batches:
            model(ids, *positions)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def bad_tensors(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """'layers.3.mlp.w13 (2 of 4096 NaN or Inf, first at [1, 0, 7])' of every tensor that is not finite."""
    lines = []
    for name, tensor in named:
        bad = (~tensor.isfinite()).nonzero()
        if len(bad):
            lines.append(f"{name} ({len(bad)} of {tensor.numel()} NaN or Inf, first at {bad[0].tolist()})")
    return lines
