"""moe_decode in terms of a backend's other verbs, which makes its bytes those of the composed layer."""

import torch
from torch import Tensor

from mxmoe.formats import FORMATS, QuantizeOptions


def compose(verbs, x, ids_TK, weights_TK, w13, b13, w2, b2, activation, interleaved, act_format, act_options, out_TD):
    """out[t] = sum over k of weights[t, k] * (act(x[t] w13[e]^T + b13[e]) w2[e]^T + b2[e]), e = ids[t, k]; `verbs` is a backend.

    Both products read activations in `act_format`; an `x` in a block format is read as it is. Hidden values are BF16, or FP32 for
    act_format "fp32". The global scale of a quantized activation is per row, so that tokens do not depend on each other.
    """
    num_rows, top_k = ids_TK.numel(), ids_TK.shape[1]
    num_experts, width, _ = w13[0].shape
    dtype = torch.float32 if act_format == "fp32" else torch.bfloat16
    index = {"dtype": torch.int32, "device": ids_TK.device}
    counts, offs = torch.empty(num_experts, **index), torch.empty(num_experts, **index)
    permutation, inverse = torch.empty(num_rows, **index), torch.empty(ids_TK.shape, **index)
    verbs.sort_by_expert(ids_TK, num_experts, counts, offs, permutation, inverse)

    rows = _routed(verbs, x, permutation, top_k)
    h_NG = torch.empty(num_rows, width, dtype=dtype, device=ids_TK.device)
    verbs.grouped_mm(_activation(verbs, rows, offs, act_format, act_options), w13, offs, b13, h_NG)
    a_NF = h_NG.new_empty(num_rows, width // 2)
    verbs.swiglu(h_NG, offs, activation, interleaved, a_NF)
    hidden = (a_NF, None, None, "fp32" if dtype == torch.float32 else "bf16")
    y_ND = h_NG.new_empty(num_rows, out_TD.shape[1])
    verbs.grouped_mm(_activation(verbs, hidden, offs, act_format, act_options), w2, offs, b2, y_ND)
    verbs.unpermute(y_ND, inverse, weights_TK, out_TD)


def _routed(verbs, x, permutation: Tensor, top_k: int):
    """The tokens of `x` as rows in the order of their experts."""
    if x[3] not in FORMATS:
        rows = x[0].new_empty(permutation.shape[0], x[0].shape[1])
        verbs.permute(x[0], permutation, top_k, rows)
        return rows, None, None, x[3]
    tokens = (permutation.clamp(min=0) // top_k).long()
    return *(None if t is None else t.view(_gatherable(t))[tokens] for t in x[:3]), x[3]


def _activation(verbs, rows, offs: Tensor, format: str, options: QuantizeOptions):
    """High-precision rows as the operand a product reads: quantized where `format` is a block format."""
    if rows[3] in FORMATS or format not in FORMATS:
        return rows
    assert options.scope == "row", f"a token's bytes must not depend on other tokens, got scope {options.scope!r}"
    fmt, (num_rows, length) = FORMATS[format], rows[0].shape
    packed = -(-length * fmt.bits // 8)
    values = torch.empty(1, num_rows, packed, dtype=fmt.values_dtype, device=offs.device)
    scales = torch.empty(1, num_rows, -(-length // fmt.block), dtype=fmt.scales_dtype, device=offs.device)
    global_scale = torch.empty(1, num_rows, dtype=torch.float32, device=offs.device) if fmt.has_global_scale else None
    verbs.quantize(rows[0][None], offs, format, options, (values, scales, global_scale), None)
    return values[0], scales[0], None if global_scale is None else global_scale[0], format


def _gatherable(t: Tensor) -> torch.dtype:
    return torch.uint8 if t.element_size() == 1 else t.dtype  # torch does not index every float8 dtype
