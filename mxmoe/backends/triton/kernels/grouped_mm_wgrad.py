"""grouped_mm_wgrad: the weights' gradient of each group, a sum over its own rows; padding and other groups' rows never enter."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.numerics import load_float, store_float
from mxmoe.backends.triton.kernels.operands import arguments_of, compute_of, gemm_config, product
from mxmoe.backends.triton.kernels.target import Target, group_slots, raw


@triton.jit
def start_of(offs, group, EP: tl.constexpr, PADDED: tl.constexpr):
    """(first position along the contraction, number of rows) of a group."""
    e = tl.arange(0, EP)
    ends = tl.load(offs + e, mask=e <= group, other=0)
    sizes = ends - tl.load(offs + e - 1, mask=(e <= group) & (e > 0), other=0)
    size = tl.sum(tl.where(e == group, sizes, 0), 0)
    if PADDED:
        return tl.multiple_of(tl.sum(tl.where(e < group, (sizes + 127) // 128, 0), 0) * 128, 128), size
    else:
        return tl.sum(tl.where(e < group, sizes, 0), 0), size


@triton.jit
def grouped_mm_wgrad_kernel(a, a_scales, a_global, b, b_scales, b_global, offs, out, O, C, num_groups, a_line, a_k, a_blocks,
                            b_line, b_k, b_blocks, stride_e, stride_o, stride_c, MAX_A: tl.constexpr, MAX_B: tl.constexpr,
                            NVFP4_A: tl.constexpr, NVFP4_B: tl.constexpr, COMPUTE: tl.constexpr, PADDED: tl.constexpr,
                            ACCUMULATE: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                            BK: tl.constexpr):  # fmt: skip
    across, down = tl.cdiv(C, BN), tl.cdiv(O, BM)
    for tile in range(tl.program_id(0), num_groups * down * across, tl.num_programs(0)):
        group = tile // (down * across)
        start, size = start_of(offs, group, EP, PADDED)
        o0, c0 = (tile // across % down * BM).to(tl.int64), (tile % across * BN).to(tl.int64)
        o, c = o0 + tl.arange(0, BM), c0 + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(start, start + size, BK):
            acc = product(acc, a, a_scales, o0, o < O, a_line, a_k, a_blocks, b, b_scales, c0, c < C, b_line, b_k, b_blocks, k0,
                          start + size, MAX_A, MAX_B, NVFP4_A, NVFP4_B, COMPUTE, BM, BN, BK)  # fmt: skip
        if a_global is not None:
            acc *= tl.load(a_global + group)
        if b_global is not None:
            acc *= tl.load(b_global + group)
        at = out + group.to(tl.int64) * stride_e + o[:, None] * stride_o + c[None, :] * stride_c
        mask = (o < O)[:, None] & (c < C)[None, :]
        if ACCUMULATE:
            mask = mask & (tl.full((BM, BN), size, tl.int32) > 0)
            acc += load_float(at, mask)
        store_float(at, acc, mask)


def grouped_mm_wgrad(on: Target, a, b, offs_E, padded: bool, accumulate: bool, out_EOC):
    num_groups, outputs, contraction = out_EOC.shape
    compute = compute_of(on.arch, a, b)
    c = gemm_config(on, compute, a, b)
    most = num_groups * triton.cdiv(outputs, c["BM"]) * triton.cdiv(contraction, c["BN"])
    strides = dict(zip(("stride_e", "stride_o", "stride_c"), out_EOC.stride(), strict=True))
    on.run(
        grouped_mm_wgrad_kernel, (min(on.programs, most),), **arguments_of("a", a), **arguments_of("b", b), offs=offs_E,
        out=raw(out_EOC), O=outputs, C=contraction, num_groups=num_groups, **strides, COMPUTE=compute, PADDED=padded,
        ACCUMULATE=accumulate, EP=group_slots(offs_E)[1], **c,
    )  # fmt: skip
