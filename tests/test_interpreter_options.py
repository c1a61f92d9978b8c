"""quantize of every format, axis, scope and option, dequantize and swizzle_scales under the interpreter: the reference's bytes."""

import itertools

import pytest
import torch

from mxmoe.backends.interpreter import running
from mxmoe.formats import FORMATS
from tests.helpers import FORMAT_NAMES, MX_FORMATS, boundary_inputs, num_threads
from tests.interpreter_cases import check_copies, ends

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = (ends(0, 130, 0, 1, 12), ends(0, 0), None)
OPTIONS = [{}, {"seed": 7}, {"seed": 2**62 + 5}]


@pytest.fixture(autouse=True)
def _one_thread():
    with num_threads(1):
        yield


@pytest.mark.parametrize("options", [*OPTIONS, {"scale_mode": "floor"}, {"hadamard": True}, {"hadamard": True, "seed": 1}], ids=str)
@pytest.mark.parametrize("format", MX_FORMATS)
def test_mx_formats(format, options):
    for (rows, length), axis in itertools.product(((150, 150), (33, 77), (144, 48)), ("row", "column")):
        x = boundary_inputs(rows, length, 1, DTYPES[length % 3], finite=False)
        groups = (ends(16, 0, 112), None) if options.get("hadamard") else GROUPS if rows == 150 else (None,)
        if options.get("hadamard") and length % 16:
            continue
        for offs in groups:
            check_copies(x, format, axis, offs, **options)


@pytest.mark.parametrize("scope", ["row", "tensor", "group"])
@pytest.mark.parametrize("options", [*OPTIONS, {"four_six": True}, {"four_six": True, "seed": 3}, {"hadamard": True}], ids=str)
def test_nvfp4(scope, options):
    for axis in ("row",) if scope == "row" else ("row", "column"):
        hadamard = options.get("hadamard")
        for offs in (ends(16, 0, 112), None) if hadamard else GROUPS:
            if offs is None and scope == "group":
                continue
            for finite in (True, False):
                x = boundary_inputs(144 if hadamard else 150, 48 if hadamard else 77, 1, DTYPES[1 + finite], finite=finite)
                check_copies(x, "nvfp4", axis, offs, scope=scope, **options)


@pytest.mark.parametrize("options", [{}, {"seed": 7}, {"four_six": True}, {"four_six": True, "seed": 7}], ids=str)
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_tiles_share_a_scale(format, options):
    if "four_six" in options and format == "mxfp8":
        return
    scopes = ("tensor", "group") if format == "nvfp4" else ("row",)
    for scope, axis in itertools.product(scopes, ("row", "column")):
        x = boundary_inputs(2 * 150, 77, 1, torch.bfloat16, finite=False).view(2, 150, 77)
        check_copies(x, format, axis, None, scope=scope, block_2d=True, **options)


@pytest.mark.parametrize("format", FORMAT_NAMES)
def test_weights_in_a_batch(format):
    x = boundary_inputs(3 * 40, 52, 1, torch.float32, finite=False).view(3, 40, 52)
    scope = {"scope": "group"} if FORMATS[format].has_global_scale else {}
    for axis in ("row", "column"):
        check_copies(x, format, axis, None, seed=1, **scope)
        check_copies(x[:, 1:, ::2], format, axis, None, seed=1, **scope)


def test_any_schedule_gives_the_same():
    for seed in range(20):
        with running(seed=seed, num_sms=1 + seed % 4):
            check_copies(boundary_inputs(150, 77, 1, torch.bfloat16), "nvfp4", "column", GROUPS[0], scope="tensor", four_six=True)
