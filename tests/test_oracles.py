"""moe_layer against transformers' own MoE blocks, in FP32, values and gradients."""

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from mxmoe import moe_layer
from tests.layer_cases import gradients, relative_error


def randomized(module, bias_scale=0.2):
    torch.manual_seed(0)
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        torch.nn.init.normal_(t, std=bias_scale if "bias" in name else t.shape[-1] ** -0.5)
    return module


def assert_same(ours, theirs, leaves):
    for got, expected in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize(("groups", "kept", "normalize"), [(1, 1, True), (4, 2, True), (4, 2, False)])
def test_deepseek_v3_block(groups, kept, normalize):
    config = DeepseekV3Config(
        hidden_size=48, moe_intermediate_size=40, n_routed_experts=16, num_local_experts=16, num_experts_per_tok=4, n_group=groups,
        topk_group=kept, n_shared_experts=2, norm_topk_prob=normalize, routed_scaling_factor=2.5,
    )  # fmt: skip
    block = randomized(DeepseekV3MoE(config))
    gate, experts, shared = block.gate, block.experts, block.shared_experts
    x = torch.randn(2, 9, 48, requires_grad=True)
    ours, _ = moe_layer(
        x, gate.weight, experts.gate_up_proj, experts.down_proj, top_k=4, recipe="fp32", score="sigmoid",
        bias=gate.e_score_correction_bias, num_groups=groups, groups_kept=kept, normalize=normalize, scale=2.5,
        shared=(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]), shared.down_proj.weight),
    )  # fmt: skip
    assert_same(ours, block(x), [x, *block.parameters()])


@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3_moe_block(normalize):
    config = Qwen3MoeConfig(
        hidden_size=48, moe_intermediate_size=40, num_experts=12, num_experts_per_tok=3, norm_topk_prob=normalize
    )
    block = randomized(Qwen3MoeSparseMoeBlock(config))
    x = torch.randn(3, 7, 48, requires_grad=True)
    ours, _ = moe_layer(
        x, block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj, top_k=3, recipe="fp32", normalize=normalize
    )
    assert_same(ours, block(x), [x, *block.parameters()])
