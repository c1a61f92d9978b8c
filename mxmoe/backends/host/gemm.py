"""grouped_mm, grouped_mm_wgrad and moe_decode on the CPU: csrc/host/grouped_mm_kernel.cpp."""

import sys

from torch import Tensor

from mxmoe.backends.host.extension import _C, execution
from mxmoe.backends.moe_decode import compose
from mxmoe.formats import FORMATS, QuantizeOptions


def grouped_mm(a, b, offs_E, bias_EO, out_MO):
    bias = None if bias_EO is None else bias_EO.float().contiguous()
    with_unit_stride(out_MO, lambda out: _C.grouped_mm(*readable(a), *readable(b), offs_E.contiguous(), bias, out, *execution()))


def grouped_mm_wgrad(a, b, offs_E, padded, accumulate, out_EOC):
    def run(out):
        _C.grouped_mm_wgrad(*readable(a), *readable(b), offs_E.contiguous(), padded, accumulate, out, *execution())

    with_unit_stride(out_EOC, run)


def moe_decode(x, ids_TK, weights_TK, w13, b13, w2, b2, activation, interleaved, act_format, act_options, out_TD):
    """One call into the core; tokens that arrive quantized take the verbs one by one, to the same bytes."""
    if x[3] in FORMATS or act_options != QuantizeOptions():
        verbs = sys.modules["mxmoe.backends.host"]
        return compose(
            verbs, x, ids_TK, weights_TK, w13, b13, w2, b2, activation, interleaved, act_format, act_options, out_TD
        )  # fmt: skip
    a = activation
    _C.moe_decode(
        x[0].contiguous(), ids_TK.contiguous(), weights_TK.contiguous(), *readable(w13), b13, *readable(w2), b2,
        a.alpha, a.limit, a.offset, interleaved, act_format, out_TD, *execution(),
    )  # fmt: skip


def checked_decode(x, ids_TK, weights_TK, w13, b13, w2, b2, formats, activation, interleaved, act_format, out_TD):
    """A function (x, ids, weights, w13, b13, w2, b2, out) -> bool: moe_decode without another check, for arguments that look like
    these, w13 and w2 tensors or MXTensors; False, with nothing done, for others. None where these are not dense plain tensors."""
    a = activation
    try:
        call = _C.CheckedDecode(
            x, ids_TK, weights_TK, w13, b13, w2, b2, out_TD, *formats, a.alpha, a.limit, a.offset, interleaved, act_format
        )
    except ValueError:
        return None
    return lambda *arguments: call(*arguments, *execution())


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
