"""What a phase begins with: the weights, sizes and tokenizer of a run, of one of its checkpoints, or of a Hugging Face
checkpoint."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from training import hf
from training.checkpoint import VALUES, Checkpoints, read_state, read_values
from training.config import SIZES
from training.model import Model, ModelConfig, Yarn


@dataclass(frozen=True)
class Base:
    """A model on disk."""

    path: Path  # a checkpoint directory, ours or Hugging Face's
    config: ModelConfig
    tokenizer: Path | None  # tokenizer.json or its directory
    sizes: dict  # fields of Config that describe it, as far as they can
    window: int  # tokens of the longest sequence it was trained on

    @property
    def is_hf(self) -> bool:
        return not (self.path / VALUES).exists()


def model_config(values: dict) -> ModelConfig:
    """From `asdict`'s result, as a checkpoint holds it."""
    yarn = values.get("yarn")
    return ModelConfig(**values | dict(yarn=yarn and Yarn(**yarn), dense_layers=tuple(values["dense_layers"])))


def find_base(path: str | Path) -> Base:
    """Of a run's directory (its newest intact checkpoint), a checkpoint's, or a Hugging Face checkpoint's. FileNotFoundError where
    it is none of these."""
    path = Path(path)
    if (path / "checkpoints").is_dir():
        path = Checkpoints(path / "checkpoints").newest()
    if (path / VALUES).exists():
        values = read_values(path)
        sizes = {name: values["config"][name] for name in SIZES}
        config = model_config(values["model_config"])
        return Base(path, config, path.parents[1] / "tokenizer.json", sizes, values["config"]["seq_len"])
    if "model_type" in (stated := _config(path / "config.json")):
        config = hf.config_from_hf(stated)
        sizes = {name: value for name, value in asdict(config).items() if name in SIZES}
        return Base(path, config, path if (path / "tokenizer.json").exists() else None, sizes, config.max_positions)
    raise FileNotFoundError(f"{path} is neither a run, nor a checkpoint of one, nor a Hugging Face checkpoint")


def _config(path: Path) -> dict:
    """What a config.json says; {} where there is none. ValueError where it is not JSON."""
    try:
        stated = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return stated if isinstance(stated, dict) else {}


@torch.no_grad()
def read_model(base: Base, **changes) -> Model:
    """The model of a base, FP32; changes are fields of its ModelConfig. ValueError where names or shapes differ."""
    if base.is_hf:
        return hf.load(base.path, changes.pop("recipe", "bf16"), **changes)
    model = Model(replace(base.config, **changes), seed=None)
    try:
        model.load_state_dict(read_state(base.path, {"model": model.state_dict()}, only="model")["model"])
    except RuntimeError as error:
        raise ValueError(f"{base.path} does not hold this model: {error}") from None
    return model


def stretched(config: ModelConfig, factor: float, window: int) -> ModelConfig:
    """Rotary positions reach `factor` times as far (YaRN): from the length that the model was first trained on, where it says so,
    else from its window."""
    if factor == 1.0:
        return config
    if config.yarn is None and window < 1:
        raise ValueError(f"yarn must leave a position of the rows' length, got {factor:g}")
    yarn = config.yarn or Yarn(1.0, window)
    yarn = replace(yarn, factor=yarn.factor * factor)
    return replace(config, yarn=yarn, max_positions=max(config.max_positions, int(yarn.factor * yarn.original_length)))
