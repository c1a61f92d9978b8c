"""moe_layer, moe_experts: values and gradients against plain torch, and the shapes, dtypes and modes a caller may use."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxmoe
from mxmoe import MoE, SwiGLU, moe_experts, moe_layer, prepare_experts, quantize
from tests.layer_cases import experts_truth, gradients, layer_truth, random_layer, relative_error

RECIPES = ["fp32", "bf16", "mxfp8", "nvfp4"]
QUANTIZED = ["mxfp8", "nvfp4"]
LOOSE = {"fp32": 1e-6, "bf16": 0.02, "mxfp8": 0.15, "nvfp4": 0.45}  # the tight bound is the floor's, in test_floor.py


def run(layer, **options):
    options = {"top_k": 2, "recipe": "fp32", **options}
    return moe_layer(layer.x, layer.router, layer.w13, layer.w2, b13=layer.b13, b2=layer.b2, shared=layer.shared, **options)


# -------------------------------------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("backend", ["reference", "host"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients(recipe, backend):
    layer = random_layer(50, 64, 48, 6, bias=True, shared=40)
    y, routing = run(layer, recipe=recipe, score="sigmoid", scale=2.5, backend=backend)
    got = gradients(y, layer.leaves())
    expected = gradients(layer_truth(layer, routing.ids, score="sigmoid", scale=2.5), layer.leaves())
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        assert relative_error(g, e) < LOOSE[recipe]


@pytest.mark.parametrize("activation", [SwiGLU(), SwiGLU(1.702, 7.0, 1.0), SwiGLU(limit=0.5)])
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_activations_and_gate_up_orders(activation, gate_up):
    layer = random_layer(30, 32, 24, 4, bias=True)
    y, routing = run(layer, activation=activation, gate_up=gate_up)
    truth = layer_truth(layer, routing.ids, activation=activation, interleaved=gate_up == "interleaved")
    for g, e in zip(gradients(y, layer.leaves()), gradients(truth, layer.leaves()), strict=True):
        assert relative_error(g, e) < 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_recompute_gives_the_same_bytes(recipe):
    layer = random_layer(40, 64, 32, 5)
    kept, recomputed = (gradients(run(layer, recipe=recipe, recompute=r)[0], layer.leaves()) for r in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_transposed_weights_give_the_same_bytes_in_their_own_layout(recipe):
    layer = random_layer(40, 64, 48, 5, dtype=torch.bfloat16)
    expected = gradients(run(layer, recipe=recipe)[0], layer.leaves())
    layer.w13, layer.w2 = (w.detach().mT.contiguous().mT.requires_grad_() for w in (layer.w13, layer.w2))
    got = gradients(run(layer, recipe=recipe)[0], layer.leaves())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(grad.stride() == leaf.stride() for grad, leaf in zip(got[1:], layer.leaves(), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_prepared_copies_give_the_same_bytes(recipe):
    layer = random_layer(40, 64, 32, 5)
    prepared = prepare_experts(layer.w13, layer.w2, recipe)
    assert prepared.nbytes > 0
    plain, ready = (gradients(run(layer, recipe=recipe, prepared=p)[0], layer.leaves()) for p in (None, prepared))
    assert all(torch.equal(a, b) for a, b in zip(plain, ready, strict=True))


def test_stale_prepared_copies_are_refused():
    layer = random_layer(8, 32, 32, 2)
    prepared = prepare_experts(layer.w13, layer.w2, "mxfp8")
    with torch.no_grad():
        layer.w13.mul_(2)
    with pytest.raises(ValueError, match="stale"):
        run(layer, recipe="mxfp8", prepared=prepared)
    with pytest.raises(ValueError, match=r"recipe 'bf16', got 'mxfp8'"):
        run(layer, recipe="bf16", prepared=prepared)


@pytest.mark.parametrize("frozen", QUANTIZED)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_l11_frozen_quantized_experts_pass_the_gradient_on(recipe, frozen):
    layer = random_layer(33, 64, 32, 3)
    w13, w2 = (quantize(w.detach(), frozen) for w in (layer.w13, layer.w2))
    y, routing = moe_layer(layer.x, layer.router, w13, w2, top_k=2, recipe=recipe)
    (dx,) = torch.autograd.grad(y.sum(), layer.x)
    layer.w13, layer.w2 = (mxmoe.dequantize(w).requires_grad_() for w in (w13, w2))
    truth = layer_truth(layer, routing.ids)
    assert relative_error(y, truth) < LOOSE[recipe]
    assert relative_error(dx, torch.autograd.grad(truth.sum(), layer.x)[0]) < LOOSE[recipe]


@pytest.mark.parametrize("recipe", RECIPES)
def test_l17_non_square_weights_twice_in_a_row(recipe):
    layer = random_layer(20, 64, 96, 3)
    prepared = prepare_experts(layer.w13, layer.w2, recipe)
    first, second = (run(layer, recipe=recipe, prepared=prepared)[0] for _ in range(2))
    assert torch.equal(first, second)
    (dx,) = torch.autograd.grad(second.sum(), layer.x)
    assert dx.shape == (20, 64)
    assert torch.equal(dx, torch.autograd.grad(run(layer, recipe=recipe)[0].sum(), layer.x)[0])


@pytest.mark.parametrize(("recipe", "for_weights"), [("bf16", 4), ("mxfp8", 0)])
def test_frozen_operands_cost_nothing(recipe, for_weights):
    """What only a frozen operand's gradient would read is not saved; in mxfp8 what the weights' gradients read is made anew."""

    def saved_bytes(*trained):
        layer = random_layer(64, 64, 64, 4)
        for name in ("x", "router", "w13", "w2"):
            getattr(layer, name).requires_grad_(name in trained)
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            y, _ = run(layer, recipe=recipe)
        weights = {layer.w13.data_ptr(), layer.w2.data_ptr()}
        return sum(t.nbytes for address, t in seen.items() if address not in weights), y

    everything, _ = saved_bytes("x", "router", "w13", "w2")
    only_x, y = saved_bytes("x")
    nothing, frozen = saved_bytes()
    rows = 64 * 2
    assert everything - only_x == rows * 64 * for_weights
    assert y.requires_grad
    assert nothing == 0
    assert not frozen.requires_grad


# ------------------------------------------------------------------------------------------------------------ extreme routings


@pytest.mark.parametrize("recipe", RECIPES)
def test_l09_unused_experts_have_zero_gradients(recipe):
    layer = random_layer(16, 32, 32, 4, bias=True)
    ids = torch.zeros(16, 1, dtype=torch.int64)
    y = moe_experts(layer.x, ids, torch.ones(16, 1), layer.w13, layer.w2, b13=layer.b13, b2=layer.b2, recipe=recipe)
    y.sum().backward()
    for p in (layer.w13, layer.w2, layer.b13, layer.b2):
        assert p.grad[0].abs().sum() > 0
        assert (p.grad[1:] == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_p03_g01_g03_zero_tokens(recipe):
    layer = random_layer(0, 64, 32, 4, shared=16)
    y, routing = run(layer, recipe=recipe)
    assert y.shape == (0, 64)
    assert routing.counts.tolist() == [0, 0, 0, 0]
    y.sum().backward()
    assert layer.x.grad.shape == (0, 64)
    assert (layer.w13.grad == 0).all()
    assert (layer.w2.grad == 0).all()


def test_p01_no_expert_sentinel():
    x = torch.tensor([[1.0], [10.0]])
    ids, weights = torch.tensor([[0, -1], [1, 2]]), torch.full((2, 2), 0.5, requires_grad=True)
    counts = mxmoe.ops.sort_by_expert(ids, 3)[0]
    assert counts.sum() == 3
    # act(g, u) with g large and u = x: silu(100) * x = 100 x, undone by w2
    w13, w2 = torch.tensor([[100.0], [1.0]]).expand(3, 2, 1).contiguous(), torch.full((3, 1, 1), 0.01)
    x_big = torch.ones_like(x)
    y = moe_experts(x_big, ids, weights, w13, w2, recipe="fp32")
    torch.testing.assert_close(y, torch.tensor([[0.5], [1.0]]))
    y.sum().backward()
    assert weights.grad[0, 1] == 0
    torch.testing.assert_close(weights.grad, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))


def test_p13_the_same_expert_twice():
    layer = random_layer(1, 8, 8, 2)
    weights = torch.tensor([[0.25, 0.5]], requires_grad=True)
    y = moe_experts(layer.x, torch.tensor([[1, 1]]), weights, layer.w13, layer.w2, recipe="fp32")
    once = experts_truth(layer.x, torch.tensor([[1]]), torch.ones(1, 1), layer)
    torch.testing.assert_close(y, 0.75 * once)
    (grad,) = torch.autograd.grad(y.sum(), weights)
    torch.testing.assert_close(grad, once.sum().expand(1, 2))


def test_r01_underflowing_scores_stay_finite():
    layer = random_layer(4, 8, 8, 8)
    with torch.no_grad():
        layer.x.fill_(1)
        layer.router.fill_(-120 / 8)
    y, routing = run(layer, score="sigmoid")
    assert routing.ids.tolist() == [[0, 1]] * 4
    assert (routing.weights == 0).all()
    assert all(torch.isfinite(t).all() for t in gradients(y, layer.leaves()))


def test_r13_balance_loss_reaches_the_router():
    layer = random_layer(32, 16, 8, 4)

    def router_grad(coefficient, repeat=1):
        x = layer.x.detach().repeat(repeat, 1)
        y, routing = moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2, recipe="fp32")
        loss = 0 * y.sum() + coefficient * (routing.load_balance_loss() + routing.z_loss())
        return torch.autograd.grad(loss, layer.router)[0]

    one, two = router_grad(0.01), router_grad(0.02)
    assert one.abs().sum() > 0
    torch.testing.assert_close(two, 2 * one)
    torch.testing.assert_close(router_grad(0.01, repeat=4), one)  # mean-type: no growth with the token count


def test_r17_capacity_is_refused():
    """r15, r17"""
    layer = random_layer(8, 16, 8, 4)
    with pytest.raises(ValueError, match="capacity_factor must be None: routing is dropless"):
        run(layer, capacity_factor=16384)


def test_r15_all_tokens_reach_one_expert():
    layer = random_layer(3, 16, 8, 2)
    y = moe_experts(layer.x, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), layer.w13, layer.w2, recipe="fp32")
    torch.testing.assert_close(y, experts_truth(layer.x, torch.zeros(3, 1), torch.ones(3, 1), layer))


def test_r05_a_nan_token_stays_alone():
    for recipe in RECIPES:
        layer = random_layer(9, 32, 32, 4)
        clean = run(layer, recipe=recipe)[0].detach()
        with torch.no_grad():
            layer.x[4, 3] = float("nan")
        y = run(layer, recipe=recipe)[0]
        assert torch.isnan(y[4]).all()
        others = [t for t in range(9) if t != 4]
        assert torch.equal(y[others], clean[others])


# ------------------------------------------------------------------------------------------------------------ batch invariance


def same_bytes(a, b) -> bool:
    """Equal, NaN where the other has NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_token_does_not_depend_on_its_batch(recipe):
    layer = random_layer(70, 64, 48, 5, shared=24)
    layer.x.data[7] *= 2.0**60  # a wild neighbour: it overflows under nvfp4, alone
    whole = run(layer, recipe=recipe)[0]
    assert torch.isfinite(torch.cat([whole[:7], whole[8:]])).all()
    order = torch.randperm(70)
    x = layer.x
    layer.x = x[order]
    assert same_bytes(run(layer, recipe=recipe)[0], whole[order])
    for t in (0, 33, 69):
        layer.x = x[t : t + 1]
        assert same_bytes(run(layer, recipe=recipe)[0], whole[t : t + 1])


@settings(max_examples=20)
@given(st.data())
def test_permuting_tokens_permutes_outputs(data):
    tokens, experts = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    recipe, top_k = data.draw(st.sampled_from(RECIPES)), data.draw(st.integers(1, experts))
    layer = random_layer(tokens, data.draw(st.sampled_from([16, 40])), data.draw(st.sampled_from([8, 33])), experts)
    order = torch.tensor(data.draw(st.permutations(range(tokens))))
    whole = run(layer, recipe=recipe, top_k=top_k)[0]
    layer.x = layer.x[order]
    assert torch.equal(run(layer, recipe=recipe, top_k=top_k)[0], whole[order])


@pytest.mark.parametrize("recipe", RECIPES)
def test_thread_count_does_not_matter(recipe):
    layer = random_layer(64, 64, 48, 5)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(gradients(run(layer, recipe=recipe)[0], layer.leaves()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))


# ------------------------------------------------------------------------------------------------------------ how it is called


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 1, 3)])
def test_any_leading_shape(shape):
    layer = random_layer(6 if shape != (7,) else 7, 16, 8, 3)
    flat, _ = run(layer)
    rows = max(1, torch.Size(shape).numel())
    x = layer.x[:rows].reshape(*shape, 16)
    y, routing = moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2, recipe="fp32")
    assert y.shape == x.shape
    assert routing.ids.shape == (rows, 2)
    assert torch.equal(y.reshape(-1, 16), flat[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_input_dtypes(dtype, recipe):
    layer = random_layer(24, 32, 32, 3, dtype=dtype)
    y, routing = run(layer, recipe=recipe)
    assert y.dtype == dtype
    got = gradients(y, layer.leaves())
    exact = random_layer(24, 32, 32, 3)
    for own, source in zip(exact.leaves(), layer.leaves(), strict=True):
        own.data.copy_(source.data)
    expected = gradients(layer_truth(exact, routing.ids), exact.leaves())
    tolerance = max(LOOSE[recipe], 0.0 if dtype == torch.float32 else 0.02)
    for g, e, leaf in zip(got[1:], expected[1:], layer.leaves(), strict=True):
        assert g.dtype == leaf.dtype
        assert relative_error(g, e) < tolerance


@pytest.mark.parametrize("recipe", RECIPES)
def test_l05_autocast(recipe):
    layer = random_layer(24, 32, 32, 3)
    plain = gradients(run(layer, recipe=recipe)[0], layer.leaves())
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, _ = run(layer, recipe=recipe)
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        got = gradients(y, layer.leaves())
        for g, p in zip(got[1:], plain[1:], strict=True):
            assert g.dtype == torch.float32
            assert relative_error(g, p) < (0.05 if recipe in QUANTIZED else 0.02)  # dy in BF16 moves some roundings


def test_strided_arguments():
    layer = random_layer(12, 32, 16, 3)
    expected = gradients(run(layer)[0], layer.leaves())
    x = torch.randn(12, 64)
    x[:, ::2] = layer.x.detach()
    strided = copy.copy(layer)
    strided.x = x.requires_grad_()[:, ::2]
    strided.w13 = layer.w13.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    got = gradients(run(strided)[0], strided.leaves())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# -------------------------------------------------------------------------------------------------- compile and checkpointing


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_compile_fullgraph_equals_eager(recipe):
    layer = random_layer(20, 32, 32, 3, bias=True, shared=16)
    eager = gradients(run(layer, recipe=recipe)[0], layer.leaves())
    torch._dynamo.reset()
    compiled = torch.compile(lambda: run(layer, recipe=recipe)[0], fullgraph=True, backend="aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled(), layer.leaves()), eager, strict=True))


def test_compile_with_the_default_compiler():
    layer = random_layer(20, 32, 32, 3)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: mxmoe.ops.unpermute(x, run(layer, recipe="mxfp8")[1]), fullgraph=True)
    with torch.no_grad():
        x = torch.randn(40, 32)
        assert torch.equal(compiled(x), mxmoe.ops.unpermute(x, run(layer, recipe="mxfp8")[1]))


def test_g01_grouped_mm_and_wgrad_without_rows_under_compile():
    x, dy, offs = torch.zeros(0, 256), torch.zeros(0, 224), torch.zeros(4, dtype=torch.int32)
    w = torch.randn(4, 224, 256)
    torch._dynamo.reset()

    def both(x, dy):
        return mxmoe.grouped_mm(x, w, offs), mxmoe.grouped_mm_wgrad(dy, x, offs)

    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        y, dw = function(x, dy)
        assert y.shape == (0, 224)
        assert dw.shape == (4, 224, 256)
        assert (dw == 0).all()


def test_l13_compiled_blocks_do_not_share_counts():
    torch._dynamo.reset()
    blocks = [random_layer(20, 32, 16, 4, seed=s) for s in (1, 2)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def block(x, router, w13, w2):
        return moe_layer(x, router, w13, w2, top_k=2, recipe="mxfp8")[0]

    for layer in blocks:
        assert torch.equal(block(layer.x, layer.router, layer.w13, layer.w2), run(layer, recipe="mxfp8")[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_l07_l19_checkpoint_on_ties_gives_the_same_bytes(reentrant):
    layer = random_layer(16, 32, 16, 8)
    layer.router.data.zero_()
    seen = []

    def block(x):
        y, routing = moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2, recipe="mxfp8")
        seen.append((routing.ids, routing.counts))
        return y

    plain = gradients(block(layer.x), layer.leaves())
    again = gradients_by_backward(torch.utils.checkpoint.checkpoint(block, layer.x, use_reentrant=reentrant), layer.leaves())
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert all(torch.equal(ids, seen[0][0]) and torch.equal(counts, seen[0][1]) for ids, counts in seen)
    assert seen[0][1].sum() == 32


def gradients_by_backward(y, leaves):
    for leaf in leaves:
        leaf.grad = None
    dy = torch.sin(torch.arange(y.numel(), dtype=torch.float32) * 0.7).view_as(y).to(y.dtype)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def test_r19_replay_with_checkpoint_over_micro_batches():
    layers = [random_layer(10, 16, 8, 4, seed=s) for s in (3, 4)]
    micro_batches = [torch.randn(10, 16) for _ in range(2)]
    recorded = [[torch.randint(0, 4, (10, 2)) for _ in layers] for _ in micro_batches]
    parameters = [p for layer in layers for p in (layer.router, layer.w13, layer.w2)]

    def loss(checkpointed):
        total, ids = 0.0, []
        for x, replays in zip(micro_batches, recorded, strict=True):
            for layer, replay in zip(layers, replays, strict=True):

                def block(x, layer=layer, replay=replay):
                    y, routing = moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2, recipe="mxfp8", replay=replay)
                    ids.append((routing.ids, replay))
                    return y

                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            total = total + x.square().sum()
        grads = torch.autograd.grad(total, parameters)
        assert all(torch.equal(used.long(), replay) for used, replay in ids)
        return grads

    assert all(torch.equal(a, b) for a, b in zip(loss(False), loss(True), strict=True))


# ---------------------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("quantized_weights", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["reference", "host"])
def test_moe_decode_gives_the_layers_bytes(recipe, quantized_weights, backend):
    layer = random_layer(5, 64, 32, 6, bias=True)
    _, routing = run(layer, recipe=recipe, backend=backend)
    w13, w2 = layer.w13.detach(), layer.w2.detach()
    arguments = layer.x.detach(), routing.ids, routing.weights.detach()
    expected = moe_experts(*arguments, w13, w2, b13=layer.b13, b2=layer.b2, recipe=recipe, backend=backend)
    if quantized_weights and recipe in QUANTIZED:
        w13, w2 = quantize(w13, recipe), quantize(w2, recipe)
    out = torch.full((5, 64), float("nan"))
    options = {"b13": layer.b13, "b2": layer.b2, "recipe": recipe, "backend": backend}
    assert mxmoe.ops.moe_decode(*arguments, w13, w2, out=out, **options) is out
    assert torch.equal(out, expected)
    wide = mxmoe.ops.moe_decode(*arguments, w13, w2, activations="bf16", **options)
    truth = experts_truth(*arguments, layer)
    assert relative_error(wide, truth) <= relative_error(out, truth) * 1.05 + 0.02 * (recipe == "fp32")


# ------------------------------------------------------------------------------------------------------------- MoE, the module


def module(**options):
    torch.manual_seed(0)
    return MoE(32, 48, 4, 2, **{"shared_dim": 16, "selection_bias": True, "score": "sigmoid", **options})


def test_module_equals_the_function():
    moe = module(expert_bias=True)
    x = torch.randn(3, 5, 32)
    y, _ = moe(x)
    expected, _ = moe_layer(
        x, moe.router, moe.w13, moe.w2, top_k=2, score="sigmoid", bias=moe.selection_bias, b13=moe.b13, b2=moe.b2,
        shared=(moe.shared_w13, moe.shared_w2),
    )  # fmt: skip
    assert torch.equal(y, expected)


def test_module_prepare_follows_the_weights():
    moe = module()
    x = torch.randn(6, 32)
    before = moe(x)[0]
    moe.prepare()
    assert torch.equal(moe(x)[0], before)
    with torch.no_grad():
        moe.w2.mul_(2)
    fresh = module()
    fresh.load_state_dict(moe.state_dict())
    assert torch.equal(moe(x)[0], fresh(x)[0])


def test_r09_selection_bias_stays_fp32():
    moe = module().to(torch.bfloat16)
    assert moe.w13.dtype == torch.bfloat16
    assert moe.selection_bias.dtype == torch.float32
    moe.selection_bias.fill_(1.0).add_(0.001)
    other = module().to(torch.bfloat16)
    other.load_state_dict(moe.state_dict())
    torch.testing.assert_close(other.selection_bias, torch.full((4,), 1.001), rtol=0, atol=1e-7)


@pytest.mark.parametrize("format", QUANTIZED)
@pytest.mark.parametrize("assign", [False, True])
def test_l01_state_dict_of_quantized_experts(tmp_path, format, assign):
    moe = module().quantize_(format)
    path = tmp_path / "state.pt"
    torch.save(moe.state_dict(), path)
    state = torch.load(path, weights_only=True)
    same = module().quantize_(format)
    same.load_state_dict(dict(state), assign=assign)
    for name, buffer in moe.state_dict().items():
        assert torch.equal(same.state_dict()[name].view(torch.uint8), buffer.view(torch.uint8))
    wide = module().to(torch.bfloat16)
    wide.load_state_dict(dict(state), assign=assign)
    assert torch.equal(wide.w13, moe.w13().dequantize(torch.bfloat16))
    quantized = module().quantize_(format)
    quantized.load_state_dict(module().state_dict(), assign=assign)
    assert torch.equal(quantized.w2.values.view(torch.uint8), moe.w2.values.view(torch.uint8))


@pytest.mark.parametrize("format", [None, *QUANTIZED])
def test_l03_deepcopy_pickle_and_save(tmp_path, format):
    moe = module()
    moe.prepare()
    if format:
        moe.quantize_(format)
    x = torch.randn(6, 32)
    y = moe(x)[0]
    torch.save(moe, tmp_path / "moe.pt")
    for again in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe)), torch.load(tmp_path / "moe.pt", weights_only=False)):
        assert torch.equal(again(x)[0], y)
        shared = {t.data_ptr() for t in moe.state_dict().values()} & {t.data_ptr() for t in again.state_dict().values()}
        assert not shared
        again.router.data.zero_()
    assert torch.equal(moe(x)[0], y)


# ---------------------------------------------------------------------------------------------------------------------- errors


def test_r23_more_experts_per_token_than_experts():
    with pytest.raises(ValueError, match=r"top_k must be between 1 and the number of experts \(4\), got 5"):
        MoE(8, 8, 4, 5)
    with pytest.raises(ValueError, match=r"\(4\), got 5"):
        run(random_layer(2, 8, 8, 4), top_k=5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(4, 9)}, ValueError, r"x must have w13's 16 columns, got shape \(4, 9\)"),
        ({"x": torch.zeros(4, 16, dtype=torch.int32)}, TypeError, "x must be float32 or bfloat16 or float16, got int32"),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"x": torch.zeros(4, 16, device="meta")}, ValueError, "must be on"),
        ({"router": torch.zeros(4, 16)}, ValueError, r"router must have shape \(3, 16\), got \(4, 16\)"),
        ({"w13": torch.zeros(3, 15, 16)}, ValueError, r"w13 must have shape \(E, 2F, D\)"),
        ({"w2": torch.zeros(3, 16, 9)}, ValueError, r"w2 must have shape \(3, 16, 8\) to go with w13, got \(3, 16, 9\)"),
        ({"b2": torch.zeros(3, 17)}, ValueError, r"b2 must have shape \(3, 16\), got \(3, 17\)"),
        ({"shared": (torch.zeros(7, 16), torch.zeros(16, 3))}, ValueError, r"shared\[0\] must have shape \(6, 16\), got \(7, 16\)"),
        ({"recipe": "mxfp9"}, ValueError, "recipe must be one of fp32, bf16, mxfp8, nvfp4, got 'mxfp9'"),
        ({"score": "tanh"}, ValueError, "score must be one of 'softmax', 'sigmoid', got 'tanh'"),
        ({"gate_up": "sideways"}, ValueError, "gate_up must be one of"),
        ({"activation": "gelu"}, ValueError, "activation must be one of 'swiglu', got 'gelu'"),
        ({"bias": torch.zeros(3, dtype=torch.bfloat16)}, TypeError, "bias must be float32, got bfloat16"),
        ({"num_groups": 2}, ValueError, r"num_groups must divide the number of experts \(3\), got 2"),
        ({"replay": torch.zeros(4, 3, dtype=torch.int32)}, ValueError, r"replay must have shape \(4, 2\)"),
        ({"replay_threshold": 0.5}, ValueError, "replay_threshold needs replay"),
        ({"backend": "gpu"}, ValueError, "backend must be 'auto' or one of reference, host, cuda, triton, interpreter, got 'gpu'"),
    ],
)  # fmt: skip
def test_errors_name_argument_expected_and_got(change, error, message):
    layer = random_layer(4, 16, 8, 3)
    arguments = {"x": layer.x, "router": layer.router, "w13": layer.w13, "w2": layer.w2, "top_k": 2, "recipe": "fp32", **change}
    with pytest.raises(error, match=message):
        moe_layer(**arguments)


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (torch.zeros(4, 2), torch.ones(4, 2), TypeError, "ids must be int32 or int64, got float32"),
        (torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), ValueError, r"ids must have shape \(4, 2\), got \(3, 2\)"),
        (torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 3), ValueError, r"weights must have shape \(4, 2\), got \(4, 3\)"),
    ],
)  # fmt: skip
def test_moe_experts_errors(ids, weights, error, message):
    layer = random_layer(4, 16, 8, 3)
    with pytest.raises(error, match=message):
        moe_experts(layer.x, ids, weights, layer.w13, layer.w2)
