"""Bars of the CPU backend: how near each verb comes to what the machine can do, and how far ahead of its peers it is.

Everything is a ratio within one run. Ceilings and peers take turns with ours in every round, and the measured number is the median
of the rounds' own ratios, because this machine's speed doubles and halves within seconds. Bytes are those read plus those written,
for kernels and roof alike; the copy roof is the faster of memcpy and a copy past the cache of as many bytes; the peak is a loop of
`vdpbf16ps` in registers of as many operations. Outputs are preallocated where a call takes `out=`.
"""

from benchmarks.bars.cpu import decode, gemm, generation, layer, memory, rows

BARS = [*rows.BARS, *gemm.BARS, *layer.BARS, *decode.BARS, *generation.BARS, *memory.BARS]
