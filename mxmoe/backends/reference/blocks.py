"""The arithmetic of one array of lines: block scales, elements, the Hadamard transform, packing. Shapes: B batch, X lines,
C contraction, N = ceil(C / block) blocks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mxmoe.casts import ELEMENTS, decode, encode, round_to_codes
from mxmoe.formats import HADAMARD_SIGNS, Format, QuantizeOptions

POISONED_ELEMENT = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x0}


def quantize_blocks(
    x_BXC: Tensor, s_dec: Tensor | None, fmt: Format, options: QuantizeOptions, words: Tensor | None
) -> tuple[Tensor, Tensor]:
    """FP32 lines -> (codes (B, X, C), block scale bytes (B, X, N)), uint8, one code per byte. s_dec broadcasts over (B, X, 1);
    words (B, X, C) are the random words of stochastic rounding."""
    length = x_BXC.shape[2]
    blocks = _blocked(x_BXC, fmt.block)
    amax = blocks.abs().amax(3)
    if options.block_2d:
        amax = _over_tiles(amax, fmt.block, lambda tile: tile.amax(2, keepdim=True))
    if fmt.has_global_scale:
        scales = _nvfp4_scales(blocks, amax, s_dec, fmt, options)
        poisoned = s_dec.isnan().expand_as(scales)
        scaled = _nvfp4_scaled(blocks, scales, s_dec)
        scales = scales.masked_fill(poisoned, 0x7F)
    else:
        scales = _mx_scales(amax, fmt, options.scale_mode)
        poisoned = ~amax.isfinite()
        scales = scales.masked_fill(poisoned, 0xFF)
        scaled = blocks * decode(254 - scales.clamp(max=254), "e8m0")[..., None]  # 2^-(b - 127)
    if words is not None:
        words = _blocked(words, fmt.block)
    codes = round_to_codes(scaled, ELEMENTS[fmt.element], words)
    codes = codes.masked_fill(poisoned[..., None], POISONED_ELEMENT[fmt.element])
    return codes.flatten(2)[..., :length].to(torch.uint8), scales


def _mx_scales(amax: Tensor, fmt: Format, mode: str) -> Tensor:
    if mode == "floor":
        largest_exponent = math.frexp(fmt.max)[1] - 1
        return ((amax.view(torch.int32) >> 23) - largest_exponent).clamp(0, 254).to(torch.uint8)
    reciprocal = torch.ones_like(amax) / torch.full_like(amax, fmt.max)
    return encode(amax * reciprocal, "e8m0")


def _nvfp4_scales(blocks, amax, s_dec, fmt: Format, options: QuantizeOptions) -> Tensor:
    """E4M3(fl(fl(amax / 6) / s_dec)); with four_six also from amax / 4, which wins where its squared error is lower."""
    s6 = encode(_divide(amax, 6.0) / s_dec, "e4m3")
    if not options.four_six:
        return s6
    s4 = encode(_divide(amax, 4.0) / s_dec, "e4m3")
    errors = [_squared_error(blocks, s, s_dec, fmt, options) for s in (s6, s4)]
    return torch.where(errors[1] < errors[0], s4, s6)


def _nvfp4_scaled(blocks, scales, s_dec) -> Tensor:
    scaled = blocks / (decode(scales, "e4m3") * s_dec)[..., None]
    return scaled.masked_fill((scales == 0)[..., None], 0.0)


def _squared_error(blocks, scales, s_dec, fmt: Format, options: QuantizeOptions) -> Tensor:
    """Sum over the block (a tree), then over the lines of a 2-D tile (a tree), of (dequantized, to nearest even, - x)^2."""
    codes = round_to_codes(_nvfp4_scaled(blocks, scales, s_dec), ELEMENTS[fmt.element])
    dequantized = decode(codes.to(torch.uint8), fmt.element) * decode(scales, "e4m3")[..., None] * s_dec[..., None]
    error = dequantized - blocks
    total = _tree_sum(error * error)
    if options.block_2d:
        total = _over_tiles(total, fmt.block, lambda tile: _tree_sum(tile.transpose(2, 3))[:, :, None])
    return total


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last axis (a power of two): element j adds j + stride, stride halving to 1."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _over_tiles(x_BXN: Tensor, block: int, reduce) -> Tensor:
    """Reduces every `block` lines to one value per block column, and gives it back to each of the lines."""
    lines = x_BXN.shape[1]
    tiles = F.pad(x_BXN, (0, 0, 0, -lines % block)).unflatten(1, (-(-lines // block), block))
    return reduce(tiles).expand_as(tiles).flatten(1, 2)[:, :lines]


def _blocked(x_BXC: Tensor, block: int) -> Tensor:
    """(B, X, C) -> (B, X, N, block), the tail filled with zeros."""
    length = x_BXC.shape[2]
    return F.pad(x_BXC, (0, -length % block)).unflatten(2, (-(-length // block), block))


def _divide(x: Tensor, divisor: float) -> Tensor:
    return x / torch.full_like(x, divisor)  # a Python divisor may become a multiplication by its reciprocal


def hadamard(x_BXC: Tensor) -> Tensor:
    """The orthonormal 16-point transform, with signs, of every 16 elements of the contraction; C is a multiple of 16."""
    signs = torch.tensor([-1.0 if HADAMARD_SIGNS >> j & 1 else 1.0 for j in range(16)], dtype=torch.float32, device=x_BXC.device)
    x = x_BXC.unflatten(2, (x_BXC.shape[2] // 16, 16)) * signs
    for stride in (1, 2, 4, 8):
        a, b = x.unflatten(3, (8 // stride, 2, stride)).unbind(4)
        x = torch.stack((a + b, a - b), 4).flatten(3)
    return (x * 0.25).flatten(2)


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes (..., C), one per byte -> (..., ceil(C / 2)), low nibble first, an odd tail's high nibble 0."""
    pairs = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-(-codes.shape[-1] // 2), 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_fp4(packed: Tensor, length: int) -> Tensor:
    """The inverse of pack_fp4."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :length]
