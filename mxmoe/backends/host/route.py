"""The router on the host; every verb as in `mxmoe/backends/__init__.py`."""

from mxmoe.backends.host.extension import _C, execution


def route(*args):
    _C.route(*args, *execution())


def route_backward(*args):
    _C.route_backward(*args, *execution())


def sort_by_expert(*args):
    _C.sort_by_expert(*args, *execution())
