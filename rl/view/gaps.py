"""The learner's log-probabilities of a rollout's tokens, computed anew, to be held against the sampler's.

The weights are those of the version that the rollout's step trained on, where the run's store can still give them; else the newest
that it has; else those of the learner's newest checkpoint.
"""

import threading
from pathlib import Path
from typing import Any

import torch

from rl.learner import marked, packed_logits, recorded_experts
from rl.objective import token_log_probs
from rl.rollout import Rollout
from rl.segments import Segment
from rl.weights import Receiver, Store, VersionError
from training.base import find_base, read_model
from training.checkpoint import Checkpoints, read_state
from training.model import Model


class Gaps:
    """Of a run. The model is read when it is first asked for; one thread at a time computes.

    Raises FileNotFoundError or ValueError where there is no base, or neither a version nor a checkpoint.
    """

    def __init__(self, run_dir: Path, base: Path | None):
        self.run_dir, self.base = run_dir, base
        self._lock = threading.Lock()
        self._model: Model | None = None
        self._loaded: tuple[int, str] | None = None  # the version that the model has, and where it is from

    def of(self, rollout: Rollout, version: int | None, config: dict) -> dict[str, Any]:
        """Learner less sampler, by segment and token; None where the model did not choose. version: that trained it, None: not yet.

        config: the run's; of it `recipe`, `deterministic`, `temperature` and `replay` are used.
        """
        with self._lock, torch.no_grad():
            found, source = self._prepare(version, config)
            temperature, replay = float(config.get("temperature", 1.0)), bool(config.get("replay", True))
            gaps = [self._gap(segment, temperature, replay) for segment in rollout.segments]
        return {"gaps": gaps, "version": found, "wanted": version, "source": source}

    def _prepare(self, version: int | None, config: dict) -> tuple[int, str]:
        if self.base is None:
            raise FileNotFoundError("the run's base is not known: name it with --base")
        if self._model is None:
            changes = {name: config[name] for name in ("recipe", "deterministic") if config.get(name)}
            self._model = read_model(find_base(self.base), **changes).train()  # as the learner has it
        if self._loaded is None or version is None or self._loaded[0] != version:
            self._loaded = None  # where loading fails the weights may be any
            self._loaded = self._load(version)
        return self._loaded

    def _load(self, version: int | None) -> tuple[int, str]:
        missing = "the run keeps neither versions nor checkpoints of its weights"
        if (self.run_dir / "weights").is_dir():
            for wanted in dict.fromkeys((version, None)):
                receiver = Receiver(Store(self.run_dir / "weights"), {name: p.data for name, p in self._model.named_parameters()})
                try:
                    if (update := receiver.fetch(wanted)) is not None:
                        return receiver.apply(update), "weights"
                except VersionError as error:
                    missing = str(error)
        if not (self.run_dir / "checkpoints").is_dir():
            raise FileNotFoundError(missing)
        path = Checkpoints(self.run_dir / "checkpoints").newest()
        state = read_state(path, {"model": self._model.state_dict()}, only="model")
        self._model.load_state_dict(state["model"])
        return int(path.name.rpartition("-")[2]), "checkpoints"

    def _gap(self, segment: Segment, temperature: float, replay: bool) -> list[float | None]:
        out: list[float | None] = [None] * len(segment.ids)
        chosen = marked([segment]).nonzero()[:, 0].tolist()
        if chosen:
            logits, ids, _ = packed_logits(self._model, [segment], recorded_experts([segment]) if replay else None)
            for i, log_prob in zip(chosen, token_log_probs(logits, ids, temperature).tolist(), strict=True):
                out[i] = log_prob - segment.log_probs[i]
        return out
