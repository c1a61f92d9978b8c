"""Verbs on the routed rows, on the host; every verb as in `mxmoe/backends/__init__.py`."""

from mxmoe.backends.host.extension import _C, execution


def permute(x, permutation, top_k, out, offs=None, copies=None):
    _C.permute(x, permutation, top_k, out, offs, _flat(copies), *execution())


def unpermute(*args):
    _C.unpermute(*args, *execution())


def unpermute_backward(dy, y, permutation, weights, rows_grad_out, weights_grad_out, offs=None, copies=None):
    _C.unpermute_backward(dy, y, permutation, weights, rows_grad_out, weights_grad_out, offs, _flat(copies), *execution())


def swiglu(h, offs, activation, interleaved, out, copies=None):
    a = activation
    _C.swiglu(h, offs, a.alpha, a.limit, a.offset, interleaved, out, _flat(copies), *execution())


def swiglu_backward(da, h, offs, activation, interleaved, dh_out, copies=None):
    a = activation
    _C.swiglu_backward(da, h, offs, a.alpha, a.limit, a.offset, interleaved, dh_out, _flat(copies), *execution())


def _flat(copies):
    if copies is None:
        return None
    format, scale_mode, row, column = copies
    return format, scale_mode == "floor", *(row or (None, None))[:2], *(column or (None, None))[:2]
