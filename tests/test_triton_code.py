"""What Triton makes of the kernels for each architecture: that they compile, spill nothing, have the instructions they should.
Ordinarily one launch of each kernel on two architectures; all of them are slow."""

import importlib.util
import inspect
import os
import re
import sys

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget

from mxmoe.backends.triton.kernels import VERBS
from tests import machine_code, triton_code
from tests.triton_launches import Launch

pytestmark = [pytest.mark.tree, pytest.mark.skipif(not machine_code.tools(), reason="needs cuobjdump and nvdisasm")]
DIVIDING = ("global_scales", "route", "route_backward", "swiglu", "swiglu_backward")
PRODUCTS = ("grouped_mm", "grouped_mm_wgrad")
SHARED = {"sm_80": 163, "sm_89": 99, "sm_120": 99}  # KiB that a block may have, elsewhere 227
TENSOR_CORE = {  # of a product of codes, or of floats: what its PTX has, what its machine code has
    "sm_80": (None, ("mma.sync", "HMMA")),
    "sm_89": (None, ("mma.sync", "HMMA")),
    "sm_90": (None, ("wgmma", "HGMMA")),
    "sm_100": (("tcgen05.mma.cta_group::1.kind::mx", ("UTCQMMA", "UTCOMMA")), ("tcgen05.mma", "UTCHMMA")),
    "sm_103": (("tcgen05.mma.cta_group::1.kind::mx", ("UTCQMMA", "UTCOMMA")), ("tcgen05.mma", "UTCHMMA")),
    "sm_120": (("mma.sync.aligned.m16n8k", ("QMMA.SF", "OMMA.SF")), ("mma.sync", "HMMA")),
}


def check(name: str, config: str, arch: str, facts: dict):
    """Of one launch; AssertionError says what is wrong."""
    kernel, of = name.split("_kernel")[0], (name, config, arch, facts)
    ptx, sass = facts["ptx"], facts["sass"]
    assert facts["spilled"] == 0, of
    assert not any(op.startswith(("LDL", "STL")) for op in sass), of
    warps = int(config.rpartition("warps ")[2].split()[0]) if "warps" in config else 4
    assert facts["registers"] * 32 * warps <= 65536, of
    assert facts["shared"] <= SHARED.get(arch, 227) * 1024, of
    divides = kernel in DIVIDING or ("NVFP4=True" in name and kernel == "quantize")
    assert divides <= any(op.startswith("div.rn.f32") for op in ptx), of
    assert not any(op.startswith(("div.full", "div.approx", "ex2", "lg2")) or ".ftz." in op for op in ptx), of
    if kernel in PRODUCTS and "COMPUTE fp32" not in config:
        in_ptx, in_sass = TENSOR_CORE[arch][0 if "COMPUTE scaled" in config else 1]
        assert any(op.startswith(in_ptx) for op in ptx), of
        assert any(op.startswith(in_sass) for op in sass), of
        if "COMPUTE scaled" in config:
            assert any("block_scale" in op or "kind::mx" in op for op in ptx), of
    elif kernel not in PRODUCTS:
        assert not any("mma" in op for op in ptx), of
    if "COMPUTE fp32" not in config:
        assert not any(op.startswith("fma") for op in ptx), of


def firsts(arch: str) -> list[Launch]:
    """Of every kernel its first launch, of products that of MXFP8."""
    found: dict[object, Launch] = {}
    for launch in triton_code.known_launches(arch):
        if launch.kernel.__name__.split("_kernel")[0] not in PRODUCTS or "MAX_A=448.0" in launch.name:
            found.setdefault(launch.kernel, launch)
    return list(found.values())


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_one_launch_of_every_kernel(arch):
    for launch in firsts(arch):
        check(launch.name, launch.config, arch, triton_code.facts(launch, arch))


def test_every_kernel_of_the_backend_is_launched():
    """By some call of the list."""
    launched = {launch.kernel.__name__ for launch in triton_code.known_launches("sm_90")}
    of_modules = set()
    for verb in VERBS.values():
        module = sys.modules[verb.__module__]
        of_modules |= {k for k, v in inspect.getmembers(module) if isinstance(v, triton.JITFunction) and k.endswith("_kernel")}
    assert launched == of_modules


@pytest.mark.slow
def test_every_launch():
    """Also against the committed table, where the same Triton made it."""
    with triton_code.all_facts() as every:
        found = list(every)
    for one in found:
        check(*one)
    written = triton_code.table(found).splitlines()
    committed = triton_code.TABLE.read_text().splitlines()
    if written[0] == committed[0]:
        assert written == committed, "a change that is meant: python -m tests.triton_code"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_assembly_for_amd(arch):
    """One launch of every kernel: no vector register spilled, matrix instructions, divisions that end in the exact fix-up, and no
    fused multiply-add outside of divisions."""
    for launch in firsts(arch):
        code = triton_code.compiled(launch, GPUTarget("hip", arch, 64)).asm["amdgcn"]
        of, divides = (launch.name, launch.config), "v_div_fixup_f32" in code
        assert re.search(r"\.vgpr_spill_count: 0\b", code), of
        assert ("v_mfma_f32" in code) == (launch.kernel.__name__.split("_kernel")[0] in PRODUCTS), of
        assert divides or not re.search(r"v_fmac?_f32", code), of
        assert divides >= (launch.kernel.__name__.split("_kernel")[0] in DIVIDING), of
