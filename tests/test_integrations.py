"""transformers' Mixture-of-Experts models on mxmoe against their own eager implementation, family by family."""

import pytest
import torch
from torch import nn

from mxmoe.integrations.transformers import IMPLEMENTATIONS, register
from tests.floor import BF16, MARGIN, Case, expert_layer
from tests.integration_cases import FAMILIES, experts_of, model_of
from tests.layer_cases import relative_error

register()
LOW_PRECISION = {"mxmoe_mxfp8": "mxfp8", "mxmoe_nvfp4": "nvfp4"}
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def prompt():
    return torch.randint(2, 96, (2, 12), generator=torch.Generator().manual_seed(7))


def train(model, ids, implementation):
    """(logits, gradient by parameter name) of one step."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach().float(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def generate(model, ids, implementation=None, tokens=10):
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)


# ---------------------------------------------------------------------------------------------------- whole models, by family


@families
def test_float32_models_match_eager(family, prompt):
    model = model_of(family, torch.float32)
    (logits, grads), (expected, expected_grads) = train(model, prompt, "mxmoe"), train(model, prompt, "eager")
    assert relative_error(logits, expected) < 2e-6
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < 1e-5, name
    assert torch.equal(generate(model, prompt, "mxmoe"), generate(model, prompt, "eager"))


@families
def test_bf16_models_err_no_more_than_eager(family, prompt):
    model, truth = model_of(family, BF16), model_of(family, BF16).float()
    (logits, grads), (eager, eager_grads) = train(model, prompt, "mxmoe"), train(model, prompt, "eager")
    expected, expected_grads = train(truth, prompt, "eager")
    assert relative_error(logits, expected) < MARGIN * relative_error(eager, expected)

    def pooled(made):
        return sum(float((made[name].float() - g).square().sum() / g.square().sum()) for name, g in expected_grads.items())

    assert pooled(grads) < MARGIN**2 * pooled(eager_grads)
    assert_greedy(generate(model, prompt, "mxmoe"), generate(model, prompt, "eager"), model, truth)


@torch.no_grad()
def assert_greedy(ours, theirs, model, truth):
    """The same tokens, up to where the logits of two candidates differ by less than BF16's error in them."""
    model.set_experts_implementation("eager")
    logits = model(theirs).logits.float()
    noise = (logits - truth(theirs).logits).abs().amax(-1)
    for row, differs in enumerate(ours != theirs):
        if differs.any():
            first = int(differs.nonzero()[0])
            at = row, first - 1
            assert logits[*at, theirs[row, first]] - logits[*at, ours[row, first]] <= 2 * noise[at]
    assert (ours == theirs).float().mean() > 0.7  # measured: at least 0.8


# ------------------------------------------------------------------------------------------------------ experts, by family


def random_experts(family: str, tokens: int = 48, seed: int = 0):
    """(experts module, ids, the same as a Case of tests/floor.py), FP32."""
    facts = FAMILIES[family]
    experts = experts_of(model_of(family, torch.float32))[0]
    g = torch.Generator().manual_seed(seed)
    for name, p in experts.named_parameters():
        p.data = torch.randn(p.shape, generator=g) * (0.1 if "bias" in name else p.shape[1 if facts.transposed else 2] ** -0.5)
    w13, w2 = (w.detach().transpose(1, 2) if facts.transposed else w.detach() for w in (experts.gate_up_proj, experts.down_proj))
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if "gpt_oss" in family else (None, None)
    x, dy = torch.randn(2, tokens, w13.shape[2], generator=g)
    ids = torch.rand(tokens, w13.shape[0], generator=g).argsort(1)[:, :3]
    weights = torch.rand(tokens, 3, generator=g)
    case = Case(x, w13, w2, dy, weights=weights, b13=biases[0], b2=biases[1], activation=facts.activation, gate_up=facts.gate_up)
    return experts, ids, case


def run_experts(experts, ids, case: Case, implementation: str):
    """y and gradients under the names of a Case, in its layout."""
    experts.config._experts_implementation = implementation
    x, weights = case.x.detach().requires_grad_(), case.weights.detach().requires_grad_()
    parameters = dict(w13=experts.gate_up_proj, w2=experts.down_proj)
    if case.b13 is not None:
        parameters |= dict(b13=experts.gate_up_proj_bias, b2=experts.down_proj_bias)
    leaves = dict(x=x, weights=weights, **parameters)
    y = experts(x, ids, weights)
    grads = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), case.dy.to(y.dtype)), strict=True))
    if experts.is_transposed:
        grads |= {name: grads[name].transpose(1, 2) for name in ("w13", "w2")}
    return {"y": y.detach(), **grads}


@families
@pytest.mark.parametrize("implementation", LOW_PRECISION)
def test_low_precision_experts_stay_within_the_floor(family, implementation):
    experts, ids, case = random_experts(family)
    got = run_experts(experts, ids, case, implementation)
    truth, floor = expert_layer(case, ids), expert_layer(case, ids, LOW_PRECISION[implementation])
    assert got.keys() == truth.keys()
    for name in truth:
        assert got[name].any()
        assert relative_error(got[name], truth[name]) < MARGIN * relative_error(floor[name], truth[name]), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_inference_gives_the_bytes_of_training(family, implementation):
    """Few tokens, many tokens, prepared copies or none: one result."""
    experts, ids, case = random_experts(family)
    expected = run_experts(experts, ids, case, implementation)["y"]
    with torch.no_grad():
        for _ in range(2):  # the second time with copies at hand
            assert torch.equal(experts(case.x, ids, case.weights), expected)
            assert torch.equal(experts(case.x[:3], ids[:3], case.weights[:3]), expected[:3])
        assert experts(case.x[:0], ids[:0], case.weights[:0]).shape == (0, case.x.shape[1])


def test_copies_follow_the_weights():
    experts, ids, case = random_experts("qwen3_moe")
    experts.config._experts_implementation = "mxmoe_mxfp8"
    with torch.no_grad():
        before = experts(case.x, ids, case.weights)
        experts.down_proj.mul_(2)  # an optimizer's step
        assert torch.equal(experts(case.x, ids, case.weights), 2 * before)
        experts.down_proj.data = experts.down_proj.data / 2  # a loaded state
        assert torch.equal(experts(case.x, ids, case.weights), before)
        experts.config._experts_implementation = "mxmoe_nvfp4"
        assert not torch.equal(experts(case.x, ids, case.weights), before)


def test_case_L21_square_weights_are_turned_by_the_class_not_by_their_shape():
    for family in ("qwen3_moe", "gpt_oss"):
        experts = experts_of(model_of(family, torch.float32, hidden_size=64, moe_intermediate_size=32, intermediate_size=32))[0]
        assert experts.gate_up_proj.shape == (8, 64, 64)
        nn.init.normal_(experts.gate_up_proj)
        x, ids, weights = torch.randn(20, 64), torch.randint(0, 8, (20, 2)), torch.rand(20, 2)
        experts.config._experts_implementation = "eager"
        expected = experts(x, ids, weights)
        experts.config._experts_implementation = "mxmoe"
        assert relative_error(experts(x, ids, weights), expected) < 1e-6


def test_ids_of_other_ranks_are_no_experts():
    experts, ids, case = random_experts("qwen3_moe")
    here = torch.arange(48) % 3 > 0
    ids = torch.where(here[:, None], ids, 8)
    experts._is_expert_parallel = True
    got, expected = run_experts(experts, ids, case, "mxmoe"), run_experts(experts, ids, case, "grouped_mm")
    for name in got:
        assert relative_error(got[name], expected[name]) < 1e-5, name
    assert not got["y"][~here].any()
