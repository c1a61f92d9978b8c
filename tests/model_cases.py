"""Small random models of transformers, and ours with the same weights: for tests and bars."""

from dataclasses import replace

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.hf import config_from_hf, state_from_hf
from training.model import Model

TINY_HF = dict(
    vocab_size=8192, hidden_size=256, intermediate_size=1280, moe_intermediate_size=256, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=32, num_experts_per_tok=4, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
    routed_scaling_factor=2.827, rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
)  # fmt: skip
SMALL_HF = TINY_HF | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    n_routed_experts=8, num_experts_per_tok=2, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
    v_head_dim=16,
)  # fmt: skip
TINY_QWEN = dict(
    vocab_size=8192, hidden_size=256, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=6,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
SMALL_QWEN = TINY_QWEN | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip
KIMI_YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 1.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def hf_model(**config) -> nn.Module:
    """Random weights larger than the usual initial ones, so that no part of the model is negligible, and a random bias. DeepSeek-V3
    where the config names a latent, else Qwen3-MoE."""
    torch.manual_seed(0)
    is_latent = "kv_lora_rank" in config
    build, read = (DeepseekV3ForCausalLM, DeepseekV3Config) if is_latent else (Qwen3MoeForCausalLM, Qwen3MoeConfig)
    model = build(read(**config)).eval()
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5)
        elif "e_score_correction_bias" in name:
            tensor.normal_(std=0.1)
        elif "embed" not in name:
            tensor.normal_(std=0.5 / tensor.shape[-1] ** 0.5)
    return model


def model_like(theirs: nn.Module, recipe: str = "fp32", **changes) -> Model:
    """Our model with their weights."""
    ours = Model(replace(config_from_hf(theirs.config, recipe), **changes), seed=None).eval()
    ours.load_state_dict(state_from_hf(theirs.state_dict()))
    return ours
