"""Small random models of the families that transformers' experts interface serves, and their experts alone."""

import copy
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn

from mxmoe.recipes import SwiGLU

SHAPE = dict(
    vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    initializer_range=0.1, num_experts_per_tok=2, bos_token_id=0, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
LATENT_ATTENTION = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16
)
DEEPSEEK = dict(
    **LATENT_ATTENTION, moe_intermediate_size=48, intermediate_size=64, n_routed_experts=8, num_local_experts=8, n_shared_experts=1,
    n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model, and what its experts compute, written down here independently of the integration."""

    model: str  # class in transformers
    options: dict
    activation: SwiGLU = field(default_factory=SwiGLU)
    gate_up: str = "concatenated"
    transposed: bool = False


FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", dict(head_dim=16, moe_intermediate_size=48, intermediate_size=64, num_experts=8, norm_topk_prob=True)
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", DEEPSEEK),
    "kimi_k25": Family(
        "Kimi_K25ForConditionalGeneration",
        dict(
            text_config=SHAPE | DEEPSEEK, projection_hidden_size=32, image_token_id=90, video_token_id=91,
            vision_config=dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
        ),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        dict(head_dim=16, moe_intermediate_size=48, intermediate_size=64, n_routed_experts=8, n_shared_experts=1,
             first_k_dense_replace=1),
    ),
    "mixtral": Family("MixtralForCausalLM", dict(intermediate_size=48, num_local_experts=8)),
    "olmoe": Family("OlmoeForCausalLM", dict(intermediate_size=48, num_experts=8)),
    "gpt_oss": Family(
        "GptOssForCausalLM", dict(head_dim=16, intermediate_size=48, num_local_experts=8),
        SwiGLU(1.702, 7.0, 1.0), "interleaved", True,
    ),
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype, **options) -> nn.Module:
    """The same weights whatever the dtype, rounded to BF16."""
    torch.manual_seed(0)
    cls = getattr(transformers, FAMILIES[family].model)
    config = cls.config_class(**SHAPE | FAMILIES[family].options | options)
    weights = cls(copy.deepcopy(config)).to(torch.bfloat16).state_dict()
    model = cls._from_config(config, dtype=dtype).eval()
    model.load_state_dict(weights)
    return model


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]
