"""Expert parallelism: `moe_layer(group=)` on 2 and 4 gloo ranks gives the bytes of one process that has all the tokens."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mxmoe import dequantize, moe_experts, quantize
from mxmoe.parallel import expert_slice
from tests.helpers import assert_same_bits
from tests.parallel_cases import (
    SIZES,
    Case,
    PerRank,
    Ranks,
    Result,
    checkpointed,
    compiled,
    experts_only,
    failing,
    make,
    module,
    outsider,
    ranked,
    seconds_to_error,
    single,
)

RECIPES = ["fp32", "bf16", "mxfp8", "nvfp4"]
EXPERTS = ("w13", "w2", "b13", "b2")
SECOND = 1.0  # timeout of the groups in which a rank does not come


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(max(SIZES))
    yield pool
    pool.stop()


def assert_equals_one_process(results: list[Result], case: Case, want: Result | None = None):
    """y, the routing, gradients of x and of the experts: bitwise. Of what every rank has: the sum over the ranks, to rounding."""
    want = want or single(case)
    for name in ("y", "ids", "weights"):
        assert_same_bits(torch.cat([getattr(r, name) for r in results]), getattr(want, name))
    for name, grad in want.grads.items():
        got = [r.grads[name] for r in results]
        if name == "x" or name in EXPERTS:
            assert_same_bits(torch.cat(got), grad)
        elif case.recipe in ("fp32", "bf16"):  # others quantize columns of the shared expert in blocks of the rank's own tokens
            assert (sum(got) - grad).norm() <= 2e-6 * grad.norm()
        else:
            assert (sum(got) - grad).norm() <= 0.1 * grad.norm()


# ------------------------------------------------------------------------------------------------------- equal to one process


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [(7,), (9, 4), (0, 7), (3, 1, 40, 8)])
def test_equals_one_process(ranks, tokens, recipe):
    case = Case(tokens, recipe, torch.bfloat16, bias=True, shared=16)
    assert_equals_one_process(ranks(len(tokens), ranked, case), case)


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_case_P05_uneven_tokens(ranks, recipe):
    case = Case((5, 0, 2, 9), recipe)
    assert_equals_one_process(ranks(4, ranked, case), case)


def test_fp16_with_outputs_beyond_its_range(ranks):
    case = Case((5, 8), "mxfp8", torch.float16, spread=3.0)
    assert_equals_one_process(ranks(2, ranked, case), case)


def test_case_P11_unequal_loads(ranks):
    """Largest load of an expert 3 on rank 0, 4 on rank 1; and all tokens of both on one rank's expert."""
    uneven = torch.tensor([[0], [0], [0], [3], [1], [1], [1], [1]])
    for ids in (uneven, torch.full((8, 1), 3)):
        case = Case((4, 4), top_k=1, dims=(32, 16, 4), replay=ids)
        results = ranks(2, ranked, case)
        assert_equals_one_process(results, case)
        assert torch.equal(torch.cat([r.ids for r in results]), ids.int())


@pytest.mark.parametrize("tokens", [(0, 0), (0, 0, 0, 0), (1, 0), (0, 0, 1, 0)])
def test_no_tokens(ranks, tokens):
    """L09 on ranks: experts without tokens have gradients of zero, not None."""
    case = Case(tokens, "mxfp8", bias=True)
    results = ranks(len(tokens), ranked, case)
    assert_equals_one_process(results, case)
    assert all(r.grads[name] is not None for r in results for name in EXPERTS)


@st.composite
def cases(draw, size: int) -> Case:
    tokens = tuple(draw(st.lists(st.integers(0, 12), min_size=size, max_size=size)))
    experts = size * draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(4, experts)))
    recipe = draw(st.sampled_from(RECIPES))
    options = {
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "recompute": draw(st.booleans()),
    }
    replay = None
    if draw(st.booleans()):  # one expert twice, none, or all tokens on one rank
        low, high = draw(st.sampled_from([(-1, experts), (0, 1), (experts - 1, experts)]))
        ids = st.lists(st.integers(low, high), min_size=top_k, max_size=top_k)
        rows = draw(st.lists(ids, min_size=sum(tokens), max_size=sum(tokens)))
        replay = torch.tensor(rows, dtype=torch.int32).view(sum(tokens), top_k)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Case(
        tokens, recipe, dtype, (draw(st.sampled_from([24, 64])), draw(st.sampled_from([8, 40])), experts), top_k, replay,
        bias=draw(st.booleans()), seed=draw(st.integers(0, 9)), options=options,
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 4])
def test_random_splits(ranks, size):
    @settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=cases(size))
    def check(case):
        assert_equals_one_process(ranks(size, ranked, case), case)

    check()


@pytest.mark.parametrize("recipe", RECIPES)
def test_reference_backend(ranks, recipe):
    """Its matrix products are torch's, whose bytes depend on the number of rows: equal to rounding only."""
    case = Case((5, 0, 2, 9), recipe, bias=True, options={"backend": "reference"})
    results, want = ranks(4, ranked, case), single(case)
    for name in ("x", *EXPERTS):
        got = torch.cat([r.grads[name] for r in results])
        assert (got - want.grads[name]).norm() <= 1e-2 * want.grads[name].norm(), name


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_gradients_of_shared_parameters_are_of_the_own_tokens(ranks, recipe):
    """Bitwise those of one process in whose loss the other ranks' tokens do not enter."""
    case = Case((6, 4), recipe, shared=16)
    for rank, result in enumerate(ranks(2, ranked, case)):
        want = single(case, of_rank=rank)
        for name in ("router", "shared_w13", "shared_w2"):
            assert_same_bits(result.grads[name], want.grads[name])


def test_mxfp8_payload(ranks):
    """The forward's bytes stay; the gradient of w13 reads the dequantized rows: all bytes are those of one process given these.

    Rounded twice, only elements below 2^-14 of their block's largest differ from those rounded once.
    """
    case = Case((5, 0, 40, 9), "mxfp8", bias=True, spread=8.0)
    layer, dy = make(case)
    exact = single(case)
    results = ranks(4, ranked, case, payload="mxfp8")
    assert_same_bits(torch.cat([r.y for r in results]), exact.y)
    rounded = dequantize(quantize(layer.x.detach(), "mxfp8")).requires_grad_()
    y = moe_experts(rounded, exact.ids, exact.weights, layer.w13, layer.w2, b13=layer.b13, b2=layer.b2)
    assert_same_bits(y.detach(), exact.y)
    y.backward(dy)
    for name in EXPERTS:
        assert_same_bits(torch.cat([r.grads[name] for r in results]), getattr(layer, name).grad)
    assert_same_bits(torch.cat([r.grads["x"] for r in results]), exact.grads["x"])
    assert not torch.equal(layer.w13.grad, exact.grads["w13"])


def test_moe_experts_with_prepared_frozen_and_strided_arguments(ranks):
    """P15 on ranks: rows that lie transposed in memory; experts as prepared copies, or as frozen MXTensors."""
    case = Case((6, 3), "mxfp8")
    want = single(case)
    for how in ("plain", "transposed", "prepared", "frozen"):
        results = ranks(2, experts_only, case, PerRank(want.ids.split(case.tokens)), PerRank(want.weights.split(case.tokens)), how)
        assert_same_bits(torch.cat(results), want.y)


@pytest.mark.parametrize(("recipe", "options"), [("bf16", {"expert_bias": True}), ("mxfp8", {"payload": "mxfp8"})])
def test_module(ranks, recipe, options):
    case = Case((5, 12), recipe, torch.bfloat16, shared=32)
    results, parameters = zip(*ranks(2, module, case, options), strict=True)
    want, whole = module(None, case, options)
    assert_equals_one_process(list(results), case, want)
    for name, p in whole.items():
        if name in EXPERTS:
            assert_same_bits(torch.cat([of_rank[name] for of_rank in parameters]), p)
        else:
            assert all(torch.equal(of_rank[name], p) for of_rank in parameters)


@pytest.mark.parametrize("how", [compiled, checkpointed])
def test_compiled_and_checkpointed(ranks, how):
    case = Case((6, 3), "bf16", shared=16, replay=torch.arange(18).view(9, 2) % 8)
    assert_equals_one_process(ranks(2, how, case), case)


# ---------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"dims": (32, 32, 8)}, "D 32"),
        ({"dims": (64, 32, 12)}, "experts 12"),
        ({"top_k": 1}, "top_k 1"),
        ({"dtype": torch.float16}, "dtype float16"),
        ({"recipe": "nvfp4"}, "recipe nvfp4"),
        ({"options": {"payload": "mxfp8"}}, "payload mxfp8"),
        ({"frozen": "x"}, "x needs a gradient False"),
        ({"frozen": "experts"}, "experts need a gradient False"),
    ],
)
def test_ranks_that_disagree(ranks, change, name):
    """Every rank gets the error, and the group works on."""
    change = dict(change)
    frozen = change.pop("frozen", None)
    odd = Case((3, 2, 4, 1), **{"recipe": "mxfp8", **change})
    usual = Case((3, 2, 4, 1), "mxfp8")
    errors = ranks(4, failing, PerRank([usual, usual, odd, usual]), PerRank([None, None, frozen, None]), errors=True)
    assert all(isinstance(e, ValueError) and "on rank 0: " in str(e) and "on rank 2: " in str(e) and name in str(e) for e in errors)
    ranks(4, ranked, usual)


def test_experts_that_do_not_divide(ranks):
    errors = ranks(4, ranked, Case((1, 1, 1, 1), dims=(32, 16, 6)), errors=True)
    assert all(isinstance(e, ValueError) and "multiple of the group's 4 ranks, got 6" in str(e) for e in errors)


def test_router_of_another_world(ranks):
    """Each rank holds the experts of 4 ranks, the group has 2."""
    errors = ranks(2, ranked, Case((1, 1)), experts=slice(0, 2), errors=True)
    assert all(isinstance(e, ValueError) and "router must have shape (4, 64)" in str(e) for e in errors)


def test_groups_that_are_none(ranks):
    assert all("member" in str(e) for e in ranks(4, outsider, errors=True)[1:])
    with pytest.raises(TypeError, match=r"must be a torch\.distributed ProcessGroup, got str"):
        expert_slice(8, "world")


@pytest.mark.parametrize("absent", ["forward", "backward"])
def test_a_rank_that_does_not_come(ranks, absent):
    *errors, _ = ranks(4, seconds_to_error, Case((3, 2, 0, 4)), absent, SECOND)
    assert any(isinstance(error, TimeoutError) for error, _ in errors)  # whoever gives up first hangs up on the others
    for error, seconds in errors:
        assert isinstance(error, TimeoutError | ConnectionError)
        assert "[0, 1, 2, 3]" in str(error)
        assert seconds < 5 * SECOND
    ranks(4, ranked, Case((1, 1, 1, 1)))


@pytest.mark.parametrize("absent", ["forward: dies", "backward: dies"])
def test_case_P11_a_rank_that_dies(absent):
    pool = Ranks(2)
    try:
        (error, seconds), _ = pool(2, seconds_to_error, Case((3, 2)), absent, 20.0)
    finally:
        pool.stop()
    assert isinstance(error, ConnectionError)
    assert "[0, 1]" in str(error)
    assert seconds < 5
