"""Bits of the tensor cores' descriptors, as CUTLASS 4.2's structs have them (cute/arch/mma_sm100_desc.hpp, mma_sm90_desc.hpp).

CUTLASS says the values again where `nvidia-cutlass` and nvcc are installed; the committed ones are from such a run.
"""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from mxmoe import _interp

# (address, leading, stride, swizzle) -> tcgen05, wgmma
OPERANDS = [(0x1C400, 16, 1024, 3), (0x400, 4096, 512, 2), (0x3FFF0, 16, 256, 1), (0x80, 16, 128, 0)]
# (m, n, a MN-major, b MN-major, element a, element b, scale id) -> mxf8f6f4; f16 with BF16; mxf4nvf4 for the K-major ones
SHAPES = [
    (128, 128, False, False, 0, 0, 0),
    (128, 256, False, False, 0, 1, 3),
    (256, 64, True, False, 1, 0, 2),
    (128, 16, False, True, 1, 1, 1),
]
PROGRAM = r"""
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm100_desc.hpp>
#include <cstdio>
int main() {
  const unsigned operands[][4] = {OPERANDS};
  for (auto& o : operands) {
    const unsigned tc[] = {0, 6, 4, 2}, wg[] = {0, 3, 2, 1};
    cute::UMMA::SmemDescriptor d{};
    d.start_address_ = o[0] >> 4, d.leading_byte_offset_ = o[1] >> 4, d.stride_byte_offset_ = o[2] >> 4;
    d.version_ = 1, d.layout_type_ = tc[o[3]];
    cute::GmmaDescriptor g{};
    g.bitfield.start_address_ = o[0] >> 4, g.bitfield.leading_byte_offset_ = o[1] >> 4, g.bitfield.stride_byte_offset_ = o[2] >> 4;
    g.bitfield.layout_type_ = wg[o[3]];
    std::printf("%llu %llu\n", (unsigned long long)uint64_t(d), (unsigned long long)g.desc_);
  }
  const unsigned shapes[][7] = {SHAPES};
  for (auto& s : shapes) {
    cute::UMMA::InstrDescriptorBlockScaled b{};
    b.m_dim_ = s[0] >> 4, b.n_dim_ = s[1] >> 3, b.a_major_ = s[2], b.b_major_ = s[3], b.a_format_ = s[4], b.b_format_ = s[5];
    b.a_sf_id_ = b.b_sf_id_ = s[6], b.scale_format_ = 1;
    cute::UMMA::InstrDescriptor h{};
    h.m_dim_ = s[0] >> 4, h.n_dim_ = s[1] >> 3, h.a_major_ = s[2], h.b_major_ = s[3];
    h.a_format_ = h.b_format_ = 1, h.c_format_ = 1;
    cute::UMMA::InstrDescriptorBlockScaled f{};
    f.m_dim_ = s[0] >> 4, f.n_dim_ = s[1] >> 3, f.a_format_ = f.b_format_ = 1, f.scale_format_ = 0;
    std::printf("%u %u %u\n", uint32_t(b), h.desc_, uint32_t(f));
  }
}
"""
GOLDEN = [
    (4611756662049545280, 4611686293305367616),
    (9223442543054684224, 9223372174310506560),
    (13835128492745900031, 13835058124001722367),
    (70403103981576, 34359803912),
    (144703488, 136316048, 136316032),
    (1757414448, 138413200, 138413184),
    (1351647392, 269517968, 269485184),
    (679806096, 134546576, 134481024),
]


def ours() -> list[tuple[int, ...]]:
    rows = [(_interp.tcgen05_descriptor(*o), _interp.wgmma_descriptor(*o)) for o in OPERANDS]
    for m, n, a_mn, b_mn, a, b, scale_id in SHAPES:
        scaled = _interp.instruction_mxf8f6f4(m, n, a_mn, b_mn, a, b, scale_id)
        rows.append((scaled, _interp.instruction_f16(m, n, a_mn, b_mn, True), _interp.instruction_mxf4nvf4(m, n)))
    return rows


def test_descriptors_are_cutlass_bits():
    assert ours() == GOLDEN


def test_cutlass_still_says_so(tmp_path):
    spec, nvcc = importlib.util.find_spec("cutlass_library"), shutil.which("nvcc")
    if not spec or not nvcc:
        pytest.skip("needs the package nvidia-cutlass and nvcc")
    table = lambda rows: ", ".join("{" + ", ".join(str(int(x)) for x in row) + "}" for row in rows)  # noqa: E731
    source = tmp_path / "bits.cu"
    source.write_text(PROGRAM.replace("OPERANDS", table(OPERANDS)).replace("SHAPES", table(SHAPES)))
    include = Path(spec.submodule_search_locations[0]) / "source" / "include"
    subprocess.run([nvcc, "-std=c++17", "-w", f"-I{include}", source, "-o", tmp_path / "bits"], check=True)
    printed = subprocess.run([tmp_path / "bits"], capture_output=True, text=True, check=True).stdout
    assert [tuple(int(x) for x in line.split()) for line in printed.splitlines()] == GOLDEN
