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
    return dict(BR=64, BL=64, num_warps=4) if column else dict(BR=16, BL=256, num_warps=8)


def _dequantize(arch: str) -> dict:
    return dict(BR=128, BL=256, num_warps=4) if arch == "interpreter" else dict(BR=32, BL=128, num_warps=8)


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
    return dict(EP=slots, BT=max(1, min(16, 1024 // slots)), num_warps=8)


def _grouped_mm(arch: str, compute: str, decoded: bool, packed: bool, aligned: bool) -> dict:
    """Sizes that no compiled kernel spills with (machine_code.txt). Decoding takes registers beside the accumulator; so do
    addresses of rows that are not aligned, each element having its own, and the scales of NVFP4's small blocks."""
    if arch == "interpreter":
        return dict(BM=128, BN=128, BK=128, num_warps=4)
    if compute == "fp32":
        return dict(BM=32, BN=32 if arch == "sm_80" else 64, BK=16, num_warps=4, num_stages=2)
    blackwell = arch in ("sm_100", "sm_103")
    if compute == "scaled" and blackwell:  # their tensor cores take scales with 128 rows only
        return dict(BM=128, BN=64 if aligned and not packed else 32, BK=128, num_warps=8, num_stages=3)
    if not aligned:
        return dict(BM=64, BN=64, BK=64, num_warps=8, num_stages=2)
    if compute == "scaled":
        return dict(BM=64, BN=64, BK=128, num_warps=8, num_stages=2)
    if decoded:
        return dict(BM=64, BN=128, BK=64, num_warps=8, num_stages=3)
    if blackwell:
        return dict(BM=128, BN=64, BK=128, num_warps=8, num_stages=3)
    return dict(BM=128, BN=128 if arch == "sm_90" else 64, BK=64, num_warps=8, num_stages=3)
