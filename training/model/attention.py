"""The two attentions: multi-head latent attention (DeepSeek-V3, Kimi-K2) and grouped-query attention (Qwen3-MoE).

Letters: T tokens, D model width, H heads, K key heads, C query and key width, V value width, R latent width, P rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.model.attend import KeysValues, attend, new_keys_values
from training.model.cache import KVCache
from training.model.config import ModelConfig
from training.model.layers import Linear, RMSNorm
from training.model.rotary import rotate
from training.model.sequences import Group, Sequences

LATENT_NORM_EPS = 1e-6  # of the two norms inside MLA, whatever norm_eps is (as in the published models)


class LatentAttention(nn.Module):
    """Keys and values are projections of one small latent per token; position enters by a rotary part of the query and of one key
    that all heads share (arXiv 2405.04434).

    Of a cached token only latent and rotary key are kept. They are projected again when many tokens are read at once; for a few,
    the key projection is absorbed into the query and the value projection into the output, so that all heads attend to the latents
    themselves. Deterministic mode caches the projected keys and values and never absorbs.
    """

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        c = config
        query_dim = c.num_heads * c.qk_dim
        if c.q_lora_rank is None:
            self.q_proj = Linear(c.dim, query_dim, c)
        else:
            self.q_a_proj = Linear(c.dim, c.q_lora_rank, c)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS, c)
            self.q_b_proj = Linear(c.q_lora_rank, query_dim, c)
        self.kv_a_proj_with_mqa = Linear(c.dim, c.kv_lora_rank + c.qk_rope_dim, c)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS, c)
        self.kv_b_proj = Linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_dim + c.v_dim), c)
        self.o_proj = Linear(c.num_heads * c.v_dim, c.dim, c)

    def forward(self, x_TD: Tensor, sequences: Sequences, cos_sin: Tensor, cache: KVCache | None) -> Tensor:
        c = self.config
        q_THC = self._query(x_TD, cos_sin)
        latent_TR, k_rope_TP = self.kv_a_proj_with_mqa(x_TD).split([c.kv_lora_rank, c.qk_rope_dim], dim=-1)
        latent_TR = self.kv_a_layernorm(latent_TR)
        k_rope_TP = rotate(k_rope_TP.unsqueeze(1), cos_sin, c.rope_interleaved).squeeze(1)

        if cache is not None and not c.deterministic:
            cache.write(self.layer_idx, sequences, torch.cat([latent_TR, k_rope_TP], dim=-1).unsqueeze(1))
            read = self._absorbed if max(sequences.lengths) <= self.absorbed_length else self._expanded
            y_THV = read(q_THC, sequences, cache)
        else:
            k_THC, v_THV = self._keys_values(latent_TR, k_rope_TP)
            if cache is None:
                keys_values = new_keys_values(k_THC, v_THV, sequences)
            else:
                cache.write(self.layer_idx, sequences, k_THC, v_THV)
                keys_values = lambda i, group: cache.read(self.layer_idx, group)  # noqa: E731
            y_THV = attend(q_THC, keys_values, sequences, c.softmax_scale, c.deterministic)
        return self.o_proj(y_THV.flatten(1))

    def _query(self, x_TD: Tensor, cos_sin: Tensor) -> Tensor:
        c = self.config
        q = self.q_proj(x_TD) if c.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        nope, rope = q.unflatten(-1, (c.num_heads, c.qk_dim)).split([c.qk_nope_dim, c.qk_rope_dim], dim=-1)
        return torch.cat([nope, rotate(rope, cos_sin, c.rope_interleaved)], dim=-1)

    def _keys_values(self, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """latent (..., R), k_rope (..., P) -> (..., H, C), (..., H, V)."""
        c = self.config
        kv = self.kv_b_proj(latent).unflatten(-1, (c.num_heads, c.qk_nope_dim + c.v_dim))
        k_nope, v = kv.split([c.qk_nope_dim, c.v_dim], dim=-1)
        return torch.cat([k_nope, k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)], dim=-1), v

    @property
    def absorbed_length(self) -> int:
        """New tokens of a sequence up to which attending to the latents costs less than projecting them."""
        c = self.config
        projected = c.qk_nope_dim + c.v_dim
        return max(1, c.kv_lora_rank * projected // max(1, 2 * c.kv_lora_rank - projected))

    def _expanded(self, q_THC: Tensor, sequences: Sequences, cache: KVCache) -> Tensor:
        c = self.config

        def keys_values(i: int, group: Group) -> KeysValues:
            (kept_BLK,) = (t.squeeze(1) for t in cache.read(self.layer_idx, group))
            k, v = self._keys_values(*kept_BLK.split([c.kv_lora_rank, c.qk_rope_dim], dim=-1))
            return KeysValues(k.transpose(1, 2), v.transpose(1, 2))

        return attend(q_THC, keys_values, sequences, c.softmax_scale, False)

    def _absorbed(self, q_THC: Tensor, sequences: Sequences, cache: KVCache) -> Tensor:
        c = self.config
        w = self.kv_b_proj.weight.to(q_THC.dtype).unflatten(0, (c.num_heads, c.qk_nope_dim + c.v_dim))
        w_k_HCR, w_v_HVR = w.split([c.qk_nope_dim, c.v_dim], dim=1)
        q_nope, q_rope = q_THC.split([c.qk_nope_dim, c.qk_rope_dim], dim=-1)
        q_latent_THR = torch.einsum("thc,hcr->thr", q_nope, w_k_HCR)

        def keys_values(i: int, group: Group) -> KeysValues:
            (kept_B1LK,) = cache.read(self.layer_idx, group)
            return KeysValues(kept_B1LK, kept_B1LK[..., : c.kv_lora_rank])

        y_THR = attend(torch.cat([q_latent_THR, q_rope], dim=-1), keys_values, sequences, c.softmax_scale, False)
        return torch.einsum("thr,hvr->thv", y_THR, w_v_HVR)


class GroupedAttention(nn.Module):
    """Several query heads share a key head; queries and keys are normed per head before they turn."""

    def __init__(self, config: ModelConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        c = config
        self.q_proj = Linear(c.dim, c.num_heads * c.head_dim, c)
        self.k_proj = Linear(c.dim, c.num_kv_heads * c.head_dim, c)
        self.v_proj = Linear(c.dim, c.num_kv_heads * c.head_dim, c)
        self.o_proj = Linear(c.num_heads * c.head_dim, c.dim, c)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, c) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, c) if c.qk_norm else nn.Identity()

    def forward(self, x_TD: Tensor, sequences: Sequences, cos_sin: Tensor, cache: KVCache | None) -> Tensor:
        c = self.config
        q_THC, k_TKC, v_TKC = (project(x_TD).unflatten(-1, (-1, c.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q_THC = rotate(self.q_norm(q_THC), cos_sin, c.rope_interleaved)
        k_TKC = rotate(self.k_norm(k_TKC), cos_sin, c.rope_interleaved)
        if cache is None:
            keys_values = new_keys_values(k_TKC, v_TKC, sequences)
        else:
            cache.write(self.layer_idx, sequences, k_TKC, v_TKC)
            keys_values = lambda i, group: cache.read(self.layer_idx, group)  # noqa: E731
        y_THC = attend(q_THC, keys_values, sequences, c.softmax_scale, c.deterministic)
        return self.o_proj(y_THC.flatten(1))
