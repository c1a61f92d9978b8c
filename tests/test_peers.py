"""dispatch and combine between ranks in one process, under the interpreter."""

import pytest

from mxmoe.backends.interpreter import KernelError, running
from tests.conformance import EXCHANGES
from tests.helpers import num_threads
from tests.mutants import mutants, reason
from tests.peer_cases import CASES, OVERLAPPED, OVERLAPPED_OPS, check_exchange, every_case, overlapped_case


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


@pytest.mark.parametrize("name", EXCHANGES)
def test_ranks_exchange_the_references_bytes(name):
    check_exchange(*EXCHANGES[name])


@pytest.mark.parametrize("name", [*CASES, *OVERLAPPED])
def test_any_schedule_gives_the_same(name):
    for seed in range(6 if name in OVERLAPPED else 20):  # 20 by the bars
        with running(seed=seed, num_sms=1 + seed % 4):
            (CASES | OVERLAPPED)[name]()


def test_every_mistake_is_caught():
    assert not [m for m in mutants(every_case) if reason(every_case, m) is None]
    for case in OVERLAPPED.values():
        wrong = mutants(case, OVERLAPPED_OPS)
        assert len(wrong) > 5
        assert not [m for m in wrong if reason(case, m) is None]


def test_a_missing_signal_is_a_deadlock_with_the_ranks_states():
    with running() as run:
        overlapped_case()
    site = next(site for site, op, _, _ in run.sites if op == "red.release.sys.add" and site.startswith("combine.h"))
    with (
        running(site=site, mutant="skip"),
        pytest.raises(KernelError, match=r"deadlock(.|\n)*device 2, CTA 0, combine .*signals of rank 2"),
    ):
        overlapped_case()
