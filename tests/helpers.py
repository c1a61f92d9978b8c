"""What several test files share: the backends as test parameters, their quantization verbs called on the contract itself with
poisoned outputs, and inputs full of boundary values."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mxmoe import _C, backends
from mxmoe.backends import host
from mxmoe.formats import FORMATS, MXTensor, QuantizeOptions, copy_shapes

FORMAT_NAMES = tuple(FORMATS)
MX_FORMATS = ("mxfp8", "mxfp8_e5m2", "mxfp4")
POISON = 0xA5  # outputs hold this byte before a backend fills them


@dataclass(frozen=True)
class Backend:
    """One backend, the host one with a forced instruction set."""

    name: str
    isa: str | None = None

    def __str__(self) -> str:
        return self.name if self.isa is None else f"{self.name}-{self.isa}"

    def supports(self, verb: str, format: str) -> bool:
        return (verb, format) in backends.get(self.name).SUPPORTS

    def run(self, verb: str, *args):
        function = getattr(backends.get(self.name), verb)
        if self.isa is None:
            return function(*args)
        with host.use_isa(self.isa):
            return function(*args)

    def quantize(self, x: Tensor, format: str, axis: str = "row", *, offs=None, scale_mode="rceil", scope="row", seed=None,
                 hadamard=False, four_six=False, block_2d=False):  # fmt: skip
        """The MXTensor of `x` (R, L) or (B, R, L), or (row, column) for axis "both", made in one call."""
        options = QuantizeOptions(scale_mode, scope, seed, hadamard, four_six, block_2d)
        axes = ("row", "column") if axis == "both" else (axis,)
        copies = {a: empty_copy(x, format, a, offs, scope) for a in axes}
        batched = x if x.ndim == 3 else x[None]
        self.run("quantize", batched, offs, format, options, *(contract_copy(copies.get(a)) for a in ("row", "column")))
        return tuple(copies.values()) if axis == "both" else copies[axis]

    def dequantize(self, t: MXTensor, dtype: torch.dtype = torch.float32) -> Tensor:
        out = poisoned(t.shape, dtype)
        batched = out if out.ndim == 3 else out[None]
        self.run("dequantize", *contract_copy(t), t.offs, t.format, t.axis, t.scope, batched)
        return out

    def swizzle(self, t: MXTensor) -> Tensor:
        """uint8 (bytes,) or (B, bytes): the scales in the blocked layout."""
        fmt = FORMATS[t.format]
        groups = None if t.offs is None else t.offs.shape[0]
        blocked = poisoned(copy_shapes(t.shape, fmt, t.axis, groups, t.scope, "blocked")[1], torch.uint8)
        self._swizzle(t, t.scales.view(torch.uint8), blocked, inverse=False)
        return blocked

    def unswizzle(self, t: MXTensor, blocked: Tensor) -> Tensor:
        """The plain scales (uint8) again; `t` says the shapes."""
        plain = poisoned(t.scales.shape, torch.uint8)
        self._swizzle(t, plain, blocked, inverse=True)
        return plain

    def _swizzle(self, t: MXTensor, plain: Tensor, blocked: Tensor, inverse: bool):
        if len(t.shape) == 2:
            plain, blocked = plain[None], blocked[None]
        self.run("swizzle_scales", plain, blocked, t.offs, t.axis, FORMATS[t.format].block, inverse)


def backends_for(verb: str) -> list[Backend]:
    """The reference and the host backend on every instruction set of this CPU, as far as they have the verb."""
    known = [Backend("reference"), *(Backend("host", isa) for isa in _C.isas())]
    return [b for b in known if any(v == verb for v, _ in backends.get(b.name).SUPPORTS)]


def backend_fixture(verb: str):
    """`backend = backend_fixture("quantize")` in a module runs its tests once per backend that has the verb."""
    import pytest  # here: benchmarks.gpu_check needs the rest without it

    @pytest.fixture(params=backends_for(verb), ids=str)
    def backend(request) -> Backend:
        return request.param

    return backend


def poisoned(shape, dtype: torch.dtype) -> Tensor:
    t = torch.empty(shape, dtype=dtype)
    t.view(torch.uint8).fill_(POISON)
    return t


def empty_copy(x: Tensor, format: str, axis: str, offs, scope: str) -> MXTensor:
    """An MXTensor of poisoned memory, of the shapes that quantizing `x` needs."""
    fmt = FORMATS[format]
    scope = scope if fmt.has_global_scale else "row"
    shapes = copy_shapes(x.shape, fmt, axis, None if offs is None else offs.shape[0], scope)
    dtypes = (fmt.values_dtype, fmt.scales_dtype, torch.float32)
    parts = [None if s is None else poisoned(s, dtype) for s, dtype in zip(shapes, dtypes, strict=True)]
    return MXTensor(*parts, format=format, axis=axis, shape=tuple(x.shape), scope=scope, offs=offs)


def contract_copy(t: MXTensor | None):
    """(values, scales, global_scale) with the batch dimension of the backend contract."""
    if t is None or len(t.shape) == 3:
        return t and (t.values, t.scales, t.global_scale)
    g = t.global_scale
    return t.values[None], t.scales[None], g[None] if g is not None and t.scope == "row" else g


def values_of(t: MXTensor) -> Tensor:
    return t.values.view(torch.uint8)


def scales_of(t: MXTensor) -> Tensor:
    return t.scales.view(torch.uint8)


def differences(a: MXTensor, b: MXTensor) -> int:
    """Number of bytes of values, scales and global scale that differ."""
    pairs = [(values_of(a), values_of(b)), (scales_of(a), scales_of(b))]
    if a.global_scale is not None:
        pairs.append((a.global_scale.view(torch.int32), b.global_scale.view(torch.int32)))
    assert all(p.shape == q.shape for p, q in pairs), (a, b)
    return sum(int((p != q).sum()) for p, q in pairs)


def boundary_inputs(rows: int, length: int, seed: int, dtype: torch.dtype = torch.float32, finite: bool = True) -> Tensor:
    """(rows, length): each row of one kind: normal numbers at many scales, any finite bits, values around the ties of small
    floats, powers of two and their neighbours, subnormals, sparse rows, zeros; unless finite, some rows with NaN and Inf."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, length, generator=g)
    exponent = torch.randint(-40, 40, (rows, 1), generator=g).float()
    bits = torch.randint(-(2**31), 2**31, (rows, length), generator=g).to(torch.int32)
    any_bits = torch.where(bits & 0x7F800000 == 0x7F800000, bits & ~0x40000000, bits).view(torch.float32)
    coarse = (torch.randint(-64, 65, (rows, length), generator=g).float() / 4) * torch.exp2(exponent)
    nudged = (coarse.view(torch.int32) + torch.randint(-1, 2, (rows, length), generator=g).int()).view(torch.float32)
    nudged = torch.where(nudged.isfinite(), nudged, coarse)
    powers = torch.exp2(torch.randint(-149, 128, (rows, length), generator=g).float())
    near_powers = (powers.view(torch.int32) + torch.randint(-1, 2, (rows, length), generator=g).int()).view(torch.float32)
    subnormal = (bits & 0x807FFFFF).view(torch.float32)
    sparse = normal * (torch.rand(rows, length, generator=g) < 0.02)
    kinds = [normal * torch.exp2(exponent), any_bits, coarse, nudged, near_powers, subnormal, sparse, normal * 0.0]
    x = torch.stack(kinds)[torch.randint(len(kinds), (rows,), generator=g), torch.arange(rows)].to(dtype)
    x = torch.where(x.isfinite(), x, torch.finfo(dtype).max)
    if not finite and rows and length:
        hit = torch.rand(rows, length, generator=g) < 0.5 / length
        special = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=dtype)
        x = torch.where(hit, special[torch.randint(3, (rows, length), generator=g)], x)
    return x


def assert_same_bits(got: Tensor, want: Tensor):
    """Equal bytes, any NaN being equal to any NaN."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.dtype.is_floating_point:
        bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
        assert torch.equal(got.isnan(), want.isnan())
        got, want = (t.masked_fill(t.isnan(), 0.0).view(bits) for t in (got, want))
    assert torch.equal(got, want)


@contextmanager
def num_threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flushed_subnormals():
    """The caller computes with FTZ and DAZ, where the CPU can."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
