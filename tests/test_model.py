"""The model against transformers' DeepseekV3ForCausalLM, and its selection bias."""

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from training.config import PRESETS, Config
from training.hf import config_from_hf, state_from_hf, state_to_hf
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


def hf_model(**config) -> DeepseekV3ForCausalLM:
    """Random weights larger than the usual initial ones, so that no part of the model is negligible, and a random
    bias."""
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).eval()
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5)
        elif "e_score_correction_bias" in name:
            tensor.normal_(std=0.1)
        elif "embed" not in name:
            tensor.normal_(std=0.5 / tensor.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TINY_HF, id="tiny"),
        pytest.param(SMALL_HF, id="small"),
        pytest.param(SMALL_HF | dict(q_lora_rank=None), id="no-q-lora"),
        pytest.param(SMALL_HF | dict(n_group=4, topk_group=2, routed_scaling_factor=2.5), id="groups"),
        pytest.param(SMALL_HF | dict(norm_topk_prob=False, routed_scaling_factor=1.0), id="not-normalized"),
        pytest.param(SMALL_HF | dict(first_k_dense_replace=2, n_shared_experts=2), id="two-dense-two-shared"),
        pytest.param(SMALL_HF | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), id="rope-theta"),
    ],
)
def test_logits_equal_transformers(config):
    theirs = hf_model(**config)
    ours = Model(config_from_hf(theirs.config, recipe="fp32")).eval()
    ours.load_state_dict(state_from_hf(theirs.state_dict()))
    ids = torch.randint(config["vocab_size"], (2, 48))
    with torch.no_grad():
        expected = theirs(ids).logits
        logits, routings = ours(ids)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert len(routings) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    assert all(routing.counts.sum() == ids.numel() * config["num_experts_per_tok"] for routing in routings)


def test_state_dict_round_trip_through_transformers_names():
    theirs = hf_model(**SMALL_HF).state_dict()
    back = state_to_hf(state_from_hf(theirs))
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_tiny_preset_is_the_transformers_config():
    assert Config(recipe="bf16").model == config_from_hf(DeepseekV3Config(**TINY_HF))


def test_scaled_rotary_embedding_is_refused():
    rope = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 4096}
    with pytest.raises(NotImplementedError, match="yarn"):
        config_from_hf(DeepseekV3Config(**TINY_HF | {"rope_parameters": rope}))


def test_r09_selection_bias_stays_fp32():
    model = Model(Config(**PRESETS["micro"]).model).to(torch.bfloat16)
    bias = model.moe_layers[0].selection_bias
    bias.fill_(1.0).add_(0.001)
    assert bias.dtype == torch.float32
    assert model.moe_layers[0].w13.dtype == torch.bfloat16
    again = Model(model.config).to(torch.bfloat16)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.moe_layers[0].selection_bias, torch.full((4,), 1.001), rtol=0, atol=0)


def test_initial_weights_depend_on_the_seed_alone():
    config = Config(**PRESETS["micro"]).model
    first, same, other = (Model(config, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_later_tokens_do_not_change_earlier_logits():
    config = Config(**PRESETS["micro"] | {"recipe": "fp32"}).model
    model = Model(config)
    ids = torch.randint(config.vocab_size, (1, 16))
    changed = ids.clone()
    changed[0, 10:] = 3
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0][:, :10], model(changed)[0][:, :10], rtol=0, atol=1e-6)


def test_every_parameter_gets_a_gradient():
    model = Model(Config(**PRESETS["micro"] | {"recipe": "bf16"}).model)
    logits, _ = model(torch.randint(512, (4, 32)))
    logits.float().logsumexp(-1).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing
