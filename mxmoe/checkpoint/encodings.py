"""How checkpoints write a low-precision weight down: several tensors in a file, its *parts*, stand for one weight.

| encoding | parts of `X.weight` (O, C) | who |
|---|---|---|
| `fp8_block` | `weight` E4M3, `weight_scale_inv` FP32 (O/128, C/128) | DeepSeek-V3 |
| `int4` | `weight_packed` I32 (O, C/8), `weight_scale` (O, C/32), `weight_shape` | Kimi K2 (compressed-tensors `pack-quantized`) |
| `mxfp8` | `weight` E4M3, `weight_scale` U8 (O, C/32) | compressed-tensors `mxfp8-quantized` |
| `nvfp4` | `weight_packed` U8 (O, C/2), `weight_scale` E4M3 (O, C/16), `weight_global_scale` FP32 (1,) | `nvfp4-pack-quantized` |
| `mxfp4` | `weight_packed` U8 (O, C/2), `weight_scale` U8 (O, C/32) | `mxfp4-pack-quantized` |
| `mxfp4_stacked` | `X_blocks` U8 (E, O, C/32, 16), `X_scales` U8 (E, O, C/32), standing for `X` (E, C, O) | gpt-oss |

`decode` multiplies in FP32, exactly but for `fp8_block` and `nvfp4`, and rounds once to the dtype asked for; `encode` is the
contract's `quantize` (docs/numerics.md), for `int4` below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mxmoe import backends
from mxmoe.formats import FORMATS, MXTensor
from mxmoe.memory import empty
from mxmoe.ops import quantize

Parts = Mapping[str, Tensor]  # by suffix
INT4_GROUP = 32
INT4_TRIES = [
    (divisor, step) for divisor in (7, 8) for step in (0, -1, 1, -2, 2)
]  # scales tried: max / divisor, BF16 steps beside it


@dataclass(frozen=True)
class Encoding:
    """One way; functions take the parts by suffix, tensors or anything with dtype and shape where only those matter."""

    name: str
    suffixes: tuple[str, ...]  # of the parts; the first holds the elements
    shape: Callable[[Mapping], tuple[int, ...]]  # of the weight; ValueError where parts do not fit together
    decode: Callable[[Parts, torch.dtype], Tensor]  # to float32, bfloat16 or float16
    encode: Callable[[Tensor], dict[str, Tensor]] | None = None
    scheme: dict | None = None  # compressed-tensors' "weights", and its name of the format
    format: str | None = None
    block: int = 1  # the contraction must be a multiple of this


def _fit(parts: Mapping, suffix: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]):
    part = parts[suffix]
    if part.dtype not in dtypes or tuple(part.shape) != shape:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{suffix} must be {expected} {list(shape)}, got {str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
        )


def _matrix(parts: Mapping, suffix: str) -> tuple[int, int]:
    if len(parts[suffix].shape) != 2:
        raise ValueError(f"{suffix} must have 2 dimensions, got shape {list(parts[suffix].shape)}")
    return tuple(parts[suffix].shape)


def _fp8_block_shape(parts: Mapping) -> tuple[int, ...]:
    rows, cols = _matrix(parts, "")
    _fit(parts, "_scale_inv", (torch.float32, torch.bfloat16), (-(-rows // 128), -(-cols // 128)))
    return rows, cols


def _fp8_block_decode(parts: Parts, dtype: torch.dtype) -> Tensor:
    scale = parts["_scale_inv"].float().repeat_interleave(128, 1)[:, : parts[""].shape[1]]
    x = parts[""].float()
    for block, row in enumerate(scale):
        x[128 * block : 128 * block + 128] *= row
    return x.to(dtype)


def _int4_shape(parts: Mapping) -> tuple[int, ...]:
    rows, words = _matrix(parts, "_packed")
    groups = _matrix(parts, "_scale")[1]
    _fit(parts, "_packed", (torch.int32,), (rows, groups * INT4_GROUP // 8))
    _fit(parts, "_scale", (torch.bfloat16, torch.float16, torch.float32), (rows, groups))
    _fit(parts, "_shape", (torch.int32, torch.int64), (2,))
    return rows, words * 8


def _int4_decode(parts: Parts, dtype: torch.dtype) -> Tensor:
    rows, cols = _int4_shape(parts)
    if (stated := parts["_shape"].tolist()) != [rows, cols]:
        raise ValueError(f"_shape must hold {[rows, cols]}, got {stated}")
    x = empty((rows, cols), dtype, parts["_packed"], "host")
    backends.get("host").decode_int4(parts["_packed"].view(torch.uint8), parts["_scale"], x)
    return x


def encode_int4(w: Tensor) -> dict[str, Tensor]:
    """Symmetric groups of 32 along the contraction: scale = BF16(max / 7), q = w / scale to nearest even in [-8, 7].

    Where some scale in BF16 reproduces a group exactly, in w's own dtype, one is found and kept: max / 7, its neighbours and, of
    weights that use -8, max / 8 and its. So decoding to FP32, or rounding that to BF16, and encoding again is lossless where such a
    scale exists; `irreproducible_groups` counts the others. ValueError for NaN or Inf, which have no code."""
    rows, cols = w.shape
    x = w.float().view(rows, -1, INT4_GROUP)
    largest = x.abs().amax(-1)
    if not largest.isfinite().all():
        raise ValueError("int4 has no code for NaN or Inf, got a weight that holds some")
    scale = _int4_scale(largest, 7, 0)
    open_groups = torch.arange(largest.numel()).view_as(largest)[~_reproduced(x, scale, w.dtype)]
    flat_x, flat_scale, flat_largest = x.view(-1, INT4_GROUP), scale.view(-1), largest.view(-1)
    for divisor, step in INT4_TRIES[1:]:
        if not open_groups.numel():
            break
        tried = _int4_scale(flat_largest[open_groups], divisor, step)
        found = _reproduced(flat_x[open_groups], tried, w.dtype)
        flat_scale[open_groups[found]] = tried[found]
        open_groups = open_groups[~found]
    q = (_int4_codes(x, scale) + 8).to(torch.uint8).view(rows, cols)
    packed = (q[:, 0::2] | q[:, 1::2] << 4).contiguous().view(torch.int32)
    return {"_packed": packed, "_scale": scale.bfloat16(), "_shape": torch.tensor([rows, cols])}


def irreproducible_groups(w: Tensor, parts: Parts) -> int:
    """Groups of w (O, C) that the parts of `encode_int4` do not give back bit for bit."""
    return int((~_reproduced(w.float().view(w.shape[0], -1, INT4_GROUP), parts["_scale"].float(), w.dtype)).sum())


def _int4_scale(largest: Tensor, divisor: int, step: int) -> Tensor:
    """BF16(largest / divisor) and `step` BF16 numbers further, at least the smallest positive one; as FP32."""
    bits = (largest / divisor).bfloat16().view(torch.int16) + step
    return bits.clamp_(min=1).view(torch.bfloat16).float()


def _int4_codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale.unsqueeze(-1)).round_().clamp_(-8, 7)


def _reproduced(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether all of a group comes back, in dtype."""
    back = (_int4_codes(x, scale) * scale.unsqueeze(-1)).to(dtype).float()
    return (back == x).all(-1)


def _block_scaled(name: str, values: str, scales_dtype: torch.dtype, global_scale: bool = False):
    """(shape, decode, encode) of a row copy written as such."""
    fmt = FORMATS[name]
    suffixes = (values, "_scale", *(("_global_scale",) if global_scale else ()))

    def shape(parts: Mapping) -> tuple[int, ...]:
        rows, stored = _matrix(parts, values)
        cols = stored * 8 // fmt.bits
        _fit(parts, values, (fmt.values_dtype,), (rows, stored))
        _fit(parts, "_scale", (scales_dtype,), (rows, -(-cols // fmt.block)))
        if global_scale:
            _fit(parts, "_global_scale", (torch.float32,), (1,))
        return rows, cols

    def decode(parts: Parts, dtype: torch.dtype) -> Tensor:
        rows, cols = shape(parts)
        if not global_scale:
            return MXTensor(parts[values], parts["_scale"], None, name, "row", (rows, cols)).dequantize(dtype)
        ones = torch.full_like(parts["_scale"], 1.0), torch.ones(1)
        elements = MXTensor(parts[values], *ones, name, "row", (rows, cols), "tensor").dequantize()
        scale = parts["_scale"].float() / parts["_global_scale"]  # divided first, as compressed-tensors does
        return elements.view(rows, -1, fmt.block).mul_(scale.unsqueeze(-1)).view(rows, cols).to(dtype)

    def encode(w: Tensor) -> dict[str, Tensor]:
        copy = quantize(w, name, scope="tensor")
        parts = {values: copy.values, "_scale": copy.scales.view(scales_dtype)}
        return parts | ({"_global_scale": copy.global_scale.reciprocal()} if global_scale else {})

    return dict(suffixes=suffixes, shape=shape, decode=decode, encode=encode, block=fmt.block)


def _stacked_shape(parts: Mapping) -> tuple[int, ...]:
    if len(parts["_blocks"].shape) != 4:
        raise ValueError(f"_blocks must have 4 dimensions, got shape {list(parts['_blocks'].shape)}")
    experts, rows, blocks, _ = parts["_blocks"].shape
    _fit(parts, "_blocks", (torch.uint8,), (experts, rows, blocks, 16))
    _fit(parts, "_scales", (torch.uint8,), (experts, rows, blocks))
    return experts, blocks * 32, rows


def _stacked_decode(parts: Parts, dtype: torch.dtype) -> Tensor:
    experts, cols, rows = _stacked_shape(parts)
    copy = MXTensor(parts["_blocks"].flatten(2), parts["_scales"], None, "mxfp4", "row", (experts, rows, cols))
    return copy.dequantize(dtype).mT


def _float_scheme(bits: int, group: int, strategy: str, scale_dtype: str) -> dict:
    return dict(
        num_bits=bits, type="float", strategy=strategy, group_size=group, symmetric=True, dynamic=False, scale_dtype=scale_dtype
    )  # fmt: skip


def _integer_scheme(bits: int, group: int) -> dict:
    return dict(num_bits=bits, type="int", strategy="group", group_size=group, symmetric=True, dynamic=False)


ENCODINGS = {
    e.name: e
    for e in (
        Encoding("fp8_block", ("", "_scale_inv"), _fp8_block_shape, _fp8_block_decode),
        Encoding(
            "int4", ("_packed", "_scale", "_shape"), _int4_shape, _int4_decode, encode_int4,
            _integer_scheme(4, INT4_GROUP), "pack-quantized", INT4_GROUP,
        ),
        Encoding(
            "mxfp8", **_block_scaled("mxfp8", "", torch.uint8), format="mxfp8-quantized",
            scheme=_float_scheme(8, 32, "group", "torch.uint8"),
        ),
        Encoding(
            "nvfp4", **_block_scaled("nvfp4", "_packed", torch.float8_e4m3fn, True), format="nvfp4-pack-quantized",
            scheme=_float_scheme(4, 16, "tensor_group", "torch.float8_e4m3fn"),
        ),
        Encoding(
            "mxfp4", **_block_scaled("mxfp4", "_packed", torch.uint8), format="mxfp4-pack-quantized",
            scheme=_float_scheme(4, 32, "group", "torch.uint8"),
        ),
        Encoding("mxfp4_stacked", ("_blocks", "_scales"), _stacked_shape, _stacked_decode),
    )
}  # fmt: skip
WRITTEN = tuple(name for name, e in ENCODINGS.items() if e.encode)


def encoding_of(name: str, dtypes: Mapping[str, torch.dtype]) -> tuple[str, str] | None:
    """(encoding, name of its weight) of the stored tensor `name` if it holds the elements of one, else None. dtypes: of all stored
    tensors. ValueError for a low-precision tensor without the scales that it needs."""
    dtype = dtypes[name]
    if name.endswith("_blocks"):
        base = name.removesuffix("_blocks")
        return ("mxfp4_stacked", base) if _present(name, base, ("_scales",), dtypes) else None
    if name.endswith("_packed"):
        base = name.removesuffix("_packed")
        if dtype == torch.int32:
            _present(name, base, ("_scale", "_shape"), dtypes, required=True)
            return "int4", base
        if dtype == torch.uint8:
            _present(name, base, ("_scale",), dtypes, required=True)
            if dtypes[base + "_scale"] == torch.uint8:
                return "mxfp4", base
            _present(name, base, ("_global_scale",), dtypes, required=True)
            return "nvfp4", base
    if dtype == torch.float8_e4m3fn and not name.endswith("_scale"):
        if name + "_scale" in dtypes:
            return "mxfp8", name
        _present(name, name, ("_scale_inv",), dtypes, required=True)
        return "fp8_block", name
    return None


def _present(name: str, base: str, suffixes: tuple[str, ...], dtypes: Mapping, required: bool = False) -> bool:
    missing = [base + suffix for suffix in suffixes if base + suffix not in dtypes]
    if missing and required:
        raise ValueError(f"{missing[0]} is missing, which {name} needs")
    return not missing
