"""The GPU kernels under the interpreter: their results, under many schedules; and that it finds what is wrong with a kernel."""

import re

import pytest
import torch

from mxmoe import moe_layer
from mxmoe.backends.interpreter import KernelError, running
from mxmoe.recipes import SwiGLU
from tests.gemm_cases import Problem, dense, operand
from tests.helpers import boundary_inputs, num_threads, poisoned
from tests.interpreter_cases import (
    CASES,
    INTERPRETER,
    check_grouped_mm,
    check_quantize,
    check_quantize_blocked,
    check_rows,
    check_swiglu,
    check_wgrad,
    cluster_case,
    ends,
)
from tests.mutants import mutants, reason


@pytest.fixture(autouse=True)
def _one_thread():
    """torch's threads spin between its small operators, on the cores that the interpreter runs on."""
    with num_threads(1):
        yield


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("axis", ["row", "column", "both"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("offs", [None, ends(0, 130, 0, 1, 139), ends(300), ends(0, 0)], ids=["whole", "ragged", "one", "empty"])
def test_quantize_is_the_reference(format, dtype, axis, offs):
    x = boundary_inputs(300, 272, 1, dtype, finite=False)
    check_quantize(x, format, axis, offs, scale_mode="floor" if axis == "column" else "rceil")
    check_quantize_blocked(x, format, axis, offs)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 300), (33, 45), (128, 128), (129, 16)])
def test_quantize_of_a_batch_and_its_tails(rows, length):
    check_quantize(boundary_inputs(3 * rows, length, 2, torch.float32, finite=False).view(3, rows, length), "mxfp8")
    check_quantize_blocked(boundary_inputs(2 * rows, length, 2, torch.bfloat16).view(2, rows, length), "mxfp8")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", [1, 16, 45, 300, 512])
@pytest.mark.parametrize("offs", [None, ends(0, 130, 0, 1, 9), ends(0, 0)], ids=["whole", "ragged", "empty"])
def test_quantize_to_nvfp4_is_the_reference(dtype, length, offs):
    x = boundary_inputs(150, length, 1, dtype, finite=False)
    check_quantize(x, "nvfp4", "row", offs)
    check_quantize_blocked(x, "nvfp4", "row", offs)


def test_quantize_of_strided_rows_and_of_no_rows():
    check_quantize(boundary_inputs(64, 80, 1, torch.bfloat16).T, "mxfp8")
    check_quantize(boundary_inputs(64, 160, 1, torch.bfloat16)[:, 3:77], "mxfp8")
    check_quantize(torch.empty(0, 64), "mxfp8", offs=ends(0, 0))


PAIRS = [(f, arch) for arch in ("sm_100", "sm_90") for f in ("mxfp8", "mxfp8_e5m2", "nvfp4", "bf16", "fp16")]


@pytest.mark.parametrize(("format", "arch"), PAIRS)
@pytest.mark.parametrize(
    ("problem", "dtype", "bias"),
    [
        (Problem((1,), 128, 128), torch.bfloat16, False),  # one token
        (Problem((0, 150, 0), 33, 96, past=3), torch.float32, True),  # all on one expert, tails everywhere
        (Problem((5, 0, 130, 128, 1), 200, 300, past=140), torch.bfloat16, True),  # ragged
        (Problem((0, 0), 16, 32, past=130), torch.float16, False),  # no token
    ],
    ids=["one", "tails", "ragged", "empty"],
)
def test_grouped_mm_is_within_its_bound(format, arch, problem, dtype, bias):
    with running(arch=arch):
        check_grouped_mm(problem, format, dtype, bias)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "nvfp4", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("problem", "dtype", "bias"),
    [
        (Problem((256,), 128, 128), torch.bfloat16, False),  # one tile
        (Problem((0, 650, 130, 1), 136, 96, past=243), torch.float32, True),  # a pair's second CTA with and without rows
        (Problem((1,), 33, 32, past=300), torch.float16, False),  # mostly no token
    ],
    ids=["one", "ragged", "past"],
)
def test_grouped_mm_by_pairs_is_within_its_bound(format, problem, dtype, bias):
    with running() as run:
        check_grouped_mm(problem, format, dtype, bias)
        if format in ("bf16", "fp16"):
            check_grouped_mm(problem, format, dtype, bias, columns=True)
    assert any(op == "tcgen05.commit.multicast" for _, op, *_ in run.sites)


@pytest.mark.parametrize(("format", "arch"), PAIRS)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("problem", "dtype"),
    [
        (Problem((1,), 128, 128), torch.bfloat16),  # one token
        (Problem((0, 150, 0), 33, 97, past=3), torch.float32),  # all on one expert, tails everywhere
        (Problem((5, 0, 130, 128, 1), 200, 300, past=140), torch.bfloat16),  # ragged
        (Problem((0, 0), 16, 32, past=130), torch.float16),  # no token
    ],
    ids=["one", "tails", "ragged", "empty"],
)
def test_grouped_mm_wgrad_is_within_its_bound(format, arch, problem, dtype, accumulate):
    with running(arch=arch):
        check_wgrad(problem, format, dtype, accumulate)


COPIES = [None, ("mxfp8", "both"), ("mxfp8", "row"), ("mxfp8_e5m2", "column")]


@pytest.mark.parametrize("copies", COPIES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width"),
    [(1, 1, 1, 1), (90, 3, 5, 260), (33, 8, 2, 45), (3, 2, 200, 64), (300, 1, 1, 16)],
    ids=["one", "ragged", "tails", "mostly_empty", "all_on_one"],
)
def test_permuted_rows_are_the_references(tokens, top_k, experts, width, dtype, copies):
    check_rows(tokens, top_k, experts, width, dtype, copies)
    check_rows(tokens, top_k, experts, width, dtype, copies, weighted=False)


@pytest.mark.parametrize("copies", COPIES, ids=str)
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@pytest.mark.parametrize(
    ("rows", "width", "offs", "activation", "dtype"),
    [
        (1, 32, None, SwiGLU(), torch.float32),
        (300, 160, ends(0, 130, 0, 1, 139), SwiGLU(1.702, 7.0, 1.0), torch.bfloat16),
        (130, 32, ends(0, 0), SwiGLU(limit=0.5), torch.float16),
        (40, 288, ends(33), SwiGLU(), torch.bfloat16),
    ],
    ids=["one", "ragged", "empty", "tail"],
)
def test_swiglu_is_the_references(rows, width, offs, activation, dtype, gate_up, copies):
    check_swiglu(rows, width, dtype, offs, activation, gate_up, copies)


def test_verbs_on_rows_of_any_length():
    for width in (1, 7, 37, 131):
        check_swiglu(9, width, torch.bfloat16, None, SwiGLU(), "interleaved", None)
        check_swiglu(9, width, torch.float32, None, SwiGLU(), "concatenated", None)
    x = torch.arange(40, dtype=torch.uint8).view(4, 10)
    out = poisoned((5, 10), torch.uint8)
    INTERPRETER.run("permute", x, torch.tensor([5, 0, -1, 7, 2], dtype=torch.int32), 2, out)
    assert out.tolist() == [x[2].tolist(), x[0].tolist(), [0] * 10, x[3].tolist(), x[1].tolist()]


@pytest.mark.parametrize("verb", ["swiglu", "permute"])
def test_no_rows(verb):
    check_rows(0, 2, 3, 64, torch.bfloat16, None) if verb == "permute" else check_swiglu(
        0, 64, torch.bfloat16, None, SwiGLU(), "concatenated", None
    )


@pytest.mark.parametrize(("format", "arch"), [(f, a) for f, a in PAIRS if f != "nvfp4"])
@pytest.mark.parametrize("contraction", [128, 384, 96])  # 96: not a whole slot, B is turned before
def test_grouped_mm_of_column_copies_is_within_its_bound(format, contraction, arch):
    with running(arch=arch):
        check_grouped_mm(Problem((5, 0, 130, 1), 200, contraction, past=14), format, columns=True)


@pytest.mark.parametrize("arch", ["sm_100", "sm_90"])
def test_grouped_mm_mixes_mx_elements(arch):
    p = Problem((40, 30), 64, 160)
    a, b = operand(torch.ones(p.rows, p.contraction), "mxfp8"), operand(torch.ones(2, p.outputs, p.contraction), "mxfp8_e5m2")
    out = poisoned((p.rows, p.outputs), torch.float32)
    with running(arch=arch):
        INTERPRETER.run("grouped_mm", a, b, p.offs, None, out)
    assert (out == 160).all()


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "nvfp4"])
def test_sm_90_decodes_every_code_with_every_scale(format):
    """Products with the identity, in FP32: exact, but multiples of 2^-133 below 2^-126; NaN and Inf are never hidden."""
    fp4 = format == "nvfp4"
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 16 if fp4 else 32)  # 32 elements a row
    scales = torch.arange(128 if fp4 else 256, dtype=torch.uint8).repeat_interleave(len(codes))
    identity = torch.eye(32, dtype=torch.uint8)
    b_codes = 2 * (identity[:, ::2] + 16 * identity[:, 1::2]) if fp4 else 0x38 * identity
    b_scales = torch.full((1, 32, 2 if fp4 else 1), 0x38 if fp4 else 127, dtype=torch.uint8)
    b = b_codes[None], b_scales, torch.ones(1, 32) if fp4 else None, "nvfp4" if fp4 else "mxfp8"

    def product(a_codes):
        a = a_codes, scales[:, None].repeat(1, b_scales.shape[2]), torch.ones(len(scales)) if fp4 else None, format
        out = poisoned((len(scales), 32), torch.float32)
        with running(arch="sm_90"):
            INTERPRETER.run("grouped_mm", a, b, torch.tensor([len(scales)], dtype=torch.int32), None, out)
        return out, dense(a)

    a_codes = codes.repeat(len(scales) // len(codes), 1)
    out, exact = product(a_codes)
    special = ~exact.float().isfinite()
    assert special.any()
    assert not out[special.any(dim=1)].isfinite().any()
    out, exact = product(a_codes if fp4 else a_codes.masked_fill(special, 0))
    finite = exact.float().isfinite()
    rounded = torch.where(exact.abs() < 2.0**-126, (exact * 2.0**133).round() * 2.0**-133, exact)
    assert torch.equal(out[finite].double(), rounded[finite].float().double())


def test_stores_add_in_every_dtype():
    for dtype in FLOATS:
        cluster_case(dtype)


@pytest.mark.parametrize("name", CASES)
def test_any_schedule_gives_the_same(name):
    for seed in range(20):
        with running(seed=seed, num_sms=1 + seed % 4):
            CASES[name]()


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_layer_and_its_gradients_are_near_the_references(recipe, arch):
    g = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=g).bfloat16() / 8 for shape in ((9, 64), (4, 64), (4, 64, 64), (4, 64, 32))]

    def run(backend):
        leaves = [t.clone().requires_grad_() for t in parts]  # x, router, w13, w2
        y, _ = moe_layer(*leaves, top_k=2, recipe=recipe, backend=backend)
        y.sum().backward()
        return y.detach(), *(t.grad for t in leaves)

    with running(arch=arch):
        got = run("interpreter")
    for result, want in zip(got, run("reference"), strict=True):
        assert want.any()
        torch.testing.assert_close(result, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


# What it finds


@pytest.mark.parametrize("name", CASES)
def test_every_mistake_is_caught(name):
    wrong = mutants(CASES[name])
    assert len(wrong) > 5
    assert not [m for m in wrong if reason(CASES[name], m) is None]


def report(op: str, index: int, mutant: str) -> str:
    """What is said where the index-th call of `op` in the text of the GEMM kernel is done wrongly."""
    case = CASES["grouped_mm-mxfp8"]
    with running() as run:
        case()
    lines = sorted((file, int(line), column) for file, line, column in (s.split(":") for s, name, *_ in run.sites if name == op))
    site = "{}:{}:{}".format(*lines[index])
    with running(site=site, mutant=mutant), pytest.raises(KernelError) as caught:
        case()
    return str(caught.value)


def test_a_race_names_both_sides():
    text = report("tcgen05.fence::before_thread_sync", 0, "skip")  # the epilogue's, before it gives the accumulator back
    assert re.search(
        r"race: grouped_mm, CTA \d, issuer \(warp 1\), tcgen05.mma.block_scale at tensor_core_sm100.h:\d+:\d+: write of", text
    )
    assert re.search(r"lane \d+, column \d+ is not ordered after the read by tcgen05.ld at \S+ of CTA \d, epilogue", text)


def test_a_deadlock_names_every_role_its_barrier_and_phase():
    text = report("tcgen05.commit", 0, "skip")  # of a slot
    assert text.startswith("deadlock: grouped_mm: no warp can go on and nothing is in flight")
    assert re.search(
        r"producer \(warp 0\): waits at \S+ for parity \d of the barrier at shared address \d+ \(phase 0, 1 of 1 arrivals", text
    )
    assert re.search(r"epilogue \(warp 2\): waits at", text)


def test_reads_past_an_array_are_named():
    p = Problem((40,), 64, 128)
    values, scales, _, format = operand(torch.randn(1, p.outputs, p.contraction), "mxfp8")
    a = operand(torch.randn(p.rows, p.contraction), "mxfp8")
    offs = torch.tensor([p.rows + 100], dtype=torch.int32)  # what ops refuses: more rows than there are
    with pytest.raises(KernelError, match=r"out of bounds: grouped_mm, CTA 0, epilogue .* st.global.v4 .* of out, which has 5120"):
        INTERPRETER.run("grouped_mm", a, (values, scales, None, format), offs, None, poisoned((40, 64), torch.bfloat16))


def test_operands_without_a_kernel_are_refused():
    p = Problem((4,), 16, 64)
    a, b = operand(torch.ones(4, 64), "bf16"), operand(torch.ones(1, 16, 64), "mxfp8")
    with pytest.raises(NotImplementedError, match="operands of one kind, got bf16 and mxfp8"):
        INTERPRETER.run("grouped_mm", a, b, p.offs, None, poisoned((4, 16), torch.bfloat16))
