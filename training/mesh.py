"""`Mesh`: the process groups a model is spread over."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """One group per kind of parallelism; None: this process alone."""

    experts: dist.ProcessGroup | None = None  # the routed experts of every layer, see docs/parallel.md
