"""The levels of docs/kernels.md: each multiplies, under any schedule, and each mistake that the document tells is reported as it says."""

import re
from pathlib import Path

import pytest
import torch

from mxmoe.backends.interpreter import LAUNCHER, KernelError, running
from tests.gemm_cases import operand, products
from tests.helpers import Backend, num_threads, poisoned
from tests.mutants import mutants, reason

ROWS, COLUMNS, CONTRACTION = 128, 256, 640  # five slots of BF16 and of MXFP8: more than a ring's four
LEVELS = range(1, 8)
# Level -> the barrier that is left out (instruction, its number in the kernel's text) and what is said.
MISSING = {
    2: ("syncthreads", 0, r"^(uninitialised|race): ladder 2, CTA \d, .*ld.shared"),
    3: ("mbarrier.wait", 0, r"^(uninitialised|race): ladder 3, CTA \d, .*ld.shared"),
    4: ("tcgen05.commit", 0, r"^deadlock: ladder 4: no warp can go on and nothing is in flight"),
    5: ("mbarrier.wait", 0, r"^race: ladder 5, CTA \d, producer \(warp 0\), tma_load"),
    6: ("mbarrier.wait", 0, r"^race: ladder 6, CTA \d, issuer \(warp 1\), tcgen05.mma"),
    7: ("tcgen05.fence::before_thread_sync", 0, r"^race: ladder 7, CTA \d, issuer \(warp 1\), tcgen05.mma.block_scale"),
}


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def run(level: int):
    """A level's product against FP64, of values whose sums are rounded."""
    g = torch.Generator().manual_seed(level)
    a, b = (torch.randn(lines, CONTRACTION if level > 3 else 128, generator=g) for lines in (ROWS, COLUMNS))
    if level == 7:
        t = [Backend("reference").quantize(x, "mxfp8") for x in (a, b)]
        parts = [p for x in t for p in (x.values.view(torch.uint8), Backend("reference").swizzle(x))]
        a_operand, b_operand = (operand(x, "mxfp8") for x in (a, b[None]))
    else:
        a, b = a.bfloat16(), b.bfloat16()
        parts = [a, None, b, None]
        a_operand, b_operand = operand(a, "bf16"), operand(b[None], "bf16")
    out = poisoned((ROWS, COLUMNS), torch.float32)
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
    with running(site=sites(level, op)[index], mutant="skip"), pytest.raises(KernelError) as caught:
        for seed in range(5):
            with running(seed=seed):
                run(level)
    assert re.search(message, str(caught.value)), caught.value


@pytest.mark.parametrize("level", LEVELS)
def test_every_mistake_in_a_level_is_caught(level):
    wrong = mutants(lambda: run(level), {"barrier", "fence", "copy"})
    assert not [m for m in wrong if reason(lambda: run(level), m) is None]


def test_the_document_shows_the_levels():
    text = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text()
    for level in LEVELS:
        assert f"csrc/cuda/ladder/level{level}.h" in text
