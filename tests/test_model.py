"""The model against transformers' DeepseekV3ForCausalLM and Qwen3MoeForCausalLM, and its parts."""

import copy
import dataclasses
import io
import json

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mxmoe.checkpoint import Checkpoint, convert
from tests.model_cases import KIMI_YARN, SMALL_HF, SMALL_QWEN, TINY_HF, YARN, hf_model, model_like
from training.config import PRESETS, Config
from training.hf import config_from_hf, config_to_hf, disk_state, export, load, state_from_hf, state_to_hf
from training.model import ROLES, KVCache, Model, parameter_roles
from training.model.rotary import frequencies, rotary_table

ARCHITECTURES = [
    pytest.param(TINY_HF, id="tiny"),
    pytest.param(SMALL_HF, id="small"),
    pytest.param(SMALL_HF | dict(q_lora_rank=None), id="no-q-lora"),
    pytest.param(SMALL_HF | dict(n_group=4, topk_group=2, routed_scaling_factor=2.5), id="groups"),
    pytest.param(SMALL_HF | dict(norm_topk_prob=False, routed_scaling_factor=1.0), id="not-normalized"),
    pytest.param(SMALL_HF | dict(first_k_dense_replace=2, n_shared_experts=2), id="two-dense-two-shared"),
    pytest.param(SMALL_HF | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), id="rope-theta"),
    pytest.param(SMALL_HF | dict(rope_interleave=False), id="rope-halves"),
    pytest.param(SMALL_HF | dict(rope_parameters=KIMI_YARN), id="yarn-kimi"),
    pytest.param(SMALL_HF | dict(rope_parameters=YARN), id="yarn"),
    pytest.param(SMALL_QWEN, id="qwen"),
    pytest.param(SMALL_QWEN | dict(norm_topk_prob=False), id="qwen-not-normalized"),
    pytest.param(SMALL_QWEN | dict(num_key_value_heads=1), id="qwen-one-key-head"),
    pytest.param(SMALL_QWEN | dict(num_key_value_heads=4), id="qwen-all-key-heads"),
    pytest.param(SMALL_QWEN | dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]), id="qwen-sparse-step"),
    pytest.param(SMALL_QWEN | dict(rope_parameters=YARN), id="qwen-yarn"),
]
SMALL = [pytest.param(SMALL_HF, id="mla"), pytest.param(SMALL_QWEN, id="gqa")]


@pytest.mark.parametrize("config", ARCHITECTURES)
def test_logits_and_gradients_equal_transformers(config):
    theirs = hf_model(**config)
    ours = model_like(theirs)
    ids = torch.randint(config["vocab_size"], (2, 48))
    expected = theirs(ids).logits
    logits, routings = ours(ids)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert len(routings) == config["num_hidden_layers"] - len(ours.config.dense_layers)
    assert all(routing.counts.sum() == ids.numel() * config["num_experts_per_tok"] for routing in routings)

    targets = torch.randint(config["vocab_size"], ids.shape)
    for values in (expected, logits):
        F.cross_entropy(values.flatten(0, 1), targets.flatten()).backward()
    ours_grads = state_to_hf({name: p.grad for name, p in ours.named_parameters()})
    theirs_grads = {name: p.grad for name, p in theirs.named_parameters()}
    assert ours_grads.keys() == theirs_grads.keys()
    for name, expected in theirs_grads.items():
        error = (ours_grads[name] - expected).abs().max() / expected.abs().max()
        assert error < 1e-4, f"{name}: {error}"


def test_state_dict_round_trip_through_transformers_names():
    theirs = hf_model(**SMALL_HF).state_dict()
    back = state_to_hf(state_from_hf(theirs))
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_tiny_preset_is_the_transformers_config():
    assert Config(recipe="bf16").model == config_from_hf(DeepseekV3Config(**TINY_HF))


@pytest.mark.parametrize(
    "rope",
    [
        KIMI_YARN,
        YARN,
        YARN | dict(beta_fast=8.0, beta_slow=0.5, truncate=False),
        YARN | dict(attention_factor=0.7),
        YARN | dict(mscale=0.707, mscale_all_dim=1.0),
        KIMI_YARN | dict(factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0),
    ],
)
@pytest.mark.parametrize("base", [SMALL_HF | dict(qk_rope_head_dim=64), SMALL_QWEN | dict(head_dim=64)], ids=["mla", "gqa"])
def test_yarn_equals_transformers(base, rope):
    theirs = (DeepseekV3Config if "kv_lora_rank" in base else Qwen3MoeConfig)(**base | dict(rope_parameters=rope))
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    ours = config_from_hf(theirs)
    torch.testing.assert_close(frequencies(ours), expected, rtol=1e-6, atol=0)
    angles = torch.outer(torch.arange(300.0), expected)
    table = rotary_table(ours, 300, torch.device("cpu"))[:300]
    torch.testing.assert_close(table, torch.stack([angles.cos(), angles.sin()], 1) * scale, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "linear"),
        (dict(attention_bias=True), "attention_bias must be False, got True"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings"),
        (dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
    ],
)
def test_what_the_model_does_not_have_is_refused(change, message):
    with pytest.raises(NotImplementedError, match=message):
        config_from_hf(DeepseekV3Config(**SMALL_HF | change))
    with pytest.raises(NotImplementedError, match="model_type must be one of deepseek_v3, kimi_k2, qwen3_moe, got 'llama'"):
        config_from_hf({"model_type": "llama"})


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


@pytest.mark.parametrize("config", [*SMALL, pytest.param(SMALL_HF | dict(rope_parameters=KIMI_YARN), id="yarn")])
@pytest.mark.parametrize("deterministic", [False, True])
def test_incremental_decoding_equals_the_full_forward(config, deterministic):
    """Two sequences at their own pace: prompts of different lengths, single tokens, several at once (absorbed), a long rest
    (expanded again)."""
    model = model_like(hf_model(**config), deterministic=deterministic)
    ids = torch.randint(config["vocab_size"], (2, 96))
    cache = KVCache(model.config, num_slots=4, capacity=96)
    got = {cache.allocate(): [] for _ in ids}
    a, b = got
    with torch.no_grad():
        expected = model(ids)[0]
        for steps in ({b: 7}, {a: 11, b: 1}, {a: 1, b: 1}, {b: 1, a: 1}, {a: 3, b: 3}, {a: 50}, {a: 1, b: 70}, {b: 1}):
            parts = [ids[slot, cache.lengths[slot] : cache.lengths[slot] + n] for slot, n in steps.items()]
            logits = model(torch.cat(parts), cache=cache, slots=list(steps), lengths=list(steps.values()))[0]
            for slot, values in zip(steps, logits.split(list(steps.values())), strict=True):
                got[slot].append(values)
    for slot, values in got.items():
        values = torch.cat(values)
        assert len(values) == cache.lengths[slot] > 60
        torch.testing.assert_close(values, expected[slot, : len(values)], rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", SMALL)
def test_t21_packed_documents_do_not_see_each_other(config):
    model = model_like(hf_model(**config))
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])
    ids, positions = torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0]]), torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])
    logits, _ = model(ids, positions)
    torch.testing.assert_close(logits[:, :3], model(first)[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:, 3:5], model(second)[0], rtol=0, atol=1e-5)
    logits[0, 2].sum().backward()  # nothing of the other documents is in the gradient either
    assert not model.embed_tokens.weight.grad[4:6].any()
    rows = torch.randint(config["vocab_size"], (3, 8))
    torch.testing.assert_close(model(rows, torch.arange(8).expand(3, 8))[0], model(rows)[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"positions must have the ids' shape \(1, 8\), got \(8,\)"):
        model(ids, positions[0])


@pytest.mark.parametrize("config", SMALL)
def test_a_prefix_is_shared_and_taken_back(config):
    model = model_like(hf_model(**config))
    cache = KVCache(model.config, num_slots=3, capacity=20)
    ids, others = torch.randint(config["vocab_size"], (2, 12))
    with torch.no_grad():
        a = cache.allocate()
        model(ids[:8], cache=cache, slots=[a], lengths=[8])
        b = cache.allocate(like=a)
        c = cache.allocate(like=a, length=5)
        assert (cache.lengths, model.config.num_layers) == ([8, 8, 5], 3)
        logits = model(torch.cat([ids[8:], others[8:]]), cache=cache, slots=[a, b], lengths=[4, 4])[0]
        torch.testing.assert_close(logits[:4], model(ids[None])[0][0, 8:], rtol=0, atol=1e-5)
        mixed = torch.cat([ids[:8], others[8:]])
        torch.testing.assert_close(logits[4:], model(mixed[None])[0][0, 8:], rtol=0, atol=1e-5)
        cache.truncate(a, 5)
        logits = model(torch.cat([ids[5:], ids[5:]]), cache=cache, slots=[c, a], lengths=[7, 7])[0]
        torch.testing.assert_close(logits[:7], model(ids[None])[0][0, 5:], rtol=0, atol=1e-5)
        torch.testing.assert_close(logits[7:], logits[:7], rtol=0, atol=1e-5)
    with pytest.raises(RuntimeError, match="all 3 slots"):
        cache.allocate()
    cache.free(b)
    assert cache.allocate() == b
    assert cache.lengths[b] == 0


def test_impossible_use_of_a_cache_is_refused():
    model = Model(Config(**PRESETS["micro"]).model)
    cache = KVCache(model.config, num_slots=2, capacity=4)
    a = cache.allocate()
    ids = torch.zeros(5, dtype=torch.int64)
    for call, message in [
        (lambda: model(ids, cache=cache, slots=[a], lengths=[5]), "slot 0 has 0 of 4 tokens, got 5 new ones"),
        (lambda: model(ids, cache=cache, slots=[1], lengths=[5]), "slot 1 is not allocated"),
        (lambda: model(ids, cache=cache, slots=[a, a], lengths=[2, 3]), "different ones"),
        (lambda: model(ids, cache=cache, slots=[a], lengths=[4]), "must add up to the 5 ids"),
        (lambda: model(ids, lengths=[5]), "go with a cache"),
        (lambda: model(ids, ids, cache=cache, slots=[a]), "positions follow from the cache"),
        (lambda: cache.truncate(a, 1), "holds 0 tokens, got length 1"),
        (lambda: KVCache(model.config, 0, 4), "must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.lengths == [0, None]


@pytest.mark.parametrize("config", SMALL)
def test_bf16_is_as_close_to_fp32_as_transformers_is(config):
    """Root mean square error of the logits against the FP32 forward of the same BF16 weights: at most 1.1 times theirs."""
    theirs = hf_model(**config).bfloat16()
    ours = model_like(theirs, "bf16").bfloat16()
    ids = torch.randint(config["vocab_size"], (8, 64))
    with torch.no_grad():
        truth = copy.deepcopy(theirs).float()(ids).logits
        errors = [(logits.float() - truth).square().mean().sqrt() for logits in (ours(ids)[0], theirs(ids).logits)]
    assert 0 < errors[0] <= 1.1 * errors[1], errors


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("config", SMALL)
def test_export_loads_into_transformers_and_back(config, recipe, tmp_path):
    theirs = hf_model(**config | dict(rope_parameters=KIMI_YARN))
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    ours = model_like(theirs, recipe)
    export(ours, tmp_path / "out", dtype, max_shard_bytes=200_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(ValueError, match="path must not exist"):
        export(ours, tmp_path / "out")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = theirs.to(dtype)
    again = load(tmp_path / "out", recipe, dtype=dtype)
    assert again.config == ours.config
    ids = torch.randint(config["vocab_size"], (2, 48))
    with torch.no_grad():
        if recipe == "fp32":
            assert torch.equal(read(ids).logits, theirs(ids).logits)
            assert torch.equal(again(ids)[0], ours(ids)[0])
        for name, tensor in state_from_hf(read.state_dict()).items():
            assert torch.equal(again.state_dict()[name].to(tensor.dtype), tensor), name


def test_checkpoint_of_transformers_is_loaded(tmp_path):
    for config in (SMALL_HF, SMALL_QWEN):
        theirs = hf_model(**config)
        theirs.save_pretrained(tmp_path / theirs.config.model_type)
        ours = load(tmp_path / theirs.config.model_type, "fp32")
        ids = torch.randint(config["vocab_size"], (2, 16))
        with torch.no_grad():
            torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [SMALL_HF, SMALL_QWEN], ids=["mla", "gqa"])
@pytest.mark.parametrize("width", [64, 32])
def test_l21_l23_square_experts_are_not_transposed(config, width, tmp_path):
    """width 64: expert projections are square; 32: gate and up together are. Plain, and quantized with their scales."""
    theirs = hf_model(**config | dict(hidden_size=64, moe_intermediate_size=width))
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "mxfp8", "mxfp8")
    ids = torch.randint(config["vocab_size"], (2, 16))
    with torch.no_grad():
        ours = load(tmp_path / "theirs", "fp32")
        torch.testing.assert_close(ours(ids)[0], theirs(ids).logits, rtol=0, atol=1e-5)
        quantized = load(tmp_path / "mxfp8", "fp32")
        for name, w in ours.state_dict().items():
            error = (quantized.state_dict()[name] - w).abs().max() / w.abs().max() if w.any() else 0.0
            assert error <= (2**-4 if ".mlp.w" in name else 0.0), name


@pytest.mark.parametrize("to", ["int4", "mxfp8"])
def test_quantized_checkpoint_with_a_vision_tower_and_more_layers_is_loaded(to, tmp_path):
    """As Kimi-K2.5 is stored: experts quantized, names under a prefix, other models' weights beside it, a layer behind the last."""
    ours = model_like(hf_model(**SMALL_HF))
    export(ours, tmp_path / "plain", torch.float32)
    convert(tmp_path / "plain", tmp_path / "small", to)
    tensors = {}
    for file in (tmp_path / "small").glob("*.safetensors"):
        tensors |= {f"language_model.{name}": t for name, t in load_file(file).items()}
    extra = {"vision_tower.weight": torch.ones(3), "language_model.model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    (tmp_path / "whole").mkdir()
    save_file(tensors | extra, tmp_path / "whole" / "model.safetensors")
    config = json.loads((tmp_path / "small" / "config.json").read_text()) | {"model_type": "kimi_k2"}
    whole = {"model_type": "kimi_k25", "text_config": config}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    read = load(tmp_path / "whole", "fp32")
    stored = Checkpoint(tmp_path / "small")
    for name, view in disk_state(read.state_dict()).items():
        assert torch.equal(view, stored.read(name, torch.float32)), name
    error = (read.layers[1].mlp.w13 - ours.layers[1].mlp.w13).abs().max() / ours.layers[1].mlp.w13.abs().max()
    assert 0 < error < 0.1

    del tensors["language_model.model.norm.weight"]
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        load(tmp_path / "whole")


def test_config_round_trip_and_what_has_no_name_there():
    for config in (SMALL_HF | dict(rope_parameters=KIMI_YARN), SMALL_HF, SMALL_QWEN, SMALL_QWEN | dict(mlp_only_layers=[1])):
        ours = config_from_hf((DeepseekV3Config if "kv_lora_rank" in config else Qwen3MoeConfig)(**config))
        assert config_from_hf(config_to_hf(ours)) == ours
    with pytest.raises(ValueError, match="no model of this kind"):
        config_to_hf(dataclasses.replace(config_from_hf(DeepseekV3Config(**SMALL_HF)), dense_layers=(1,)))


@pytest.mark.parametrize("config", SMALL)
def test_every_parameter_has_a_role(config):
    model = model_like(hf_model(**config))
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert set(roles.values()) == set(ROLES) - ({"shared", "dense"} if config is SMALL_QWEN else set())
    assert roles["lm_head.weight"] == "head"
    assert roles["layers.1.mlp.router"] == "router"
    assert roles["layers.1.mlp.w13"] == "expert"
    assert roles["layers.0.self_attn.o_proj.weight"] == "attention"
    assert roles["norm.weight"] == "norm"
    if config is SMALL_HF:
        assert roles["layers.0.mlp.w13"] == "dense"
        assert roles["layers.1.mlp.shared_w2"] == "shared"
        assert roles["layers.0.self_attn.kv_a_layernorm.weight"] == "norm"


def test_l03_copies_and_pickles_are_the_same_model():
    model = Model(Config(**PRESETS["micro"]).model)
    ids = torch.randint(512, (2, 16))
    expected = model(ids)[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(ids)[0], expected)
        with torch.no_grad():
            other.embed_tokens.weight.zero_()
    assert torch.equal(model(ids)[0], expected)


def test_l07_recompute_of_whole_layers_gives_the_same_gradients():
    """Tied router logits, so that a second forward that chose otherwise would show."""
    model = Model(Config(**PRESETS["micro"] | {"recipe": "bf16"}).model)
    ids, grads = torch.randint(512, (2, 16)), []
    with torch.no_grad():
        model.moe_layers[0].router.zero_()
    for recompute in (False, True):
        model.zero_grad()
        logits, _ = torch.utils.checkpoint.checkpoint(model, ids, use_reentrant=False) if recompute else model(ids)
        logits.float().square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_l09_experts_without_tokens_have_a_gradient():
    model = Model(Config(**PRESETS["micro"] | {"recipe": "bf16"}).model)
    layer = model.moe_layers[0]
    layer.selection_bias[:2] += 100  # all tokens to experts 0 and 1 of 4
    model(torch.randint(512, (2, 16)))[0].float().square().mean().backward()
    assert not layer.w13.grad[2:].any()
    assert layer.w13.grad[:2].any()
