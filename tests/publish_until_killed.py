"""Publishes versions until it is killed: python -m tests.publish_until_killed STORE. Every tensor is a function of the version."""

import sys

import torch

from rl.weights import Publisher, Store


def state_of(version: int) -> dict[str, torch.Tensor]:
    """Version n: the weights of n - 1 with other bits at every 97th place from n on."""
    base = torch.arange(300_000, dtype=torch.int32)
    return {
        "w": (base + (version - base % 97).div(97, rounding_mode="floor")).view(torch.float32),
        "n": torch.tensor([version]).int(),
    }


if __name__ == "__main__":
    with Publisher(Store(sys.argv[1]), full_every=5, resume=True) as publisher:
        version = publisher.version or 0
        while True:
            version += 1
            publisher.publish(state_of(version), version).result()
            print(version, flush=True)
