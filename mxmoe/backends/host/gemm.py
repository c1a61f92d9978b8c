"""grouped_mm and grouped_mm_wgrad on the CPU: csrc/host/grouped_mm_kernel.cpp."""

from torch import Tensor

from mxmoe.backends.host.extension import _C, execution


def grouped_mm(a, b, offs_E, bias_EO, out_MO):
    bias = None if bias_EO is None else bias_EO.float().contiguous()
    with_unit_stride(out_MO, lambda out: _C.grouped_mm(*readable(a), *readable(b), offs_E.contiguous(), bias, out, *execution()))


def grouped_mm_wgrad(a, b, offs_E, padded, accumulate, out_EOC):
    def run(out):
        _C.grouped_mm_wgrad(*readable(a), *readable(b), offs_E.contiguous(), padded, accumulate, out, *execution())

    with_unit_stride(out_EOC, run)


def readable(operand):
    """The operand with one of its last two strides 1, as the kernel reads it; copied where it is not."""
    values, scales, global_scale, format = operand
    if 1 not in values.stride()[-2:]:
        values = values.contiguous()
    if scales is not None and scales.stride(-1) != 1:
        scales = scales.contiguous()
    return values, scales, global_scale, format


def with_unit_stride(out: Tensor, run):
    """run(out), through a contiguous copy where the last dimension of `out` is not dense."""
    if out.stride(-1) == 1:
        return run(out)
    dense = out.contiguous()
    run(dense)
    out.copy_(dense)
