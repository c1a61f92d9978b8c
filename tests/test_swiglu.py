"""swiglu and swiglu_backward: each backend against the formula in FP64, autograd and the reference's bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mxmoe.recipes import SwiGLU
from tests.helpers import Backend, assert_same_bits, backend_fixture, backends_for, flushed_subnormals, num_threads, poisoned

NAN, INF = float("nan"), float("inf")
REFERENCE = Backend("reference")
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
ACTIVATIONS = [SwiGLU(), GPT_OSS, SwiGLU(limit=0.5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOST = backends_for("swiglu")[1:]
backend = backend_fixture("swiglu")


def swiglu(backend, h, activation=None, *, interleaved=False, offs=None):
    out = poisoned((h.shape[0], h.shape[1] // 2), h.dtype)
    backend.run("swiglu", h, offs, activation or SwiGLU(), interleaved, out)
    return out


def swiglu_backward(backend, da, h, activation=None, *, interleaved=False, offs=None):
    out = poisoned(h.shape, h.dtype)
    backend.run("swiglu_backward", da, h, offs, activation or SwiGLU(), interleaved, out)
    return out


def gate_up(h, interleaved):
    return (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)


def formula(h, activation, interleaved):
    g, u = gate_up(h, interleaved)
    if activation.limit is not None:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    return g * (activation.alpha * g).sigmoid() * (u + activation.offset)


def special_rows(rows, width, dtype):
    h = torch.randn(rows, width) * 10
    values = [NAN, INF, -INF, 0.0, -0.0, -86.9, -87.1, -88.8, -90.0, 1e4, -1e4, 1e-40, 7.0, -7.0, 7.01, 0.5]
    h.view(-1)[: len(values) * (h.numel() // len(values))].view(-1, len(values))[::3] = torch.tensor(values)
    return h.to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_values_and_gradient_equal_the_formula_in_float64(backend, activation, interleaved):
    h, da = torch.randn(30, 2 * 37) * 3, torch.randn(30, 37)
    x = h.double().requires_grad_()
    y = formula(x, activation, interleaved)
    y.backward(da.double())
    torch.testing.assert_close(swiglu(backend, h, activation, interleaved=interleaved).double(), y.detach(), rtol=1e-6, atol=1e-6)
    dh = swiglu_backward(backend, da, h, activation, interleaved=interleaved)
    torch.testing.assert_close(dh.double(), x.grad, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_fp32_result_rounded_once(backend, dtype):
    h, da = torch.randn(20, 96).to(dtype), torch.randn(20, 48).to(dtype)
    assert torch.equal(swiglu(backend, h), swiglu(backend, h.float()).to(dtype))
    assert torch.equal(swiglu_backward(backend, da, h), swiglu_backward(backend, da.float(), h.float()).to(dtype))
    torch.testing.assert_close(swiglu(backend, h), F.silu(h[:, :48].float()).mul(h[:, 48:].float()).to(dtype))


def test_ends_of_the_range(backend):
    h = torch.tensor([[-90.0, -INF, INF, NAN, 0.0, 100.0], [1.0, 1.0, 1.0, 1.0, INF, NAN]]).T.contiguous()
    out = swiglu(backend, h).flatten()
    assert out[0] == 0  # sigmoid(-90) is 0
    assert out[1].isnan()  # -Inf * 0
    assert out[2] == INF
    assert out[3:].isnan().all()


def test_nan_passes_the_clamps(backend):
    h = torch.tensor([[NAN, 1.0], [1.0, NAN]])
    assert swiglu(backend, h, GPT_OSS).isnan().all()
    dh = swiglu_backward(backend, torch.ones(2, 1), h, GPT_OSS)
    assert dh.isnan().tolist() == [[True, True], [True, False]]  # du does not depend on u


def test_gradient_stops_at_the_clamps(backend):
    h = torch.tensor([[8.0, 1.0], [1.0, 8.0], [1.0, -8.0], [-8.0, 1.0], [7.0, 7.0]])
    dh = swiglu_backward(backend, torch.ones(5, 1), h, GPT_OSS)
    assert (dh == 0).tolist() == [[True, False], [False, True], [False, True], [False, False], [False, False]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_past_the_last_offset_are_zero_and_not_read(backend, interleaved):
    h = torch.randn(12, 10)
    h[7:] = NAN
    offs = torch.tensor([0, 5, 5, 7], dtype=torch.int32)
    out = swiglu(backend, h, interleaved=interleaved, offs=offs)
    assert_same_bits(out[:7], swiglu(backend, h[:7].contiguous(), interleaved=interleaved))
    assert_same_bits(out[7:], torch.zeros(5, 5))
    dh = swiglu_backward(
        backend, torch.full((12, 5), NAN).index_fill(0, torch.arange(7), 1.0), h, interleaved=interleaved, offs=offs
    )
    assert dh[:7].isfinite().all()
    assert_same_bits(dh[7:], torch.zeros(5, 10))
    assert not swiglu(backend, h, interleaved=interleaved, offs=torch.zeros(4, dtype=torch.int32)).any()


def test_no_rows(backend):
    assert swiglu(backend, torch.empty(0, 8)).shape == (0, 4)
    assert swiglu_backward(backend, torch.empty(0, 4), torch.empty(0, 8)).shape == (0, 8)


def test_rows_of_any_distance_are_read_in_place(backend):
    wide = torch.randn(9, 100)
    assert torch.equal(swiglu(backend, wide[:, 3:43]), swiglu(backend, wide[:, 3:43].contiguous()))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 70))
def test_interleaving_moves_values_and_changes_none(seed, width):
    h = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(seed))
    interleaved = torch.stack(h.chunk(2, -1), -1).flatten(1)
    for each in backends_for("swiglu"):
        assert torch.equal(swiglu(each, h), swiglu(each, interleaved, interleaved=True))


@pytest.mark.parametrize("backend", HOST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_bytes_equal_the_reference(backend, dtype, interleaved):
    offs = torch.tensor([3, 30], dtype=torch.int32)
    for activation in ACTIVATIONS:
        for rows, width in ((1, 2), (33, 200), (16, 512)):
            h, da = special_rows(rows, width, dtype), torch.randn(rows, width // 2).to(dtype)
            for o in (None, offs) if rows == 33 else (None,):
                options = dict(interleaved=interleaved, offs=o)
                assert_same_bits(swiglu(backend, h, activation, **options), swiglu(REFERENCE, h, activation, **options))
                want = swiglu_backward(REFERENCE, da, h, activation, **options)
                assert_same_bits(swiglu_backward(backend, da, h, activation, **options), want)


@pytest.mark.parametrize("backend", HOST, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bytes_of_every_16_bit_gate(backend, dtype):
    every = torch.arange(65536).to(torch.int16).view(dtype).view(128, 512)
    h = torch.cat([every, every.flip(0, 1)], -1)
    assert_same_bits(swiglu(backend, h), swiglu(REFERENCE, h))
    da = torch.randn(128, 512).to(dtype)
    assert_same_bits(swiglu_backward(backend, da, h), swiglu_backward(REFERENCE, da, h))


@pytest.mark.parametrize("backend", HOST, ids=str)
def test_bytes_do_not_depend_on_threads_or_the_callers_flush_mode(backend):
    h, da = special_rows(200, 600, torch.float32), torch.randn(200, 300) * 1e-38
    with num_threads(1):
        want = swiglu(backend, h), swiglu_backward(backend, da, h)
    assert ((want[1] != 0) & (want[1].abs() < 1e-38)).any()  # the test needs subnormals
    with num_threads(3), flushed_subnormals():
        got = swiglu(backend, h), swiglu_backward(backend, da, h)
    for each, expected in zip(got, want, strict=True):
        assert_same_bits(each, expected)
