"""What nvcc makes of the GPU kernels: the instructions that must be there, no spills, and the committed table of them."""

import pytest

from tests import machine_code

pytestmark = [
    pytest.mark.tree,
    pytest.mark.skipif(not machine_code.objects(), reason="built without nvcc"),
    pytest.mark.skipif(not machine_code.tools(), reason="needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm"),
]
# Beginning of the kernel's name -> architectures, instructions it must have (prefixes), must not have.
EXPECTED = {
    "route<": ({"sm_90", "sm_100"}, ("LDG.E", "MUFU.RCP", "STG.E"), ("LDS", "STS", "MUFU.EX2", "MUFU.LG2")),
    "route_backward<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS", "MUFU.EX2", "MUFU.LG2")),
    "mean_tokens<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS", "ATOM", "RED.")),
    "sort_by_expert<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("ATOM", "RED.")),
    "moe_decode<": ({"sm_90", "sm_100"}, ("LDG.E.128", "STG.E"), ("ATOM", "RED.", "MUFU.EX2")),
    "permute<NoCopies": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "unpermute<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "unpermute_backward<NoCopies": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "weights_grad<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "swiglu<NoCopies": ({"sm_90", "sm_100"}, ("LDG.E", "MUFU.RCP", "STG.E"), ("LDS", "STS", "MUFU.EX2")),
    "swiglu_backward<NoCopies": ({"sm_90", "sm_100"}, ("LDG.E", "MUFU.RCP", "STG.E"), ("LDS", "STS", "MUFU.EX2")),
    "permute<": ({"sm_90", "sm_100"}, ("STS", "F2FP.SATFINITE"), ()),
    "unpermute_backward<": ({"sm_90", "sm_100"}, ("STS", "F2FP.SATFINITE"), ()),
    "swiglu<": ({"sm_90", "sm_100"}, ("STS", "F2FP.SATFINITE", "MUFU.RCP"), ("MUFU.EX2",)),
    "swiglu_backward<": ({"sm_90", "sm_100"}, ("STS", "F2FP.SATFINITE", "MUFU.RCP"), ("MUFU.EX2",)),
    "level1<": ({"sm_100"}, ("LDG.E", "STG.E.128"), ("LDS", "STS", "UTMALDG")),  # docs/kernels.md
    "level2<": ({"sm_100"}, ("LDG.E.128", "STS.128"), ("UTMALDG",)),
    "level3<": ({"sm_100"}, ("UTMALDG", "SYNCS.ARRIVE"), ("STS", "UTCHMMA")),
    **{f"level{i}<": ({"sm_100"}, ("UTMALDG", "UTCHMMA", "UTCBAR", "LDTM"), ("HMMA", "STS")) for i in (4, 5, 6)},
    "level7<": ({"sm_100"}, ("UTMALDG", "UBLKCP", "UTCCP", "UTCQMMA", "UTCBAR", "LDTM"), ("HMMA", "STS")),
    "quantize<": ({"sm_90", "sm_100"}, ("UTMALDG", "SYNCS.ARRIVE", "F2FP.SATFINITE", "LDS.128", "STG.E.64"), ()),
    "quantize_blocks<0": ({"sm_90", "sm_100"}, ("LDG.E", "MUFU.RCP", "STG.E", "LDS"), ()),  # global scales
    "quantize_blocks<1": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "dequantize<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "swizzle_scales<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS")),
    "products_fp32<": ({"sm_90", "sm_100"}, ("LDG.E", "STG.E"), ("LDS", "STS", "HMMA")),
    "quantize_nvfp4<": ({"sm_90", "sm_100"}, ("LDG.E.128", "MUFU.RCP"), ()),
    "exchange_schedule<": ({"sm_90", "sm_100"}, ("LDG.E.STRONG.SYS", "REDG.E.ADD.STRONG.SYS"), ()),
    "dispatch<": ({"sm_90", "sm_100"}, ("LDG.E.128", "STG.E.128"), ("LDS", "STS")),
    "combine<": ({"sm_90", "sm_100"}, ("LDG.E.128", "STG.E.128", "LDG.E.STRONG.SYS"), ("LDS", "STS")),
    "cluster_copy<": ({"sm_100"}, ("UTMALDG.2D.2CTA", "UCGABAR", "SYNCS.ARRIVE", "UTMASTG", "UTMAREDG"), ()),
    "grouped_mm_sm90<0": ({"sm_90"}, ("HGMMA.64x128x16.F32", "UTMALDG", "SYNCS.ARRIVE", "WARPGROUP.DEPBAR"), ("HMMA", "STS")),
    "grouped_mm_sm90<": ({"sm_90"}, ("HGMMA.64x128x16.F32.BF16", "UTMALDG", "UBLKCP", "HMUL2.BF16", "STS.128"), ("HMMA", "F2F.")),
    "grouped_mm_wgrad_sm90<0": ({"sm_90"}, ("HGMMA.64x128x16.F32", "UTMALDG", "STS.128", "WARPGROUP.DEPBAR"), ("HMMA", "HMUL2")),
    "grouped_mm_wgrad_sm90<": ({"sm_90"}, ("HGMMA.64x128x16.F32.BF16", "UTMALDG", "UBLKCP", "HMUL2.BF16", "STS.128"), ("HMMA",)),
    "grouped_mm_wgrad_sm100<0": ({"sm_100"}, ("UTCHMMA", "UTMALDG", "STS.128", "UTCBAR", "LDTM"), ("UTCQMMA", "UTCCP", "HMMA")),
    "grouped_mm_wgrad_sm100<1": ({"sm_100"}, ("UTCQMMA", "UTCCP", "UTMALDG", "UBLKCP", "UTCBAR", "LDTM"), ("HMMA", "STS")),
    "grouped_mm_wgrad_sm100<2": ({"sm_100"}, ("UTCOMMA.4X", "UTCCP", "UTMALDG", "UBLKCP", "UTCBAR", "LDTM"), ("HMMA", "STS")),
    "grouped_mm_sm100<0, 2": ({"sm_100"}, ("UTCHMMA.2CTA", "UTMALDG.2D.2CTA", "UTCBAR.2CTA"), ("UTCQMMA", "UTCCP", "HMMA")),
    "grouped_mm_sm100<1, 2": ({"sm_100"}, ("UTCQMMA.2CTA", "UTCCP.T.S.2CTA", "UTMALDG.2D.2CTA", "UTCBAR.2CTA"), ("HMMA",)),
    "grouped_mm_sm100<2, 2": ({"sm_100"}, ("UTCOMMA.2CTA.4X", "UTCCP.T.S.2CTA", "UTMALDG.2D.2CTA", "UTCBAR.2CTA"), ("HMMA",)),
    "grouped_mm_sm100<0": ({"sm_100"}, ("UTCHMMA", "UTMALDG", "UTCBAR", "LDTM"), ("UTCQMMA", "UTCCP", "HMMA")),  # BF16, FP16
    "grouped_mm_sm100<1": ({"sm_100"}, ("UTCQMMA", "UTCCP", "UTMALDG", "UBLKCP", "UTCBAR", "LDTM"), ("HMMA",)),  # MXFP8
    "grouped_mm_sm100<2": ({"sm_100"}, ("UTCOMMA.4X", "UTCCP", "UTMALDG", "UBLKCP", "UTCBAR", "LDTM"), ("HMMA",)),  # NVFP4
}


@pytest.fixture(scope="module")
def kernels():
    return {key: facts for path in machine_code.objects() for key, facts in machine_code.kernels(path).items()}


def test_every_kernel_has_its_instructions_and_no_spills(kernels):
    for (arch, name), facts in kernels.items():
        (archs, present, absent) = next(e for start, e in EXPECTED.items() if name.startswith(start))
        assert arch in archs, name
        for op in present:
            assert any(found.startswith(op) for found in facts["code"]), (name, arch, op)
        assert not [found for found in facts["code"] if found.startswith((*absent, "LDL", "STL"))], (name, arch)
        assert facts["spilled"] == 0, (name, arch)


def test_every_expected_kernel_is_there(kernels):
    for start, (archs, _, _) in EXPECTED.items():
        assert {arch for arch, name in kernels if name.startswith(start)} == archs, start


def test_the_committed_table_is_what_was_built():
    assert machine_code.TABLE.read_text() == machine_code.table(), "look at the difference, then `python -m tests.machine_code`"
