"""grouped_mm, grouped_mm_wgrad, moe_decode: the matrix products of the layer, one weight matrix per group of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.checks import FLOATS, check_choice, check_offs, check_offs_values, check_out, check_shape, check_tensor
from mxmoe.formats import FORMATS, HIGH_PRECISION, MXTensor
from mxmoe.memory import empty
from mxmoe.ops.quantize import plain_scales
from mxmoe.ops.registration import OPS, backend_for, dtype_format, fill_op

Operand = Tensor | MXTensor


def operand_schema(name: str) -> str:
    """Of one operand in an op's schema: values, scales, global scale, format."""
    return f"Tensor {name}, Tensor? {name}_scales, Tensor? {name}_global, str {name}_format"


_A, _B = operand_schema("a"), operand_schema("b")


@fill_op(f"grouped_mm({_A}, {_B}, Tensor offs, Tensor? bias, Tensor(a!) out, str backend)")
def _grouped_mm(a, a_scales, a_global, a_format, b, b_scales, b_global, b_format, offs, bias, out, backend):
    check_offs_values(offs, out.shape[0])
    backends.get(backend).grouped_mm((a, a_scales, a_global, a_format), (b, b_scales, b_global, b_format), offs, bias, out)


@fill_op(
    f"grouped_mm_wgrad({_A}, {_B}, Tensor offs, Tensor[] made_with, SymInt num_rows, bool padded, bool accumulate, Tensor(a!) out, "
    "str backend)"
)
def _grouped_mm_wgrad(
    a, a_scales, a_global, a_format, b, b_scales, b_global, b_format, offs, made_with, num_rows, padded, accumulate, out, backend
):
    check_offs_values(offs, num_rows)
    for own in made_with:
        if offs.device.type == "cpu" and not torch.equal(own, offs):
            raise ValueError(f"a and b must be quantized with these offs {offs.tolist()}, got a copy made with {own.tolist()}")
    backends.get(backend).grouped_mm_wgrad(
        (a, a_scales, a_global, a_format), (b, b_scales, b_global, b_format), offs, padded, accumulate, out
    )


def grouped_mm(
    a: Operand,
    b: Operand,
    offs: Tensor,
    *,
    bias: Tensor | None = None,
    in_fp32: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """out[r] = a[r] . b[e]^T + bias[e] for each row r of group e; FP32 accumulation, one rounding; zero past offs[-1].

    a: (M, C) tensor or row-copy MXTensor. b: (E, O, C) tensor (C or O of unit stride), row-copy MXTensor of shape (E, O, C), or
    column-copy MXTensor of shape (E, C, O). bias (E, O), any float dtype, read as FP32. offs int32 (E,). in_fp32:
    tensors of any dtypes are multiplied in FP32, which has their values. -> (M, O) of out_dtype (default: a's dtype, BF16 for an
    MXTensor). Each output is one FP32 accumulator over
    ascending pairs of C: a row's bytes do not depend on the other rows. Raises TypeError, ValueError (argument, expected, got),
    NotImplementedError.
    """
    (rows, contraction), a_fields = operand_lines("a", a, 2)
    (num_experts, outputs, b_contraction), b_fields = operand_lines("b", b, 3, backend)
    if contraction != b_contraction:
        raise ValueError(f"b must contract over a's {contraction} columns, got {b_contraction}")
    offs = check_offs(offs, a_fields[0], num_experts)
    _check_pair(a_fields, b_fields, in_fp32)
    if bias is not None:
        check_tensor("bias", bias, 2, FLOATS, a_fields[0])
        check_shape("bias", bias, (num_experts, outputs))
        bias = bias.float().contiguous()
    dtype = out.dtype if out is not None and out_dtype is None else out_dtype or _default_out_dtype(a)
    check_choice("out_dtype", dtype, tuple(HIGH_PRECISION))
    name = backend_for(backend, a_fields[0], "grouped_mm", b_fields[3])
    if out is None:
        out = empty((rows, outputs), dtype, a_fields[0], name)
    else:
        check_out("out", out, (rows, outputs), dtype, a_fields[0])
    a_fields[2] = scale_per_line(a, a_fields[2], (rows,))
    b_fields[2] = scale_per_line(b, b_fields[2], (num_experts, outputs))
    OPS.grouped_mm(*a_fields, *b_fields, offs, bias, out, name)
    return out


def grouped_mm_wgrad(
    a: Operand,
    b: Operand,
    offs: Tensor,
    *,
    accumulate: bool = False,
    in_fp32: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """out[e] (+)= a[rows of e]^T . b[rows of e]: the weight gradient of `grouped_mm` from dy (a) and x (b).

    a (M, O), b (M, C): tensors, or column-copy MXTensors made with the same offs; in_fp32 as in `grouped_mm`. -> (E, O, C) FP32
    (default) or BF16; a group without rows gives zeros (accumulate: stays). accumulate needs out: FP32 sum, one rounding. Raises
    as `grouped_mm`.
    """
    (rows, outputs), a_fields, a_padded = _columns("a", a, offs)
    (b_rows, contraction), b_fields, b_padded = _columns("b", b, offs)
    if rows != b_rows or a_padded != b_padded:
        raise ValueError(
            f"a and b must have the same rows and both or neither be MXTensors, got {rows} and {b_rows} rows, formats "
            f"{a_fields[3]!r} and {b_fields[3]!r}"
        )
    _check_pair(a_fields, b_fields, in_fp32)
    offs, num_groups = offs.contiguous(), offs.shape[0]
    dtype = out.dtype if out is not None and out_dtype is None else out_dtype or torch.float32
    check_choice("out_dtype", dtype, (torch.float32, torch.bfloat16))
    if accumulate and out is None:
        raise ValueError("accumulate=True needs out to add to, got None")
    name = backend_for(backend, a_fields[0], "grouped_mm_wgrad", a_fields[3])
    if out is None:
        out = empty((num_groups, outputs, contraction), dtype, a_fields[0], name)
    else:
        check_out("out", out, (num_groups, outputs, contraction), dtype, a_fields[0])
    for operand, fields in ((a, a_fields), (b, b_fields)):
        fields[2] = scale_per_line(operand, fields[2], (num_groups,))
    made_with = [t.offs for t in (a, b) if a_padded]
    OPS.grouped_mm_wgrad(*a_fields, *b_fields, offs, made_with, rows, a_padded, accumulate, out, name)
    return out


def _default_out_dtype(a: Operand) -> torch.dtype:
    return torch.bfloat16 if isinstance(a, MXTensor) else a.dtype


def operand_lines(name: str, t: Operand, ndim: int, backend: str = "auto"):
    """Logical (..., lines, contraction) and the backend's operand fields [values, scales, global_scale, format]; panels stay such
    where the backend reads them."""
    if isinstance(t, MXTensor):
        if len(t.shape) != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(t.shape)}")
        if ndim == 2 and t.axis != "row":
            raise ValueError(f"{name} must be a row copy (blocks along the contraction), got axis {t.axis!r}")
        if t.panels and backends.resolve(backend, t.device.type) in backends.READ_PANELS:
            return tuple(t.shape), [t.values.contiguous(), t.scales.contiguous(), t.global_scale, t.format]
        t = plain_scales(t)
        values, shape = t.values, tuple(t.shape)
        if t.axis == "column":
            shape = (*shape[:-2], shape[-1], shape[-2])
            if FORMATS[t.format].bits == 8:
                values = values.transpose(-1, -2)
        return shape, [values, t.scales, t.global_scale, t.format]
    check_tensor(name, t, ndim)
    if 1 not in t.stride()[-2:]:
        t = t.contiguous()
    return tuple(t.shape), [t, None, None, dtype_format(t)]


def _columns(name: str, t: Operand, offs: Tensor):
    """Logical (rows, lines), the operand fields as (lines, contraction) views, and whether groups are padded."""
    if isinstance(t, MXTensor):
        if len(t.shape) != 2 or t.axis != "column" or t.offs is None:
            raise ValueError(
                f"{name} must be a 2-D column copy quantized with offs (blocks along the rows of each group), got shape "
                f"{tuple(t.shape)}, axis {t.axis!r}, offs {'given' if t.offs is not None else None}"
            )
        check_offs(offs, t.values, t.offs.shape[0])
        t = plain_scales(t)
        values = t.values.transpose(0, 1) if FORMATS[t.format].bits == 8 else t.values
        return tuple(t.shape), [values, t.scales, t.global_scale, t.format], True
    check_tensor(name, t, 2)
    check_offs(offs, t)
    if 1 not in t.stride():
        t = t.contiguous()
    return tuple(t.shape), [t.transpose(0, 1), None, None, dtype_format(t)], False


def _check_pair(a, b, in_fp32: bool):
    """High-precision operands must agree in dtype; one goes with any quantized one. in_fp32: both are such, and become "fp32"."""
    if a[0].device != b[0].device:
        raise ValueError(f"a and b must be on the same device, got {a[0].device} and {b[0].device}")
    high = set(HIGH_PRECISION.values())
    if in_fp32:
        if not {a[3], b[3]} <= high:
            raise TypeError(f"in_fp32 is for tensors in high precision, got {a[3]} and {b[3]}")
        a[3] = b[3] = "fp32"
    if a[3] in high and b[3] in high and a[3] != b[3]:
        raise TypeError(f"a and b must have the same dtype, got {a[3]} and {b[3]}")


def scale_per_line(t: Operand, global_scale: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The NVFP4 global scale expanded to one per line: of shape (M,) or (E, O), or (E,) for wgrad."""
    if global_scale is None:
        return None
    if t.scope == "tensor":
        return global_scale.expand(shape).contiguous()
    if t.scope == "row":
        return global_scale.contiguous()
    if len(shape) == 2:
        return global_scale.unsqueeze(1).expand(shape).contiguous()
    if shape == tuple(global_scale.shape) and t.axis == "column":
        return global_scale
    rows = torch.arange(shape[0], dtype=torch.int32, device=global_scale.device)
    group = torch.searchsorted(t.offs.contiguous(), rows, right=True)  # the groups it was made with, whatever the GEMM's are
    return global_scale[group.clamp(max=t.offs.shape[0] - 1)]
