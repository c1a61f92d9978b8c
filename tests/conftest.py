"""Settings of every test."""

import warnings

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


warnings.filterwarnings("ignore", module="torchao")
