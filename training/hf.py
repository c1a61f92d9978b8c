"""The model's parameters under Hugging Face's names (`DeepseekV3ForCausalLM`), both ways.

Most names differ by the prefix `model.` only. Routed experts are stacked in both; gate and up projections of the dense
layers and of the shared expert are two matrices there and one here.
"""

import re

import torch
from torch import Tensor

from training.model import ModelConfig

RENAMED = {
    "mlp.router": "mlp.gate.weight",
    "mlp.selection_bias": "mlp.gate.e_score_correction_bias",
    "mlp.w13": "mlp.experts.gate_up_proj",
    "mlp.w2": "mlp.experts.down_proj",
}
# Our prefix of the two matrices of a SwiGLU, w13 and w2 -> their prefix of its three projections.
SWIGLU = {"mlp.shared_w": "mlp.shared_experts.", "mlp.w": "mlp."}


def config_from_hf(config, recipe: str = "bf16") -> ModelConfig:
    """ModelConfig of a transformers `DeepseekV3Config`. NotImplementedError for scaled rotary embeddings and
    biases."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" or config.attention_bias or not config.rope_interleave:
        raise NotImplementedError(
            "only interleaved, unscaled rotary embeddings and attention without biases are supported, got "
            f"rope_type={rope.get('rope_type')!r}, attention_bias={config.attention_bias}, "
            f"rope_interleave={config.rope_interleave}"
        )
    return ModelConfig(
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        dense_dim=config.intermediate_size,
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        expert_dim=config.moe_intermediate_size,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_dim=config.qk_nope_head_dim,
        qk_rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        num_dense_layers=config.first_k_dense_replace,
        num_shared_experts=config.n_shared_experts,
        num_groups=config.n_group,
        groups_kept=config.topk_group,
        normalize=config.norm_topk_prob,
        route_scale=config.routed_scaling_factor,
        rope_theta=rope["rope_theta"],
        norm_eps=config.rms_norm_eps,
        recipe=recipe,
    )


def _split(name: str) -> tuple[str, str]:
    """'layers.3.mlp.w13' -> ('layers.3.', 'mlp.w13')."""
    prefix = re.match(r"(layers\.\d+\.)?", name)[0]
    return prefix, name[len(prefix) :]


def state_to_hf(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State dict of `Model` -> state dict of `DeepseekV3ForCausalLM`."""
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
    """State dict of `DeepseekV3ForCausalLM` -> state dict of `Model`."""
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
