"""`MoE`: `moe_layer` with its parameters, as a torch.nn.Module."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mxmoe import ops
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.layer import PreparedExperts, as_read, moe_layer, prepare_experts
from mxmoe.ops.route import check_selection
from mxmoe.parallel import expert_slice
from mxmoe.recipes import Recipe, SwiGLU, get_recipe
from mxmoe.routing import Routing

EXPERT_WEIGHTS = ("w13", "w2")
EXPERT_PARAMETERS = (*EXPERT_WEIGHTS, "b13", "b2")
FIELDS = ("values", "scales", "global_scale")


class QuantizedWeight(nn.Module):
    """A frozen weight kept as the buffers of a row-copy MXTensor: `values`, `scales` and, for NVFP4, `global_scale`. State dicts
    hold its lines, also where it is kept in panels."""

    def __init__(self, t: MXTensor):
        super().__init__()
        self.format, self.shape, self.scope = t.format, tuple(t.shape), t.scope
        for name in FIELDS:
            self.register_buffer(name, None)
        self._keep(t)

    def _keep(self, t: MXTensor):
        self.layout = pytree.tree_structure(t)
        for name in FIELDS:
            setattr(self, name, getattr(t, name))

    def for_inference_(self) -> QuantizedWeight:
        """Keeps it as products read it best on its device: `mxmoe.to_panels`."""
        self._keep(as_read(self()))
        return self

    def forward(self) -> MXTensor:
        fields = (self._buffers[name] for name in FIELDS)
        return pytree.tree_unflatten([t for t in fields if t is not None], self.layout)  # checked once, when it was made

    def _apply(self, fn, recurse=True):  # moves with the module; a dtype change does not touch quantized bytes
        for name in FIELDS:
            buffer = getattr(self, name)
            if buffer is not None:
                setattr(self, name, buffer.to(fn(buffer.new_empty(0, dtype=torch.float32)).device))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        lines = ops.plain_scales(self())
        destination.update({prefix + name: t for name in FIELDS if (t := getattr(lines, name)) is not None})

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        own = self()
        if own.panels:
            self._keep(ops.plain_scales(own))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if own.panels:
            self.for_inference_()

    def __reduce__(self):  # through the MXTensor, whose bytes pickle; torch cannot unpickle tensors of 8-bit floats
        return QuantizedWeight, (self(),), {"training": self.training}

    def extra_repr(self) -> str:
        return f"{self.format}, shape={self.shape}"


class MoE(nn.Module):
    """A Mixture-of-Experts layer: router, experts, optional shared expert and selection bias.

    dim D, expert_dim F, num_experts E, top_k K; shared_dim: width of the shared expert, 0 for none. The other options are those
    of `moe_layer`. Parameters: router (E, D), w13 (E, 2F, D), w2 (E, D, F), shared_w13, shared_w2, b13, b2; buffer
    selection_bias (E,), FP32 whatever dtype the module is cast to. `forward(x)` gives (y, Routing). `prepare()` quantizes the
    experts once until they change; `quantize_(format)` replaces them for good by their quantized form (frozen). group: expert
    parallelism over its R ranks; w13, w2, b13, b2 then hold this rank's E / R experts, and ranks that build it from the same seed
    hold together what one process would. ValueError on impossible sizes.
    """

    def __init__(
        self,
        dim: int,
        expert_dim: int,
        num_experts: int,
        top_k: int,
        *,
        shared_dim: int = 0,
        shared_recipe: str | Recipe | None = None,
        recipe: str | Recipe = "mxfp8",
        score: str = "softmax",
        selection_bias: bool = False,
        num_groups: int = 1,
        groups_kept: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        gate_up: str = "concatenated",
        activation: str | SwiGLU = "swiglu",
        expert_bias: bool = False,
        recompute: bool = False,
        replay_threshold: float | None = None,
        group: dist.ProcessGroup | None = None,
        payload: str = "exact",
        backend: str = "auto",
        device=None,
        dtype=None,
    ):
        super().__init__()
        for name, value in (("dim", dim), ("expert_dim", expert_dim), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        check_selection(top_k, num_experts, num_groups, groups_kept)
        get_recipe(recipe)
        own = num_experts if group is None else len(range(num_experts)[expert_slice(num_experts, group)])
        self.top_k, self.recipe, self.replay_threshold = top_k, recipe, replay_threshold
        self.options = dict(
            score=score, num_groups=num_groups, groups_kept=groups_kept, normalize=normalize, scale=scale, gate_up=gate_up,
            shared_recipe=shared_recipe, activation=activation, recompute=recompute, group=group, payload=payload, backend=backend,
        )  # fmt: skip

        def parameter(*shape):
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.router = parameter(num_experts, dim)
        self.w13 = parameter(own, 2 * expert_dim, dim)
        self.w2 = parameter(own, dim, expert_dim)
        self.b13 = parameter(own, 2 * expert_dim) if expert_bias else None
        self.b2 = parameter(own, dim) if expert_bias else None
        self.shared_w13 = parameter(2 * shared_dim, dim) if shared_dim else None
        self.shared_w2 = parameter(dim, shared_dim) if shared_dim else None
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self._prepared: PreparedExperts | None = None
        self.reset_parameters()

    def reset_parameters(self):
        """Uniform within 1 / sqrt(fan-in) for matrices, zero for biases; other ranks' experts are drawn and dropped."""
        group = self.options["group"]
        for name, p in self.named_parameters():
            bound = 0.0 if name in ("b13", "b2") else p.shape[-1] ** -0.5
            ranks, own = (group.size(), group.rank()) if group is not None and name in EXPERT_PARAMETERS else (1, 0)
            for rank in range(ranks):
                nn.init.uniform_(p if rank == own else torch.empty_like(p), -bound, bound)

    def forward(self, x: Tensor, replay: Tensor | None = None) -> tuple[Tensor, Routing]:
        """x (..., D) -> (y (..., D), Routing); replay (..., K): recorded expert ids, held to `replay_threshold` (see `route`)."""
        w13, w2 = (w() if isinstance(w, QuantizedWeight) else w for w in (self.w13, self.w2))
        shared = None if self.shared_w13 is None else (self.shared_w13, self.shared_w2)
        return moe_layer(
            x, self.router, w13, w2, top_k=self.top_k, recipe=self.recipe, bias=self.selection_bias, b13=self.b13, b2=self.b2,
            shared=shared, replay=replay, replay_threshold=None if replay is None else self.replay_threshold,
            prepared=self._current(), **self.options,
        )  # fmt: skip

    def prepare(self, backward: bool = True) -> PreparedExperts:
        """Quantize the experts now; forward uses the copies until a weight changes, then drops them."""
        self._prepared = prepare_experts(self.w13, self.w2, self.recipe, backward=backward, backend=self.options["backend"])
        return self._prepared

    def _current(self) -> PreparedExperts | None:
        if self._prepared is not None and not self._prepared.made_from(self.w13, self.w2):
            self._prepared = None
        return self._prepared

    def quantize_(self, format: str | None = None) -> MoE:
        """Replace w13 and w2 by frozen row copies of `format` (default: the recipe's forward format), in place."""
        format = format or get_recipe(self.recipe).forward
        self._prepared = None
        for name in EXPERT_WEIGHTS:
            w = getattr(self, name)
            source = ops.dequantize(w()) if isinstance(w, QuantizedWeight) else w.detach()
            delattr(self, name)
            setattr(self, name, QuantizedWeight(ops.quantize(source, format, "row", backend=self.options["backend"])))
        return self

    def _apply(self, fn, recurse=True):
        bias = self.selection_bias
        super()._apply(fn, recurse)
        if bias is not None and self.selection_bias.dtype != bias.dtype:  # FP32 for good: a step of 0.001 would vanish in BF16
            self.selection_bias = bias.to(self.selection_bias.device)
        self._prepared = None
        return self

    def __getstate__(self):
        return {**self.__dict__, "_prepared": None}

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Quantized and high-precision expert weights load into each other: by dequantizing, or by quantizing."""
        for name in EXPERT_WEIGHTS:
            own, key = getattr(self, name), prefix + name
            if isinstance(own, QuantizedWeight) and key in state_dict:
                t = ops.quantize(state_dict.pop(key), own.format, "row", scope=own.scope)
                state_dict.update({f"{key}.{field}": getattr(t, field) for field in FIELDS if getattr(t, field) is not None})
            elif not isinstance(own, QuantizedWeight) and f"{key}.values" in state_dict:
                fields = [state_dict.pop(f"{key}.{field}", None) for field in FIELDS]
                state_dict[key] = ops.dequantize(_row_copy(fields, tuple(own.shape))).to(own.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _row_copy(fields: list[Tensor | None], shape: tuple[int, ...]) -> MXTensor:
    """The MXTensor of stored fields; their dtypes tell the format."""
    values, scales, global_scale = fields
    for f in FORMATS.values():
        if (f.values_dtype, f.scales_dtype, f.has_global_scale) == (values.dtype, scales.dtype, global_scale is not None):
            return MXTensor(values, scales, global_scale, f.name, "row", shape)
    raise ValueError(f"no format has values {values.dtype} with scales {scales.dtype}")
