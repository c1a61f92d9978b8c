"""Number formats and `MXTensor`, the carrier of a quantized matrix.

A block-scaled format stores small elements (E4M3, E5M2, E2M1) in blocks of 32 or 16 that share one scale: MX formats (OCP
Microscaling v1.0) a power of two (E8M0), NVFP4 an E4M3 number times one FP32 global scale. docs/numerics.md has every bit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mxmoe import layout
from mxmoe.checks import check_choice, check_shape, check_tensor


@dataclass(frozen=True)
class Format:
    """Facts of one format."""

    name: str
    element: str  # "e4m3" | "e5m2" | "e2m1"
    block: int  # elements that share a scale
    max: float  # largest element
    bits: int  # of an element
    values_dtype: torch.dtype
    scales_dtype: torch.dtype
    has_global_scale: bool = False

    @property
    def scale_element(self) -> str:
        """Name of the block scale's own format."""
        return "e4m3" if self.has_global_scale else "e8m0"


FORMATS = {
    f.name: f
    for f in (
        Format("mxfp8", "e4m3", 32, 448.0, 8, torch.float8_e4m3fn, torch.float8_e8m0fnu),
        Format("mxfp8_e5m2", "e5m2", 32, 57344.0, 8, torch.float8_e5m2, torch.float8_e8m0fnu),
        Format("mxfp4", "e2m1", 32, 6.0, 4, torch.uint8, torch.float8_e8m0fnu),
        Format("nvfp4", "e2m1", 16, 6.0, 4, torch.uint8, torch.float8_e4m3fn, has_global_scale=True),
    )
}
HADAMARD_SIGNS = 0x5C2B  # bit j set: element j of 16 is negated before the butterflies
HIGH_PRECISION = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize; the defaults are the contract's. See `mxmoe.quantize`."""

    scale_mode: str = "rceil"  # "rceil" | "floor" (MX formats)
    scope: str = "row"  # of the NVFP4 global scale: "row" | "tensor" | "group"
    seed: int | None = None  # stochastic rounding where not None: 64-bit Philox key
    hadamard: bool = False
    four_six: bool = False
    block_2d: bool = False


_PARTS = ("values", "scales", "global_scale", "offs")  # the tensors of an MXTensor


def copy_shapes(shape, fmt: Format, axis: str, num_groups: int | None = None, scope: str = "row", scale_layout: str = "plain"):
    """Shapes of (values, scales, global_scale or None) of one copy of an array of `shape` (R, L) or (B, R, L); num_groups: the
    length of the offs it is made with, None without."""
    *batch, rows, cols = shape
    if axis == "row":
        lines, length = rows, cols
        values = (*batch, rows, -(-cols // 2) if fmt.bits == 4 else cols)
    else:
        lines, length = cols, rows if num_groups is None else layout.padded_rows(rows, num_groups)
        values = (*batch, cols, -(-length // 2)) if fmt.bits == 4 else (*batch, length, cols)
    scales = (*batch, lines, -(-length // fmt.block))
    if scale_layout == "blocked":
        scales = (*batch, layout.blocked_bytes(*scales[-2:], num_groups if axis == "row" else None))
    if not fmt.has_global_scale:
        return values, scales, None
    if scope == "row":
        return values, scales, (*batch, lines)
    groups = 1 if scope == "tensor" else batch[0] if batch else num_groups
    return values, scales, (groups,)


def panel_shapes(shape, fmt: Format):
    """The same of a row copy of weights (E, R, L) in panels: R a multiple of 64, L of 32 (docs/layouts.md)."""
    if not can_panel(shape):
        raise ValueError(f"panels need a shape (E, R, L) with R a multiple of 64 and L one of 32, got {tuple(shape)}")
    experts, rows, length = shape
    panels, block_bytes = rows // layout.PANEL_LINES, layout.PANEL_LINES * layout.PANEL_BLOCK * fmt.bits // 8
    values = (experts, panels, length // layout.PANEL_BLOCK, block_bytes)
    return values, (experts, panels, length // fmt.block, layout.PANEL_LINES), (experts, rows) if fmt.has_global_scale else None


def can_panel(shape) -> bool:
    """Whether a row copy of that shape has a form in panels."""
    return len(shape) == 3 and shape[1] % layout.PANEL_LINES == 0 and shape[2] % layout.PANEL_BLOCK == 0


@dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """A matrix (R, L), or a stack (B, R, L) of them, in a block-scaled format: one rounded copy of a high-precision tensor.

    x[r, l] = values[r, l] * scales[r, l // block] (* global_scale): here a block of 32 and a tail of 8 that holds 0.001 only.

    >>> x = torch.tensor([[1.0, -2.0, 3.5, 448.0] + [0.0] * 28 + [0.001] * 8])
    >>> t = mxmoe.quantize(x, "mxfp8")
    >>> t
    MXTensor(mxfp8, row, shape (1, 40), plain scales, 42 bytes, cpu)
    >>> t.scales.view(torch.uint8)  # 448 / 448 <= 2^0: byte 127; 0.001 / 448 <= 2^-18: byte 127 - 18
    tensor([[127, 109]], dtype=torch.uint8)
    >>> t.values.view(torch.uint8)[0, [0, 1, 2, 3, 4, 32]]  # E4M3 codes of 1, -2, 3.5, 448, 0 and of 0.001 * 2^18 = 262.1
    tensor([ 56, 192,  70, 126,   0, 120], dtype=torch.uint8)
    >>> t.dequantize()[0, [0, 1, 2, 3, 32]].tolist()  # 262.1 became 256, and 256 * 2^-18 is
    [1.0, -2.0, 3.5, 448.0, 0.0009765625]

    It is plain data: a pytree of its tensors (torch.compile, tree_map), picklable, loadable by torch.load(weights_only=True) once
    mxmoe is imported. The constructor raises TypeError or ValueError where the parts do not fit together.
    """

    values: Tensor  # format.values_dtype or uint8; row (.., R, L); column (.., R, L), 4-bit (.., L, R): see copy_shapes
    scales: Tensor  # format.scales_dtype or uint8; plain (.., lines, blocks); blocked (.., bytes); in panels: see panel_shapes
    global_scale: Tensor | None  # FP32 where the format has one: (.., lines) of scope row, (1,) tensor, (groups,) group
    format: str
    axis: str  # "row": blocks along the last axis; "column": along the second to last
    shape: tuple[int, ...]  # logical shape of the source
    scope: str = "row"  # of global_scale
    scale_layout: str = "plain"  # "plain" (line, block) | "blocked" (docs/layouts.md)
    offs: Tensor | None = None  # int32 (E,): groups the copy was made with

    def __post_init__(self):
        check_choice("format", self.format, tuple(FORMATS))
        check_choice("axis", self.axis, ("row", "column"))
        check_choice("scope", self.scope, ("row", "tensor", "group"))
        check_choice("scale_layout", self.scale_layout, ("plain", "blocked"))
        if len(self.shape) not in (2, 3):
            raise ValueError(f"shape must have 2 or 3 dimensions, got {tuple(self.shape)}")
        fmt = FORMATS[self.format]
        if (self.global_scale is not None) != fmt.has_global_scale:
            expected = "a tensor" if fmt.has_global_scale else "None"
            raise ValueError(f"global_scale must be {expected} for format {self.format!r}, got {type(self.global_scale).__name__}")
        if fmt.has_global_scale and self.scope == "group" and self.offs is None and len(self.shape) == 2:
            raise ValueError("scope 'group' needs offs or a 3-D shape, got a 2-D shape without offs")
        num_groups = None
        if self.offs is not None:
            check_tensor("offs", self.offs, 1, (torch.int32,), self.values)
            num_groups = self.offs.shape[0]
        shapes = copy_shapes(self.shape, fmt, self.axis, num_groups, self.scope, self.scale_layout)
        if getattr(self.values, "ndim", 0) == 4:
            if (self.axis, self.scope, self.scale_layout, num_groups) != ("row", "row", "plain", None):
                raise ValueError("panels are of a row copy with scope 'row' and plain scales, made without offs")
            shapes = panel_shapes(self.shape, fmt)
        dtypes = (fmt.values_dtype, torch.uint8, *((torch.float4_e2m1fn_x2,) if fmt.bits == 4 else ()))
        dtypes = (dtypes, (fmt.scales_dtype, torch.uint8), (torch.float32,))
        for (name, t), shape, allowed in zip(list(self._parts().items())[:3], shapes, dtypes, strict=True):
            if t is not None:
                check_tensor(name, t, len(shape), allowed, self.values)
                check_shape(name, t, shape)

    def _parts(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in _PARTS}

    @property
    def panels(self) -> bool:
        """Whether values and scales lie in panels of 64 lines: `mxmoe.to_panels`."""
        return self.values.ndim == 4

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and global scale."""
        return sum(t.nbytes for t in (self.values, self.scales, self.global_scale) if t is not None)

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor):
            return f"MXTensor({', '.join(f'{name}={part!r}' for name, part in self._parts().items())})"
        scope = f", scope {self.scope}" if self.global_scale is not None else ""
        groups = f", {self.offs.shape[0]} groups" if self.offs is not None else ""
        kept = "panels" if self.panels else f"{self.scale_layout} scales"
        return (
            f"MXTensor({self.format}, {self.axis}{scope}, shape {tuple(self.shape)}{groups}, {kept}, "
            f"{self.nbytes} bytes, {self.device})"
        )

    def __reduce__(self):
        values, scales, *others = (getattr(self, f.name) for f in fields(self))
        return _unpickle, (values.view(torch.uint8), values.dtype, scales.view(torch.uint8), scales.dtype, *others)

    def dequantize(self, dtype: torch.dtype = torch.float32, *, backend: str = "auto") -> Tensor:
        """The values as `dtype` (float32, bfloat16 or float16), in the logical shape; rows outside the groups are 0."""
        from mxmoe import ops

        return ops.dequantize(self, dtype, backend=backend)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MXTensor:
        """The same copy on another device."""
        return pytree.tree_map(lambda t: t.to(device, non_blocking=non_blocking), self)

    def replace(self, **changes) -> MXTensor:
        """The same copy with some fields changed, checked again."""
        return replace(self, **changes)

    def save(self, path: str | os.PathLike):
        """Writes one safetensors file; `save_mxtensors` puts several into one."""
        from mxmoe.storage import save_mxtensors

        save_mxtensors(path, {"tensor": self})

    @staticmethod
    def load(path: str | os.PathLike) -> MXTensor:
        """Reads a file of `save`; ValueError naming the file where it is damaged, foreign or holds several."""
        from mxmoe.storage import load_mxtensors

        tensors = load_mxtensors(path)
        if len(tensors) != 1:
            raise ValueError(f"{path} must hold one MXTensor, got {sorted(tensors)}; use load_mxtensors")
        return next(iter(tensors.values()))


def _flatten(t: MXTensor):
    present = {name: part for name, part in t._parts().items() if part is not None}
    return list(present.values()), (tuple(present), t.format, t.axis, tuple(t.shape), t.scope, t.scale_layout)


def _flatten_with_keys(t: MXTensor):
    parts, context = _flatten(t)
    return [(pytree.GetAttrKey(name), part) for name, part in zip(context[0], parts, strict=True)], context


def _unflatten(parts, context) -> MXTensor:
    """Unchecked: pytrees also hold specs, flags and tensors of other shapes in the places of the parts."""
    names, *others = context
    t = object.__new__(MXTensor)
    t.__dict__.update(dict.fromkeys(_PARTS), **dict(zip(names, parts, strict=True)))
    t.__dict__.update(zip(("format", "axis", "shape", "scope", "scale_layout"), others, strict=True))
    return t


pytree.register_pytree_node(
    MXTensor, _flatten, _unflatten, serialized_type_name="mxmoe.MXTensor", flatten_with_keys_fn=_flatten_with_keys
)


def _unpickle(values, values_dtype, scales, scales_dtype, *others) -> MXTensor:
    """Bytes and dtypes apart: pickle has no storages of the 8-bit floats."""
    return MXTensor(values.view(values_dtype), scales.view(scales_dtype), *others)


torch.serialization.add_safe_globals([_unpickle])
