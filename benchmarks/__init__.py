"""Measurements: `bars` says whether the project holds what it promises, `bench_*.py` how fast each verb is beside its peers.

docs/performance.md explains both. Never installed; run from the root of the repository.
"""

import os

# Fresh memory costs more than many kernels (4 KiB page faults): torch asks for huge pages, which helps every provider alike.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
