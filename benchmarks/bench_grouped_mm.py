"""grouped_mm, grouped_mm_wgrad, moe_decode: floating-point operations per second, beside torch's grouped product."""

import pytest
import torch

from benchmarks.cases import CASES
from benchmarks.conftest import Provider
from mxmoe import grouped_mm, grouped_mm_wgrad, moe_experts, ops, prepare_experts, quantize
from mxmoe.layout import offs_from_sizes

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def offs_of(case) -> torch.Tensor:
    """Uneven groups, as a router makes them."""
    ids = torch.randint(case.num_experts, (case.rows,))
    return offs_from_sizes(torch.bincount(ids, minlength=case.num_experts))


@cases
def test_grouped_mm(compare, case):
    """The first product of the layer: rows (N, D) with w13 (E, 2F, D)."""
    x, w, offs = (
        torch.randn(case.rows, case.dim).bfloat16(),
        torch.randn(case.num_experts, 2 * case.expert_dim, case.dim).bfloat16(),
        offs_of(case),
    )
    out = torch.empty(case.rows, 2 * case.expert_dim, dtype=torch.bfloat16)
    providers = {"host bf16": Provider(lambda: grouped_mm(x, w, offs, out=out), True)}
    for format in ("mxfp8", "nvfp4"):
        operands = quantize(x, format), quantize(w, format)
        providers[f"host {format}"] = Provider(lambda o=operands: grouped_mm(*o, offs, out=out), True)
    w_t = w.transpose(1, 2)
    providers["torch._grouped_mm bf16"] = lambda: torch._grouped_mm(x, w_t, offs=offs)
    shape = f"{case.name}: {case.rows} x {2 * case.expert_dim} x {case.dim}, E {case.num_experts}"
    compare("grouped_mm", shape, providers, flops=2 * x.numel() * 2 * case.expert_dim)


@cases
def test_grouped_mm_wgrad(compare, case):
    """The gradient of w13."""
    dh, x, offs = torch.randn(case.rows, 2 * case.expert_dim).bfloat16(), torch.randn(case.rows, case.dim).bfloat16(), offs_of(case)
    out = torch.empty(case.num_experts, 2 * case.expert_dim, case.dim, dtype=torch.bfloat16)
    copies = quantize(dh, "mxfp8", "column", offs=offs), quantize(x, "mxfp8", "column", offs=offs)
    dh_t = dh.T
    providers = {
        "host bf16": Provider(lambda: grouped_mm_wgrad(dh, x, offs, out=out), True),
        "host mxfp8": Provider(lambda: grouped_mm_wgrad(*copies, offs, out=out), True),
        "torch._grouped_mm bf16": lambda: torch._grouped_mm(dh_t, x, offs=offs),
    }
    shape = f"{case.name}: {2 * case.expert_dim} x {case.dim}, {case.rows} rows, E {case.num_experts}"
    compare("grouped_mm_wgrad", shape, providers, flops=2 * x.numel() * 2 * case.expert_dim)


@pytest.mark.parametrize("tokens", [1, 8])
@cases
def test_moe_decode(compare, case, tokens):
    """A few tokens; the time is that of reading the chosen experts' weights, so the rate is bytes of those."""
    x = torch.randn(tokens, case.dim).bfloat16()
    w13 = torch.randn(case.num_experts, 2 * case.expert_dim, case.dim).bfloat16() * case.dim**-0.5
    w2 = torch.randn(case.num_experts, case.dim, case.expert_dim).bfloat16() * case.expert_dim**-0.5
    ids = torch.stack([torch.randperm(case.num_experts)[: case.top_k] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, case.top_k)
    read = len(ids.unique()) / case.num_experts
    out = torch.empty_like(x)
    providers = {}
    for recipe in ("bf16", "mxfp8", "nvfp4"):
        quantized = [w if recipe == "bf16" else quantize(w, recipe) for w in (w13, w2)]
        size = read * sum(w.nbytes for w in quantized)
        call = lambda q=quantized, r=recipe: ops.moe_decode(x, ids, weights, *q, recipe=r, out=out)  # noqa: E731
        providers[f"host {recipe}"] = Provider(call, True, size)
    prepared = prepare_experts(w13, w2, "mxfp8", backward=False)
    mxfp8 = providers["host mxfp8"].work
    layer = Provider(lambda: moe_experts(x, ids, weights, w13, w2, recipe="mxfp8", prepared=prepared), False, mxfp8)
    providers["host mxfp8, moe_experts"] = layer
    providers["torch bf16"] = lambda: torch_decode(x, ids, weights, w13, w2)
    compare(
        "moe_decode", f"{case.shape.replace(f'T {case.tokens}', f'T {tokens}')}", providers, bytes=read * (w13.nbytes + w2.nbytes)
    )


def torch_decode(x, ids, weights, w13, w2) -> torch.Tensor:
    """Token by token, expert by expert."""
    y = torch.zeros_like(x)
    for t, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for e, share in zip(experts, shares, strict=True):
            gate, up = torch.mv(w13[e], x[t]).chunk(2)
            y[t] += share * torch.mv(w2[e], torch.nn.functional.silu(gate) * up)
    return y
