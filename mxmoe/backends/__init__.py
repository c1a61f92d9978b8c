"""Backends: each is a module with one function per verb, all of the same signature, and `SUPPORTS`.

The functions get plain, already checked tensors on one device and *fill* preallocated outputs (names ending in `_out`, or the
documented output arguments); they never allocate results and never validate; `empty(shape, dtype, device)` makes the outputs. The
contract below is the whole interface; what each verb means is in `mxmoe/ops`, its bits in docs/numerics.md. `None` marks an absent
operand or an output that is not wanted.

Shapes: B batch (experts of a weight, else 1), R rows, L row length, M/O/C rows, outputs and contraction of a GEMM, E experts,
T tokens, K top-k, N = T * K routed rows, D model width, F expert width, G = 2F. `block` is 32 or 16 by format; 4-bit values are
packed two per byte along their contraction axis. `offs` is int32 (E,), cumulative ends; rows past `offs[-1]` are never read.

    quantize(x_BRL, offs_E, format, options: QuantizeOptions, row: Copy | None, column: Copy | None)
        Fills the copies. `Copy = (values, scales, global_scale)`, global_scale None for MX formats.
        row:    values (B, R, L) or packed (B, R, ceil(L/2)); scales (B, R, ceil(L/block));
                global (B, R) for scope row, (1,) tensor, (B,) group, or (E,) group with offs.
        column: values (B, P, L) for 8 bits, transposed and packed (B, L, ceil(P/2)) for 4; scales (B, L, ceil(P/block));
                P = R, or with offs layout.padded_rows(R, E): group g starts at layout.padded_starts(offs)[g], padding bytes 0.
                global (1,), (B,) or (E,).
        With offs B is 1; the row copy stays in place; rows past offs[-1] get value and scale bytes 0 (and global scale 0).
        Scales here are always plain (line, block); the blocked layout is made by swizzle_scales.
        four_six picks by the error of elements rounded to nearest even, also with a seed. block_2d: the column copy is the row
        copy turned (stochastic with copy id 0; a four_six error sums each row of the tile by its tree, then the 16 rows by one).
    dequantize(values, scales, global_scale, offs, format, axis, scope, out_BRL)
        The inverse of one Copy as above; out is FP32, BF16 or FP16.
    swizzle_scales(plain, blocked, offs_E, axis, block: int, inverse: bool)
        plain (B, lines, blocks) uint8 -> blocked (B, bytes) uint8 (padding 0), or back when inverse. With offs the groups of
        NUMERICS "Groups": row copy: group g's lines start at blocked line padded_starts[g]; column copy: group g's blocks are
        a blocked matrix of their own starting at byte padded_lines * padded_starts[g] / block (padded_lines: multiple of 128).
    route(logits_TE, bias_E, replay_TK, top_k, score, num_groups, groups_kept, normalize, scale, replay_threshold,
          ids_out_TK, weights_out_TK, probs_out_E, z_out)
        logits, bias FP32; replay and ids int32; weights FP32. probs_out: mean over tokens of the normalised scores;
        z_out (1,): mean over tokens of logsumexp(logits)^2.
    sort_by_expert(ids_TK, num_experts, counts_out_E, offs_out_E, permutation_out_N, inverse_out_TK)
        Stable order by (expert, slot), slot = t * K + k; ids outside [0, E) have no row: inverse -1; permutation past the
        last row is -1. All int32.
    route_backward(logits_TE, ids_TK, weights_grad_TK, probs_grad_E, z_grad, score, normalize, scale, logits_grad_out_TE)
    permute(x_TD, permutation_N, top_k, out_ND, offs_E=None, copies=None)
        row n = x[permutation[n] // K], zero where -1; x may be uint8 as well.
    unpermute(y_ND, inverse_TK, weights_TK, out_TD)              FP32 sum over k ascending of weights * row; weights None: 1
    unpermute_backward(dy_TD, y_ND, permutation_N, weights_TK, rows_grad_out_ND, weights_grad_out_TK, offs_E=None, copies=None)
        rows_grad = rounded(w * dy), zero where -1; weights_grad = FP32 dot(dy, y row), 0 where no expert (y None: not made).
        The copies are those of rows in BF16.
    grouped_mm(a: Operand, b: Operand, offs_E, bias_EO, out_MO)
        out[r] = a[r] . b[e]^T (+ bias[e]) for the rows of group e; rows past offs[-1] are zero.
    grouped_mm_wgrad(a: Operand, b: Operand, offs_E, padded: bool, accumulate: bool, out_EOC)
        out[e] (+)= sum over the group's contraction of a (O, P) times b (C, P); lines contract along their last axis. padded:
        group e starts at padded_starts[e] (column copies), else at offs[e-1].
    swiglu(h_NG, offs_E, activation: SwiGLU, interleaved: bool, out_NF, copies=None)
    swiglu_backward(da_NF, h_NG, offs_E, activation, interleaved, dh_out_NG, copies=None)
        Copies of a concatenated gradient need F to be a multiple of 32.
    moe_decode(x: Operand, ids_TK, weights_TK, w13: Operand, b13, w2: Operand, b2, activation, interleaved, act_format,
               act_options, out_TD)

`copies = (format, scale_mode, row: Copy | None, column: Copy | None)` of an MX format: the verb fills them, as `quantize` with offs
would from its output, and that output is None.

`Operand = (values, scales, global_scale, format)`: values as a (lines, contraction) view (weights (E, O, contraction)), any of the
last two strides may be 1 (packed 4-bit values always contract along a unit stride); scales (lines, blocks) plain; global_scale
FP32 expanded to one per line (or (E,) in wgrad); for "fp32", "bf16", "fp16" operands scales and global_scale are None. The format
says how they are multiplied: values of "fp32" may have 16 bits. Weights for a backend of READ_PANELS may lie in panels: values
(E, O / 64, C / 32, bytes), scales (E, O / 64, C / block, 64), dense (layout.in_panels).
"""

import importlib
from functools import cache
from types import ModuleType

BACKENDS = ("reference", "host", "cuda", "triton", "interpreter")
READ_PANELS = ("host",)  # their grouped_mm and moe_decode take weights in panels


@cache
def get(name: str) -> ModuleType:
    """The backend module of that name; ImportError with the reason where it is not usable here."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {name!r}")
    return importlib.import_module(f"mxmoe.backends.{name}")


def fast(device_type: str) -> tuple[str, ...]:
    """What backend="auto" is there, the first that has the verb in the format: `host` on a CPU; on a GPU `cuda` where its kernels
    are built for every GPU of this machine, then `triton`."""
    if device_type == "cpu":
        return ("host",)
    if device_type == "cuda":
        return ("cuda", "triton") if get("cuda").lacks() is None else ("triton",)
    raise NotImplementedError(f"backend='auto' has no backend for device {device_type!r}; available: {', '.join(BACKENDS)}")


def candidates(name: str, device_type: str) -> tuple[str, ...]:
    """Of "auto", `fast`; an explicit name alone (it never falls back)."""
    if name == "auto":
        return fast(device_type)
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}, got {name!r}")
    return (name,)


def resolve(name: str, device_type: str) -> str:
    """The first of the candidates."""
    return candidates(name, device_type)[0]
