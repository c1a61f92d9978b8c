"""Cases for the GPU kernels under the interpreter: each makes its inputs, runs a kernel and asserts its result."""

from contextlib import contextmanager

import torch
from torch import Tensor

from mxmoe import Routing, ops
from mxmoe.backends.device.quantize import run as run_quantize
from mxmoe.backends.interpreter import LAUNCHER, running
from mxmoe.formats import MXTensor, QuantizeOptions
from mxmoe.recipes import SwiGLU
from tests.gemm_cases import DTYPES, Problem, assert_within_bound, column_operand, operand, products, wgrad_products
from tests.helpers import Backend, assert_same_bits, boundary_inputs, contract_copy, differences, empty_copy, poisoned

REFERENCE, INTERPRETER = Backend("reference"), Backend("interpreter")


def ends(*sizes: int) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def check_quantize(x: Tensor, format: str, axis: str = "both", offs: Tensor | None = None, scale_mode: str = "rceil"):
    """Every byte of values and plain scales is the reference's."""
    want, got = (b.quantize(x, format, axis, offs=offs, scale_mode=scale_mode) for b in (REFERENCE, INTERPRETER))
    for g, w in zip(*((t if axis == "both" else (t,)) for t in (got, want)), strict=True):
        assert differences(g, w) == 0


def check_quantize_blocked(x: Tensor, format: str, axis: str = "both", offs: Tensor | None = None):
    """The kernel's own blocked scales are those that swizzle_scales makes of the plain ones."""
    axes = ("row", "column") if axis == "both" else (axis,)
    want = {a: REFERENCE.quantize(x, format, a, offs=offs) for a in axes}
    got = {a: empty_copy(x, format, a, offs, "row") for a in axes}
    blocked = {a: poisoned(REFERENCE.swizzle(want[a]).shape, torch.uint8) for a in axes}
    copies = []
    for a in ("row", "column"):
        values, _, global_scale = contract_copy(got.get(a)) or (None, None, None)
        copies.append(None if values is None else (values, blocked[a], global_scale))
    batched = x if x.ndim == 3 else x[None]
    run_quantize(LAUNCHER, batched, offs, format, QuantizeOptions(), *copies, blocked=True)
    for a in axes:
        assert torch.equal(got[a].values.view(torch.uint8), want[a].values.view(torch.uint8)), a
        assert torch.equal(blocked[a], REFERENCE.swizzle(want[a])), a
        if want[a].global_scale is not None:
            assert torch.equal(got[a].global_scale.view(torch.int32), want[a].global_scale.view(torch.int32))


def check_copies(x: Tensor, format: str, axis: str, offs: Tensor | None, **options):
    """quantize to one copy with options, dequantize it, change its scales' layout and back: the reference's bytes."""
    got, want = (b.quantize(x, format, axis, offs=offs, **options) for b in (INTERPRETER, REFERENCE))
    assert differences(got, want) == 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(*(b.dequantize(want, dtype) for b in (INTERPRETER, REFERENCE)))
    blocked = REFERENCE.swizzle(want)
    assert_same_bits(INTERPRETER.swizzle(want), blocked)
    assert_same_bits(INTERPRETER.unswizzle(want, blocked), REFERENCE.unswizzle(want, blocked))


def check_grouped_mm(p: Problem, format: str, dtype=torch.bfloat16, bias: bool = False, columns: bool = False):
    """Within the bound of FP64 of the same operand bytes; rows past the last group are zero. columns: b is a column copy, as dgrad
    reads weights."""
    g = torch.Generator().manual_seed(0)
    a = operand(torch.randn(p.rows, p.contraction, generator=g), format)
    weights = torch.randn(len(p.sizes), p.outputs, p.contraction, generator=g)
    b = column_weights(weights, format) if columns else operand(weights, format)
    bias_EO = torch.randn(len(p.sizes), p.outputs, generator=g) if bias else None
    out = poisoned((p.rows, p.outputs), dtype)
    INTERPRETER.run("grouped_mm", a, b, p.offs, bias_EO, out)
    y, size = products(a, b, p.offs, p.rows)
    if bias:
        added = bias_EO.double().repeat_interleave(torch.tensor(p.sizes), dim=0)
        y[: len(added)] += added
        size[: len(added)] += added.abs()
    assert_within_bound(out, y, size, p.contraction + 1)
    assert not out[p.rows - p.past :].any()


def column_weights(w: Tensor, format: str):
    """w (E, O, C) as an operand whose neighbouring outputs are neighbours in memory."""
    turned = w.mT.contiguous()
    if format in DTYPES:
        return turned.to(DTYPES[format]).mT, None, None, format
    t = REFERENCE.quantize(turned, format, "column")
    return t.values.mT, t.scales, None, format


def router_logits(tokens: int, experts: int) -> Tensor:
    """Several sizes, and rows of ties, of -Inf, of NaN, of +Inf, of numbers that underflow or overflow."""
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)) * 3
    inf, nan = float("inf"), float("nan")
    special = [(slice(None), v) for v in (0.0, -120.0, -inf, nan)] + [(slice(1, None), -inf), (0, nan), (-1, inf)]
    for row, (part, value) in zip(logits, special, strict=False):
        row[part] = value
    for row, factor in zip(logits[len(special) :], (1e30, 30.0, 1e-42), strict=False):
        row *= factor
    logits[len(special) + 3 :: 2].round_()
    return logits


def check_route(tokens: int, experts: int, top_k: int, score: str, biased: bool = False, replayed: bool = False, **options):
    """route, and route_backward from each of the three gradients and from all: the reference's bytes."""
    g = torch.Generator().manual_seed(tokens)
    logits, bias = router_logits(tokens, experts), torch.randn(experts, generator=g) * 0.1
    replay = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32, generator=g)
    grads = [torch.randn(shape, generator=g) for shape in ((tokens, top_k), (experts,), (1,))]
    grads = [grads, *([t if i == j else None for j, t in enumerate(grads)] for i in range(3))]
    o = dict(score=score, num_groups=1, groups_kept=1, normalize=True, scale=1.0, replay_threshold=None) | options

    def run(backend):
        ids, weights = poisoned((tokens, top_k), torch.int32), poisoned((tokens, top_k), torch.float32)
        probs, z = poisoned(experts, torch.float32), poisoned(1, torch.float32)
        backend.run(
            "route", logits, bias if biased else None, replay if replayed else None, top_k, *o.values(), ids, weights, probs, z
        )
        logits_grads = [poisoned((tokens, experts), torch.float32) for _ in grads]
        for some, out in zip(grads, logits_grads, strict=True):
            backend.run("route_backward", logits, ids, *some, o["score"], o["normalize"], o["scale"], out)
        return ids, weights, probs, z, *logits_grads

    assert_same(run(INTERPRETER), run(REFERENCE))


@contextmanager
def poisoned_workspaces():
    """torch.empty gives NaN or the largest integer, so that what one launch leaves out for the next one does not go unseen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@poisoned_workspaces()
def route_case():
    check_route(14, 40, 3, "sigmoid", biased=True, replayed=True, num_groups=4, groups_kept=2, replay_threshold=1.0, scale=2.5)
    check_route(11, 36, 4, "softmax", normalize=False)
    check_route(2, 36, 4, "sigmoid")  # no NaN that hides the means


@poisoned_workspaces()
def sort_case():
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 41, (310, 2), dtype=torch.int32, generator=g)  # runs with a tail, slots without an expert
    assert_same(*(ops.sort_by_expert(ids, 40, backend=name) for name in (INTERPRETER.name, "reference")))


def quantize_case():
    check_quantize_blocked(boundary_inputs(200, 160, 3, torch.bfloat16), "mxfp8", offs=ends(0, 130, 1, 40))


def quantize_nvfp4_case():
    check_quantize_blocked(boundary_inputs(50, 300, 3, torch.bfloat16, finite=False), "nvfp4", "row", ends(0, 30, 1, 10))


def quantize_nvfp4_plain_case():
    check_quantize(boundary_inputs(9, 83, 3, torch.float32, finite=False), "nvfp4", "row", ends(5, 0, 3))


def copies_case(format: str, **options):
    @poisoned_workspaces()
    def case():
        x = boundary_inputs(150, 77, 3, torch.bfloat16)
        for axis in ("row", "column"):
            check_copies(x, format, axis, ends(130, 0, 13), **options)
        check_copies(x.float()[:48, :32].half(), format, "row", None, hadamard=True, **options)

    return case


def copies_row_scope_case():
    check_copies(boundary_inputs(150, 77, 3, torch.float32, finite=False), "nvfp4", "row", ends(130, 0, 20), seed=5)


def quantize_plain_case():
    check_quantize(boundary_inputs(150, 130, 3, torch.float32), "mxfp8", offs=ends(130, 0, 3))


def grouped_mm_case(format: str, arch: str = "sm_100", columns: bool = False):
    def case():
        with running(arch=arch):
            check_grouped_mm(Problem((130, 0, 1, 20), 136, 256 if columns else 300, past=9), format, columns=columns)

    return case


def grouped_mm_pair_case(format: str, columns: bool = False):
    """Groups large enough for pairs of CTAs; the last one leaves the second of a pair without rows."""

    def case():
        check_grouped_mm(Problem((0, 560), 136, 128 if columns else 300), format, columns=columns)

    return case


def check_rows(tokens: int, top_k: int, experts: int, width: int, dtype, copies: tuple[str, str] | None, weighted: bool = True):
    """permute, unpermute and unpermute_backward: the reference's bytes, of their outputs or of their copies (format, axis)."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32, generator=g)  # some slots without an expert
    routing = Routing.from_ids(ids, torch.randn(tokens, top_k, generator=g), experts, backend="reference")
    x = boundary_inputs(tokens, width, 5, dtype, finite=False)
    y, dy = torch.randn(tokens * top_k, width, generator=g).to(dtype), torch.randn(tokens, width, generator=g).to(dtype)
    weights = routing.weights if weighted else None
    fused = {} if copies is None else dict(format=copies[0], axis=copies[1])

    def run(name):
        dots = y if weighted else None
        rows_grad = ops.unpermute_backward(dy, routing, weights, dots, rows_dtype=torch.bfloat16, **fused, backend=name)
        y_tokens = (ops.unpermute(y, routing, weights, out_dtype=d, backend=name) for d in (dtype, torch.float32))
        return ops.permute(x, routing, **fused, backend=name), rows_grad, *y_tokens

    assert_same(run(INTERPRETER.name), run("reference"))


def check_swiglu(rows: int, width: int, dtype, offs, activation, gate_up: str, copies: tuple[str, str] | None):
    """swiglu and its backward, likewise."""
    h = boundary_inputs(rows, 2 * width, 3, dtype, finite=False)
    da = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    options = dict(activation=activation, gate_up=gate_up, offs=offs)
    if copies is not None:
        options |= dict(format=copies[0], axis=copies[1], scale_mode="floor" if gate_up == "interleaved" else "rceil")
    got, want = (
        (ops.swiglu(h, **options, backend=name), ops.swiglu_backward(da, h, **options, backend=name))
        for name in (INTERPRETER.name, "reference")
    )
    assert_same(got, want)


def assert_same(got, want):
    """Bitwise, through tuples; None is None."""
    if isinstance(want, tuple):
        for g, w in zip(got, want, strict=True):
            assert_same(g, w)
    elif isinstance(want, MXTensor):
        assert differences(got, want) == 0
    elif want is None:
        assert got is None
    else:
        assert_same_bits(got, want)


def rows_case():
    check_rows(70, 3, 5, 132, torch.bfloat16, ("mxfp8", "both"))


def rows_plain_case():
    check_rows(9, 3, 5, 130, torch.float32, None)
    check_rows(9, 3, 5, 132, torch.float16, None)


def swiglu_case():
    offs, activation = ends(0, 130, 1, 5), SwiGLU(1.702, 7.0, 1.0)
    check_swiglu(150, 160, torch.bfloat16, offs, activation, "concatenated", ("mxfp8", "both"))


def swiglu_interleaved_case():
    check_swiglu(40, 132, torch.float32, ends(33), SwiGLU(), "interleaved", ("mxfp8_e5m2", "both"))


def swiglu_plain_case():
    check_swiglu(20, 37, torch.float16, ends(3, 9), SwiGLU(limit=0.5), "interleaved", None)
    check_swiglu(20, 36, torch.bfloat16, None, SwiGLU(), "concatenated", None)


def cluster_case(dtype=torch.float32):
    """Rows that end inside the second tile of a pair."""
    x = torch.randn(100, 128 // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = torch.ones_like(x)
    out, want = poisoned(x.shape, dtype), x + sums
    LAUNCHER.launch("cluster_copy", x, out, sums)
    assert_same_bits(out, x)
    assert_same_bits(sums, want)


def check_wgrad(p: Problem, format: str, dtype=torch.bfloat16, accumulate: bool = False):
    """Within the bound of FP64; rows past the last group, NaN here, enter nowhere."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(p.rows, width, generator=g) for width in (p.outputs, p.contraction))
    for rows in (a, b):
        rows[p.rows - p.past :] = float("nan")
    (to_a, padded), (to_b, _) = (column_operand(t, format, p.offs) for t in (a, b))
    y, size = wgrad_products(to_a, to_b, p.offs, padded)
    out = poisoned((len(p.sizes), p.outputs, p.contraction), dtype)
    if accumulate:
        out = torch.randn(out.shape, generator=g).to(dtype)
        y, size = y + out.double(), size + out.double().abs()
    INTERPRETER.run("grouped_mm_wgrad", to_a, to_b, p.offs, padded, accumulate, out)
    assert_within_bound(out, y, size, max(p.sizes) + 1)


def wgrad_case(format: str, arch: str = "sm_100"):
    def case():
        with running(arch=arch):
            check_wgrad(Problem((130, 0, 1, 63), 136, 200, past=9), format)
            check_wgrad(Problem((70, 3), 130, 50), format, torch.float32, accumulate=True)

    return case


def decode_operands(tokens: int, top_k: int, width: int, hidden: int, experts: int, format: str, whole: bool, seed: int = 0):
    """x, ids (some without an expert, the last expert without a token), weights, w13, b13, w2, b2. whole: numbers whose sums are
    exact in any order, so that the result has one right value."""
    g = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randint(-2, 3, shape, generator=g).float() if whole else torch.randn(shape, generator=g) / 4

    ids = torch.randint(-1, max(experts - 1, 1), (tokens, top_k), dtype=torch.int32, generator=g)
    weights = torch.rand(tokens, top_k, generator=g).masked_fill(ids < 0, float("nan"))
    w13, w2 = (operand(numbers(experts, *shape), format) for shape in ((2 * hidden, width), (width, hidden)))
    return numbers(tokens, width).bfloat16(), ids, weights, w13, numbers(experts, 2 * hidden), w2, numbers(experts, width)


def run_decode(backend: Backend, x, ids, weights, w13, b13, w2, b2, activation, interleaved, dtype) -> Tensor:
    out = poisoned((len(ids), x.shape[1]), dtype)
    given = (x, None, None, "bf16"), ids, weights, w13, b13, w2, b2, activation, interleaved, "bf16", QuantizeOptions()
    backend.run("moe_decode", *given, out)
    return out


def check_decode(tokens: int, top_k: int, width: int, hidden: int, experts: int, format: str, bias=True, dtype=torch.float32,
                 interleaved=False, exact_only=False):  # fmt: skip
    """The reference's bytes where every sum is exact: whole numbers, and a steep activation that keeps them whole. Near them
    elsewhere: another order of the sums, hidden values and outputs in BF16."""
    for whole, activation in ((True, SwiGLU(1000.0, 4.0, 1.0)), (False, SwiGLU(1.702, 7.0)))[: 1 if exact_only else 2]:
        case = list(decode_operands(tokens, top_k, width, hidden, experts, format, whole))
        if not bias:
            case[4] = case[6] = None
        got, want = (run_decode(b, *case, activation, interleaved, dtype) for b in (INTERPRETER, REFERENCE))
        if whole:
            assert_same_bits(got, want)
        elif want.numel():
            torch.testing.assert_close(got, want, rtol=0.0, atol=2**-7 * float(want.abs().max()))


def decode_case(format: str):
    @poisoned_workspaces()
    def case():
        check_decode(3, 3, 37, 5, 3, format, exact_only=True)
        check_decode(1, 4, 32, 32, 1, format, bias=False, dtype=torch.bfloat16, interleaved=True, exact_only=True)

    return case


def products_case():
    """FP32, of FP32 and of 16 bits, in any strides."""
    p = Problem((40, 0, 1, 12), 37, 19, past=5)
    check_grouped_mm(p, "fp32", torch.float32, bias=True)
    check_grouped_mm(p, "fp32", torch.bfloat16)
    check_wgrad(p, "fp32", torch.float32, accumulate=True)
    check_wgrad(p, "fp32", torch.float16)
    g = torch.Generator().manual_seed(0)
    a, b = torch.randint(-4, 5, (19, 40), generator=g).bfloat16().T, torch.randint(-4, 5, (1, 19, 33), generator=g).half().mT
    out = poisoned((40, 33), torch.float32)
    INTERPRETER.run("grouped_mm", (a, None, None, "fp32"), (b, None, None, "fp32"), ends(40), None, out)
    assert_same_bits(out, a.float() @ b[0].float().T)


# One or two of each kernel: run under many schedules, and with every mistake made on purpose. A new kernel adds its own here.
CASES = {
    "quantize": quantize_case,
    "quantize_plain": quantize_plain_case,
    "quantize_nvfp4": quantize_nvfp4_case,
    "quantize_nvfp4_plain": quantize_nvfp4_plain_case,
    "copies-mxfp8": copies_case("mxfp8", seed=5),
    "copies-mxfp4": copies_case("mxfp4"),
    "copies-nvfp4": copies_case("nvfp4", scope="tensor", seed=5),
    "copies-nvfp4-rows": copies_row_scope_case,
    **{f"grouped_mm-{format}": grouped_mm_case(format) for format in ("mxfp8", "nvfp4", "bf16")},
    **{f"grouped_mm-{format}-columns": grouped_mm_case(format, columns=True) for format in ("mxfp8", "bf16")},
    **{f"grouped_mm-{format}-sm_90": grouped_mm_case(format, "sm_90") for format in ("mxfp8", "nvfp4", "bf16")},
    **{f"grouped_mm-{format}-columns-sm_90": grouped_mm_case(format, "sm_90", columns=True) for format in ("mxfp8", "bf16")},
    **{f"wgrad-{format}": wgrad_case(format) for format in ("mxfp8", "nvfp4", "bf16")},
    **{f"wgrad-{format}-sm_90": wgrad_case(format, "sm_90") for format in ("mxfp8", "nvfp4", "bf16")},
    **{f"grouped_mm-{format}-pair": grouped_mm_pair_case(format) for format in ("mxfp8", "nvfp4", "bf16")},
    "grouped_mm-bf16-columns-pair": grouped_mm_pair_case("bf16", columns=True),
    "products": products_case,
    "cluster": cluster_case,
    "route": route_case,
    "sort": sort_case,
    **{f"moe_decode-{format}": decode_case(format) for format in ("bf16", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")},
    "rows": rows_case,
    "rows_plain": rows_plain_case,
    "swiglu": swiglu_case,
    "swiglu_interleaved": swiglu_interleaved_case,
    "swiglu_plain": swiglu_plain_case,
}
