"""The model: the text architecture of DeepSeek-V3 and Kimi-K2.

    x = embed(ids);  per layer: x += attention(norm(x)); x += mlp(norm(x));  logits = lm_head(norm(x))

Attention is multi-head latent attention (MLA): keys and values are projections of one small latent per token, and
position enters through a separate rotary part of the query and of one key shared by all heads. The first layers have a
dense SwiGLU, the others a mixture of experts with a sigmoid router, a selection bias that balances the load without a
loss, and a shared expert (`mxmoe.MoE`). Parameters are FP32 or BF16; the recipe chooses the arithmetic: `fp32`
computes everything in FP32, all others run the dense GEMMs and the attention in BF16 (autocast), the experts as the
recipe says, norms, router and residual in FP32.

Sources: DeepSeek-V2 (arXiv 2405.04434) for MLA, DeepSeek-V3 (arXiv 2412.19437) for the router; `training/hf.py` maps
the parameters to Hugging Face's names. Left out: KV cache, YaRN, multi-token prediction, attention masks other than
causal.

Letters: B sequences, S positions, H heads, V vocabulary, D model width, F expert width, G = 2F, E experts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxmoe
from mxmoe.routing import Routing

LATENT_NORM_EPS = 1e-6  # of the two norms inside MLA, whatever norm_eps is (as in the published models)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and routing of one model; the defaults not given are Kimi-K2's."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    dense_dim: int  # width of the dense layers' SwiGLU
    num_experts: int
    top_k: int
    expert_dim: int
    kv_lora_rank: int
    qk_nope_dim: int  # per head, without position
    qk_rope_dim: int  # per head, rotary
    v_dim: int  # per head
    q_lora_rank: int | None = None  # None: queries are one projection
    num_dense_layers: int = 1
    num_shared_experts: int = 1  # one SwiGLU of num_shared_experts * expert_dim
    num_groups: int = 1
    groups_kept: int = 1
    normalize: bool = True
    route_scale: float = 2.827
    rope_theta: float = 50000.0
    norm_eps: float = 1e-6
    recipe: str = "bf16"
    recompute: bool = False  # of the experts' activations in the backward


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in FP32, whatever the dtypes of input and weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


def swiglu(x: Tensor, w13_GD: Tensor, w2_DF: Tensor) -> Tensor:
    gate, up = F.linear(x, w13_GD).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w2_DF)


def rotary_angles(length: int, config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, FP32 (S, rope / 2), of position * theta^(-2i / rope)."""
    exponent = torch.arange(0, config.qk_rope_dim, 2, dtype=torch.float32, device=device) / config.qk_rope_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / config.rope_theta**exponent)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x0, x1), (x2, x3), ... of the last axis, in FP32; the result lists all first members, then
    all second.

    Queries and keys are permuted alike, so their products are those of the interleaved order.
    """
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head latent attention, causal: (B, S, D) -> (B, S, D)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = c = config
        query_dim = c.num_heads * (c.qk_nope_dim + c.qk_rope_dim)
        if c.q_lora_rank is None:
            self.q_proj = linear(c.dim, query_dim)
        else:
            self.q_a_proj = linear(c.dim, c.q_lora_rank)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS)
            self.q_b_proj = linear(c.q_lora_rank, query_dim)
        self.kv_a_proj_with_mqa = linear(c.dim, c.kv_lora_rank + c.qk_rope_dim)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_dim + c.v_dim))
        self.o_proj = linear(c.num_heads * c.v_dim, c.dim)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        q = self.q_proj(x_BSD) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD)))
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split([c.kv_lora_rank, c.qk_rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))

        q_nope, q_rope = self._heads(q).split([c.qk_nope_dim, c.qk_rope_dim], dim=-1)
        k_nope, v = self._heads(kv).split([c.qk_nope_dim, c.v_dim], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1), *angles).expand(-1, c.num_heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, *angles)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        y_BHSV = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y_BHSV.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)


class DenseMLP(nn.Module):
    """SwiGLU of the first layers."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(2 * config.dense_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.dim, config.dense_dim))

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, None]:
        return swiglu(x_BSD, self.w13, self.w2), None


def moe(config: ModelConfig) -> mxmoe.MoE:
    """Routed experts and a shared one; the forward returns the output and the Routing of its tokens."""
    return mxmoe.MoE(
        config.dim,
        config.expert_dim,
        config.num_experts,
        config.top_k,
        shared_dim=config.num_shared_experts * config.expert_dim,
        recipe=config.recipe,
        score="sigmoid",
        selection_bias=True,
        num_groups=config.num_groups,
        groups_kept=config.groups_kept,
        normalize=config.normalize,
        scale=config.route_scale,
        recompute=config.recompute,
    )


class Layer(nn.Module):
    """One decoder layer with pre-norms."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = DenseMLP(config) if layer_idx < config.num_dense_layers else moe(config)

    def forward(self, x_BSD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Routing | None]:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), angles)
        y_BSD, routing = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + y_BSD, routing


class Model(nn.Module):
    """ids (B, S) -> logits (B, S, V) and the Routing of every MoE layer, first to last."""

    def __init__(self, config: ModelConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config, layer_idx) for layer_idx in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.lm_head = linear(config.dim, config.vocab_size)
        self._initialize(seed)

    @torch.no_grad()
    def _initialize(self, seed: int, std: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std, generator=generator)

    @property
    def moe_layers(self) -> list[mxmoe.MoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, mxmoe.MoE)]

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context every layer runs in: BF16 for the dense GEMMs and the attention, except for recipe fp32."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.config.recipe != "fp32")

    def forward(self, ids_BS: Tensor) -> tuple[Tensor, list[Routing]]:
        with self.autocast(ids_BS.device):
            angles = rotary_angles(ids_BS.shape[1], self.config, ids_BS.device)
            x_BSD = self.embed_tokens(ids_BS)
            routings = []
            for layer in self.layers:
                x_BSD, routing = layer(x_BSD, angles)
                if routing is not None:
                    routings.append(routing)
            return self.lm_head(self.norm(x_BSD)), routings
