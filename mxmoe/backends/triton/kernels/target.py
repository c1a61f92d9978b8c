"""Where kernels run, and how they are launched there: a GPU, Triton's interpreter, or nowhere, to list what would be compiled.

A launch names every argument; tensors of BF16 go as int16, those of 8-bit floats as uint8. Sizes of tiles come from `config`, a
function of the kernel, the architecture and the shape, never from a measurement.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mxmoe.backends.triton.kernels.configs import pick_config

INTERPRETED = triton.knobs.runtime.interpret  # read when kernels are decorated, so once


@dataclass(frozen=True)
class Target:
    """arch: "sm_90" ..., or "interpreter"; run(kernel, grid, **arguments); programs: of kernels whose programs stay."""

    arch: str
    run: Callable[..., None]
    programs: int

    def config(self, kernel: str, **facts) -> dict:
        return pick_config(kernel, self.arch, **facts)


def raw(t: Tensor | None) -> Tensor | None:
    """The same memory as kernels take it."""
    if t is None or t.dtype in (torch.float32, torch.float16, torch.int32, torch.uint8):
        return t
    return t.view(torch.int16 if t.dtype == torch.bfloat16 else torch.uint8)


def group_slots(offs: Tensor | None) -> tuple[int, int]:
    """(number of groups, the power of two that kernels read their ends in), zeros without groups."""
    return (0, 0) if offs is None else (len(offs), triton.next_power_of_2(max(len(offs), 1)))


def run(kernel, grid: tuple[int, ...], **arguments):
    """Queues a kernel on the current stream of its tensors' device; not one without programs."""
    if 0 in grid:
        return
    device = next(t.device for t in arguments.values() if isinstance(t, Tensor))
    with nullcontext() if INTERPRETED else torch.cuda.device(device):
        kernel[grid](**arguments, enable_fp_fusion=False)


def target_of(device: torch.device) -> Target:
    """ValueError where Triton has no device there."""
    if INTERPRETED:
        return Target("interpreter", run, 3)
    if device.type != "cuda":
        raise ValueError(f"backend='triton' needs tensors on a GPU, or Triton's interpreter (TRITON_INTERPRET=1), got {device}")
    facts = torch.cuda.get_device_properties(device)
    arch = facts.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{facts.major}{facts.minor}"
    return Target(arch, run, facts.multi_processor_count)
