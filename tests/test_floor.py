"""The layer errs by at most 1.5 times the quantization floor, in y and in every gradient (tests/floor.py)."""

import pytest
import torch

from tests.floor import MARGIN, random_case, worst_ratio


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("experts_only", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_error_within_the_floor(seed, experts_only, recipe):
    dtype = torch.float32 if recipe == "fp32" else None
    case, options = random_case(seed, dtype=dtype, least_tokens=80, experts_only=experts_only)
    ratio, name = worst_ratio(case, options, recipe)
    assert ratio <= MARGIN, name
