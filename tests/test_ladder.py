"""The levels of docs/kernels.md: each multiplies, under any schedule, and what the document tells of mistakes is reported."""

from pathlib import Path

import pytest
import torch

from mxmoe.backends.interpreter import LAUNCHER, KernelError, running
from tests.gemm_cases import operand, products
from tests.helpers import Backend, num_threads, poisoned
from tests.mutants import mutants, reason

ROWS, CONTRACTION = 128, 640  # at least five slots: more than a ring's four
LEVELS = range(1, 8)
# Level -> the barrier that is left out (instruction, its number in the kernel's text) and what is said.
MISSING = {
    2: (
        "syncthreads",
        1,
        r"^race: ladder 2, CTA \d, warp \(warp \d\), st.shared.v4 at \S+ write of .* after the read by ld.shared",
    ),
    3: ("mbarrier.wait", 0, r"^uninitialised: ladder 3, CTA \d, warp \(warp \d\), ld.shared at \S+ shared address \d+ was never"),
    4: ("tcgen05.commit", 0, r"^deadlock: ladder 4: no warp can go on and nothing is in flight"),
    5: (
        "mbarrier.wait",
        0,
        r"^barrier: ladder 5, CTA \d, producer \(warp 0\), mbarrier.arrive.expect_tx .* more arrivals than the 1",
    ),
    6: ("tcgen05.fence::before_thread_sync", 0, r"^race: ladder 6, CTA \d, issuer \(warp 1\), tcgen05.mma at .* by tcgen05.ld"),
    7: (
        "mbarrier.wait",
        3,
        r"^race: ladder 7, CTA \d, issuer \(warp 1\), tcgen05.cp at .* is not ordered after the write by bulk_load",
    ),
}


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def run(level: int):
    """A level's product against FP64, of values whose sums are rounded."""
    g = torch.Generator().manual_seed(level)
    columns = 512 if level > 5 else 128  # four tiles: each accumulator twice
    a, b = (torch.randn(lines, CONTRACTION if level > 3 else 128, generator=g) for lines in (ROWS, columns))
    if level == 7:
        t = [Backend("reference").quantize(x, "mxfp8") for x in (a, b)]
        parts = [p for x in t for p in (x.values.view(torch.uint8), Backend("reference").swizzle(x))]
        a_operand, b_operand = (operand(x, "mxfp8") for x in (a, b[None]))
    else:
        a, b = a.bfloat16(), b.bfloat16()
        parts = [a, None, b, None]
        a_operand, b_operand = operand(a, "bf16"), operand(b[None], "bf16")
    out = poisoned((ROWS, columns), torch.float32)
    LAUNCHER.launch("ladder", level, *parts, out)
    y, size = products(a_operand, b_operand, torch.tensor([ROWS], dtype=torch.int32), ROWS)
    assert ((out.double() - y).abs() <= a.shape[1] * 2.0**-23 * size).all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_multiplies(level):
    for seed in range(3 if level > 3 else 1):
        with running(seed=seed, num_sms=1 + seed):
            run(level)


def sites(level: int, op: str) -> list[str]:
    """The calls of an instruction in a level, in the order of the text."""
    with running() as run_:
        run(level)
    found = {site for site, name, _, _ in run_.sites if name == op}
    return sorted(found, key=lambda site: (site.split(":")[0], *map(int, site.split(":")[1:])))


@pytest.mark.parametrize("level", MISSING)
def test_a_missing_barrier_is_reported(level):
    op, index, message = MISSING[level]
    with running(site=sites(level, op)[index], mutant="skip", num_sms=1), pytest.raises(KernelError, match=message):
        run(level)


def test_q05_kernels_lose_no_nan():
    x = torch.ones(1, 64)
    x[0, 0] = float("nan")
    t = Backend("interpreter").quantize(x, "mxfp8")
    assert t.scales.view(torch.uint8).tolist() == [[255, 119]]
    assert (t.values.view(torch.uint8)[0, :32] == 0x7F).all()
    assert (t.dequantize()[0, 32:] == 1).all()


@pytest.mark.parametrize("level", LEVELS)
def test_every_mistake_in_a_level_is_caught(level):
    """But fences around the allocation that a later fence of the same warp makes up for, from level 6 on."""
    with running(num_sms=1):
        wrong = mutants(lambda: run(level), {"barrier", "fence", "copy"})
        survivors = [m for m in wrong if reason(lambda: run(level), m) is None]
    assert not [m for m in survivors if level < 6 or not (m.area == "fence" and m.site.startswith("problem.h"))]


@pytest.mark.tree
def test_the_document_shows_the_levels():
    text = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    for level in LEVELS:
        assert f"csrc/cuda/ladder/level{level}.h" in text
