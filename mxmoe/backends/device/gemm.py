"""grouped_mm by csrc/cuda/kernels/grouped_mm_sm{100,90}.h, grouped_mm_wgrad by grouped_mm_wgrad_sm{100,90}.h; both in FP32 by
products_fp32.h."""

import torch
from torch import Tensor

from mxmoe import layout
from mxmoe.backends.device.memory import dense, for_tma
from mxmoe.formats import FORMATS

HALF = ("bf16", "fp16")
MX8 = ("mxfp8", "mxfp8_e5m2")
STEP = {1: 128, 2: 64}  # contraction of the kernel's slots, by bytes of an element


def grouped_mm(on, a, b, offs_E, bias_EO, out_MO, arrived=None, minibatch=0):
    """The verb. arrived: flags of minibatches of a's rows, in 16 bits, that dispatch brings meanwhile."""
    if out_MO.numel() == 0:
        return
    bias = None if bias_EO is None else bias_EO.float().contiguous()
    if a[3] == b[3] == "fp32":
        with dense(out_MO) as out:
            on.launch("grouped_mm_fp32", a[0], b[0], offs_E.contiguous(), bias, out)
        return
    arch = on.arch(out_MO.device).replace("_", "")
    check_one_kind(on, a[3], b[3])
    num_rows, num_experts, outputs = out_MO.shape[0], offs_E.shape[0], out_MO.shape[1]
    a_values = for_tma(as_bytes(a))
    b_columns = b[3] != "nvfp4" and b[0].stride(1) == 1 and b[0].shape[2] % STEP[b[0].element_size()] == 0
    b_values = for_tma(as_bytes(b).mT if b_columns else as_bytes(b))
    a_scales = b_scales = None
    if a[1] is not None:
        starts, rows = layout.padded_starts(offs_E), torch.arange(num_rows, dtype=torch.int32, device=offs_E.device)
        group = torch.searchsorted(offs_E, rows, right=True)
        owned, group = group < num_experts, group.clamp(max=num_experts - 1)
        first = torch.cat((offs_E.new_zeros(1), offs_E)).take(group)
        lines = torch.where(owned, starts.take(group) + rows - first, -1)
        a_scales = blocked(a[1], lines, layout.padded_rows(num_rows, num_experts))
        padded = layout.blocked_bytes(outputs, 1) // 4  # lines of one expert
        expert, output = (torch.arange(n, device=offs_E.device) for n in (num_experts, outputs))
        b_scales = blocked(b[1].flatten(0, 1), (expert.unsqueeze(1) * padded + output).flatten(), num_experts * padded)
    with dense(out_MO) as out:
        on.launch(
            f"grouped_mm_{arch}", a_values, a_scales, contiguous(a[2]), a[3], b_values, b_scales, contiguous(b[2]), b[3], b_columns,
            offs_E.contiguous(), bias, arrived, minibatch, out,
        )  # fmt: skip


def grouped_mm_wgrad(on, a, b, offs_E, padded: bool, accumulate: bool, out_EOC):
    if out_EOC.numel() == 0:
        return
    if a[3] == b[3] == "fp32":
        with dense(out_EOC) as out:
            on.launch("grouped_mm_wgrad_fp32", a[0], b[0], offs_E.contiguous(), accumulate, out)
        return
    arch = on.arch(out_EOC.device).replace("_", "")
    check_one_kind(on, a[3], b[3])
    operands = []
    for values, scales, global_E, format in (a, b):
        as_they_lie = values if format == "nvfp4" else values.T  # token by token, but for 4 bits
        to = for_tma(as_bytes((as_they_lie, None, None, format)))
        blocks = None if scales is None else blocked_groups(scales, offs_E, FORMATS[format].block)
        operands += [to, blocks, contiguous(global_E), format]
    with dense(out_EOC) as out:
        on.launch(f"grouped_mm_wgrad_{arch}", *operands, offs_E.contiguous(), accumulate, out)


def check_one_kind(on, a_format: str, b_format: str):
    if not (a_format == b_format or {a_format, b_format} <= set(MX8)):
        raise NotImplementedError(f"the {on.name} backend multiplies operands of one kind, got {a_format} and {b_format}")


def as_bytes(operand) -> Tensor:
    """Values as TMA takes them: 16-bit elements, or bytes."""
    values = operand[0]
    return values if operand[3] in HALF else values.view(torch.uint8)


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def blocked(scales_XN: Tensor, lines_X: Tensor, num_lines: int) -> Tensor:
    """uint8 (bytes,): the blocked matrix of num_lines lines (a multiple of 128) with row i of the scales as line lines_X[i], none
    where that is negative."""
    num_blocks, lines = scales_XN.shape[1], lines_X.long().unsqueeze(1)
    at = layout.blocked_offset(lines, torch.arange(num_blocks, device=lines.device), num_blocks)
    return scattered(scales_XN, at, lines >= 0, layout.blocked_bytes(num_lines, num_blocks))


def blocked_groups(scales_LN: Tensor, offs_E: Tensor, block_size: int) -> Tensor:
    """uint8 (bytes,): of a column copy's scales, each group's blocks as a blocked matrix of their own, one after the other."""
    num_lines, num_blocks = scales_LN.shape
    starts, sizes = (t.long() // block_size for t in (layout.padded_starts(offs_E), layout.padded_sizes(offs_E)))
    line, block = (torch.arange(n, device=offs_E.device) for n in scales_LN.shape)
    group = torch.searchsorted(starts, block, right=True) - 1  # groups without rows come before the one that has the block
    lines = layout.blocked_bytes(num_lines, 1) // 4  # padded
    start, size = starts.take(group), sizes.take(group)
    at = lines * start + layout.blocked_offset(line.unsqueeze(1), block - start, size)
    return scattered(scales_LN, at, block < start + size, lines * num_blocks)


def scattered(scales: Tensor, at: Tensor, where: Tensor, num_bytes: int) -> Tensor:
    """uint8 (num_bytes,): the scales at these bytes, where they go anywhere; zeros elsewhere. No size depends on values, so that
    a GPU need not be asked."""
    out = torch.zeros(num_bytes + 1, dtype=torch.uint8, device=scales.device)
    out.scatter_(0, torch.where(where, at, num_bytes).flatten(), scales.view(torch.uint8).flatten())
    return out.narrow(0, 0, num_bytes)
