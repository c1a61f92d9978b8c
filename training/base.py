"""What a phase begins with: the weights, sizes and tokenizer of a run, of one of its checkpoints, or of a Hugging Face
checkpoint."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from training import hf
from training.checkpoint import VALUES, Checkpoints, read_state, read_values
from training.config import SIZES
from training.model import Model, ModelConfig


@dataclass(frozen=True)
class Base:
    """A model on disk."""

    path: Path  # a checkpoint directory, ours or Hugging Face's
    config: ModelConfig
    tokenizer: Path | None  # tokenizer.json or its directory
    sizes: dict  # fields of Config that describe it, as far as they can

    @property
    def is_hf(self) -> bool:
        return not (self.path / VALUES).exists()


def model_config(values: dict) -> ModelConfig:
    """From `asdict`'s result, as a checkpoint holds it."""
    return ModelConfig(**values)


def find_base(path: str | Path) -> Base:
    """Of a run's directory (its newest intact checkpoint), a checkpoint's, or a Hugging Face checkpoint's. FileNotFoundError where
    it is none of these."""
    path = Path(path)
    if (path / "checkpoints").is_dir():
        path = Checkpoints(path / "checkpoints").newest()
    if (path / VALUES).exists():
        values = read_values(path)
        sizes = {name: values["config"][name] for name in SIZES}
        return Base(path, model_config(values["model_config"]), path.parents[1] / "tokenizer.json", sizes)
    if (path / "config.json").exists() and "model_type" in json.loads((path / "config.json").read_text()):
        from transformers import AutoConfig

        config = hf.config_from_hf(AutoConfig.from_pretrained(path))
        sizes = {name: value for name, value in asdict(config).items() if name in SIZES}
        return Base(path, config, path if (path / "tokenizer.json").exists() else None, sizes)
    raise FileNotFoundError(f"{path} is neither a run, nor a checkpoint of one, nor a Hugging Face checkpoint")


@torch.no_grad()
def load_weights(model: nn.Module, base: Base) -> None:
    """Fills the model's parameters and selection biases. ValueError where names or shapes differ."""
    state = hf.read_state(base.path) if base.is_hf else read_state(base.path, {"model": model.state_dict()}, only="model")["model"]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{base.path} does not hold this model: {error}") from None


def load_model(path: str | Path, **overrides) -> tuple[Model, Base]:
    """The model of a base, in evaluation mode; overrides are fields of its ModelConfig."""
    base = find_base(path)
    model = Model(model_config(asdict(base.config) | overrides))
    load_weights(model, base)
    return model.eval(), base
