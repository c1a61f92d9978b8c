"""moe_decode of each backend; that its bytes are the layer's is in test_layer.py."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mxmoe import ops, quantize
from mxmoe.formats import FORMATS, QuantizeOptions
from mxmoe.recipes import SwiGLU
from tests.gemm_cases import operand
from tests.helpers import assert_same_bits, backend_fixture, num_threads, poisoned

D, F, E, K = 96, 48, 5, 2
FORMATS_OF = [("fp32", "fp32"), ("bf16", "bf16"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp4", "bf16")]  # weights, activations
backend = backend_fixture("moe_decode")


def case(weight_format, act_format, tokens=7):
    x = torch.randn(tokens, D).to(torch.float32 if act_format == "fp32" else torch.bfloat16)
    ids = torch.randint(-1, E - 1, (tokens, K), dtype=torch.int32)  # the last expert has no token
    w13, w2 = operand(torch.randn(E, 2 * F, D) / 8, weight_format), operand(torch.randn(E, D, F) / 8, weight_format)
    return x, ids, torch.rand(tokens, K), w13, torch.randn(E, 2 * F), w2, torch.randn(E, D)


def decode(backend, x, ids, weights, w13, b13, w2, b2, act_format):
    """x: a tensor, or an operand in a block format."""
    out = poisoned((ids.shape[0], D), torch.float32)
    source = x if isinstance(x, tuple) else (x, None, None, "fp32" if x.dtype == torch.float32 else "bf16")
    backend.run(
        "moe_decode", source, ids, weights, w13, b13, w2, b2, SwiGLU(), False, act_format, QuantizeOptions(), out
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("weight_format", "act_format"), FORMATS_OF)
def test_a_token_does_not_depend_on_its_batch(backend, weight_format, act_format):
    x, ids, weights, *experts = case(weight_format, act_format)
    y = decode(backend, x, ids, weights, *experts, act_format)
    for rows in ([3], [6, 0], [4, 1, 1, 5]):
        got = decode(backend, x[rows], ids[rows], weights[rows], *experts, act_format)
        if backend.name == "host":
            assert_same_bits(got, y[rows])
        else:
            torch.testing.assert_close(got, y[rows], rtol=2**-6, atol=2**-4)
    with num_threads(1):
        assert_same_bits(decode(backend, x, ids, weights, *experts, act_format), y)


def test_equals_a_loop_over_tokens_in_fp32(backend):
    x, ids, weights, w13, b13, w2, b2 = case("fp32", "fp32")
    expected = torch.zeros(7, D)
    for t in range(7):
        for k in range(K):
            e = int(ids[t, k])
            if e >= 0:
                gate, up = (w13[0][e] @ x[t] + b13[e]).chunk(2)
                expected[t] += weights[t, k] * (w2[0][e] @ (torch.nn.functional.silu(gate) * up) + b2[e])
    torch.testing.assert_close(decode(backend, x, ids, weights, w13, b13, w2, b2, "fp32"), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_that_arrive_quantized(backend, format):
    x, ids, weights, *experts = case(format, format)
    expected = decode(backend, x, ids, weights, *experts, format)
    assert_same_bits(decode(backend, operand(x, format), ids, weights, *experts, format), expected)


def test_experts_without_a_token_are_not_read(backend):
    x, ids, weights, w13, b13, w2, b2 = case("bf16", "bf16")
    y = decode(backend, x, ids, weights, w13, b13, w2, b2, "bf16")
    for t in (w13[0], b13, w2[0], b2):
        t[E - 1] = float("nan")
    assert_same_bits(decode(backend, x, ids, weights, w13, b13, w2, b2, "bf16"), y)
    assert y.isfinite().all()


def test_no_tokens_and_no_experts(backend):
    x, ids, weights, *experts = case("mxfp8", "mxfp8")
    assert not decode(backend, x, torch.full_like(ids, -1), weights, *experts, "mxfp8").any()
    assert decode(backend, x[:0], ids[:0], weights[:0], *experts, "mxfp8").shape == (0, D)


@pytest.mark.parametrize("format", ["bf16", *FORMATS])
@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    outputs=st.integers(1, 150),
    blocks=st.integers(0, 20),
    tail=st.sampled_from([1, 2, 16, 30]),
    activations=st.sampled_from(["bf16", "mxfp8", "nvfp4"]),
    special=st.sampled_from([None, 0.0, 1e30, 1e-38, float("inf"), float("nan")]),
    seed=st.integers(0, 99),
)
def test_few_rows_have_the_bits_of_many(format, sizes, outputs, blocks, tail, activations, special, seed):
    """A product of at most 8 rows per expert streams the weights, one of more packs panels of them."""
    generator = torch.Generator().manual_seed(seed)
    contraction, starts = 32 * blocks + tail, torch.tensor([0, *sizes]).cumsum(0).tolist()
    a, w = (
        torch.randn(starts[-1], contraction, generator=generator),
        torch.randn(len(sizes), outputs, contraction, generator=generator),
    )
    if special is not None:
        w[0, outputs // 2, ::7], w[-1, :, 0] = special, 0.0
    weights = w.bfloat16() if format == "bf16" else quantize(w, format)
    bias = torch.randn(len(sizes), outputs, generator=generator)
    many = torch.cat([torch.arange(start, end).repeat(9) for start, end in pairwise(starts)])
    of_few = torch.cat([torch.arange(9 * start, 9 * start + end - start) for start, end in pairwise(starts)])

    def product(rows, sizes):
        x = rows.bfloat16() if activations == "bf16" else quantize(rows, activations)
        return ops.grouped_mm(x, weights, torch.tensor(sizes).cumsum(0).int(), bias=bias, out_dtype=torch.float32)

    few, expected = product(a, sizes), product(a[many], [9 * size for size in sizes])[of_few]
    assert_same_bits(few, expected)
    with num_threads(1):
        assert_same_bits(product(a, sizes), few)


@pytest.mark.parametrize("format", ["bf16", "mxfp8", "nvfp4"])
def test_a_call_like_one_before_is_checked_no_less(format):
    """Arguments that look like those of a checked call go past the checks; everything else meets them again."""
    x, ids, share = torch.randn(3, D).bfloat16(), torch.randint(-1, E, (3, K)).int(), torch.rand(3, K)
    weights = torch.randn(2, E, 2 * F, D).bfloat16() / 8, torch.randn(2, E, D, F).bfloat16() / 8
    first, second = ([w[i] if format == "bf16" else quantize(w[i], format) for w in weights] for i in range(2))
    options = dict(recipe=format, activations="bf16")

    def fresh(*arguments, **others):  # another SwiGLU that computes the same: checked
        return ops.moe_decode(*arguments, **options, activation=SwiGLU(limit=1e30 + next(limits)), **others)

    limits = iter([1e30 * i for i in range(9)])
    for experts in (first, second, first):
        assert_same_bits(ops.moe_decode(x, ids, share, *experts, **options), fresh(x, ids, share, *experts))
    assert_same_bits(ops.moe_decode(x[1:], ids[1:], share[1:], *first, **options), fresh(x[1:], ids[1:], share[1:], *first))
    turned = share.T.contiguous().T
    assert_same_bits(ops.moe_decode(x, ids, turned, *first, **options), fresh(x, ids, share, *first))
    out = torch.empty_like(x)
    assert ops.moe_decode(x, ids, share, *first, **options, out=out) is out
    with pytest.raises(ValueError, match="must not overlap"):
        ops.moe_decode(x, ids, share, *first, **options, out=x)
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.moe_decode(x, ids, share[:2], *first, **options)
    with pytest.raises(ValueError, match="w2 must have shape"):
        ops.moe_decode(x, ids, share, first[0], first[0], **options)
    with pytest.raises(TypeError, match="ids must be"):
        ops.moe_decode(x, ids.float(), share, *first, **options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ops.moe_decode(x, ids, share, *first, **options), FakeTensor)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_repeated_calls_go_past_the_checks_but_not_past_a_profiler(monkeypatch, ids_dtype):
    x, ids, share = torch.randn(1, D).bfloat16(), torch.zeros(1, 1, dtype=ids_dtype), torch.ones(1, 1)
    experts = torch.randn(E, 2 * F, D).bfloat16(), torch.randn(E, D, F).bfloat16()

    def call():
        return ops.moe_decode(x, ids, share, *experts, recipe="bf16")

    expected = call()
    with torch.profiler.profile() as profile:
        assert_same_bits(call(), expected)
    assert [event.count for event in profile.key_averages() if event.key == "mxmoe::moe_decode"] == [1]
    monkeypatch.setattr("mxmoe.ops.decode.check_tensor", lambda *_: pytest.fail("checked again"))
    assert_same_bits(call(), expected)
    monkeypatch.setattr("mxmoe.ops.registration._NUM_INTERCEPTORS", None)  # a torch that does not say whether anybody listens
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        call()


def test_ids_outside_the_experts_go_past_the_checks_as_no_expert():
    x, share = torch.randn(2, D).bfloat16(), torch.ones(2, 2)
    experts = torch.randn(E, 2 * F, D).bfloat16(), torch.randn(E, D, F).bfloat16()
    ids = torch.tensor([[1, 2**32 + 1], [-(2**40), E]])
    expected = ops.moe_decode(x, torch.tensor([[1, -1], [-1, -1]]), share, *experts, recipe="bf16")
    for _ in range(2):
        assert_same_bits(ops.moe_decode(x, ids, share, *experts, recipe="bf16"), expected)
