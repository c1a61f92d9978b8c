"""grouped_mm: rows of each group times its expert's weights. Programs stay and walk over tiles; groups are found on the device."""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.groups import group_at, padded_total
from mxmoe.backends.triton.kernels.numerics import store_float
from mxmoe.backends.triton.kernels.operands import arguments_of, compute_of, gemm_config, length_of, product
from mxmoe.backends.triton.kernels.target import Target, group_slots, raw


@triton.jit
def grouped_mm_kernel(a, a_scales, a_global, b, b_scales, b_global, offs, bias, out, M, O, C, num_groups, a_line, a_k, a_blocks,
                      b_expert, b_line, b_k, b_blocks, stride_m, stride_o, MAX_A: tl.constexpr, MAX_B: tl.constexpr,
                      NVFP4_A: tl.constexpr, NVFP4_B: tl.constexpr, COMPUTE: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr,
                      BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    across = tl.cdiv(O, BN)
    padded, last = padded_total(offs, num_groups, EP, BM)
    down = padded // BM + tl.cdiv(M - last, BM)
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        position = tile // across * BM
        group, first, size, padded_first = group_at(offs, num_groups, position, EP, BM)
        inside = position - padded_first + tl.arange(0, BM)
        row0, o0 = (first + position - padded_first).to(tl.int64), tile % across * BN
        rows, live = (first + inside).to(tl.int64), inside < size
        o = o0 + tl.arange(0, BN)
        expert = tl.minimum(group, num_groups - 1).to(tl.int64)
        weights, weight_scales = b + expert * b_expert, b_scales
        if b_scales is not None:
            weight_scales += expert * O * b_blocks
        acc = tl.zeros((BM, BN), tl.float32)
        for k0 in range(0, tl.where(group < num_groups, C, 0), BK):  # rows past the groups are zero
            acc = product(acc, a, a_scales, row0, live, a_line, a_k, a_blocks, weights, weight_scales, o0.to(tl.int64), o < O,
                          b_line, b_k, b_blocks, k0, C, MAX_A, MAX_B, NVFP4_A, NVFP4_B, COMPUTE, BM, BN, BK)  # fmt: skip
        if a_global is not None:
            acc *= tl.load(a_global + rows, mask=live, other=0.0)[:, None]
        if b_global is not None:
            acc *= tl.load(b_global + expert * O + o, mask=o < O, other=0.0)[None, :]
        if bias is not None:
            acc += tl.load(bias + expert * O + o, mask=o < O, other=0.0)[None, :]
        past = (tl.full((BM,), group, tl.int32) == num_groups) & (rows < M)
        at = out + rows[:, None] * stride_m + o[None, :] * stride_o
        store_float(at, tl.where(live[:, None], acc, 0.0), (live | past)[:, None] & (o < O)[None, :])


def grouped_mm(on: Target, a, b, offs_E, bias_EO, out_MO):
    num_rows, outputs = out_MO.shape
    num_groups, slots = group_slots(offs_E)
    if num_groups == 0:
        out_MO.zero_()
        return
    compute = compute_of(on.arch, a, b)
    c = gemm_config(on, compute, a, b)
    most = (triton.cdiv(num_rows, c["BM"]) + num_groups) * triton.cdiv(outputs, c["BN"])
    on.run(
        grouped_mm_kernel, (min(on.programs, most),), **arguments_of("a", a), **arguments_of("b", b), b_expert=b[0].stride(0),
        offs=offs_E, bias=None if bias_EO is None else bias_EO.float().contiguous(), out=raw(out_MO), M=num_rows, O=outputs,
        C=min(length_of(a), length_of(b)), num_groups=num_groups, stride_m=out_MO.stride(0), stride_o=out_MO.stride(1),
        COMPUTE=compute, EP=slots, **c,
    )  # fmt: skip
