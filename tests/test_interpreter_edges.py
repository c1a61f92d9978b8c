"""The GPU kernels under the interpreter at the edges: arrays without elements, experts of one line, settings of a run, Ctrl-C,
several threads, exchanges that do not fit."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mxmoe
from mxmoe import Routing, moe_layer, ops
from mxmoe.backends.interpreter import LAUNCHER, KernelError, peers, running
from tests.helpers import assert_same_bits, boundary_inputs, differences, num_threads, poisoned, values_of
from tests.interpreter_cases import CASES, check_quantize, ends

ARCHS = ("sm_90", "sm_100")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = (*DTYPES, "mxfp8", "nvfp4")


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def rows_of(x, format):
    return x.to(DTYPES[format]) if format in DTYPES else mxmoe.quantize(x, format, backend="reference")


def columns_of(x, format, offs):
    if format in DTYPES:
        return x.to(DTYPES[format])
    scope = "group" if format == "nvfp4" else "row"
    return mxmoe.quantize(x, format, "column", offs=offs, scope=scope, backend="reference")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "contraction"), [(0, 32, 64), (5, 0, 64), (5, 32, 0), (0, 0, 0)], ids=str)
def test_products_without_elements(rows, outputs, contraction, format, arch):
    offs = ends(min(rows, 2), 0)
    a, b = rows_of(torch.ones(rows, contraction), format), rows_of(torch.ones(2, outputs, contraction), format)
    grad = torch.full((2, outputs, contraction), 3.0)
    bias = torch.arange(2.0 * outputs).view(2, outputs)

    def run(backend):
        y = ops.grouped_mm(a, b, offs, bias=bias, out=poisoned((rows, outputs), torch.bfloat16), backend=backend)
        dy, x = (columns_of(torch.ones(rows, n), format, offs) for n in (outputs, contraction))
        written = ops.grouped_mm_wgrad(dy, x, offs, out=poisoned(grad.shape, torch.float32), backend=backend)
        return y, written, ops.grouped_mm_wgrad(dy, x, offs, accumulate=True, out=grad.clone(), backend=backend)

    with running(arch=arch):
        for got, want in zip(run("interpreter"), run("reference"), strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("format", FORMATS)
def test_one_expert_of_one_output(format, arch):
    """Both leading dimensions of the weight are 1: a flat view of it may have any distance between rows."""
    a = rows_of(torch.randint(-2, 3, (9, 300)).float(), format)
    b = rows_of(torch.randint(-2, 3, (1, 1, 300)).float(), format)
    with running(arch=arch):
        got, want = (ops.grouped_mm(a, b, ends(9), out_dtype=torch.float32, backend=n) for n in ("interpreter", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize("shape", [(0, 64), (0, 0), (5, 0)], ids=str)
@pytest.mark.parametrize("offs", [None, ends(0), ends(0, 0, 0)], ids=["whole", "one", "groups"])
def test_copies_of_nothing_are_padding(format, shape, offs):
    """TMA has no descriptor of an array without elements: a rank without tokens needs none."""
    check_quantize(boundary_inputs(*shape, 0), format, offs=offs)


def test_a_box_of_an_empty_matrix_is_reported():
    x = torch.zeros(0, 128, dtype=torch.uint8)
    copies = torch.zeros(1, 256, 128, dtype=torch.uint8), torch.zeros(1, 128, 8, dtype=torch.uint8)
    with pytest.raises(KernelError, match=r"copy: quantize.* tma_load .*no descriptor of an empty matrix"):
        LAUNCHER.launch("quantize", x.float()[None], ends(0, 0), "mxfp8", False, False, None, None, *copies)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_a_layer_without_tokens(recipe):
    g = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=g).requires_grad_() for shape in ((0, 32), (4, 32), (4, 32, 32), (4, 32, 16))]
    y, _ = moe_layer(*parameters, top_k=2, recipe=recipe, backend="interpreter")
    assert y.shape == (0, 32)
    assert all(not grad.any() for grad in torch.autograd.grad(y.sum(), parameters))


def test_q33_both_copies_of_2d_blocks_hold_the_same_values():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    row, column = mxmoe.quantize(x, "mxfp8", "both", block_2d=True, backend="interpreter")
    for copy, want in zip((row, column), mxmoe.quantize(x, "mxfp8", "both", block_2d=True, backend="reference"), strict=True):
        assert differences(copy, want) == 0
    assert torch.equal(values_of(row), values_of(column))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "groups_kept": 2}], ids=str)
def test_r11_ties_go_to_the_lower_id(score, groups):
    assert mxmoe.route(torch.zeros(4, 8), 3, score=score, **groups, backend="interpreter").ids.tolist() == [[0, 1, 2]] * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arch": "sm_80"}, "arch must be one of 'sm_90', 'sm_100', got 'sm_80'"),
        ({"num_sms": 0}, "num_sms must be at least 1 and below 2147483648, got 0"),
        ({"num_sms": -5}, "num_sms must be at least 1 and below 2147483648, got -5"),
        ({"seed": -1}, "seed must be at least 0 and below 18446744073709551616, got -1"),
    ],
    ids=str,
)
def test_settings_of_a_run_are_checked(settings, message):
    with pytest.raises(ValueError, match=message), running(**settings):
        pass


class Interrupted(Exception):
    pass


def test_ctrl_c_ends_a_kernel():
    def interrupt(*_):
        raise Interrupted

    x, w = torch.ones(1024, 512), torch.ones(1, 512, 512)  # half a minute
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            ops.grouped_mm(x, w, ends(1024), backend="interpreter")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    CASES["products"]()


def test_several_threads():
    cases = [case for name, case in CASES.items() if name.startswith("grouped_mm")][:4]

    def work(seed):
        with running(seed=seed, num_sms=1 + seed):
            cases[seed]()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(len(cases))))


def routing_of(tokens, top_k=1, experts=2):
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    return Routing.from_ids(ids, torch.ones(tokens, top_k), experts, backend="reference")


@pytest.mark.parametrize(
    ("xs", "routings", "message"),
    [
        ([], [], "routings must be of one number of experts and one top-k, got"),
        ([torch.ones(2, 32)] * 2, [routing_of(2), routing_of(2, experts=4)], "of one number of experts"),
        ([torch.ones(2, 32)] * 2, [routing_of(2), routing_of(2, top_k=2)], "of one number of experts and one top-k"),
        ([torch.ones(2, 32)], [routing_of(2)] * 2, "xs must have one matrix for each of the 2 ranks, got 1"),
        ([torch.ones(2, 32), torch.ones(2, 48)], [routing_of(2)] * 2, r"xs\[1\] must have shape \(2, 32\), got \(2, 48\)"),
        ([torch.ones(2, 32), torch.ones(3, 32)], [routing_of(2)] * 2, r"xs\[1\] must have shape \(2, 32\), got \(3, 32\)"),
        ([torch.ones(2, 32), torch.ones(2, 32).half()], [routing_of(2)] * 2, r"xs\[1\] must be float32, got float16"),
        ([mxmoe.quantize(torch.ones(2, 32), "nvfp4")] * 2, [routing_of(2)] * 2, "must all be MXFP8 row copies .*got .'nvfp4'"),
        ([mxmoe.quantize(torch.ones(2, 32), "mxfp8"), torch.ones(2, 32)], [routing_of(2)] * 2, "row copies .*got Tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_exchange_refuses_what_does_not_fit(xs, routings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        peers.dispatch(xs, routings)


def test_combine_refuses_rows_without_a_kernel():
    routings = [routing_of(2), routing_of(3)]
    rows, exchange = peers.dispatch([torch.ones(2, 16), torch.ones(3, 16)], routings)
    weights = [None, None]
    with pytest.raises(TypeError, match=r"rows\[0\] must be bfloat16 or float32, got float16"):
        peers.combine([r.half() for r in rows], exchange, weights, torch.float32)
    with pytest.raises(ValueError, match=r"weights must have shape \(2, 1\), got \(3, 1\)"):
        peers.combine(rows, exchange, [torch.ones(3, 1), None], torch.float32)
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        peers.combine(rows, exchange, weights, torch.uint8)
    assert [y.tolist() for y in peers.combine(rows, exchange, weights, torch.float32)] == [[[1.0] * 16] * n for n in (2, 3)]
