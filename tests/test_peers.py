"""dispatch and combine between ranks in one process, under the interpreter."""

import pytest
import torch

from mxmoe.backends.interpreter import KernelError, running
from tests.helpers import num_threads
from tests.mutants import mutants, reason
from tests.peer_cases import check_exchange, dispatch_case, dispatch_mxfp8_case, overlapped_case

# Mutants that change nothing these cases can see, by file, instruction and kind.
EQUIVALENT = {
    ("exchange_schedule.h", "st.global", "all lanes"),  # every lane writes the same
    ("exchange_schedule.h", "st.release.sys", "all lanes"),  # likewise
    ("exchange_schedule.h", "st.shared", "all lanes"),  # sizes of runs past the last, which nobody reads
    ("peers.h", "ld.global", "all lanes"),  # starts of runs past the last, not used
    ("exchange_schedule.h", "red.release.sys.add", "relaxed"),  # for who overwrites its offsets afterwards: nobody here
    ("combine.h", "wait.acquire.sys", "fewer"),  # one row less: shows only where that row comes last
}


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


def every_case():
    dispatch_case()
    dispatch_mxfp8_case()
    overlapped_case()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "width", "dtype", "payload"),
    [
        ((5, 9), 2, 4, 64, torch.bfloat16, "exact"),
        ((100, 0, 3, 41), 3, 8, 45, torch.float32, "exact"),
        ((0, 0, 1, 0), 1, 4, 16, torch.bfloat16, "exact"),
        ((20, 20, 20, 20), 8, 200, 1032, torch.bfloat16, "exact"),
        ((30, 0), 2, 6, 512, torch.bfloat16, "mxfp8"),
        ((9, 31, 0, 12), 4, 12, 80, torch.bfloat16, "mxfp8"),
    ],
)
def test_ranks_exchange_the_references_bytes(tokens, top_k, experts, width, dtype, payload):
    check_exchange(tokens, top_k, experts, width, dtype, payload)


@pytest.mark.parametrize("case", [dispatch_case, dispatch_mxfp8_case, overlapped_case])
def test_any_schedule_gives_the_same(case):
    for seed in range(20):
        with running(seed=seed, num_sms=1 + seed % 4):
            case()


def test_every_mistake_is_caught():
    left = {(m.site.split(":")[0], m.op, m.kind) for m in mutants(every_case) if reason(every_case, m) is None}
    assert left <= EQUIVALENT


def test_a_missing_signal_is_a_deadlock_with_the_ranks_states():
    with running() as run:
        overlapped_case()
    site = next(site for site, op, _, _ in run.sites if op == "red.release.sys.add" and site.startswith("combine.h"))
    with (
        running(site=site, mutant="skip"),
        pytest.raises(KernelError, match=r"deadlock(.|\n)*device 2, CTA 0, combine .*signals of rank 2"),
    ):
        overlapped_case()
