"""Runs the compiled GPU kernels (mxmoe._cuda, loaded when the first one is asked for), and says which devices take them."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from mxmoe.backends.device import Launcher

# Compute capability -> the architecture whose kernels run there. Those of sm_100 are built for its family, to which sm_103 belongs.
ARCHS = {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}
SUPPORTED = "9.0 (Hopper: H100, H200), 10.0 (Blackwell: B200, GB200) or 10.3 (Blackwell Ultra: B300, GB300)"


@cache
def module() -> ModuleType:
    """mxmoe._cuda; ImportError with the reason where it is not usable here."""
    try:
        return importlib.import_module("mxmoe._cuda")
    except ImportError as error:
        spec = importlib.util.find_spec("mxmoe._cuda")
        raise ImportError(
            f"the cuda backend needs mxmoe._cuda ({spec.origin if spec else 'not built'}), which failed to load: {error}. Build it "
            "where nvcc 13.0 or newer is: MXMOE_CUDA=ON pip install -e ."
        ) from error


def arch_of(name: str, capability: tuple[int, int]) -> str:
    """The architecture whose kernels run on a device of that compute capability; NotImplementedError where there is none."""
    if capability not in ARCHS:
        major, minor = capability
        raise NotImplementedError(
            f"the cuda backend needs a device of compute capability {SUPPORTED}, got {name} with {major}.{minor}"
        )
    return ARCHS[capability]


@cache
def lacks() -> str | None:
    """Why these kernels do not run on every GPU of this machine; None where they do, or where there is no GPU."""
    try:
        module()
        for i in range(torch.cuda.device_count()):
            arch_of(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
    except (ImportError, NotImplementedError) as error:
        return str(error)
    return None


@cache
def arch(device: torch.device) -> str:
    if device.type != "cuda":
        raise ValueError(f"backend='cuda' needs tensors on a CUDA device, got {device}")
    return arch_of(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def launch(name: str, *args):
    """Queues a kernel on the current stream of its tensors' device."""
    device = next(t.device for t in args if isinstance(t, Tensor))
    arch(device)
    with torch.cuda.device(device):
        getattr(module(), name)(*args, torch.cuda.current_stream(device).cuda_stream)


LAUNCHER = Launcher("cuda", arch, launch)
