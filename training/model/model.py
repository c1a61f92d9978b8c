"""`Model`: embedding, decoder layers and head. Letters: T tokens, D model width, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import mxmoe
from mxmoe.routing import Routing
from training.mesh import Mesh
from training.model.attention import GroupedAttention, LatentAttention
from training.model.cache import KVCache
from training.model.config import ModelConfig
from training.model.layers import DenseMLP, Linear, RMSNorm, moe
from training.model.rotary import rotary_table
from training.model.sequences import Sequences

ROLES = ("embedding", "head", "norm", "attention", "router", "expert", "shared", "dense")


class Layer(nn.Module):
    """One decoder layer with pre-norms."""

    def __init__(self, config: ModelConfig, layer_idx: int, mesh: Mesh):
        super().__init__()
        self.input_layernorm = RMSNorm(config.dim, config.norm_eps, config)
        self.self_attn = (LatentAttention if config.is_latent else GroupedAttention)(config, layer_idx)
        self.post_attention_layernorm = RMSNorm(config.dim, config.norm_eps, config)
        self.mlp = DenseMLP(config) if layer_idx in config.dense_layers else moe(config, mesh)

    def forward(
        self, x_TD: Tensor, sequences: Sequences, cos_sin: Tensor, cache: KVCache | None = None, replay: Tensor | None = None
    ) -> tuple[Tensor, Routing | None]:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), sequences, cos_sin, cache)
        y_TD, routing = self.mlp(self.post_attention_layernorm(x_TD), replay)
        return x_TD + y_TD, routing


class Model(nn.Module):
    """ids -> logits and the Routing of every MoE layer, first to last.

        logits, routings = model(ids_BS)                                  # every row by itself
        logits, routings = model(ids_BS, positions_BS)                    # rows that hold several documents each
        logits, routings = model(ids_T, cache=cache, slots=[0, 3], lengths=[7, 1])

    positions, int64, the ids' shape: a token's place in its document; where they do not go on by one, a new document begins, and
    attention stops there. With a cache the ids, flat or rows, are the next `lengths` tokens of the sequences at `slots` (default:
    the i-th row is slot i), which the cache then holds; no gradient flows through the cache. replay: recorded expert ids (T, K) of
    every MoE layer. Weights come from `seed`; None leaves them to be loaded.
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0, *, mesh: Mesh | None = None):
        super().__init__()
        self.config = config
        mesh = mesh or Mesh()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config, layer_idx, mesh) for layer_idx in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps, config)
        self.lm_head = Linear(config.dim, config.vocab_size, config)
        if seed is not None:
            self._initialize(seed)

    @torch.no_grad()
    def _initialize(self, seed: int, std: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std, generator=generator)

    @property
    def moe_layers(self) -> list[mxmoe.MoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, mxmoe.MoE)]

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context every layer runs in: BF16 for the dense GEMMs and the attention, except for recipe fp32."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.config.recipe != "fp32")

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        slots: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        replay: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Routing]]:
        x_TD, routings = self.trunk(ids, positions, cache=cache, slots=slots, lengths=lengths, replay=replay)
        return self.head(x_TD).unflatten(0, ids.shape), routings

    def trunk(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        slots: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        replay: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Routing]]:
        """(T, D) after the last layer, before the last norm: what `head` takes, for all tokens or some, and what layers behind the
        trunk (multi-token prediction) would go on from."""
        sequences = self._sequences(ids, positions, cache, slots, lengths)
        replays = iter(replay or [None] * len(self.moe_layers))
        with self.autocast(ids.device):
            cos_sin = rotary_table(self.config, sequences.longest, ids.device)[sequences.positions]
            x_TD = self.embed_tokens(ids.flatten())
            routings = []
            for layer in self.layers:
                recorded = next(replays) if isinstance(layer.mlp, mxmoe.MoE) else None
                x_TD, routing = layer(x_TD, sequences, cos_sin, cache, recorded)
                if routing is not None:
                    routings.append(routing)
        if cache is not None:
            cache.advance(sequences)
        return x_TD, routings

    def head(self, x_TD: Tensor) -> Tensor:
        """Logits (T, V) of what `trunk` returns."""
        with self.autocast(x_TD.device):
            return self.lm_head(self.norm(x_TD))

    @staticmethod
    def _sequences(ids: Tensor, positions, cache: KVCache | None, slots, lengths) -> Sequences:
        if cache is None:
            if slots is not None or lengths is not None:
                raise ValueError("slots and lengths go with a cache, got none")
            return Sequences.of_rows(ids.shape, positions, ids.device)
        if positions is not None:
            raise ValueError("positions follow from the cache where one is given, got both")
        rows = ids.numel() // ids.shape[-1]
        lengths = [ids.shape[-1]] * rows if lengths is None else lengths
        if sum(lengths) != ids.numel():
            raise ValueError(f"lengths must add up to the {ids.numel()} ids, got {list(lengths)}")
        return cache.sequences(range(len(lengths)) if slots is None else slots, lengths)


def parameter_roles(model: Model) -> dict[str, str]:
    """Parameter name -> its role, one of ROLES."""
    return {
        f"{path}.{name}": _role(path, module, name)
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }


def _role(path: str, module: nn.Module, name: str) -> str:
    if isinstance(module, mxmoe.MoE):
        return "shared" if name.startswith("shared") else "router" if name == "router" else "expert"
    kinds = {nn.Embedding: "embedding", RMSNorm: "norm", DenseMLP: "dense"}
    return kinds.get(type(module)) or ("head" if path == "lm_head" else "attention")
