"""Uses that the library refuses or must survive: overlapping memory, foreign groups, indices out of range, higher derivatives."""

import pytest
import torch

import mxmoe
from mxmoe import MoE, Routing, SwiGLU, moe_experts, moe_layer, ops, prepare_experts, quantize
from tests.layer_cases import random_layer

BACKENDS = ["reference", "host", "interpreter"]


def offs(*ends):
    return torch.tensor(ends, dtype=torch.int32)


def routing_with(**parts):
    g = torch.Generator().manual_seed(0)
    r = Routing.from_ids(torch.randint(0, 4, (5, 2), generator=g), torch.rand(5, 2, generator=g), 4)
    names = ("ids", "weights", "counts", "offs", "permutation", "inverse")
    return Routing(**{name: parts.get(name, getattr(r, name)) for name in names})


def spread(t):
    """The same values with a stride of 2 in the last dimension."""
    return torch.stack([t, torch.full_like(t, 3)], -1)[..., 0]


# ------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("verb", ["grouped_mm", "permute", "unpermute", "swiglu_backward"])
def test_out_that_overlaps_an_argument_is_refused(verb):
    x, one = torch.randn(8, 8), Routing.from_ids(torch.randint(0, 4, (8, 1)), torch.ones(8, 1), 4)
    calls = {
        "grouped_mm": lambda: mxmoe.grouped_mm(x, torch.randn(1, 8, 8), offs(8), out=x),
        "permute": lambda: mxmoe.permute(x, one, out=x),
        "unpermute": lambda: mxmoe.unpermute(x, one, out=x),
        "swiglu_backward": lambda: ops.swiglu_backward(torch.randn(8, 4), x, SwiGLU(), out=x),
    }
    with pytest.raises(ValueError, match="must not overlap"):
        calls[verb]()


def test_out_beside_its_argument_in_one_buffer_is_welcome():
    buffer = torch.randn(16, 8)
    expected = mxmoe.grouped_mm(buffer[:8].clone(), torch.eye(8).unsqueeze(0), offs(8))
    assert torch.equal(mxmoe.grouped_mm(buffer[:8], torch.eye(8).unsqueeze(0), offs(8), out=buffer[8:]), expected)


def test_parts_of_a_quantized_out_that_overlap_are_refused():
    t = quantize(torch.randn(8, 64), "mxfp8")
    scales = t.values.view(torch.uint8).flatten()[:16].view(8, 2).view(t.scales.dtype)
    with pytest.raises(ValueError, match="row_values must not overlap row_scales"):
        quantize(torch.randn(8, 64), "mxfp8", out=t.replace(scales=scales))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_parts_of_a_routing(backend):
    r = routing_with()
    s = routing_with(**{name: spread(getattr(r, name)) for name in ("ids", "permutation", "inverse")})
    x, y, logits, grad = torch.randn(5, 8), torch.randn(10, 8), torch.randn(5, 4), torch.randn(5, 2)

    def results(routing):
        rows, weights_grad = ops.unpermute_backward(x, routing, grad, y, backend=backend)
        moved = mxmoe.permute(x, routing, backend=backend), mxmoe.unpermute(y, routing, backend=backend)
        return *moved, rows, weights_grad, ops.route_backward(logits, routing, grad, backend=backend)

    assert all(torch.equal(a, b) for a, b in zip(results(r), results(s), strict=True))


# ----------------------------------------------------------------------------------------------- indices and groups


@pytest.mark.parametrize("backend", BACKENDS)
def test_routing_indices_out_of_range_are_refused(backend):
    far = torch.full((10,), 2**30, dtype=torch.int32)
    x, y = torch.randn(5, 8), torch.randn(10, 8)
    with pytest.raises(ValueError, match="permutation must hold indices below 10, got 1073741824"):
        mxmoe.permute(x, routing_with(permutation=far), backend=backend)
    with pytest.raises(ValueError, match="permutation must hold indices below 10"):
        ops.unpermute_backward(x, routing_with(permutation=far), None, y, backend=backend)
    with pytest.raises(ValueError, match="inverse must hold indices below 10"):
        mxmoe.unpermute(y, routing_with(inverse=far.view(5, 2)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_swizzle_refuses_groups_outside_the_rows(axis, backend):
    t = quantize(torch.randn(10, 32), "mxfp8", axis, offs=offs(4, 10))
    with pytest.raises(ValueError, match="offs must"):
        mxmoe.swizzle_scales(t.replace(offs=offs(2**30, -5)), backend=backend)


def test_wgrad_refuses_copies_made_with_other_groups():
    t, u = (quantize(torch.randn(10, 32), "mxfp8", "column", offs=o) for o in (offs(4, 10), offs(7, 10)))
    for a, b in ((t, t), (u, t), (t, u)):
        with pytest.raises(ValueError, match=r"quantized with these offs \[7, 10\], got a copy made with \[4, 10\]"):
            mxmoe.grouped_mm_wgrad(a, b, offs(7, 10))


def test_group_scales_stay_with_the_groups_they_were_made_of():
    x = torch.randn(10, 32) * torch.tensor([1.0] * 4 + [1e4] * 6).unsqueeze(1)
    a = quantize(x, "nvfp4", "row", scope="group", offs=offs(4, 10))
    w = quantize(torch.randn(3, 8, 32), "nvfp4")
    expected = mxmoe.grouped_mm(a.dequantize(), w, offs(2, 7, 10), out_dtype=torch.float32)
    got = mxmoe.grouped_mm(a, w, offs(2, 7, 10), out_dtype=torch.float32)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_no_columns_and_no_slots():
    y = moe_experts(
        torch.zeros(3, 0), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), torch.zeros(2, 4, 0), torch.zeros(2, 0, 2)
    )
    assert y.shape == (3, 0)
    none = moe_experts(
        torch.ones(3, 4), torch.zeros(3, 0, dtype=torch.int64), torch.ones(3, 0), torch.ones(2, 4, 4), torch.ones(2, 4, 2)
    )
    assert torch.equal(none, torch.zeros(3, 4))
    assert mxmoe.linear(torch.zeros(3, 0), torch.zeros(2, 0)).tolist() == [[0.0, 0.0]] * 3


# --------------------------------------------------------------------------------------------------------- derivatives


def experts_call(layer):
    return lambda x: moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2, recipe="fp32")[0]


@pytest.mark.parametrize("call", ["layer", "linear", "route"])
def test_second_derivatives_are_refused(call):
    layer = random_layer(4, 16, 8, 3)
    calls = {
        "layer": experts_call(layer),
        "linear": lambda x: mxmoe.linear(x, layer.router, recipe="fp32"),
        "route": lambda x: mxmoe.route(x, 2).weights,
    }
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(calls[call](layer.x).square().sum(), layer.x, create_graph=True)


@pytest.mark.parametrize("call", ["layer", "linear", "route"])
def test_forward_mode_is_refused(call):
    layer = random_layer(4, 16, 8, 3)
    calls = {
        "layer": experts_call(layer),
        "linear": lambda x: mxmoe.linear(x, layer.router, recipe="fp32"),
        "route": lambda x: mxmoe.route(x, 2).weights,
    }
    x = layer.x.detach()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode"):
        torch.func.jvp(calls[call], (x,), (x,))


def test_compile_with_a_dynamic_number_of_tokens():
    layer = random_layer(6, 32, 8, 4)
    compiled = torch.compile(
        lambda x: moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2)[0], backend="aot_eager", fullgraph=True
    )
    for tokens in (6, 9):
        x = torch.randn(tokens, 32, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)  # an error where the trace fixes the size
        y, eager = compiled(x), moe_layer(x, layer.router, layer.w13, layer.w2, top_k=2)[0]
        leaves = (x, layer.w13, layer.w2)
        pairs = zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True)
        assert torch.equal(y, eager)
        assert all(torch.equal(a, b) for a, b in pairs)


# ------------------------------------------------------------------------------------------------------ prepared copies


def test_prepared_copies_are_stale_for_a_transposed_view():
    layer = random_layer(4, 16, 8, 3)  # w13 is (3, 16, 16)
    prepared = prepare_experts(layer.w13, layer.w2)
    with pytest.raises(ValueError, match="stale"):
        moe_layer(layer.x, layer.router, layer.w13.transpose(1, 2), layer.w2, top_k=2, prepared=prepared)


def test_prepared_copies_keep_the_address_of_their_source():
    layer = random_layer(4, 16, 8, 3)
    w13 = torch.randn(3, 16, 16)
    prepared, address = prepare_experts(w13, layer.w2), w13.data_ptr()
    del w13
    assert address not in [torch.randn(3, 16, 16).data_ptr() for _ in range(100)]
    assert prepared.sources[0].data_ptr() == address


def test_prepared_in_inference_mode_then_trained():
    layer = MoE(32, 16, 4, 2)
    x = torch.randn(3, 32)
    expected = layer(x)[0]
    with torch.inference_mode():
        layer.prepare()
    y = layer(x)[0]
    y.sum().backward()
    assert torch.equal(y, expected)
    assert layer.w13.grad is not None
    with torch.inference_mode(), pytest.raises(ValueError, match="w13 must not be made in inference mode"):
        prepare_experts(torch.ones(2, 4, 8), torch.ones(2, 8, 2))


# ------------------------------------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_dtype_changes_nothing(backend):
    g = torch.Generator().manual_seed(0)
    x, router = torch.randn(9, 64, generator=g), torch.randn(4, 64, generator=g)
    w13, w2 = torch.randn(4, 64, 64, generator=g) / 8, torch.randn(4, 64, 32, generator=g) / 8
    parameters = [t.requires_grad_() for t in (x, router, w13, w2)]

    def run():
        shared = (w13[0], w2[0])
        y, routing = moe_layer(*parameters, top_k=2, recipe="nvfp4", score="sigmoid", shared=shared, backend=backend)
        loss = y.sum() + routing.z_loss() + routing.load_balance_loss()
        ids, weights = routing.ids, routing.weights.detach()
        decoded = ops.moe_decode(x.detach(), ids, weights, w13.detach(), w2.detach(), recipe="nvfp4", backend=backend)
        turned = quantize(x.detach(), "mxfp4", hadamard=True, backend=backend)
        return [y, weights, *torch.autograd.grad(loss, parameters), decoded, turned.dequantize(backend=backend)]

    expected = run()
    torch.set_default_dtype(torch.float64)  # a buffer of any other dtype than FP32 is refused by name or changes a result's
    try:
        assert all(got.dtype == want.dtype and torch.equal(got, want) for got, want in zip(run(), expected, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
