"""Hugging Face checkpoints of the architectures that `Model` has: DeepSeek-V3, Kimi-K2 (K2.5's language model), Qwen3-MoE.

    model = load("moonshotai/Kimi-K2.5 on disk", recipe="mxfp8")   # any encoding of docs/checkpoints.md, a weight at a time
    export(model, "out")                                           # transformers, vLLM and SGLang read it

Most names differ by the prefix `model.` only. Routed experts are stacked here and in transformers' memory, single matrices on disk;
gate and up projections of the dense layers and of the shared expert are two matrices there and one here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mxmoe.checkpoint import Checkpoint
from mxmoe.checkpoint.reader import INDEX
from mxmoe.checkpoint.shards import Stored, create, sync_directory
from training.model import Model, ModelConfig, Yarn

RENAMED = {
    "mlp.router": "mlp.gate.weight",
    "mlp.selection_bias": "mlp.gate.e_score_correction_bias",
    "mlp.w13": "mlp.experts.gate_up_proj",
    "mlp.w2": "mlp.experts.down_proj",
}
# Our prefix of the two matrices of a SwiGLU, w13 and w2 -> their prefix of its three projections.
SWIGLU = {"mlp.shared_w": "mlp.shared_experts.", "mlp.w": "mlp."}
LATENT = ("deepseek_v3", "kimi_k2")  # model types with MLA
YARN = {  # ours -> theirs
    "factor": "factor", "original_length": "original_max_position_embeddings", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "mscale": "mscale", "mscale_all_dim": "mscale_all_dim", "attention_factor": "attention_factor", "truncate": "truncate",
}  # fmt: skip
SHARED = {  # fields that are called alike in both model types
    "vocab_size": "vocab_size", "dim": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "dense_dim": "intermediate_size", "top_k": "num_experts_per_tok", "expert_dim": "moe_intermediate_size",
    "normalize": "norm_topk_prob", "max_positions": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
OF_LATENT = {
    "num_experts": "n_routed_experts", "kv_lora_rank": "kv_lora_rank", "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim", "v_dim": "v_head_dim", "q_lora_rank": "q_lora_rank",
    "num_shared_experts": "n_shared_experts", "num_groups": "n_group", "groups_kept": "topk_group",
    "route_scale": "routed_scaling_factor",
}  # fmt: skip
OF_GROUPED = {"num_experts": "num_experts", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
FIXED = {  # what a config must say, if it says anything
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip


def config_from_hf(config, recipe: str = "bf16") -> ModelConfig:
    """ModelConfig of a transformers config, or of what a config.json holds. NotImplementedError: names what `Model` lacks."""
    c: dict = config if isinstance(config, Mapping) else config.to_dict()
    c = c.get("text_config") or c
    kind = c.get("model_type")
    if kind not in (*LATENT, "qwen3_moe"):
        raise NotImplementedError(f"model_type must be one of {', '.join(LATENT)}, qwen3_moe, got {kind!r}")
    needed = [*SHARED.values(), *([*OF_LATENT.values(), "first_k_dense_replace"] if kind in LATENT else [])]
    if missing := [key for key in needed if key not in c]:
        raise ValueError(f"the config of a {kind} must say {', '.join(missing)}")
    for key, value in FIXED.items():
        if c.get(key, value) != value:
            raise NotImplementedError(f"{key} must be {value!r}, got {c[key]!r}")
    theta, yarn = _rope_from_hf(c)
    own = {ours: c[theirs] for ours, theirs in SHARED.items()} | dict(rope_theta=theta, yarn=yarn, recipe=recipe)
    if kind in LATENT:
        own |= {ours: c[theirs] for ours, theirs in OF_LATENT.items()}
        dense_layers = tuple(range(c["first_k_dense_replace"]))
        return ModelConfig(**own, dense_layers=dense_layers, rope_interleaved=c.get("rope_interleave", True))
    own |= {ours: c[theirs] for ours, theirs in OF_GROUPED.items() if theirs in c}
    own.setdefault("num_experts", c.get("num_local_experts"))
    if own.get("head_dim") is None:
        own["head_dim"] = own["dim"] // own["num_heads"]
    step, only = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or ()
    dense_layers = tuple(i for i in range(own["num_layers"]) if i in only or (i + 1) % step)
    return ModelConfig(
        **own, dense_layers=dense_layers, num_shared_experts=0, score="softmax", selection_bias=False, route_scale=1.0,
        rope_interleaved=False,
    )  # fmt: skip


def _rope_from_hf(c: dict) -> tuple[float, Yarn | None]:
    """(theta, YaRN) of either way in which configs say it."""
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise NotImplementedError(f"rotary embeddings must be of type default or yarn, got {kind!r}")
    given = {ours: rope[theirs] for ours, theirs in YARN.items() if rope.get(theirs) is not None}
    given.setdefault("original_length", c["max_position_embeddings"])
    given.setdefault("factor", c["max_position_embeddings"] / given["original_length"])
    return theta, Yarn(**given)


def config_to_hf(config: ModelConfig) -> dict:
    """What config.json says of the model. ValueError where neither architecture has what it has."""
    c = config
    names = SHARED | (OF_LATENT if c.is_latent else OF_GROUPED)
    theirs = {name: getattr(c, ours) for ours, name in names.items()} | {"hidden_act": "silu", "tie_word_embeddings": False}
    theirs |= {"attention_bias": False, "rope_theta": c.rope_theta, "rope_scaling": None}
    if c.yarn is not None:
        stated = {name: getattr(c.yarn, ours) for ours, name in YARN.items()}
        theirs["rope_scaling"] = {"rope_type": "yarn", "type": "yarn"} | {k: v for k, v in stated.items() if v is not None}
    if c.is_latent:
        theirs |= {
            "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": len(c.dense_layers),
            "rope_interleave": c.rope_interleaved, "num_key_value_heads": c.num_heads, "num_nextn_predict_layers": 0,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        }  # fmt: skip
    else:
        theirs |= {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
            "mlp_only_layers": list(c.dense_layers), "use_sliding_window": False,
        }  # fmt: skip
    if config_from_hf(theirs, c.recipe) != dataclasses.replace(c, recompute=False, deterministic=False):
        raise ValueError(f"{theirs['model_type']} has no model of this kind: {c}")
    return theirs


def _split(name: str) -> tuple[str, str]:
    """'layers.3.mlp.w13' -> ('layers.3.', 'mlp.w13')."""
    prefix = re.match(r"(layers\.\d+\.)?", name)[0]
    return prefix, name[len(prefix) :]


def state_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `Model` -> state dict of transformers' model, of views."""
    hf = {}
    for name, tensor in state.items():
        prefix, leaf = _split(name)
        root = f"model.{prefix}" if name != "lm_head.weight" else ""
        is_swiglu = tensor.dim() == 2 and re.fullmatch(r"mlp\.(shared_)?w(13|2)", leaf)
        if not is_swiglu:
            hf[root + RENAMED.get(leaf, leaf)] = tensor
            continue
        theirs = SWIGLU[leaf.rstrip("123")]
        if leaf.endswith("13"):
            gate, up = tensor.chunk(2)
            hf[f"{root}{theirs}gate_proj.weight"], hf[f"{root}{theirs}up_proj.weight"] = gate, up
        else:
            hf[f"{root}{theirs}down_proj.weight"] = tensor
    return hf


def state_from_hf(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of transformers' model -> state dict of `Model`."""
    renamed = {theirs: ours for ours, theirs in RENAMED.items()}
    swiglu = {theirs: ours for ours, theirs in SWIGLU.items()}
    state = {}
    for name, tensor in hf.items():
        prefix, leaf = _split(name.removeprefix("model."))
        match = re.fullmatch(r"(mlp\.(?:shared_experts\.)?)(gate|up|down)_proj\.weight", leaf)
        if not match:
            state[prefix + renamed.get(leaf, leaf)] = tensor
        elif match[2] == "down":
            state[f"{prefix}{swiglu[match[1]]}2"] = tensor
        elif match[2] == "gate":
            state[f"{prefix}{swiglu[match[1]]}13"] = torch.cat([tensor, hf[name.replace("gate_proj", "up_proj")]])
    return state


def disk_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `Model` -> names and tensors as they are on disk, one matrix per expert and projection: views."""
    disk = {}
    for name, tensor in state_to_hf(state).items():
        root, _, leaf = name.rpartition(".")
        if not root.endswith(".experts"):
            disk[name] = tensor
            continue
        for expert_idx, expert in enumerate(tensor):
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
            for projection, part in zip(names, expert.chunk(len(names)), strict=True):
                disk[f"{root}.{expert_idx}.{projection}.weight"] = part
    return disk


def load(path: str | os.PathLike, recipe: str = "bf16", *, dtype: torch.dtype = torch.float32, device="cpu", **changes) -> Model:
    """The model of a checkpoint on disk, in any encoding that `mxmoe.checkpoint` reads, its parameters in `dtype` (routers and
    selection biases in FP32). changes: other fields of ModelConfig. One weight beside the model is in memory at a time.

    Layers behind the last (multi-token prediction) and a vision tower are left out. ValueError, FileNotFoundError: as `Checkpoint`,
    and naming every weight that is missing, unexpected or mis-shaped. NotImplementedError: an architecture `Model` does not have.
    """
    checkpoint = Checkpoint(path)
    config = dataclasses.replace(config_from_hf(checkpoint.config, recipe), **changes)
    with torch.device("meta"):
        model = Model(config, seed=None)
    model = model.to(dtype).to_empty(device=device)
    for layer in model.moe_layers:
        layer.router.data = layer.router.data.float()
    prefix = "language_model." if checkpoint.config.get("text_config") else ""
    views = disk_state(model.state_dict())
    expected = {name: tuple(view.shape) for name, view in views.items()}
    expected |= {
        name.removeprefix(prefix): weight.shape
        for name, weight in checkpoint.weights.items()
        if _is_ignored(name.removeprefix(prefix), config.num_layers)
    }
    checkpoint.check(expected, prefix)
    for name, view in views.items():
        quantized = checkpoint.weights[prefix + name].encoding != "plain"
        view.copy_(checkpoint.read(prefix + name, view.dtype if quantized else None))
    return model


def _is_ignored(name: str, num_layers: int) -> bool:
    """Layers behind the last, and frequencies that old checkpoints hold."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.endswith(".rotary_emb.inv_freq") or (layer is not None and int(layer[1]) >= num_layers)


def export(model: Model, path: str | os.PathLike, dtype: torch.dtype = torch.bfloat16, *, max_shard_bytes: int = 5 * 10**9) -> Path:
    """Writes the model as a Hugging Face checkpoint: config.json and safetensors in `dtype` (routers and selection biases keep
    FP32). Atomic: the directory `path` appears when all of it is on disk. ValueError: `path` is there, or neither architecture
    fits. A shard of the model is in memory beside it at a time, a tensor where `dtype` is the parameters'."""
    path = Path(path)
    if path.exists():
        raise ValueError(f"path must not exist, got {path}")
    config = config_to_hf(model.config) | {"dtype": str(dtype).removeprefix("torch.")}
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    placed = _write_shards(disk_state(model.state_dict()), partial, dtype, max_shard_bytes)
    total = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    (partial / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=1) + "\n")
    (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    sync_directory(partial)
    partial.rename(path)
    sync_directory(path.parent)
    return path


def _write_shards(state: dict[str, Tensor], directory: Path, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, str]:
    """Tensor name -> file that holds it."""
    stored = [
        Stored(name, directory, torch.float32 if ".mlp.gate." in name else dtype, tuple(t.shape)) for name, t in state.items()
    ]
    shards: list[list[Stored]] = [[]]
    for t in stored:
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + t.nbytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(t)
    placed = {}
    for number, shard in enumerate(shards, 1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with create(file, shard) as writer:
            for t in shard:
                writer.write(t.name, state[t.name].detach().to("cpu", t.dtype))
                placed[t.name] = file.name
    return placed
