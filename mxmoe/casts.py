"""Raw casts between FP32 and the small floats, written with integer operations: the bits are the definition.

| name | sign exponent mantissa | largest | NaN | Inf |
|---|---|---|---|---|
| `e4m3` | 1 4 3, bias 7 | 448 (0x7E) | 0x7F | - |
| `e5m2` | 1 5 2, bias 15 | 57344 (0x7B) | 0x7D..0x7F | 0x7C |
| `e2m1` | 1 2 1, bias 1 | 6 (0x7) | - | - |
| `e8m0` | 0 8 0, bias 127 | 2^127 (0xFE) | 0xFF | - |

torch's own float8 casts are not used: how they treat overflow, NaN and E8M0 rounding differs between versions and devices.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Element:
    """A signed small float: value = (1 + mantissa / 2^m) * 2^(exponent - bias), subnormals below 2^min_exponent."""

    bits: int
    mantissa: int  # bits
    min_exponent: int  # of a normal number, and of the subnormals' grid
    max: float
    nan: int  # code encode writes for NaN (E2M1 has none: the code of the largest, as cvt.satfinite does)

    @property
    def exponent_codes(self) -> int:
        return 1 << (self.bits - 1 - self.mantissa)


ELEMENTS = {
    "e4m3": Element(8, 3, -6, 448.0, 0x7F),
    "e5m2": Element(8, 2, -14, 57344.0, 0x7F),
    "e2m1": Element(4, 1, 0, 6.0, 0x7),
}


def encode(x: Tensor, name: str) -> Tensor:
    """Small-float codes of `x` (FP32, BF16 or FP16; any shape and strides): uint8, one code per byte (E2M1 in the low nibble).

    e4m3, e5m2, e2m1: round to nearest even, subnormals included, saturating; Inf -> largest | sign, NaN -> 0x7F | sign (E2M1:
    0x7 | sign), -0 and underflowing negatives keep their sign. e8m0 (a scale): |x| rounded up to a power of two, at least
    2^-127 (byte 0), at most 2^127 (254); NaN -> 255. Raises TypeError (dtype), ValueError (name).
    """
    x = _float32(x)
    if name == "e8m0":
        return _encode_e8m0(x)
    element = _element(name)
    codes = round_to_codes(x, element)
    return torch.where(x.isnan(), codes & (1 << element.bits - 1) | element.nan, codes).to(torch.uint8)


def decode(codes: Tensor, name: str) -> Tensor:
    """FP32 values of small-float codes (uint8 or the matching float8 dtype; E2M1: one code per byte, in the low nibble)."""
    table = _decode_table(name, codes.device)
    codes = codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes
    return table[codes.int() & (len(table) - 1)]


def round_to_codes(x: Tensor, element: Element, words: Tensor | None = None) -> Tensor:
    """int32 codes of FP32 `x` (not NaN), to nearest even, or stochastically with one 32-bit random word per element.

    |x| / step, step the spacing of the grid in x's binade, is exact in FP32 (a power of two times x); its rounding n is the code
    counted from the binade's start, and a carry moves into the next binade by itself. Stochastic: |x| / step in fixed point with
    24 fraction bits (lower bits dropped), plus word >> 8, fraction dropped.
    """
    magnitude = x.abs().clamp(max=element.max)
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=element.min_exponent)
    steps = magnitude * power_of_two(element.mantissa - exponent)
    if words is None:
        n = torch.round(steps).to(torch.int32)
    else:
        fixed = (steps * 2.0**24).to(torch.int32)
        n = (fixed + (words >> 8).to(torch.int32)) >> 24
    sign = (x.view(torch.int32) >> 31) & (1 << element.bits - 1)
    return (exponent - element.min_exponent << element.mantissa) + n | sign


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP32 for int32 exponents in [-126, 127]."""
    return (exponent + 127 << 23).view(torch.float32)


def _encode_e8m0(x: Tensor) -> Tensor:
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    round_up = torch.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
    return torch.where(x.isnan(), 255, (exponent + round_up).clamp(max=254)).to(torch.uint8)


def _decode_table(name: str, device: torch.device) -> Tensor:
    """FP32 value of every code of the format. Made anew each time: the next caller may be under another mode (fake tensors)."""
    if name == "e8m0":
        bits = [0x00400000, *(b << 23 for b in range(1, 255)), 0x7FC00000]
        return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)
    element = _element(name)
    values = []
    for code in range(1 << element.bits - 1):
        exponent, mantissa = divmod(code, 1 << element.mantissa)
        if exponent:
            mantissa += 1 << element.mantissa
        value = mantissa * 2.0 ** (max(exponent, 1) - 1 + element.min_exponent - element.mantissa)
        if value > element.max:
            value = float("inf") if name == "e5m2" and code == 0x7C else float("nan")
        values.append(value)
    positive = torch.tensor(values, dtype=torch.float32, device=device)
    return torch.cat([positive, (positive.view(torch.int32) | -0x80000000).view(torch.float32)])


def _element(name: str) -> Element:
    if name not in ELEMENTS:
        raise ValueError(f"name must be one of {', '.join(ELEMENTS)}, e8m0, got {name!r}")
    return ELEMENTS[name]


def _float32(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"x.dtype must be float32, bfloat16 or float16, got {x.dtype}")
    return x.float()
