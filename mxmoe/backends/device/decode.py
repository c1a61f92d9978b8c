"""moe_decode by csrc/cuda/kernels/moe_decode.h for a few tokens with activations in BF16; else by the other verbs."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from mxmoe.backends.device.gemm import grouped_mm
from mxmoe.backends.device.quantize import quantize
from mxmoe.backends.device.route import sort_by_expert
from mxmoe.backends.device.rows import permute, swiglu, unpermute
from mxmoe.backends.moe_decode import compose

FORMATS = ("bf16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")  # of weights
MAX_SLOTS = 1024  # of the kernels: tokens times experts per token


def moe_decode(on, x, ids, weights, w13, b13, w2, b2, activation, interleaved, act_format, act_options, out):
    if act_format != "bf16" or x[3] != "bf16" or not {w13[3], w2[3]} <= set(FORMATS) or ids.numel() > MAX_SLOTS:
        verbs = SimpleNamespace(**{verb.__name__: partial(verb, on) for verb in (sort_by_expert, permute, quantize, grouped_mm,
                                                                              swiglu, unpermute)})  # fmt: skip
        return compose(verbs, x, ids, weights, w13, b13, w2, b2, activation, interleaved, act_format, act_options, out)
    if ids.numel() == 0:
        return out.zero_()
    a = activation
    hidden = torch.empty(ids.numel(), w13[0].shape[1] // 2, dtype=torch.bfloat16, device=ids.device)
    for source, w, bias, down, to in ((x[0].contiguous(), w13, b13, False, hidden), (hidden, w2, b2, True, out)):
        on.launch("moe_decode", source, ids, weights, *_rows(w), bias, interleaved, a.alpha, a.limit, a.offset, down, to)


def _rows(w) -> tuple[str, Tensor, Tensor | None, Tensor | None]:
    """format, values and scales whose rows are contiguous, global scales (E, O)."""
    values, scales, global_scale, format = w
    if format != "bf16":
        values, scales = values.view(torch.uint8), scales.view(torch.uint8)
    values, scales = (t if t is None or t.stride(-1) == 1 else t.contiguous() for t in (values, scales))
    return format, values, scales, None if global_scale is None else global_scale.contiguous()
