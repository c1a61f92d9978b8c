"""quantize_model_, compiled models, adapters and refusals of mxmoe.integrations.transformers."""

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import mxmoe
from mxmoe.integrations.transformers import GATES, IMPLEMENTATIONS, quantize_model_, register
from tests.floor import BF16, rounded
from tests.integration_cases import FAMILIES, experts_of, model_of
from tests.layer_cases import relative_error

register()
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def prompt():
    return torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(7))


def greedy(model, ids, tokens=8):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None)


def straight_line(experts, x, ids, weights):
    """Experts quantized by `quantize_model_`, in FP32 but for the operands and the hidden values, which are rounded."""
    w13, w2 = (w().dequantize(backend="reference") for w in (experts.gate_up_proj, experts.down_proj))
    format, wide, y = experts.gate_up_proj.format, x.float(), torch.zeros(x.shape)
    for e in range(w13.shape[0]):
        token, slot = torch.where(ids == e)
        if len(token):
            h = (rounded(wide[token], format, "row") @ w13[e].T).to(BF16)
            if experts.has_bias:
                h = (h.float() + experts.gate_up_proj_bias[e].float()).to(BF16)
            a = experts._apply_gate(h.float()).to(BF16).float()
            rows = (rounded(a, format, "row") @ w2[e].T).to(BF16).float()
            if experts.has_bias:
                rows += experts.down_proj_bias[e].float()
            y.index_add_(0, token, rows * weights[token, slot, None].float())
    return y.to(x.dtype)


# --------------------------------------------------------------------------------------------------------- quantize_model_


@families
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_quantized_models_keep_only_the_copies_and_generate(family, format, prompt):
    model = model_of(family, BF16)
    unquantized = copy.deepcopy(model)
    sizes = quantize_model_(model, format)
    layers = experts_of(model)
    bits = {"mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16 + 32 / 56}[format]  # 56: mean contraction of gate_up_proj and down_proj
    assert sizes.num_layers == len(layers) == len(experts_of(unquantized))
    assert sizes.before_bytes == sum(2 * p.numel() for e in experts_of(unquantized) for p in (e.gate_up_proj, e.down_proj))
    assert sizes.after_bytes == sum(b.nbytes for e in layers for b in e.buffers())
    assert sizes.after_bytes / sizes.before_bytes == pytest.approx(bits / 16, rel=0.05)
    assert str(sizes).startswith(f"{len(layers)} layers of experts in {format}: ")
    assert not [name for e in layers for name, _ in e.named_parameters() if "bias" not in name]

    unquantized.set_experts_implementation(f"mxmoe_{format}")
    with torch.no_grad():  # the copies that the implementation makes for itself
        assert torch.equal(model(prompt).logits, unquantized(prompt).logits)
    generated = greedy(model, prompt)
    assert torch.equal(generated, greedy(unquantized, prompt))
    ALL_EXPERTS_FUNCTIONS["straight_line"] = straight_line
    try:
        for experts in layers:
            experts.config._experts_implementation = "straight_line"
        reference = greedy(model, prompt)
    finally:
        del ALL_EXPERTS_FUNCTIONS["straight_line"]
    assert torch.equal(generated, reference)


@families
def test_l23_scales_lie_as_their_weights_in_both_orientations(family):
    """Non-square experts, (E, O, C) and (E, C, O) in the model: every element comes back within one step of E4M3 (1/8 below its
    power of two, 2^-9 of the block's scale), which it does not where values or scales of another row or block are taken."""
    model = model_of(family, BF16)
    layers = experts_of(model)
    sources = [{name: getattr(e, name).detach().float() for name in ("gate_up_proj", "down_proj")} for e in layers]
    quantize_model_(model, "mxfp8")
    for experts, source in zip(layers, sources, strict=True):
        for name, w in source.items():
            w = w.transpose(1, 2) if FAMILIES[family].transposed else w
            E, O, C = w.shape
            assert O != C
            blocks = F.pad(w, (0, -C % 32)).view(E, O, -1, 32)
            scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 8)
            step = torch.maximum(blocks.abs() / 8, scale * 2**-9).reshape(E, O, -1)[..., :C]
            back = getattr(experts, name)().dequantize(backend="reference").float()
            assert back.shape == w.shape
            assert ((back - w).abs() <= step).all()


def test_mxmoe_on_quantized_weights_keeps_activations_in_bf16():
    for family in ("qwen3_moe", "gpt_oss"):
        experts = experts_of(model_of(family, BF16))[0]
        truth = copy.deepcopy(experts).float()
        quantize_model_(experts, "nvfp4")
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(experts, name)().dequantize()
            getattr(truth, name).data = w.transpose(1, 2) if truth.is_transposed else w
        x, ids, weights = torch.randn(40, 64, dtype=BF16), torch.randint(0, 8, (40, 2)), torch.rand(40, 2)
        truth.config = copy.deepcopy(truth.config)
        truth.config._experts_implementation = "eager"
        experts.config._experts_implementation = "mxmoe"
        for tokens in (3, 40):
            arguments = x[:tokens], ids[:tokens], weights[:tokens]
            with torch.no_grad():
                assert relative_error(experts(*arguments), truth(arguments[0].float(), *arguments[1:])) < 0.01  # measured: 0.004


def test_case_L11_training_goes_on_around_quantized_experts():
    """dx is dy times the dequantized weights; the weights themselves are no parameters."""
    experts = experts_of(model_of("qwen3_moe", torch.float32))[0]
    quantize_model_(experts, "mxfp8")
    x, ids, weights = torch.randn(20, 64, requires_grad=True), torch.arange(20)[:, None] % 8, torch.ones(20, 1)
    dy = torch.randn(20, 64)
    (dx,) = torch.autograd.grad(experts(x, ids, weights), x, dy)
    w13, w2 = (w().dequantize()[ids[:, 0]] for w in (experts.gate_up_proj, experts.down_proj))
    leaf = x.detach().requires_grad_()
    gate, up = torch.einsum("tgd,td->tg", w13, leaf).chunk(2, -1)
    (expected,) = torch.autograd.grad(torch.einsum("tdf,tf->td", w2, F.silu(gate) * up), leaf, dy)
    assert relative_error(dx, expected) < 0.05  # BF16 rounding of dy and h, MXFP8 of x; measured: 0.03


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_a_quantized_model(assign, prompt, tmp_path):
    model, other = model_of("gpt_oss", BF16), model_of("gpt_oss", BF16)
    for p in other.parameters():
        p.data = torch.randn_like(p)
    quantize_model_(model, "nvfp4"), quantize_model_(other, "nvfp4")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"), assign=assign)
    with torch.no_grad():
        assert torch.equal(other(prompt).logits, model(prompt).logits)
        assert torch.equal(copy.deepcopy(model)(prompt).logits, model(prompt).logits)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 20), width=st.integers(1, 40), hidden=st.integers(1, 40),
    family=st.sampled_from(["qwen3_moe", "gpt_oss"]), format=st.sampled_from(["mxfp8", "nvfp4"]),
)  # fmt: skip
def test_quantized_experts_give_the_bytes_of_their_own_copies(seed, tokens, width, hidden, family, format):
    cls = type(experts_of(_template(family))[0])
    config = copy.deepcopy(experts_of(_template(family))[0].config)
    config.hidden_size, config.moe_intermediate_size, config.intermediate_size = width, hidden, hidden
    torch.manual_seed(seed)
    experts = cls(config)
    for p in experts.parameters():
        nn.init.normal_(p)
    x, ids, weights = torch.randn(tokens, width), torch.randint(-1, 10, (tokens, 2)), torch.randn(tokens, 2)
    config._experts_implementation = f"mxmoe_{format}"
    with torch.no_grad():
        expected = experts(x, ids, weights)
        sizes = quantize_model_(experts, format)
        assert sizes.num_layers == 1
        assert torch.equal(experts(x, ids, weights), expected)
    assert torch.equal(experts(x.requires_grad_(), ids, weights), expected)


_TEMPLATES: dict[str, nn.Module] = {}


def _template(family: str) -> nn.Module:
    if family not in _TEMPLATES:
        _TEMPLATES[family] = model_of(family, torch.float32)
    return _TEMPLATES[family]


# ------------------------------------------------------------------------------------------------ compiled models, adapters


@pytest.mark.parametrize(
    ("family", "implementation"), [("qwen3_moe", "mxmoe"), ("deepseek_v3", "mxmoe_mxfp8"), ("gpt_oss", "mxmoe_nvfp4")]
)
def test_compiled_models_give_the_same_bytes(family, implementation, prompt):
    torch._dynamo.reset()
    model = model_of(family, BF16)
    model.set_experts_implementation(implementation)
    if implementation == "mxmoe_nvfp4":
        quantize_model_(model, "nvfp4")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for ids in (prompt, prompt[:1, :4]):
            assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_compiled_experts_train_with_the_same_bytes(implementation):
    torch._dynamo.reset()
    experts = experts_of(model_of("gpt_oss", BF16))[0]
    experts.config._experts_implementation = implementation
    x, ids, weights = torch.randn(20, 64, dtype=BF16), torch.randint(0, 8, (20, 2)), torch.rand(20, 2)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]

    def train(function):
        y = function(x, ids, weights)
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves)]

    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(train(compiled), train(experts), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_case_L07_checkpointed_models_train_with_the_same_bytes(reentrant, prompt):
    """All router logits tie: the recomputation must pick the same experts."""
    model = model_of("qwen3_moe", BF16).train()
    for layer in model.model.layers:
        nn.init.zeros_(layer.mlp.gate.weight)
    model.set_experts_implementation("mxmoe_mxfp8")

    def grads():
        model.zero_grad()
        model(prompt, labels=prompt, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters()]

    expected = grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert all(torch.equal(a, b) for a, b in zip(grads(), expected, strict=True))


class LoRA(nn.Module):
    """W + B A, as a parametrization, for (out, in) and for stacked (experts, out, in) weights."""

    def __init__(self, w: torch.Tensor, rank: int = 2):
        super().__init__()
        self.a = nn.Parameter(torch.randn(*w.shape[:-2], rank, w.shape[-1], dtype=w.dtype) / w.shape[-1])
        self.b = nn.Parameter(torch.randn(*w.shape[:-1], rank, dtype=w.dtype) / 8)

    def forward(self, w):
        return w + self.b @ self.a


@pytest.mark.parametrize("implementation", ["mxmoe", "mxmoe_mxfp8"])
def test_adapters_are_left_alone(implementation, prompt):
    """Low-rank adapters on attention and on the experts' weights: only they train, and each step is seen by the next forward."""
    model = model_of("qwen3_moe", torch.float32).requires_grad_(False)
    for layer in model.model.layers:
        for module, name in (
            (layer.self_attn.q_proj, "weight"),
            (layer.mlp.experts, "gate_up_proj"),
            (layer.mlp.experts, "down_proj"),
        ):
            parametrize.register_parametrization(module, name, LoRA(getattr(module, name)))
    adapters = [p for p in model.parameters() if p.requires_grad]

    def grads(name):
        model.set_experts_implementation(name)
        return torch.autograd.grad(model(prompt, labels=prompt).loss, adapters)

    tolerance = {"mxmoe": 1e-5, "mxmoe_mxfp8": 0.5}[implementation]
    for got, expected in zip(grads(implementation), grads("eager"), strict=True):
        assert relative_error(got, expected) < tolerance  # measured: 6e-7 and, for MXFP8 of tiny gradients, 0.35
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        before = model(prompt).logits
        with pytest.raises(ValueError, match=r"merge adapters first.*got ParametrizedQwen3MoeExperts"):
            quantize_model_(model)
        for p in adapters:
            p.zero_()
        after = model(prompt).logits
        assert not torch.equal(before, after)
        for layer in model.model.layers:
            parametrize.remove_parametrizations(layer.mlp.experts, "gate_up_proj")
            parametrize.remove_parametrizations(layer.mlp.experts, "down_proj")
        assert torch.equal(model(prompt).logits, after)


def test_frozen_experts_keep_their_copies_while_adapters_train(prompt):
    model = model_of("qwen3_moe", torch.float32).requires_grad_(False)
    q = model.model.layers[0].self_attn.q_proj.requires_grad_()
    model.set_experts_implementation("mxmoe_mxfp8")
    (first,) = torch.autograd.grad(model(prompt, labels=prompt).loss, q.weight)
    (second,) = torch.autograd.grad(model(prompt, labels=prompt).loss, q.weight)
    model.requires_grad_(True)  # now without copies
    (expected,) = torch.autograd.grad(model(prompt, labels=prompt).loss, q.weight)
    assert torch.equal(first, second)
    assert torch.equal(first, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_L05_autocast(implementation):
    experts = experts_of(model_of("gpt_oss", torch.float32))[0]
    experts.config._experts_implementation = implementation
    x, ids, weights = torch.randn(20, 64, requires_grad=True), torch.randint(0, 8, (20, 2)), torch.rand(20, 2)
    expected = experts(x, ids, weights)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, ids, weights)
        with torch.no_grad():
            assert relative_error(experts(x[:3], ids[:3], weights[:3]), expected[:3]) < 0.01
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, experts.down_proj.grad.dtype) == (torch.float32,) * 3  # transformers' own keep x's dtype
    assert relative_error(y, expected) < 0.01  # measured: 0.004


# ----------------------------------------------------------------------------------------------------------------- refusals


def test_importing_mxmoe_does_not_import_transformers():
    code = "import mxmoe, mxmoe.integrations, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_register_adds_names_to_the_interface():
    assert register() == ("mxmoe", "mxmoe_mxfp8", "mxmoe_nvfp4")
    assert set(IMPLEMENTATIONS) <= set(ALL_EXPERTS_FUNCTIONS.valid_keys())
    with pytest.raises(ValueError, match=r"mxmoe_fp3.*is not supported"):
        model_of("mixtral", BF16).set_experts_implementation("mxmoe_fp3")


def experts_class(module: str, name: str):
    return getattr(__import__(f"transformers.models.{module}.modeling_{module}", fromlist=[name]), name)


@pytest.mark.parametrize(
    ("module", "name", "reason"),
    [
        ("nemotron_h", "NemotronHExperts", "without a gate"),
        ("muse_spark", "MuseSparkExperts", "norm after each expert"),
        ("gemma4", "Gemma4TextExperts", "not GELUTanh"),
        ("inkling2", "Inkling2Experts", "gate Inkling2Experts._apply_gate"),
    ],
)
def test_other_families_are_refused_by_name(module, name, reason):
    cls = experts_class(module, name)
    sizes = dict(hidden_size=32, moe_hidden_size=32, moe_intermediate_size=16, intermediate_size=16, moe_latent_size=None)
    counts = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_hidden_layers=1)
    numbers = dict(swiglu_limit=7.0, rms_norm_eps=1e-6, post_norm_eps=1e-6, mlp_gate_softcap=1.0, mlp_up_softcap=1.0)
    names = dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", mlp_hidden_act="relu2")
    config = SimpleNamespace(**sizes, **counts, **numbers, **names, _experts_implementation="mxmoe")
    experts = cls(config)
    with pytest.raises(NotImplementedError, match=name) as error:
        experts(torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
    assert reason in str(error.value)
    with pytest.raises(NotImplementedError, match=name):
        quantize_model_(experts)
    assert isinstance(experts.down_proj, nn.Parameter)


def gate_classes():
    """(module, class) of the experts with a gate of their own that are supported."""
    modules = {"HYV4Experts": "hy_v4", "HYV4VLExperts": "hy_v4_vl", "DeepseekV4Experts": "deepseek_v4", "GptOssExperts": "gpt_oss",
               "MiniMaxM3VLExperts": "minimax_m3_vl", "OpenAIPrivacyFilterExperts": "openai_privacy_filter"}  # fmt: skip
    names = [gate.split(".")[0] for gate in GATES if "." in gate]
    return [(modules[name], name) for name in names]


@pytest.mark.parametrize(("module", "name"), gate_classes())
def test_gates_compute_what_their_classes_do(module, name):
    cls = experts_class(module, name)
    experts = cls.__new__(cls)
    nn.Module.__init__(experts)
    experts.__dict__.update(alpha=1.5, limit=2.0, swiglu_alpha=1.5, swiglu_limit=2.0, act_fn=nn.SiLU())
    h = torch.randn(50, 32) * 3
    gate_up = "interleaved" if name == "GptOssExperts" else "concatenated"
    ours = mxmoe.swiglu(h, GATES[f"{name}._apply_gate"](experts), gate_up=gate_up)
    assert relative_error(ours, experts._apply_gate(h)) < 1e-6


def test_quick_gelu_is_a_silu():
    experts = experts_of(model_of("mixtral", torch.float32, hidden_act="quick_gelu"))[0]
    x, ids, weights = torch.randn(20, 64), torch.randint(0, 8, (20, 2)), torch.rand(20, 2)
    experts.config._experts_implementation = "eager"
    expected = experts(x, ids, weights)
    experts.config._experts_implementation = "mxmoe"
    assert relative_error(experts(x, ids, weights), expected) < 1e-6


def test_quantize_model_refuses_before_it_changes_anything():
    model = model_of("qwen3_moe", BF16)
    with pytest.raises(ValueError, match="format must be one of 'mxfp8', 'nvfp4', got 'int4'"):
        quantize_model_(model, "int4")
    with pytest.raises(ValueError, match="experts interface, got Linear without"):
        quantize_model_(nn.Linear(4, 4))
    experts = experts_of(model)
    experts[1].act_fn = nn.GELU()
    with pytest.raises(NotImplementedError, match=r"not GELU.*Qwen3MoeExperts cannot use it"):
        quantize_model_(model)
    assert isinstance(experts[0].gate_up_proj, nn.Parameter)
    experts[1].act_fn = nn.SiLU()
    quantize_model_(model, "nvfp4")
    with pytest.raises(ValueError, match="in high precision, got quantized Qwen3MoeExperts"):
        quantize_model_(model, "nvfp4")
    model.set_experts_implementation("mxmoe_mxfp8")
    with pytest.raises(ValueError, match="quantized to nvfp4 need implementation 'mxmoe_nvfp4' or 'mxmoe', got 'mxmoe_mxfp8'"):
        model(torch.ones(1, 2, dtype=torch.long))


def test_weights_that_are_no_plain_tensors_are_refused():
    class Sharded(torch.Tensor):
        pass

    experts = experts_of(model_of("qwen3_moe", BF16))[0]
    del experts.down_proj
    experts.down_proj = torch.empty(8, 64, 48).as_subclass(Sharded)
    experts.config._experts_implementation = "mxmoe"
    with pytest.raises(NotImplementedError, match="plain tensors, not Sharded: Qwen3MoeExperts cannot use it"):
        experts(torch.randn(4, 64), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))


@families
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_quantized_models_are_saved_and_loaded(family, format, prompt, tmp_path):
    model = model_of(family, BF16)
    quantize_model_(model, format)
    model.save_pretrained(tmp_path)
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    for (name, got), (_, expected) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name
    with torch.no_grad():
        assert torch.equal(loaded(prompt).logits, model(prompt).logits)
    assert torch.equal(greedy(loaded, prompt), greedy(model, prompt))


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_weights_whose_shapes_allow_it_lie_in_panels(format, prompt, tmp_path):
    """In memory only: state dicts and files hold lines."""
    model = model_of("qwen3_moe", BF16, moe_intermediate_size=32)
    unquantized, lines = copy.deepcopy(model), mxmoe.quantize(experts_of(model)[0].gate_up_proj.detach(), format)
    quantize_model_(model, format)
    weights = [m for m in model.modules() if isinstance(m, mxmoe.module.QuantizedWeight)]
    assert all(w().panels for w in weights)
    unquantized.set_experts_implementation(f"mxmoe_{format}")
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, unquantized(prompt).logits)
    assert torch.equal(greedy(model, prompt), greedy(unquantized, prompt))

    stored = next(t for name, t in model.state_dict().items() if name.endswith("0.mlp.experts.gate_up_proj.values"))
    assert torch.equal(stored.view(torch.uint8), lines.values.view(torch.uint8))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    again = model_of("qwen3_moe", BF16, moe_intermediate_size=32)
    for p in again.parameters():
        p.data = torch.randn_like(p)
    quantize_model_(again, format)
    again.load_state_dict(model.state_dict(), assign=True)
    for other in (loaded, again, copy.deepcopy(model)):
        assert all(m().panels for m in other.modules() if isinstance(m, mxmoe.module.QuantizedWeight))
        with torch.no_grad():
            assert torch.equal(other(prompt).logits, model(prompt).logits)
