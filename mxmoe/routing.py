"""`Routing`: which expert gets which token, with what weight, in what order; the losses and the bias that balance the experts.

Shape letters: T tokens, K top-k, E experts, N = T * K rows at most (a slot without an expert has no row).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mxmoe.checks import check_shape, check_tensor


@dataclass(frozen=True, eq=False, repr=False)
class Routing:
    """The decision of a router for T tokens: made by `mxmoe.route`, or by `Routing.from_ids` from ids chosen elsewhere.

    Two of four experts for each of three tokens, weights renormalised softmax scores. Slot t * K + k is expert k of token t:

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 0.0, 0.0], [0.0, 0.0, 1.0, 2.0]])
    >>> r = mxmoe.route(logits, 2)
    >>> r
    Routing(3 tokens, top 2 of 4 experts, 6 rows, cpu)
    >>> r.ids  # the best first, a tie (token 1: experts 0, 2 and 3) to the lower id
    tensor([[0, 1],
            [1, 0],
            [3, 2]], dtype=torch.int32)
    >>> r.weights  # 1 / (1 + e^-1) = 0.7311, 1 / (1 + e^-3) = 0.9526
    tensor([[0.7311, 0.2689],
            [0.9526, 0.0474],
            [0.7311, 0.2689]])
    >>> r.counts, r.offs  # expert 0 has rows 0 and 1, expert 1 rows 2 and 3, expert 2 row 4, expert 3 row 5
    (tensor([2, 2, 1, 1], dtype=torch.int32), tensor([2, 4, 5, 6], dtype=torch.int32))
    >>> r.permutation  # row -> slot: row 0 is slot 0 (token 0), row 1 is slot 3 (token 1), row 2 is slot 1 (token 0), ...
    tensor([0, 3, 1, 2, 5, 4], dtype=torch.int32)
    >>> r.inverse  # slot -> row
    tensor([[0, 2],
            [3, 1],
            [5, 4]], dtype=torch.int32)
    >>> r.probs_mean  # mean of the three softmax rows
    tensor([0.2566, 0.3965, 0.1183, 0.2286])
    >>> r.load_balance_loss()  # 4 * (2/6 * 0.2566 + 2/6 * 0.3965 + 1/6 * 0.1183 + 1/6 * 0.2286)
    tensor(1.1021)
    >>> r.max_violation()  # 2 / 1.5 - 1
    tensor(0.3333)

    It is plain data: a pytree of its tensors (torch.compile, tree_map), picklable (detached), loadable by
    torch.load(weights_only=True) once mxmoe is imported. The constructor raises TypeError or ValueError where the parts do not fit.
    """

    ids: Tensor  # int32 (T, K): expert of each slot; outside [0, E) = no expert
    weights: Tensor  # FP32 (T, K)
    counts: Tensor  # int32 (E,): rows of each expert
    offs: Tensor  # int32 (E,): cumulative ends of the experts' rows
    permutation: Tensor  # int32 (N,): row -> slot t * K + k; -1 past the last row
    inverse: Tensor  # int32 (T, K): slot -> row; -1 where the slot has no expert
    probs_mean: Tensor | None = None  # FP32 (E,): mean over tokens of the normalised scores (load-balance loss)
    z: Tensor | None = None  # FP32 (1,): mean over tokens of logsumexp(logits)^2

    def __post_init__(self):
        check_tensor("ids", self.ids, 2, (torch.int32,))
        check_tensor("counts", self.counts, 1, (torch.int32,), self.ids)
        slots, experts = tuple(self.ids.shape), (self.num_experts,)
        shapes = dict(weights=slots, offs=experts, permutation=(self.ids.numel(),), inverse=slots, probs_mean=experts, z=(1,))
        for name, shape in shapes.items():
            part = getattr(self, name)
            if part is None and name in ("probs_mean", "z"):
                continue
            dtype = torch.float32 if name in ("weights", "probs_mean", "z") else torch.int32
            check_tensor(name, part, len(shape), (dtype,), self.ids)
            check_shape(name, part, shape)

    @staticmethod
    def from_ids(ids: Tensor, weights: Tensor, num_experts: int, *, backend: str = "auto") -> Routing:
        """The Routing of given ids (T, K), int32 or int64, and weights (T, K), read as FP32; it has no loss terms."""
        from mxmoe import ops

        counts, offs, permutation, inverse = ops.sort_by_expert(ids, num_experts, backend=backend)
        return Routing(ids.to(torch.int32).contiguous(), weights.float(), counts, offs, permutation, inverse)

    @property
    def num_experts(self) -> int:
        return self.counts.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def load_balance_loss(self) -> Tensor:
        """E * sum over experts of (share of the rows) * (mean probability): 1 when balanced, up to E; 0 for zero tokens.

        Differentiable through the probabilities. Switch (arXiv 2101.03961, eq. 4) for any K; equal to DeepSeek-V3's sequence-wise
        loss (arXiv 2412.19437, eq. 17-20, its alpha left to the caller) when the tokens are one sequence; K times smaller than
        `load_balancing_loss_func` of transformers, which divides the counts by T instead of T * K.
        """
        counts = self.counts.to(torch.float32)
        share = counts / counts.sum().clamp(min=1)
        return self.num_experts * (share * self._term("probs_mean")).sum()

    def z_loss(self) -> Tensor:
        """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5); 0 for zero tokens. Differentiable."""
        return self._term("z").squeeze(0)

    def max_violation(self) -> Tensor:
        """Rows of the fullest expert / mean - 1: 0 when balanced (MaxVio of arXiv 2408.15664); 0 for zero tokens."""
        counts = self.counts.to(torch.float32)
        mean = counts.mean()
        return torch.where(mean > 0, counts.max() / mean.clamp(min=1e-20) - 1, torch.zeros_like(mean))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Routing:
        """The same routing on another device."""
        return pytree.tree_map(lambda t: t.to(device, non_blocking=non_blocking), self)

    def save(self, path: str | os.PathLike):
        """Writes one safetensors file, which appears whole or not at all."""
        from mxmoe.storage import save_routing

        save_routing(path, self)

    @staticmethod
    def load(path: str | os.PathLike) -> Routing:
        """Reads a file of `save`; ValueError naming the file where it is damaged or foreign."""
        from mxmoe.storage import load_routing

        return load_routing(path)

    def _term(self, name: str) -> Tensor:
        term = getattr(self, name)
        if term is None:
            raise ValueError(f"this Routing was made from ids and has no {name}; the losses need one made by mxmoe.route")
        return term

    def __reduce__(self):
        return Routing, tuple(part if part is None else part.detach() for part in _parts(self).values())

    def __repr__(self) -> str:
        if not all(isinstance(part, Tensor) for part in (self.ids, self.counts, self.inverse)):
            return f"Routing({', '.join(f'{name}={part!r}' for name, part in _parts(self).items())})"
        tokens, top_k = self.ids.shape
        rows = f"{int(self.counts.sum())} rows, " if self.device.type == "cpu" else ""  # no read from a GPU
        return f"Routing({tokens} tokens, top {top_k} of {self.num_experts} experts, {rows}{self.device})"


def update_selection_bias_(bias: Tensor, counts: Tensor, speed: float = 1e-3) -> Tensor:
    """Loss-free balancing, in place: bias += speed * sign(mean(counts) - counts). bias FP32 (E,), counts (E,) -> bias.

    Run once per optimizer step with the counts of all its tokens (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    TypeError where the bias is not FP32: a step of 0.001 vanishes in BF16.
    """
    check_tensor("bias", bias, 1, (torch.float32,))
    check_tensor("counts", counts, 1, (torch.int32, torch.int64, torch.float32), bias)
    check_shape("counts", counts, tuple(bias.shape))
    counts = counts.to(torch.float64)  # exact, so that the sign is
    with torch.no_grad():
        return bias.add_(torch.sign(counts.sum() - counts * len(counts)).to(torch.float32), alpha=speed)


def _parts(routing: Routing) -> dict[str, Tensor | None]:
    return {field.name: getattr(routing, field.name) for field in fields(routing)}


def _flatten(routing: Routing):
    present = {name: part for name, part in _parts(routing).items() if part is not None}
    return list(present.values()), tuple(present)


def _flatten_with_keys(routing: Routing):
    parts, names = _flatten(routing)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(names, parts, strict=True)], names


def _unflatten(parts, names) -> Routing:
    """Unchecked: pytrees also hold specs, flags and tensors of other shapes in the places of the parts."""
    routing = object.__new__(Routing)
    routing.__dict__.update(dict.fromkeys(field.name for field in fields(Routing)))
    routing.__dict__.update(zip(names, parts, strict=True))
    return routing


pytree.register_pytree_node(
    Routing, _flatten, _unflatten, serialized_type_name="mxmoe.Routing", flatten_with_keys_fn=_flatten_with_keys
)
torch.serialization.add_safe_globals([Routing])
