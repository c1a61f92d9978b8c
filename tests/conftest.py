"""Settings of every test."""

import signal
import warnings

import pytest
import torch
from hypothesis import settings


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


warnings.filterwarnings("ignore", module="torchao")

# A thread starts with its parent's floating-point state: torch's own must not be started by a test that flushes subnormals.
torch.ones(1 << 20).add_(1)

# A machine shared with others makes any example slow now and then.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Background jobs of a shell ignore Ctrl-C, and so would the programs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
