"""permute, unpermute and unpermute_backward: each backend against torch indexing, autograd and the reference's bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxmoe
from mxmoe import Routing
from tests.helpers import Backend, assert_same_bits, backend_fixture, backends_for, num_threads, poisoned

NAN = float("nan")
REFERENCE = Backend("reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOST = backends_for("permute")[1:]
backend = backend_fixture("permute")


def permute(backend, x, routing):
    out = poisoned((routing.permutation.numel(), x.shape[1]), x.dtype)
    backend.run("permute", x, routing.permutation, routing.ids.shape[1], out)
    return out


def unpermute(backend, y, routing, weights=None, dtype=None):
    out = poisoned((routing.ids.shape[0], y.shape[1]), dtype or y.dtype)
    backend.run("unpermute", y, routing.inverse, weights, out)
    return out


def unpermute_backward(backend, dy, routing, weights=None, y=None, dtype=None):
    rows = poisoned((routing.permutation.numel(), dy.shape[1]), dtype or dy.dtype)
    weights_grad = None if y is None else poisoned(routing.ids.shape, torch.float32)
    backend.run("unpermute_backward", dy, y, routing.permutation, weights, rows, weights_grad)
    return rows, weights_grad


def random_routing(tokens, top_k, experts):
    """Some slots without an expert, some experts twice in a token."""
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32)
    return Routing.from_ids(ids, torch.randn(tokens, top_k), experts, backend="reference")


def routing_of(ids, weights, experts):
    return Routing.from_ids(torch.tensor(ids), torch.tensor(weights), experts, backend="reference")


def test_p01_missing_expert_is_skipped(backend):
    routing = routing_of([[0, -1], [1, 2]], [[0.5, 0.5], [0.5, 0.5]], 3)
    x = torch.tensor([[1.0], [10.0]])
    rows = permute(backend, x, routing)
    assert rows.tolist() == [[1.0], [10.0], [10.0], [0.0]]  # three rows, the fourth is past the last one
    rows[3] = NAN  # and nothing reads it
    assert unpermute(backend, rows, routing, routing.weights).tolist() == [[0.5], [10.0]]
    rows_grad, weights_grad = unpermute_backward(backend, torch.ones(2, 1), routing, routing.weights, rows)
    assert rows_grad.tolist() == [[0.5], [0.5], [0.5], [0.0]]
    assert weights_grad.tolist() == [[1.0, 0.0], [10.0, 10.0]]


def test_p03_no_tokens(backend):
    routing = random_routing(0, 2, 4)
    x = torch.empty(0, 64)
    assert permute(backend, x, routing).shape == (0, 64)
    assert unpermute(backend, x, routing, routing.weights).shape == (0, 64)
    rows_grad, weights_grad = unpermute_backward(backend, x, routing, routing.weights, x)
    assert (rows_grad.shape, weights_grad.shape) == ((0, 64), (0, 2))


def test_no_token_has_an_expert(backend):
    routing = Routing.from_ids(torch.full((3, 2), -1), torch.ones(3, 2), 4, backend="reference")
    x = torch.randn(3, 5)
    assert not permute(backend, x, routing).any()
    assert_same_bits(unpermute(backend, torch.full((6, 5), NAN), routing, torch.full((3, 2), NAN)), torch.zeros(3, 5))
    rows_grad, weights_grad = unpermute_backward(backend, x, routing, torch.full((3, 2), NAN), torch.full((6, 5), NAN))
    assert_same_bits(rows_grad, torch.zeros(6, 5))
    assert_same_bits(weights_grad, torch.zeros(3, 2))


def test_p13_same_expert_twice_counts_twice(backend):
    routing = routing_of([[1, 1]], [[0.25, 0.5]], 2)
    y = 2 * permute(backend, torch.tensor([[3.0]]), routing)
    assert unpermute(backend, y, routing, routing.weights).tolist() == [[4.5]]
    assert unpermute_backward(backend, torch.ones(1, 1), routing, routing.weights, y)[1].tolist() == [[6.0, 6.0]]


def test_all_tokens_on_one_expert_keep_their_order(backend):
    routing = routing_of([[2], [2], [2]], [[1.0]] * 3, 4)
    x = torch.randn(3, 7)
    assert torch.equal(permute(backend, x, routing), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_equal_torch_indexing(backend, dtype):
    routing = random_routing(40, 3, 7)
    x, y = torch.randn(40, 53).to(dtype), torch.randn(120, 53).to(dtype)
    n = int(routing.counts.sum())
    slots = routing.permutation[:n].long()
    assert_same_bits(permute(backend, x, routing), torch.cat([x[slots // 3], torch.zeros(120 - n, 53, dtype=dtype)]))
    sums = torch.zeros(40, 53).index_add_(0, slots // 3, y[:n].float() * routing.weights.flatten()[slots, None])
    torch.testing.assert_close(unpermute(backend, y, routing, routing.weights, torch.float32), sums, rtol=1e-6, atol=1e-6)
    plain = torch.zeros(40, 53).index_add_(0, slots // 3, y[:n].float())
    torch.testing.assert_close(unpermute(backend, y, routing, None, torch.float32), plain, rtol=1e-6, atol=1e-6)


def test_unpermute_adds_in_rank_order_and_rounds_once(backend):
    routing = routing_of([[1, 0, 2]], [[1.0, 1.0, 1.0]], 3)
    y = torch.tensor([[1.0], [2.0**24], [-(2.0**24)]])  # rows of experts 0, 1, 2: ranks 1, 0, 2
    assert unpermute(backend, y, routing, routing.weights).item() == 0.0  # (2^24 + 1) - 2^24 in FP32
    ones = torch.ones(3, 1, dtype=torch.bfloat16)
    thirds = torch.tensor([[1.0, 2.0**-8, 2.0**-8]])  # rounding to BF16 after each step would stay at 1
    assert unpermute(backend, ones, routing, thirds).item() == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_equals_autograd_in_float64(backend, dtype):
    routing = random_routing(30, 4, 5)
    n = int(routing.counts.sum())
    slots = routing.permutation[:n].long()
    y = torch.randn(120, 70).to(dtype)
    dy = torch.randn(30, 70).to(dtype)
    rows, weights = y[:n].double().requires_grad_(), routing.weights.double().requires_grad_()
    torch.zeros(30, 70, dtype=torch.double).index_add(0, slots // 4, rows * weights.flatten()[slots, None]).backward(dy.double())
    rows_grad, weights_grad = unpermute_backward(backend, dy, routing, routing.weights, y)
    assert_same_bits(rows_grad[:n], (routing.weights.flatten()[slots, None] * dy[slots // 4].float()).to(dtype))
    torch.testing.assert_close(rows_grad[:n].double(), rows.grad, rtol=2**-7 if dtype != torch.float32 else 1e-6, atol=0)
    torch.testing.assert_close(weights_grad.double(), weights.grad, rtol=1e-5, atol=1e-5)
    alone, none = unpermute_backward(backend, dy, routing, routing.weights)
    assert none is None
    assert_same_bits(alone, rows_grad)


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 20),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    width=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_permute_then_unpermute_gives_the_tokens_back(tokens, top_k, experts, width, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator)
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    first = torch.zeros(tokens, top_k)
    first[:, torch.randint(0, top_k, (1,), generator=generator)] = 1.0
    for each in backends_for("permute"):
        routing = Routing.from_ids(ids, first, experts, backend=each.name)
        assert torch.equal(unpermute(each, permute(each, x, routing), routing, first), x)


@pytest.mark.parametrize("backend", HOST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_equal_the_reference_on_any_threads(backend, dtype):
    for tokens, top_k, width in ((1, 1, 1), (37, 3, 100), (64, 8, 256)):
        routing = random_routing(tokens, top_k, 9)
        x, y = torch.randn(tokens, width + 3).to(dtype)[:, 1 : width + 1], torch.randn(tokens * top_k, width).to(dtype)
        if tokens > 1:
            x[2, 5], y[3, 7], y[4, 9] = NAN, float("inf"), 1e-40
        w = routing.weights
        for threads in (1, 3):
            with num_threads(threads):
                assert_same_bits(permute(backend, x, routing), permute(REFERENCE, x, routing))
                for out in {dtype, torch.float32}:
                    for weights in (w, None):
                        want = unpermute(REFERENCE, y, routing, weights, out)
                        assert_same_bits(unpermute(backend, y, routing, weights, out), want)
                    want = unpermute_backward(REFERENCE, x, routing, w, y, out)
                    for got, expected in zip(unpermute_backward(backend, x, routing, w, y, out), want, strict=True):
                        assert_same_bits(got, expected)


@pytest.mark.parametrize("backend", HOST, ids=str)
@pytest.mark.parametrize("width", [256, 1021])
def test_streamed_rows_equal_indexing(backend, width):
    """Outputs past 32 MiB go around the cache; rows that are no multiple of 64 bytes have ragged ends."""
    tokens = (33 << 20) // (4 * width) // 2 + 1
    x = torch.randn(tokens, width)
    ids = torch.randint(0, 5, (tokens, 2))
    routing = Routing.from_ids(ids, torch.ones(tokens, 2), 5)
    assert torch.equal(permute(backend, x, routing), x[routing.permutation.long() // 2])


@pytest.mark.parametrize("backend", HOST, ids=str)
def test_p01_offsets_past_two_billion_elements(backend):
    """Row 300000 of 7168 columns starts at element 2150400000; here row 1 does, in memory that is reserved and never touched."""
    distance = 300000 * 7168
    far = torch.empty(distance + 4, dtype=torch.bfloat16).as_strided((2, 4), (distance, 1))
    near = torch.randn(2, 4).bfloat16()
    backend.run("permute", near, torch.tensor([1, 0], dtype=torch.int32), 1, far)
    assert torch.equal(far, near.flip(0))
    routing = routing_of([[1], [0]], [[1.0], [1.0]], 2)
    assert torch.equal(permute(backend, far, routing), near)
    assert torch.equal(unpermute(backend, far, routing, routing.weights), near)


def test_errors_name_the_argument():
    routing = random_routing(4, 2, 3)
    with pytest.raises(ValueError, match="4"):
        mxmoe.permute(torch.randn(5, 3), routing)
    with pytest.raises(ValueError, match="8"):
        mxmoe.unpermute(torch.randn(5, 3), routing)
    with pytest.raises(TypeError, match="float"):
        mxmoe.permute(torch.zeros(4, 3, dtype=torch.int64), routing)
