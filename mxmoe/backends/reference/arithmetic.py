"""The contract's FP32 arithmetic in plain PyTorch: software exp and log, and sums whose order is fixed.

One rounding per operation: eager PyTorch never contracts a * b + c. NaN stays NaN; its sign and payload are not
promised.
"""

import torch
from torch import Tensor

LANES = 32  # a sum over experts or features: lane j adds elements j, j + 32, ... in order, then a tree 16, 8, 4, 2, 1
CHUNK = 256  # a sum over tokens: chunks of 256 added in order, then the chunk sums in order


def exp(x: Tensor) -> Tensor:
    """e^x: 0 below -87, Inf above 88.7; Cody and Waite reduction, polynomial of Cephes' expf."""
    n = torch.round(x * 1.44269504)
    r = (x - n * 0.693359375) - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    y = ((p * r) * r + r) + 1
    inside = (x >= -87) & (x <= 88.7)
    # 2^n by the exponent field: exact, because the result is normal (2^128 itself is not representable)
    y = (y.view(torch.int32) + (torch.where(inside, n, 0).to(torch.int32) << 23)).view(torch.float32)
    y = torch.where(x < -87, 0.0, y)
    y = torch.where(x > 88.7, torch.inf, y)
    return torch.where(x.isnan(), torch.nan, y)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of a normal positive x = m * 2^e, m in [sqrt(1/2), sqrt(2)); polynomial of Cephes' logf."""
    bits = x.view(torch.int32)
    small = (bits & 0x7FFFFF) < 0x3504F3  # m in [1, sqrt(2)) keeps its exponent, the rest is halved
    e = ((bits >> 23) - torch.where(small, 127, 126)).to(torch.float32)
    m = ((bits & 0x7FFFFF) | torch.where(small, 0x3F800000, 0x3F000000).to(torch.int32)).view(torch.float32)
    f = m - 1
    square = f * f
    p = torch.full_like(f, 7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1):
        p = p * f + c
    for c in (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        p = p * f + c
    y = ((p * f) * square + e * -2.12194440e-4) - square * 0.5
    return torch.where(x.isnan(), torch.nan, (f + y) + e * 0.693359375)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + exp(-x))


def sum_lanes(x: Tensor) -> Tensor:
    """Sum over the last axis in the order of `LANES`, kept as an axis of length 1."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))
    lanes = x.new_zeros(*x.shape[:-1], LANES)
    for part in padded.split(LANES, dim=-1) if padded.shape[-1] else ():
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def sum_ascending(x: Tensor) -> Tensor:
    """Sum over the last axis in ascending order (the top-k of a token), kept as an axis of length 1."""
    total = x.new_zeros(*x.shape[:-1], 1)
    for part in x.split(1, dim=-1) if x.shape[-1] else ():
        total = total + part
    return total


def mean_tokens(x: Tensor) -> Tensor:
    """Mean over the first axis: chunks of `CHUNK` tokens added in order, then the chunk sums in order; 0 if empty."""
    num_tokens = x.shape[0]
    total = x.new_zeros(x.shape[1:])
    if num_tokens == 0:
        return total
    chunks = torch.cat([x, x.new_zeros(-num_tokens % CHUNK, *x.shape[1:])]).unflatten(0, (-1, CHUNK))
    sums = chunks.new_zeros(chunks.shape[0], *x.shape[1:])
    for i in range(min(CHUNK, num_tokens)):
        sums = sums + chunks[:, i]
    for chunk in sums:
        total = total + chunk
    return total / num_tokens
