"""What a decoder layer is made of besides attention: projections, norms, SwiGLU, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxmoe
from training.mesh import Mesh
from training.model.config import ModelConfig


class Linear(nn.Linear):
    """A projection without bias; in deterministic mode by `mxmoe.linear`, whose rows do not depend on each other."""

    def __init__(self, inputs: int, outputs: int, config: ModelConfig):
        super().__init__(inputs, outputs, bias=False)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        if not self.config.deterministic:
            return super().forward(x)
        return mxmoe.linear(x, self.weight, recipe=self.config.dense_recipe, out_dtype=self.config.compute_dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm computed in FP32, whatever the dtypes of input and weight; in deterministic mode the sum of squares is a product."""

    def __init__(self, dim: int, eps: float, config: ModelConfig):
        super().__init__(dim, eps)
        self.deterministic = config.deterministic

    def forward(self, x: Tensor) -> Tensor:
        if not self.deterministic:
            return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)
        wide = x.float()
        squares = mxmoe.linear(wide * wide, wide.new_ones(1, wide.shape[-1]), recipe="fp32")
        return (wide * (1 / (squares / wide.shape[-1] + self.eps).sqrt()) * self.weight.float()).to(x.dtype)


class DenseMLP(nn.Module):
    """SwiGLU of the layers without experts; in deterministic mode an expert that every token passes."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.w13 = nn.Parameter(torch.empty(2 * config.dense_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.dim, config.dense_dim))

    def forward(self, x_TD: Tensor, replay: None = None) -> tuple[Tensor, None]:
        if self.config.deterministic:
            ids = torch.zeros(len(x_TD), 1, dtype=torch.int32, device=x_TD.device)
            weights = torch.ones_like(ids, dtype=torch.float32)
            w13, w2 = self.w13.unsqueeze(0), self.w2.unsqueeze(0)
            return mxmoe.moe_experts(x_TD, ids, weights, w13, w2, recipe=self.config.dense_recipe), None
        gate, up = F.linear(x_TD, self.w13).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w2), None


def moe(config: ModelConfig, mesh: Mesh) -> mxmoe.MoE:
    """Routed experts and a shared one; the forward returns the output and the Routing of its tokens."""
    return mxmoe.MoE(
        config.dim,
        config.expert_dim,
        config.num_experts,
        config.top_k,
        shared_dim=config.num_shared_experts * config.expert_dim,
        recipe=config.recipe,
        score=config.score,
        selection_bias=config.selection_bias,
        num_groups=config.num_groups,
        groups_kept=config.groups_kept,
        normalize=config.normalize,
        scale=config.route_scale,
        recompute=config.recompute,
        group=mesh.experts,
    )
