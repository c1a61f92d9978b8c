"""Verbs on the routed rows by csrc/cuda/kernels/{permute,unpermute,unpermute_backward,weights_grad,swiglu,swiglu_backward}.h."""

from mxmoe.backends.device.memory import dense

FUSED = ("mxfp8", "mxfp8_e5m2")


def permute(on, x, permutation, top_k, out, offs=None, copies=None):
    on.launch("permute", x, permutation, top_k, offs, out, *_flat(on, copies))


def unpermute(on, y, inverse, weights, out):
    with dense(out) as to:
        on.launch("unpermute", y, inverse, weights, to)


def unpermute_backward(on, dy, y, permutation, weights, rows_grad_out, weights_grad_out, offs=None, copies=None):
    top_k = len(permutation) // max(len(dy), 1) or 1
    on.launch("unpermute_backward", dy, permutation, weights, top_k, offs, rows_grad_out, *_flat(on, copies))
    if weights_grad_out is not None:
        weights_grad_out.zero_()  # slots without a row
        if y is not None:
            on.launch("weights_grad", dy, y, permutation, top_k, weights_grad_out)


def swiglu(on, h, offs, activation, interleaved, out, copies=None):
    a = activation
    on.launch("swiglu", h, offs, a.alpha, a.limit, a.offset, interleaved, out, *_flat(on, copies))


def swiglu_backward(on, da, h, offs, activation, interleaved, dh_out, copies=None):
    a = activation
    on.launch("swiglu_backward", da, h, offs, a.alpha, a.limit, a.offset, interleaved, dh_out, *_flat(on, copies))


def _flat(on, copies):
    if copies is None:
        return "", False, None, None, None, None
    format, scale_mode, row, column = copies
    if format not in FUSED:
        raise NotImplementedError(f"the {on.name} backend fuses copies in {' and '.join(FUSED)}, got {format}")
    return format, scale_mode == "floor", *(row or (None, None))[:2], *(column or (None, None))[:2]
