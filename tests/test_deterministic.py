"""The deterministic mode: a token's logits are the same bytes alone, in any batch, packed, prefilled or decoded."""

from dataclasses import replace

import pytest
import torch

from tests.deterministic_cases import alone, differing_bytes, documents
from tests.model_cases import KIMI_YARN, SMALL_HF, SMALL_QWEN, hf_model, model_like
from training.config import PRESETS, Config
from training.model import Model

CONFIGS = [
    pytest.param(SMALL_HF | dict(rope_parameters=KIMI_YARN, n_group=4, topk_group=2), id="mla"),
    pytest.param(SMALL_QWEN, id="gqa"),
]


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_do_not_depend_on_the_company(config, recipe):
    model = model_like(hf_model(**config), recipe, deterministic=True)
    docs = documents(config["vocab_size"], (1, 2, 33, 140))  # the bars have longer ones
    expected = alone(model, docs)
    assert all(torch.isfinite(logits).all() for logits in expected)
    assert not any(differing_bytes(model, docs, expected, seed) for seed in range(4))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_ordinary_mode_would_not_pass(config):
    """So that the tests above can fail."""
    model = model_like(hf_model(**config), "bf16")
    docs = documents(config["vocab_size"], (1, 2, 33, 140))
    assert any(differing_bytes(model, docs, alone(model, docs), seed) for seed in range(4))


@pytest.mark.parametrize("config", CONFIGS)
def test_it_is_the_same_model(config):
    """Logits and gradients of both modes, FP32."""
    theirs = hf_model(**config)
    ids, positions = torch.randint(config["vocab_size"], (2, 160)), torch.arange(160).expand(2, 160).contiguous()
    positions[0, 33:] = torch.arange(127)
    results = []
    for deterministic in (False, True):
        model = model_like(theirs, deterministic=deterministic)
        logits = model(ids, positions)[0]
        logits.logsumexp(-1).sum().backward()
        results.append((logits, {name: p.grad for name, p in model.named_parameters()}))
    (logits, grads), (other_logits, other_grads) = results
    torch.testing.assert_close(other_logits, logits, rtol=0, atol=1e-5)
    for name, grad in grads.items():
        error = (other_grads[name] - grad).abs().max() / grad.abs().max()
        assert error < 1e-4, f"{name}: {error}"


def test_training_in_it_is_deterministic():
    config = Config(**PRESETS["micro"]).model
    ids, grads = torch.randint(config.vocab_size, (2, 32)), []
    for _ in range(2):
        model = Model(replace(config, deterministic=True))
        model(ids)[0].float().square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
