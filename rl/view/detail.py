"""One rollout in full: what was said and done, what it earned, and its tokens as texts."""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from rl.demo.base import place_of
from rl.demo.recipe import BaseRecipe
from rl.rollout import Rollout, place
from rl.segments import Segment
from rl.view.index import Index
from training.base import find_base
from training.data.tokenizer import load_vocabulary


class Texts:
    """Of token ids, by the tokenizer of the run's base; `note` says why there is none, and the ids have no texts."""

    def __init__(self, base: Path | None):
        self.base = base
        self.note = ""
        self._known: dict[int, str] = {}

    @cached_property
    def tokenizer(self):
        if self.base is None:
            self.note = "the run's base is not known: name it with --base"
            return None
        try:
            found = find_base(self.base).tokenizer
            if found is None:
                raise FileNotFoundError(f"{self.base} has no tokenizer")
            return load_vocabulary(found).tokenizer
        except (OSError, ValueError, KeyError) as error:
            self.note = f"no texts of tokens: {error}"
            return None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Token by token, special ones as they are spelt; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        new = [i for i in dict.fromkeys(ids) if i not in self._known]
        texts = self.tokenizer.decode_batch([[i] if i >= 0 else [] for i in new], skip_special_tokens=False)
        self._known |= zip(new, texts, strict=True)
        return [self._known[i] for i in ids]


def base_of(config: dict | None, given: str = "") -> Path | None:
    """Where the weights and the tokenizer that a run began with are: as given, as its configuration names it, or the tiny base that
    was made for it."""
    config = config or {}
    if given or config.get("base"):
        return Path(given or str(config["base"]))
    made = place_of(str(config["cache_dir"]), BaseRecipe()) if "cache_dir" in config else None
    return made if made is not None and made.is_dir() else None


def load(index: Index, group: int, sample: int) -> Rollout:
    """Raises FileNotFoundError for one that is not there, ValueError for a damaged one."""
    return Rollout.load(place(index.run_dir, group, sample))


def detail(rollout: Rollout, texts: Texts) -> dict[str, Any]:
    """Of lists, each goes token by token. shared: leading tokens that a segment has in common with the one before."""
    segments = rollout.segments
    rest = {name: value for name, value in vars(rollout).items() if name not in ("segments", "reward")}
    reward = {"parts": dict(rollout.reward.parts), "total": rollout.reward.total, "error": rollout.reward.error}
    layers = max((s.experts.shape[1] for s in segments if s.experts is not None), default=0)
    rows = [row(s, segments[i - 1].ids if i else [], texts) for i, s in enumerate(segments)]
    return rest | {"reward": reward, "layers": layers, "segments": rows, "note": texts.note}


def row(segment: Segment, before: Sequence[int], texts: Texts) -> dict[str, Any]:
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, segment.ids, strict=False)))
    lists = {"ids": segment.ids, "mask": segment.mask, "log_probs": segment.log_probs, "versions": segment.versions}
    return lists | {"texts": texts.of(segment.ids), "shared": shared}


def experts(rollout: Rollout, layer: int) -> list[list[list[int]] | None]:
    """By segment and token: the ids that a MoE layer chose. Raises ValueError for a layer that was not recorded."""
    count = max((s.experts.shape[1] for s in rollout.segments if s.experts is not None), default=0)
    if not 0 <= layer < count:
        raise ValueError(f"layer must be one of the {count} that were recorded, got {layer}")
    return [None if s.experts is None else s.experts[:, layer].tolist() for s in rollout.segments]
