"""grouped_mm by csrc/cuda/kernels/grouped_mm_sm100.h or, of 16-bit operands, grouped_mm_sm90.h; grouped_mm_wgrad by
grouped_mm_wgrad_sm100.h and grouped_mm_wgrad_sm90.h."""

import torch
from torch import Tensor

from mxmoe import layout
from mxmoe.backends.interpreter.extension import arch, launch
from mxmoe.backends.interpreter.memory import dense, for_tma

HALF = ("bf16", "fp16")
MX8 = ("mxfp8", "mxfp8_e5m2")
STEP = {1: 128, 2: 64}  # contraction of the kernel's slots, by bytes of an element


def grouped_mm(a, b, offs_E, bias_EO, out_MO):
    check_one_kind(a[3], b[3])
    num_rows, num_experts, outputs = out_MO.shape[0], offs_E.shape[0], out_MO.shape[1]
    a_values = for_tma(as_bytes(a))
    b_columns = arch() != "sm_90" and b[3] != "nvfp4" and b[0].stride(1) == 1 and b[0].shape[2] % STEP[b[0].element_size()] == 0
    b_values = for_tma(as_bytes(b).mT if b_columns else as_bytes(b)).flatten(0, 1)
    a_scales = b_scales = None
    if a[1] is not None:
        starts = layout.padded_starts(offs_E)
        rows = torch.arange(num_rows, dtype=torch.int32)
        group = torch.searchsorted(offs_E, rows, right=True)
        owned = group < num_experts
        rows, group = rows[owned], group[owned]
        first = torch.cat((offs_E.new_zeros(1), offs_E))[group]
        a_scales = blocked(a[1][owned], starts[group] + rows - first, layout.padded_rows(num_rows, num_experts))
        lines = layout.blocked_bytes(outputs, 1) // 4  # of one expert, padded
        index = torch.arange(num_experts).unsqueeze(1) * lines + torch.arange(outputs)
        b_scales = blocked(b[1].flatten(0, 1), index.flatten(), num_experts * lines)
    bias = None if bias_EO is None else bias_EO.float().contiguous()
    with dense(out_MO) as out:
        if arch() == "sm_90":
            if a[3] not in HALF:
                raise NotImplementedError(f"sm_90 has no grouped_mm of {a[3]} operands yet")
            return launch("grouped_mm_sm90", a_values, b_values, a[3], offs_E.contiguous(), bias, out)
        launch(
            "grouped_mm_sm100", a_values, a_scales, contiguous(a[2]), a[3], b_values, b_scales, contiguous(b[2]), b[3], b_columns,
            offs_E.contiguous(), bias, out,
        )  # fmt: skip


def grouped_mm_wgrad(a, b, offs_E, padded: bool, accumulate: bool, out_EOC):
    check_one_kind(a[3], b[3])
    if a[3] not in (HALF if arch() == "sm_90" else (*HALF, *MX8)):
        raise NotImplementedError(f"{arch()} has no grouped_mm_wgrad of {a[3]} operands yet")
    operands = []
    for values, scales, _, format in (a, b):
        tokens = for_tma(as_bytes((values.T, None, None, format)))
        operands += [tokens, None if scales is None else blocked_groups(scales, offs_E), format]
    with dense(out_EOC) as out:
        if arch() == "sm_90":
            a_tokens, b_tokens = operands[0], operands[3]
            return launch("grouped_mm_wgrad_sm90", a_tokens, b_tokens, a[3], offs_E.contiguous(), accumulate, out)
        launch("grouped_mm_wgrad_sm100", *operands, offs_E.contiguous(), accumulate, out)


def check_one_kind(a_format: str, b_format: str):
    if not (a_format == b_format or {a_format, b_format} <= set(MX8)):
        raise NotImplementedError(f"the interpreter backend multiplies operands of one kind, got {a_format} and {b_format}")


def as_bytes(operand) -> Tensor:
    """Values as TMA takes them: 16-bit elements, or bytes."""
    values = operand[0]
    return values if operand[3] in HALF else values.view(torch.uint8)


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def blocked(scales_XN: Tensor, lines_X: Tensor, num_lines: int) -> Tensor:
    """uint8 (bytes,): the blocked matrix of num_lines lines (a multiple of 128) with row i of the scales as line lines_X[i]."""
    num_blocks = scales_XN.shape[1]
    out = torch.zeros(layout.blocked_bytes(num_lines, num_blocks), dtype=torch.uint8)
    at = layout.blocked_offset(lines_X.long().unsqueeze(1), torch.arange(num_blocks), num_blocks)
    out[at] = scales_XN.view(torch.uint8)
    return out


def blocked_groups(scales_LN: Tensor, offs_E: Tensor) -> Tensor:
    """uint8 (bytes,): of a column copy's scales, each group's blocks as a blocked matrix of their own, one after the other."""
    num_lines, num_blocks = scales_LN.shape
    starts, sizes = (t.long() // 32 for t in (layout.padded_starts(offs_E), layout.padded_sizes(offs_E)))
    block = torch.arange(num_blocks)
    group = torch.searchsorted(starts, block, right=True) - 1  # groups without rows come before the one that has the block
    block = block[block < starts[group] + sizes[group]]
    group = group[: len(block)]
    lines = layout.blocked_bytes(num_lines, 1) // 4  # padded
    in_group = layout.blocked_offset(torch.arange(num_lines).unsqueeze(1), block - starts[group], sizes[group])
    out = torch.zeros(lines * num_blocks, dtype=torch.uint8)
    out[lines * starts[group] + in_group] = scales_LN.view(torch.uint8)[:, : len(block)]
    return out
