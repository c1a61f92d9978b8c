"""What Triton makes of the kernels of mxmoe/backends/triton, without a GPU: every launch of every verb, listed on tensors without
values and compiled for an architecture: registers, spills, shared memory and the instructions that matter.

`python -m tests.triton_code` writes mxmoe/backends/triton/machine_code.txt anew. Needs Triton and cuobjdump
(tests/machine_code.py).
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxmoe.backends.triton.kernels import VERBS
from mxmoe.backends.triton.kernels.target import Target
from tests import machine_code

TABLE = Path(__file__).parents[1] / "mxmoe" / "backends" / "triton" / "machine_code.txt"
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.uint8: "u8",
}
OPTIONS = ("num_warps", "num_stages")
SHOWN = re.compile(
    r"\b(tcgen05\.mma[\w.:]*|wgmma\.mma_async\.sync\.aligned\.[\w.]*|mma\.sync\.aligned\.[\w.:]*|div\.\w+\.f32|fma\.rn\.f32|"
    r"atom\.[\w.]*|cp\.async\.c\w\.[\w.]*|ld\.local\S*|\w+\.ftz\.f32)"
)


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments that decide its code."""

    kernel: triton.JITFunction
    signature: dict[str, str]
    constants: dict[str, object]
    aligned: tuple[int, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        """The kernel, and the constants that distinguish its code."""
        shown = (f"{k}={v}" for k, v in self.constants.items() if v is not None and k.isupper())
        missing = "".join(f", no {k}" for k, v in self.constants.items() if v is None)
        types = ", ".join(f"{k} {v[1:]}" for k, v in self.signature.items() if v in ("*i16", "*fp16", "*fp32") and k in "xhyab")
        return f"{self.kernel.__name__}({', '.join([*shown])}; {types}{missing})"


def launches(call: Callable[[dict[str, Callable]], None], arch: str) -> list[Launch]:
    """What `call`, given the verbs, would launch on a device of that architecture."""
    found = []

    def record(kernel, grid, **arguments):
        assert len(grid) <= 3
        options = {k: v for k in OPTIONS if (v := arguments.pop(k, None)) is not None}
        found.append(Launch(kernel, *_typed(kernel, arguments), options))

    call({name: lambda *args, verb=verb: verb(Target(arch, record, 132), *args) for name, verb in VERBS.items()})
    return found


def _typed(kernel, arguments: dict) -> tuple[dict[str, str], dict[str, object], tuple[int, ...]]:
    """Types, constants and the places of what a multiple of 16 is, as a launch with these arguments has them."""
    signature, constants, aligned = {}, {}, []
    for i, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        if not isinstance(value, int) or value % 16 == 0:
            aligned.append(i)
    assert not arguments, f"{kernel.__name__} has no parameters {list(arguments)}"
    return signature, constants, tuple(i for i in aligned if list(signature.values())[i] != "fp32")


def compiled(launch: Launch, capability: int):
    attributes = {(i,): [["tt.divisibility", 16]] for i in launch.aligned}
    source = ASTSource(fn=launch.kernel, signature=launch.signature, constexprs=launch.constants, attrs=attributes)
    options = {"enable_fp_fusion": False, **launch.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def facts(code) -> dict:
    """registers, spilled bytes, shared bytes, and the instructions of its PTX."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        usage = machine_code.dump(Path(file.name), "-res-usage")
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage).groups()
    return {
        "registers": int(registers), "spilled": int(stack) + int(local), "shared": code.metadata.shared,
        "code": Counter(SHOWN.findall(code.asm["ptx"])),
    }  # fmt: skip
