"""Verbs on the routed rows, on the host; every verb as in `mxmoe/backends/__init__.py`."""

from mxmoe.backends.host.extension import _C, execution


def permute(*args):
    _C.permute(*args, *execution())


def unpermute(*args):
    _C.unpermute(*args, *execution())


def unpermute_backward(*args):
    _C.unpermute_backward(*args, *execution())


def swiglu(h, offs, activation, interleaved, out):
    _C.swiglu(h, offs, activation.alpha, activation.limit, activation.offset, interleaved, out, *execution())


def swiglu_backward(da, h, offs, activation, interleaved, dh_out):
    a = activation
    _C.swiglu_backward(da, h, offs, a.alpha, a.limit, a.offset, interleaved, dh_out, *execution())
