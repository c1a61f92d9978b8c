"""quantize, dequantize, swizzle_scales: high precision <-> block-scaled copies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mxmoe import backends, layout
from mxmoe.checks import check_choice, check_offs, check_offs_values, check_out, check_tensor
from mxmoe.formats import FORMATS, HIGH_PRECISION, Format, MXTensor, QuantizeOptions, can_panel, copy_shapes, panel_shapes
from mxmoe.memory import empty
from mxmoe.ops.registration import OPS, backend_for, fill_op


@fill_op(
    "quantize(Tensor x, Tensor? offs, str format, str scale_mode, str scope, int? seed, bool hadamard, bool four_six, "
    "bool block_2d, Tensor(a!)? row_values, Tensor(b!)? row_scales, Tensor(c!)? row_global, Tensor(d!)? column_values, "
    "Tensor(e!)? column_scales, Tensor(f!)? column_global, str backend)"
)
def _quantize(x, offs, format, scale_mode, scope, seed, hadamard, four_six, block_2d, rv, rs, rg, cv, cs, cg, backend):
    check_offs_values(offs, x.shape[1])
    options = QuantizeOptions(scale_mode, scope, seed, hadamard, four_six, block_2d)
    row = None if rv is None else (rv, rs, rg)
    column = None if cv is None else (cv, cs, cg)
    backends.get(backend).quantize(x, offs, format, options, row, column)


@fill_op(
    "dequantize(Tensor values, Tensor scales, Tensor? global_scale, Tensor? offs, str format, str axis, str scope, "
    "Tensor(a!) out, str backend)"
)
def _dequantize(values, scales, global_scale, offs, format, axis, scope, out, backend):
    check_offs_values(offs, out.shape[1])
    backends.get(backend).dequantize(values, scales, global_scale, offs, format, axis, scope, out)


@fill_op(
    "swizzle_scales(Tensor(a!) plain, Tensor(b!) blocked, Tensor? offs, SymInt num_rows, str axis, int block, bool inverse, "
    "str backend)"
)
def _swizzle_scales(plain, blocked, offs, num_rows, axis, block, inverse, backend):
    check_offs_values(offs, num_rows)
    backends.get(backend).swizzle_scales(plain, blocked, offs, axis, block, inverse)


def quantize(
    x: Tensor,
    format: str,
    axis: str = "row",
    *,
    offs: Tensor | None = None,
    scale_mode: str = "rceil",
    scope: str = "row",
    seed: int | None = None,
    hadamard: bool = False,
    four_six: bool = False,
    block_2d: bool = False,
    scale_layout: str = "plain",
    out: MXTensor | tuple[MXTensor, MXTensor] | None = None,
    backend: str = "auto",
) -> MXTensor | tuple[MXTensor, MXTensor]:
    """Block-scaled copy of `x`: scale = round(max|block| / format.max), values = round(x / scale), saturating.

    x (R, L), or (E, R, L) for stacked weights; FP32, BF16 or FP16, any strides. axis "row": blocks along L; "column": along R;
    "both": (row copy, column copy) in one pass. offs (E,): the rows of a 2-D x form groups, each quantized as if alone; a column
    copy then pads every group to a multiple of 128 rows (docs/layouts.md).
    scale_mode "rceil" | "floor" (MX formats); scope "row" | "tensor" | "group" of the NVFP4 global scale ("row" has no column copy;
    "group" = one per entry of offs, or per expert of a 3-D x); seed: stochastic rounding; hadamard: 16-point transform along the
    contraction first; four_six: NVFP4 block scales from max/6 or max/4, whichever errs less; block_2d: one scale per 32x32
    (MXFP8) or 16x16 (NVFP4) tile; scale_layout "plain" (line, block) | "blocked" (what tensor cores read).
    Raises TypeError (dtype), ValueError (shape, option, offs), NotImplementedError (backend lacks the format).
    Sources: OCP Microscaling v1.0; RCEIL arXiv 2506.08027; NVFP4 arXiv 2509.25149; four_six arXiv 2512.02010.
    """
    check_tensor("x", x, (2, 3))
    check_choice("format", format, tuple(FORMATS))
    check_choice("axis", axis, ("row", "column", "both"))
    check_choice("scale_layout", scale_layout, ("plain", "blocked"))
    f = FORMATS[format]
    options = QuantizeOptions(scale_mode, scope if f.has_global_scale else "row", seed, hadamard, four_six, block_2d)
    _check_options(x, f, axis, offs, options)
    if offs is not None:
        offs = check_offs(offs, x)
        if x.ndim != 2:
            raise ValueError(f"x must have 2 dimensions when offs is given, got shape {tuple(x.shape)}")
    name = backend_for(backend, x, "quantize", format)
    copies, fields = make_copies(x, x.shape, f, axis, offs, options, out, name)
    batched = x if x.ndim == 3 else x.unsqueeze(0)
    OPS.quantize(
        batched, offs, format, scale_mode, options.scope, seed, hadamard, four_six, block_2d, *fields, name
    )  # fmt: skip
    if scale_layout == "blocked":
        copies = tuple(swizzle_scales(copy, backend=backend) for copy in copies)
    return copies if axis == "both" else copies[0]


def _check_options(x, f, axis, offs, o: QuantizeOptions):
    check_choice("scale_mode", o.scale_mode, ("rceil", "floor"))
    check_choice("scope", o.scope, ("row", "tensor", "group"))
    if f.has_global_scale:
        if axis != "row" and o.scope == "row":
            raise ValueError(
                "scope='row' has no column copy (a contraction over tokens cannot have one scale per token): use scope='group' "
                f"or 'tensor', got axis={axis!r}"
            )
        if o.scope == "group" and offs is None and x.ndim != 3:
            raise ValueError("scope='group' needs offs or a 3-D x (one group per expert), got a 2-D x without offs")
        if o.block_2d and o.scope == "row":
            raise ValueError("block_2d needs scope 'tensor' or 'group' for nvfp4, got 'row'")
        if o.scale_mode != "rceil":
            raise ValueError(f"scale_mode applies to MX formats only, got {o.scale_mode!r} for {f.name!r}")
    elif o.four_six:
        raise ValueError(f"four_six applies to nvfp4 only, got format {f.name!r}")
    if o.four_six and o.hadamard:
        raise ValueError("four_six and hadamard cannot be combined")
    if o.block_2d and f.name not in ("mxfp8", "nvfp4"):
        raise ValueError(f"block_2d applies to mxfp8 and nvfp4, got format {f.name!r}")
    if o.block_2d and offs is not None:
        raise ValueError("block_2d is for weights and takes no offs")
    if o.block_2d and o.hadamard:
        raise ValueError("block_2d and hadamard cannot be combined (the transform would differ between the two copies)")
    if o.seed is not None and not 0 <= o.seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), got {o.seed}")
    if o.hadamard:
        lengths = {"row": (x.shape[-1],), "column": (x.shape[-2],), "both": x.shape[-2:]}[axis]
        if any(length % 16 for length in lengths):
            raise ValueError(f"hadamard needs a contraction length that is a multiple of 16, got {tuple(lengths)}")
        if (
            offs is not None
            and axis != "row"
            and offs.device.type == "cpu"
            and not torch.compiler.is_compiling()
            and any(end % 16 for end in offs.tolist())
        ):
            raise ValueError(f"hadamard needs every group to be a multiple of 16 rows, got offs {offs.tolist()}")


def make_copies(like: Tensor, shape, f: Format, axis: str, offs, options: QuantizeOptions, out, backend: str):
    """(copies, fields): the outputs of quantizing an array of `shape`, those given or new ones on `like`'s device, and the six
    tensors of the backend contract (values, scales, global scale of row and column copy)."""
    axes = ("row", "column") if axis == "both" else (axis,)
    if out is None:
        copies = tuple(_empty_copy(like, shape, f, a, offs, options, backend) for a in axes)
    else:
        copies = out if isinstance(out, tuple) else (out,)
        _check_out_copies(copies, like, shape, f, axes, offs, options)
    by_axis = dict(zip(axes, copies, strict=True))
    fields = []
    for a in ("row", "column"):
        fields += _batched_fields(by_axis[a], options.scope) if a in by_axis else [None] * 3
    return copies, fields


def _empty_copy(like, shape, f, axis, offs, options, backend) -> MXTensor:
    groups = None if offs is None else offs.shape[0]
    values, scales, global_scale = copy_shapes(shape, f, axis, groups, options.scope)
    return MXTensor(
        empty(values, f.values_dtype, like, backend),
        empty(scales, f.scales_dtype, like, backend),
        None if global_scale is None else torch.empty(global_scale, dtype=torch.float32, device=like.device),
        f.name, axis, tuple(shape), options.scope, "plain", offs,
    )  # fmt: skip


def _check_out_copies(copies, like, shape, f, axes, offs, options):
    if len(copies) != len(axes):
        raise ValueError(
            f"out must hold {len(axes)} MXTensor for axis {'both' if len(axes) == 2 else axes[0]!r}, got {len(copies)}"
        )
    groups = None if offs is None else offs.shape[0]
    for copy, axis in zip(copies, axes, strict=True):
        if not isinstance(copy, MXTensor):
            raise TypeError(f"out must be MXTensor, got {type(copy).__name__}")
        expected = (f.name, axis, tuple(shape), options.scope, "plain")
        got = (copy.format, copy.axis, tuple(copy.shape), copy.scope, copy.scale_layout)
        if expected != got:
            raise ValueError(f"out must have (format, axis, shape, scope, scale_layout) = {expected}, got {got}")
        shapes = copy_shapes(shape, f, axis, groups, options.scope)
        dtypes = (f.values_dtype, f.scales_dtype, torch.float32)
        for name, t, part_shape, dtype in zip(
            ("values", "scales", "global_scale"),
            (copy.values, copy.scales, copy.global_scale),
            shapes,
            dtypes,
            strict=True,
        ):
            if part_shape is not None:
                check_out(f"out.{name}", t, part_shape, dtype, like)


def _batched_fields(t: MXTensor, scope: str):
    """[values, scales, global_scale] with the batch dimension of the backend contract."""
    if len(t.shape) == 3:
        return [t.values, t.scales, t.global_scale]
    g = t.global_scale
    return [t.values.unsqueeze(0), t.scales.unsqueeze(0), g.unsqueeze(0) if g is not None and scope == "row" else g]


def dequantize(t: MXTensor, out_dtype: torch.dtype = torch.float32, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """values * scale (* global_scale), in FP32, rounded once to `out_dtype` (FP32, BF16 or FP16); shape `t.shape`."""
    if not isinstance(t, MXTensor):
        raise TypeError(f"t must be an MXTensor, got {type(t).__name__}")
    check_choice("out_dtype", out_dtype, tuple(HIGH_PRECISION))
    t = plain_scales(t, backend=backend)
    name = backend_for(backend, t.values, "dequantize", t.format)
    if out is None:
        out = empty(t.shape, out_dtype, t.values, name)
    else:
        check_out("out", out, t.shape, out_dtype, t.values)
    fields = [None if part is None else part.contiguous() for part in _batched_fields(t, t.scope)]
    target = out if out.ndim == 3 else out.unsqueeze(0)
    OPS.dequantize(*fields, None if t.offs is None else t.offs.contiguous(), t.format, t.axis, t.scope, target, name)
    return out


def swizzle_scales(t: MXTensor, *, backend: str = "auto") -> MXTensor:
    """The same copy with its scales in the blocked layout (docs/layouts.md): byte (r % 32) * 16 + (r // 32) * 4 + k of each
    128 x 4 tile, padding bytes 0; scales become flat, (bytes,) or (E, bytes). The inverse is `plain_scales`."""
    return _change_layout(t, "blocked", backend)


def plain_scales(t: MXTensor, *, backend: str = "auto") -> MXTensor:
    """The same copy with plain (line, block) scales, its lines apart; the inverse of `swizzle_scales` and of `to_panels`."""
    if isinstance(t, MXTensor) and t.panels:
        return _reordered(t, layout.in_lines, copy_shapes(t.shape, FORMATS[t.format], t.axis), backend)
    return _change_layout(t, "plain", backend)


def to_panels(t: MXTensor, *, backend: str = "auto") -> MXTensor:
    """The same weights, for inference on a CPU, in panels of 64 lines (docs/layouts.md): `moe_decode` and `grouped_mm` read each
    from start to end. t: a row copy (E, R, L), R a multiple of 64, L of 32, with plain scales and scope "row". The inverse is
    `plain_scales`; other backends read panels through it. Raises TypeError, ValueError (argument, expected, got).
    """
    if not isinstance(t, MXTensor):
        raise TypeError(f"t must be an MXTensor, got {type(t).__name__}")
    if t.panels:
        return t
    if not can_panel(t.shape) or (t.axis, t.scope, t.scale_layout) != ("row", "row", "plain"):
        raise ValueError(
            "t must be a row copy (E, R, L) with R a multiple of 64, L one of 32, plain scales and scope 'row' to lie in panels, "
            f"got {t!r}"
        )
    return _reordered(t, layout.in_panels, panel_shapes(t.shape, FORMATS[t.format]), backend)


def _reordered(t: MXTensor, values_order, shapes, backend: str) -> MXTensor:
    """Its values and scales copied to tensors of these shapes in another order."""
    name = backends.resolve(backend, t.device.type)
    values, scales = (empty(shape, torch.uint8, t.values, name) for shape in shapes[:2])
    source = values_order(t.values.view(torch.uint8).contiguous(), FORMATS[t.format].bits)
    values.view(source.dtype).view(source.shape).copy_(source)
    lines = t.scales.view(torch.uint8)
    if not t.panels:
        lines = lines.unflatten(1, (-1, layout.PANEL_LINES))
    scales.view(lines.transpose(2, 3).shape).copy_(lines.transpose(2, 3))
    return replace(t, values=values.view(t.values.dtype), scales=scales.view(t.scales.dtype))


def _change_layout(t: MXTensor, scale_layout: str, backend: str) -> MXTensor:
    if not isinstance(t, MXTensor):
        raise TypeError(f"t must be an MXTensor, got {type(t).__name__}")
    if t.scale_layout == scale_layout:
        return t
    f = FORMATS[t.format]
    name = backend_for(backend, t.values, "swizzle_scales", t.format)
    groups = None if t.offs is None else t.offs.shape[0]
    shape = copy_shapes(t.shape, f, t.axis, groups, t.scope, scale_layout)[1]
    result, source = torch.empty(shape, dtype=f.scales_dtype, device=t.device), t.scales.contiguous()
    inverse = scale_layout == "plain"
    plain, blocked = (
        s.view(torch.uint8) if len(t.shape) == 3 else s.view(torch.uint8).unsqueeze(0)
        for s in ((result, source) if inverse else (source, result))
    )
    offs = None if t.offs is None else t.offs.contiguous()
    OPS.swizzle_scales(plain, blocked, offs, t.shape[-2], t.axis, f.block, inverse, name)
    return replace(t, scales=result, scale_layout=scale_layout)
