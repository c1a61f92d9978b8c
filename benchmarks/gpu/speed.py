"""The speed of a backend beside torch's on the same GPU, the copies to the host that a step makes, and its CUDA graph.

Times are medians of calls between events on the stream, after a warm-up; tensors are larger than the L2 cache, outputs
preallocated. Bytes are those read plus those written; the copy that they are compared with is `Tensor.copy_`.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mxmoe import moe_layer, ops
from mxmoe.formats import MXTensor

ROWS, WIDTH, EXPERTS, OUTPUTS = 8192, 7168, 8, 4096
REPEATS, WARMUP = 20, 3


def seconds(call: Callable[[], object]) -> float:
    for _ in range(WARMUP):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def result(measured: float, unit: str, bound: float | None = None, least: bool = True, **notes) -> dict:
    holds = None if bound is None else measured >= bound if least else measured <= bound
    return {"outcome": "measured", "measured": measured, "unit": unit, "target": bound, "holds": holds, **notes}


def num_bytes(*tensors) -> int:
    parts = [
        p for t in tensors for p in ((t.values, t.scales, t.global_scale) if isinstance(t, MXTensor) else (t,)) if p is not None
    ]
    return sum(p.numel() * p.element_size() for p in parts)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def even_groups(rows: int = ROWS) -> Tensor:
    return torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * (rows // EXPERTS)


def copy_speed() -> float:
    """Bytes per second of a copy."""
    x = rows(ROWS, WIDTH)
    y = torch.empty_like(x)
    return 2 * num_bytes(x) / seconds(lambda: y.copy_(x))


def copy_bandwidth() -> dict:
    return result(copy_speed() / 1e9, "GB/s")


def share_of_copy(call: Callable[[], object], moved: int, bound: float | None = None) -> dict:
    speed, roof = moved / seconds(call), copy_speed()
    return result(speed / roof, "x copy bandwidth", bound, gigabytes_per_second=speed / 1e9)


def quantize(format: str, axis: str) -> dict:
    x = rows(ROWS, WIDTH)
    made = ops.quantize(x, format, axis)
    copies = made if axis == "both" else (made,)
    return share_of_copy(lambda: ops.quantize(x, format, axis, out=made), num_bytes(x, *copies), 0.8)


def swiglu() -> dict:
    h = rows(ROWS, WIDTH)
    out = rows(ROWS, WIDTH // 2)
    return share_of_copy(lambda: ops.swiglu(h, out=out), num_bytes(h, out))


def grouped_mm(format: str, bound: float | None) -> dict:
    """Of 8 experts against torch._grouped_mm in BF16."""
    x, w, offs = rows(ROWS, WIDTH), rows(EXPERTS, OUTPUTS, WIDTH), even_groups()
    a, b = (x, w) if format == "bf16" else (ops.quantize(x, format), ops.quantize(w, format))
    out = rows(ROWS, OUTPUTS)
    ours = seconds(lambda: ops.grouped_mm(a, b, offs, out=out))
    theirs = seconds(lambda: torch._grouped_mm(x, w.mT, offs=offs))
    flops = 2 * ROWS * OUTPUTS * WIDTH
    return result(theirs / ours, "x torch._grouped_mm (bf16)", bound, teraflops=flops / ours / 1e12)


def scaled_mm(format: str) -> dict:
    """One group against torch._scaled_mm of E4M3 with one scale per tensor."""
    x, w = rows(ROWS, WIDTH), rows(OUTPUTS, WIDTH)
    a, b = ops.quantize(x, format), ops.quantize(w.unsqueeze(0), format)
    offs = torch.full((1,), ROWS, dtype=torch.int32, device="cuda")
    ours = seconds(lambda: ops.grouped_mm(a, b, offs))
    x8, w8, one = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    theirs = seconds(lambda: torch._scaled_mm(x8, w8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    return result(theirs / ours, "x torch._scaled_mm (one scale)", None, teraflops=2 * ROWS * OUTPUTS * WIDTH / ours / 1e12)


def wgrad(format: str) -> dict:
    """Against torch._grouped_mm of the transposed operands in BF16."""
    dy, x, offs = rows(ROWS, OUTPUTS), rows(ROWS, WIDTH), even_groups()
    a, b = (dy, x) if format == "bf16" else (ops.quantize(t, format, "column", offs=offs) for t in (dy, x))
    ours = seconds(lambda: ops.grouped_mm_wgrad(a, b, offs, out_dtype=torch.bfloat16))
    theirs = seconds(lambda: torch._grouped_mm(dy.T, x, offs=offs))
    return result(theirs / ours, "x torch._grouped_mm (bf16)", None, teraflops=2 * ROWS * OUTPUTS * WIDTH / ours / 1e12)


def moe_decode(format: str, bound: float | None) -> dict:
    """8 tokens, 8 of 64 experts each: bytes of the weights they read."""
    tokens, width, expert_width, experts, top_k = 8, 4096, 1536, 64, 8
    x, router_ids = rows(tokens, width), torch.arange(tokens * top_k, device="cuda", dtype=torch.int32).view(tokens, top_k)
    w13, w2 = rows(experts, 2 * expert_width, width), rows(experts, width, expert_width)
    weights = torch.full((tokens, top_k), 1 / top_k, device="cuda")
    w13, w2 = (ops.quantize(w, format) for w in (w13, w2))
    ids = router_ids % experts
    return share_of_copy(lambda: ops.moe_decode(x, ids, weights, w13, w2), num_bytes(w13, w2), bound)


def layer(recipe: str) -> Callable[[], Tensor]:
    x = rows(1024, 1024).requires_grad_()
    router, w13, w2 = (
        (torch.randn(*shape, device="cuda") / 32).requires_grad_() for shape in ((16, 1024), (16, 1024, 1024), (16, 1024, 512))
    )

    def step():
        y, _ = moe_layer(x, router, w13, w2, top_k=4, recipe=recipe)
        y.backward(x.detach())
        return y

    return step


def host_copies(recipe: str) -> dict:
    """Copies to the host in forward and backward, by the profiler; a synchronising torch operator is an error."""
    step = layer(recipe)
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if "Memcpy DtoH" in event.name]
    return result(len(copies), "copies to the host", 0, least=False)


def graph_equals_eager() -> dict:
    """quantize, grouped_mm and swiglu recorded in a CUDA graph and replayed on other inputs."""
    x, w, offs = rows(1024, 1024), rows(EXPERTS, 1024, 1024), even_groups(1024)

    def step():
        return ops.swiglu(ops.grouped_mm(ops.quantize(x, "mxfp8"), ops.quantize(w, "mxfp8"), offs), offs=offs)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    x.copy_(rows(*x.shape))
    graph.replay()
    return result(int((recorded != step()).sum()), "elements differ from eager", 0, least=False)


def jobs(backend: str) -> dict[str, Callable[[], dict]]:
    decode_bound = 0.6 if backend == "cuda" else None  # Triton's is composed of other verbs
    return {
        "copy bandwidth": copy_bandwidth,
        **{
            f"quantize {f} {axis}": partial(quantize, f, axis)
            for f, axis in (("mxfp8", "row"), ("mxfp8", "both"), ("nvfp4", "row"))
        },
        "swiglu bf16": swiglu,
        "grouped_mm bf16": partial(grouped_mm, "bf16", 0.9),
        **{f"grouped_mm {f}": partial(grouped_mm, f, None) for f in ("mxfp8", "nvfp4")},
        "grouped_mm mxfp8, one group": partial(scaled_mm, "mxfp8"),
        **{f"grouped_mm_wgrad {f}": partial(wgrad, f) for f in ("bf16", "mxfp8")},
        **{f"moe_decode {f}": partial(moe_decode, f, decode_bound) for f in ("mxfp8", "nvfp4")},
        **{f"host copies of a step, {recipe}": partial(host_copies, recipe) for recipe in ("bf16", "mxfp8", "nvfp4")},
        "CUDA graph": graph_equals_eager,
    }
