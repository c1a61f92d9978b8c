"""Small checkpoints of every encoding, written by other libraries' code, and what those libraries read from them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mxmoe.checkpoint.encodings import ENCODINGS


@dataclass(frozen=True)
class Case:
    """Stored tensors by name, the weight they stand for, and the oracle's reading of it."""

    name: str
    stored: dict[str, Tensor]
    expected: Tensor


def scheme_of(encoding: str) -> QuantizationScheme:
    weights = QuantizationArgs.model_validate(ENCODINGS[encoding].scheme)
    return QuantizationScheme(targets=["Linear"], weights=weights, format=ENCODINGS[encoding].format)


def decompress(encoding: str, parts: dict[str, Tensor]) -> Tensor:
    """compressed-tensors' reading; parts by suffix."""
    compressor = BaseCompressor.get_value_from_registry(ENCODINGS[encoding].format)
    return compressor.decompress({f"weight{suffix}": part for suffix, part in parts.items()}, scheme_of(encoding))["weight"]


def compressed(encoding: str, rows: int, cols: int) -> Case:
    """A matrix as compressed-tensors writes it."""
    name, w = "model.layers.0.mlp.experts.0.gate_proj.weight", random_matrix(rows, cols)
    scheme = scheme_of(encoding)
    largest = w.view(rows, -1, scheme.weights.group_size).abs().amax(-1)
    state = {"weight": w}
    if encoding == "nvfp4":
        state["weight_global_scale"] = (2688 / largest.amax()).reshape(1)
        state["weight_scale"] = (largest / 6 * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    elif encoding == "int4":
        state["weight_scale"] = (largest / 7).bfloat16()
    else:
        state["weight_scale"] = 2.0 ** (largest / {"mxfp8": 448, "mxfp4": 6}[encoding]).log2().ceil()
    parts = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
    parts = {key: part for key, part in parts.items() if part is not None}
    expected = decompress(encoding, {key.removeprefix("weight"): part for key, part in parts.items()})
    return Case(name, {name.removesuffix("weight") + key: part for key, part in parts.items()}, expected)


def fp8_block(rows: int, cols: int) -> Case:
    """128 x 128 blocks as DeepSeek-V3 stores them; rows and cols are multiples of 128 for the oracle."""
    name = "model.layers.0.self_attn.o_proj.weight"
    w = random_matrix(rows, cols).to(torch.float8_e4m3fn)
    scale = torch.rand(rows // 128, cols // 128) * 1e-3
    expected = Fp8Dequantize(None)._dequantize_one(w, scale, torch.float32)
    return Case(name, {name: w, f"{name}_scale_inv": scale}, expected)


def stacked(experts: int, rows: int, cols: int) -> Case:
    """gpt-oss's experts."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (experts, rows, cols // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, cols // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return Case(name, {f"{name}_blocks": blocks, f"{name}_scales": scales}, expected)


def random_matrix(rows: int, cols: int) -> Tensor:
    """Blocks of very different sizes."""
    return torch.randn(rows, cols) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())


CASES = {
    "int4": lambda: compressed("int4", 24, 96),
    "mxfp8": lambda: compressed("mxfp8", 24, 96),
    "nvfp4": lambda: compressed("nvfp4", 24, 96),
    "mxfp4": lambda: compressed("mxfp4", 24, 96),
    "fp8_block": lambda: fp8_block(256, 384),
    "mxfp4_stacked": lambda: stacked(3, 8, 64),
}


def write(path: Path, shards: list[dict[str, Tensor]], config: dict | None = None) -> Path:
    """A checkpoint of these files with an index, by the safetensors library."""
    path.mkdir(parents=True)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: t.contiguous() for name, t in shard.items()}, path / file)
        weight_map |= dict.fromkeys(shard, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(config or {}))
    return path
