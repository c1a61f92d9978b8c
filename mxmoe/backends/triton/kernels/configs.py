"""Tiles and warps of every kernel: a pure function of kernel, architecture and shape.

Blocks are rows BR and columns BL of a tile. In the interpreter a program costs about a millisecond whatever its tile: tiles are
large.
"""


def pick_config(kernel: str, arch: str, **facts) -> dict:
    """Sizes by name, and num_warps."""
    return globals()[f"_{kernel}"](arch, **facts)


def _quantize(arch: str, column: bool) -> dict:
    if arch == "interpreter":
        return dict(BR=128, BL=256, num_warps=4)
    return dict(BR=64, BL=64, num_warps=4) if column else dict(BR=16, BL=256, num_warps=4)


def _dequantize(arch: str) -> dict:
    return dict(BR=128, BL=256, num_warps=4) if arch == "interpreter" else dict(BR=32, BL=128, num_warps=4)


def _rows(arch: str, column: bool) -> dict:
    return _quantize(arch, column)


def _swiglu(arch: str, column: bool) -> dict:
    if arch == "interpreter":
        return dict(BR=128, BL=128, num_warps=4)
    return dict(BR=64, BL=32, num_warps=4) if column else dict(BR=16, BL=128, num_warps=4)


def _weights_grad(arch: str) -> dict:
    return dict(BR=128 if arch == "interpreter" else 16, num_warps=4)


def _route(arch: str, experts: int) -> dict:
    slots = max(32, 1 << (experts - 1).bit_length())
    if arch == "interpreter":
        return dict(EP=slots, BT=16, num_warps=4)
    return dict(EP=slots, BT=max(1, min(16, 1024 // slots)), num_warps=4)
