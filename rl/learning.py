"""The learner as an actor: steps, versions, checkpoints; and how one that died comes back to the very weights it had."""

import copy
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rl.actors import kept
from rl.learner import Learner, StepReport, TrainSample
from rl.objective import Correction
from rl.rollout import read_batch
from rl.weights import Publisher, Receipt, Store
from rl.weights.version import version_of
from training.base import find_base, read_model
from training.checkpoint import Checkpoints
from training.optimizer import load_moments, make_optimizer, moments

Groups = Sequence[Sequence[TrainSample]]


class LearnerActor:
    """The model at `base`, or where the run directory has checkpoints, as the newest of them has it.

    run_dir: checkpoints/ and batches/ are kept there. weights: the store that versions go to. step: how many steps the run has
    taken; those after the checkpoint are taken again, from the batches as they were recorded. save_every: steps between two
    checkpoints. kl_weight: of the KL from the model at `base`; a copy of it is kept where this is not 0. options: of `Learner`.
    """

    def __init__(
        self,
        base: str,
        run_dir: str,
        weights: str,
        *,
        step: int = 0,
        save_every: int = 5,
        full_every: int = 20,
        weight_decay: float = 0.0,
        threads: int = 1,
        changes: dict | None = None,
        correction: Mapping | None = None,
        kl_weight: float = 0.0,
        **options,
    ):
        torch.set_num_threads(threads)
        self.run_dir, self.save_every = Path(run_dir), save_every
        model = read_model(find_base(base), **(changes or {}))
        options |= {"correction": Correction(**(correction or {})), "kl_weight": kl_weight}
        reference = copy.deepcopy(model) if kl_weight else None
        self.learner = Learner(model, make_optimizer(model, weight_decay), reference=reference, **options)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints")
        self._load()
        self.replayed = step - self.learner.version
        for number in range(self.learner.version, step):
            self.learner.step(read_batch(self.run_dir, number))
        store = Store(weights)
        roll_back(store, step)
        self.publisher = Publisher(store, full_every=full_every, resume=True)
        self._receipts: list = []
        if self.publisher.version is None or self.publisher.version < step:
            self._publish()

    def pid(self) -> int:
        return os.getpid()

    def step(self, groups: Sequence[Sequence]) -> tuple[StepReport, dict[str, float]]:
        """One step over groups of samples or references to them (`rl.actors.keep`); returns its report and where its time went."""
        start = time.monotonic()
        batch = [[kept(sample) for sample in group] for group in groups]
        read = time.monotonic()
        report = self.learner.step(batch)
        trained = time.monotonic()
        self._publish()
        times = {"read_s": read - start, "train_s": trained - read, "publish_s": time.monotonic() - trained}
        return report, times | self._written()

    def recorded(self, step: int) -> None:
        """The step is durable in the run's state: a checkpoint may hold it now."""
        if step % self.save_every == 0:
            self.save()

    def save(self, *, wait: bool = False) -> None:
        """A checkpoint of the present weights and moments, written in the background."""
        learner = self.learner
        state = {"model": learner.model.state_dict(), "moments": moments(learner.optimizer), "version": learner.version}
        self.checkpoints.save(learner.version, state, background=not wait)

    def wait(self) -> None:
        """Returns once no checkpoint is being written; OSError where one could not be."""
        self.checkpoints.wait()

    def republish(self) -> None:
        """Where the store did not take the newest version (it was away, or full): once more."""
        if not any(not future.done() for future in self._receipts) and (self.publisher.version or 0) < self.learner.version:
            self._publish()

    def close(self) -> None:
        self.publisher.close()
        self.checkpoints.wait()

    def _written(self) -> dict[str, float]:
        """What was written since this was asked last, and how often the store refused."""
        done = [future for future in self._receipts if future.done()]
        self._receipts = [future for future in self._receipts if not future.done()]
        failed = [error for future in done if (error := future.exception()) is not None]
        if unexpected := [error for error in failed if not isinstance(error, OSError)]:
            raise unexpected[0]
        receipts: list[Receipt] = [future.result() for future in done if future.exception() is None]
        return {
            "sync_bytes": sum(receipt.bytes for receipt in receipts),
            "sync_changes": sum(receipt.changes for receipt in receipts),
            "sync_failures": len(failed),
        }

    def _publish(self) -> None:
        state = {name: p.data for name, p in self.learner.model.named_parameters()}
        self._receipts.append(self.publisher.publish(state, self.learner.version))

    def _load(self) -> None:
        if not self.checkpoints.paths():
            return
        state = self.checkpoints.load()
        self.learner.model.load_state_dict(state["model"])
        load_moments(self.learner.optimizer, state.get("moments", {}))
        self.learner.version = state["version"]


def roll_back(store: Store, version: int) -> None:
    """Forget what is later than `version`: steps that the run's state does not have and that are taken again."""
    late = [name for name in store.names() if (found := version_of(name)) is not None and found > version]
    late += [name for name in store.names() if name.split("/")[0] in {each.split("/")[0] for each in late} and name not in late]
    for name in sorted(late, key=lambda name: not name.endswith("/manifest.json")):
        store.delete(name)
