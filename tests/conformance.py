"""Every GPU kernel against the reference, over the shapes that break kernels: what the bars run under 20 schedules and
`python -m benchmarks.gpu_check` on a GPU. The kernels' own cases (tests/interpreter_cases.py) come first."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from mxmoe.backends.interpreter import running
from mxmoe.recipes import SwiGLU
from tests import peer_cases
from tests.gemm_cases import Problem
from tests.helpers import FORMAT_NAMES, boundary_inputs
from tests.interpreter_cases import (
    CASES,
    check_copies,
    check_decode,
    check_grouped_mm,
    check_quantize,
    check_quantize_blocked,
    check_route,
    check_rows,
    check_swiglu,
    check_wgrad,
    ends,
)

ARCHS = ("sm_90", "sm_100")
FORMATS = ("bf16", "fp16", "mxfp8", "mxfp8_e5m2", "nvfp4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUPS = {"one token": (1,), "all on one expert": (0, 150, 0), "ragged": (5, 0, 130, 128, 1), "no token": (0, 0)}
TAILS = {"one token": (128, 128, 0), "all on one expert": (33, 96, 3), "ragged": (200, 300, 140), "no token": (16, 32, 130)}
ROWS = {  # tokens, top-k, experts, width
    "one token": (1, 1, 1, 1),
    "ragged": (90, 3, 5, 260),
    "tails": (33, 8, 2, 45),
    "mostly empty": (3, 2, 200, 64),
    "all on one expert": (70, 1, 1, 16),
    "no token": (0, 2, 3, 64),
}
EXCHANGES = {  # tokens of each rank, top-k, experts, width, dtype, payload
    "two": ((5, 9), 2, 4, 64, torch.bfloat16, "exact"),
    "ragged": ((100, 0, 3, 41), 3, 8, 45, torch.float32, "exact"),
    "one token": ((0, 0, 1, 0), 1, 4, 16, torch.bfloat16, "exact"),
    "many experts": ((20, 20, 20, 20), 8, 200, 1032, torch.bfloat16, "exact"),
    "mxfp8 of one rank": ((30, 0), 2, 6, 512, torch.bfloat16, "mxfp8"),
    "mxfp8 ragged": ((9, 31, 0, 12), 4, 12, 80, torch.bfloat16, "mxfp8"),
}
ROUTED = {"one token": (1, 8, 2), "ragged": (33, 40, 3), "tails": (9, 250, 32), "one expert": (7, 1, 1), "no token": (0, 8, 2)}
ROUTING = {
    "softmax": dict(score="softmax"),
    "sigmoid": dict(score="sigmoid", biased=True, scale=2.5),
    "replayed": dict(score="softmax", normalize=False, replayed=True, replay_threshold=0.2),
}
DECODED = {  # tokens, top-k, width, hidden, experts
    "one token": (1, 2, 64, 32, 4),
    "ragged": (3, 3, 37, 5, 3),
    "one expert": (4, 1, 96, 16, 1),
    "no token": (0, 2, 64, 32, 4),
}
COPIES = (None, ("mxfp8", "both"), ("mxfp8_e5m2", "column"))


def quantized(shape: str, format: str, dtype: torch.dtype):
    axis, sizes = "row" if format == "nvfp4" else "both", GROUPS[shape]
    x = boundary_inputs(sum(sizes) + 9, 83 if format == "nvfp4" else 130, 1, dtype, finite=False)
    for offs in (None, ends(*sizes)):
        check_quantize(x, format, axis, offs)
        check_quantize_blocked(x, format, axis, offs)


def multiplied(check: Callable, shape: str, format: str, dtype: torch.dtype, arch: str, **options):
    outputs, contraction, past = TAILS[shape]
    with running(arch=arch):
        check(Problem(GROUPS[shape], outputs, contraction, past), format, dtype, **options)


def copied(shape: str, format: str):
    """The options that go together with a format, of row and column copies."""
    sizes, scope = GROUPS[shape], {"scope": "group"} if format == "nvfp4" else {}
    x = boundary_inputs(sum(sizes) + 9, 77, 1, torch.bfloat16, finite=False)
    for axis, options in product(("row", "column"), ({"seed": 7}, {"four_six": True} if scope else {"scale_mode": "floor"})):
        check_copies(x, format, axis, ends(*sizes), **scope, **options)
    check_copies(x[:, :64], format, "row", ends(*sizes), hadamard=True, **scope)
    check_copies(x[None], format, "column", None, **scope, **({"block_2d": True} if format in ("mxfp8", "nvfp4") else {}))


def activated(shape: str, dtype: torch.dtype, copies, gate_up: str):
    sizes = GROUPS[shape]
    check_swiglu(sum(sizes) + 3, 32 if copies else 37, dtype, ends(*sizes), SwiGLU(1.702, 7.0, 1.0), gate_up, copies)


def moved(shape: str, dtype: torch.dtype, copies):
    check_rows(*ROWS[shape], dtype, copies)


def table() -> dict[str, Callable[[], None]]:
    """Name -> a case that raises where the kernel is wrong, and NotImplementedError where its architecture has none. Names of cases
    for one architecture end with it."""
    found = {f"case {name}": case for name, case in CASES.items()}
    for format, dtype, shape in product(("mxfp8", "mxfp8_e5m2", "nvfp4"), DTYPES, GROUPS):
        found[f"quantize {format} {dtype} {shape}"] = partial(quantized, shape, format, dtype)
    for shape, dtype in product(GROUPS, DTYPES):
        found[f"grouped_mm fp32 {shape} {dtype}"] = partial(multiplied, check_grouped_mm, shape, "fp32", dtype, "sm_100", bias=True)
        found[f"grouped_mm_wgrad fp32 {shape} {dtype}"] = partial(multiplied, check_wgrad, shape, "fp32", dtype, "sm_100")
    for format, shape, arch in product(FORMATS, GROUPS, ARCHS):
        dtype = DTYPES[len(shape) % 3]
        mm, wgrad = partial(multiplied, check_grouped_mm), partial(multiplied, check_wgrad)
        found[f"grouped_mm {format} {shape} {arch}"] = partial(mm, shape, format, dtype, arch, bias=True)
        found[f"grouped_mm columns {format} {shape} {arch}"] = partial(mm, shape, format, dtype, arch, columns=True)
        for accumulate in (False, True):
            added = "added" if accumulate else "written"
            found[f"grouped_mm_wgrad {added} {format} {shape} {arch}"] = partial(
                wgrad, shape, format, dtype, arch, accumulate=accumulate
            )
        if format == "nvfp4":
            del found[f"grouped_mm columns {format} {shape} {arch}"]
    for format, shape in product(FORMAT_NAMES, GROUPS):
        found[f"copies {format} {shape}"] = partial(copied, shape, format)
    for (name, shape), (how, options) in product(ROUTED.items(), ROUTING.items()):
        found[f"route {how} {name}"] = partial(check_route, *shape, **options)
    for (name, shape), format in product(DECODED.items(), ("bf16", *FORMAT_NAMES)):
        found[f"moe_decode {format} {name}"] = partial(check_decode, *shape, format)
    for shape, dtype, copies in product(ROWS, DTYPES, COPIES):
        found[f"permute, unpermute {dtype} {shape} {copies}"] = partial(moved, shape, dtype, copies)
    for shape, dtype, copies, gate_up in product(GROUPS, DTYPES, COPIES, ("concatenated", "interleaved")):
        found[f"swiglu {gate_up} {dtype} {shape} {copies}"] = partial(activated, shape, dtype, copies, gate_up)
    return found


def exchanges() -> dict[str, Callable[[], None]]:
    """Likewise, of ranks in one process: not for a GPU."""
    found = {f"exchange {name}": partial(peer_cases.check_exchange, *arguments) for name, arguments in EXCHANGES.items()}
    return found | {f"exchange case {name}": case for name, case in (peer_cases.CASES | peer_cases.OVERLAPPED).items()}
