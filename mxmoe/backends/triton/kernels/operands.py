"""Tiles of a GEMM's operands: high precision as it is, block formats decoded exactly, or their codes and scales for a tensor core
that multiplies them.

MAX names the element format as in copies.py, 0 high precision. COMPUTE "bf16", "fp16" or "fp32" is what tiles become: each product
of an element and its scale is exact in BF16 but for subnormals (docs/numerics.md, GEMM).
"""

import triton
import triton.language as tl

from mxmoe.backends.triton.kernels.dequantize import element_of
from mxmoe.backends.triton.kernels.numerics import decode_scale, float_of
from mxmoe.backends.triton.kernels.target import Target, raw
from mxmoe.formats import FORMATS

SCALED = ("sm_100", "sm_103", "sm_120", "sm_121")  # have a matrix product of block-scaled operands


@triton.jit
def bytes_tile(values, first, live, k0, limit, stride_line, stride_k, MAX: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr):
    """Elements k0 ... of lines first ..., as they lie: (BX, BK), or (BX, BK / 2) pairs. Zeros where not live or not below limit.
    NOTE: 32-bit offsets within a tile halve its addresses' registers; the tile's own is of 64 bits."""
    pair: tl.constexpr = 2 if MAX == 6.0 else 1
    k = tl.arange(0, BK // pair)
    tile = values + (first * stride_line + tl.full((), k0 // pair, tl.int64) * stride_k)
    at = tile + (tl.arange(0, BX)[:, None] * stride_line + k[None, :] * stride_k)
    return tl.load(at, mask=live[:, None] & (pair * k < limit - k0)[None, :], other=0)


@triton.jit
def scales_tile(scales, first, live, k0, limit, blocks, NVFP4: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr):
    """The bytes of the scales of the same elements."""
    block: tl.constexpr = 16 if NVFP4 else 32
    k = tl.arange(0, BK // block)
    at = scales + (first * blocks + k0 // block) + (tl.arange(0, BX)[:, None] * blocks + k[None, :])
    return tl.load(at, mask=live[:, None] & (k * block < limit - k0)[None, :], other=0)


@triton.jit
def decoded_tile(values, scales, first, live, k0, limit, stride_line, stride_k, blocks, MAX: tl.constexpr, NVFP4: tl.constexpr,
                 COMPUTE: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """(BX, BK) elements of COMPUTE, without the global scale."""
    x = bytes_tile(values, first, live, k0, limit, stride_line, stride_k, MAX, BX, BK)
    if MAX == 0.0:
        if COMPUTE == "fp32":
            return float_of(x.to(tl.int32) << 16) if x.dtype == tl.int16 else x.to(tl.float32)
        else:
            return x.to(tl.bfloat16, bitcast=True) if COMPUTE == "bf16" else x
    else:
        block: tl.constexpr = 16 if NVFP4 else 32
        codes = x.to(tl.int32)
        if MAX == 6.0:
            codes = tl.reshape(tl.join(codes & 15, codes >> 4), (BX, BK))
        scale = decode_scale(scales_tile(scales, first, live, k0, limit, blocks, NVFP4, BX, BK).to(tl.int32), NVFP4)
        x = tl.reshape(tl.reshape(element_of(codes, MAX), (BX, BK // block, block)) * scale[:, :, None], (BX, BK))
        return x if COMPUTE == "fp32" else x.to(tl.bfloat16)


@triton.jit
def product(acc, a, a_scales, a_first, a_live, a_line, a_k, a_blocks, b, b_scales, b_first, b_live, b_line, b_k, b_blocks, k0,
            limit, MAX_A: tl.constexpr, MAX_B: tl.constexpr, NVFP4_A: tl.constexpr, NVFP4_B: tl.constexpr, COMPUTE: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc (BM, BN) + a (BM, BK) . b (BN, BK)^T, elements k0 ... below limit. COMPUTE "scaled": of codes and scales."""
    if COMPUTE == "scaled":
        a_codes = bytes_tile(a, a_first, a_live, k0, limit, a_line, a_k, MAX_A, BM, BK)
        b_codes = bytes_tile(b, b_first, b_live, k0, limit, b_line, b_k, MAX_B, BN, BK)
        a_scale = scales_tile(a_scales, a_first, a_live, k0, limit, a_blocks, NVFP4_A, BM, BK)
        b_scale = scales_tile(b_scales, b_first, b_live, k0, limit, b_blocks, NVFP4_B, BN, BK)
        if NVFP4_A:
            a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
        a_name: tl.constexpr = "e4m3" if MAX_A == 448.0 else "e5m2" if MAX_A == 57344.0 else "e2m1"
        b_name: tl.constexpr = "e4m3" if MAX_B == 448.0 else "e5m2" if MAX_B == 57344.0 else "e2m1"
        return tl.dot_scaled(a_codes, a_scale, a_name, tl.trans(b_codes), b_scale, b_name, acc)
    else:
        x = decoded_tile(a, a_scales, a_first, a_live, k0, limit, a_line, a_k, a_blocks, MAX_A, NVFP4_A, COMPUTE, BM, BK)
        y = decoded_tile(b, b_scales, b_first, b_live, k0, limit, b_line, b_k, b_blocks, MAX_B, NVFP4_B, COMPUTE, BN, BK)
        return tl.dot(x, tl.trans(y), acc, input_precision="ieee")


def arguments_of(name: str, operand) -> dict:
    """The kernel's arguments of operand `name` ("a" or "b") of the contract, lines and contraction its last two dimensions."""
    values, scales, global_scale, format = operand
    fmt = FORMATS.get(format)
    return {
        name: raw(values), f"{name}_scales": raw(scales), f"{name}_global": global_scale, f"{name}_line": values.stride(-2),
        f"{name}_k": values.stride(-1), f"{name}_blocks": 0 if scales is None else scales.shape[-1],
        f"MAX_{name.upper()}": fmt.max if fmt else 0.0, f"NVFP4_{name.upper()}": bool(fmt and fmt.has_global_scale),
    }  # fmt: skip


def gemm_config(on: Target, compute: str, a, b) -> dict:
    """Of a product: by what is multiplied, and whether 16 bytes of each operand can be read at once."""
    values = [operand[0] for operand in (a, b)]
    aligned = all(v.data_ptr() % 16 == 0 and all(s == 1 or s % 16 == 0 for s in v.stride()) for v in values)
    decoded = compute != "scaled" and bool({a[3], b[3]} & {*FORMATS})
    packed = all(operand[3] in FORMATS and FORMATS[operand[3]].bits == 4 for operand in (a, b))
    return on.config("grouped_mm", compute=compute, decoded=decoded, packed=packed, aligned=aligned)


def length_of(operand) -> int:
    """Of the contraction; of a packed operand perhaps one more, by an element that is zero."""
    values, _, _, format = operand
    return values.shape[-1] * (2 if format in FORMATS and FORMATS[format].bits == 4 else 1)


def compute_of(arch: str, a, b) -> str:
    """What tiles are multiplied as: codes where the tensor core takes both, else the narrowest type that holds both."""
    formats = {a[3], b[3]}
    if arch in SCALED and formats <= {*FORMATS} and len({FORMATS[f].block for f in formats}) == 1:
        return "scaled"
    if arch == "interpreter" or "fp32" in formats or ("fp16" in formats and formats != {"fp16"}):
        return "fp32"  # Triton's interpreter has no BF16 arithmetic
    return "fp16" if formats == {"fp16"} else "bf16"
