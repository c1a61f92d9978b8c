"""Hugging Face transformers: its Mixture-of-Experts models on these kernels, for training, fine-tuning and generation.

    from mxmoe.integrations.transformers import quantize_model_, register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="mxmoe_mxfp8")  # or set_experts_implementation
    quantize_model_(model, "nvfp4")  # for inference: keep the experts in memory in that format only

transformers keeps the experts of a layer as stacked weights and looks up what computes them by `config._experts_implementation`;
`register` adds three names to that table. The router, shared experts and everything else stay transformers' own. One call:

    y[t] = sum over k of top_k_weights[t, k] * (w2[e] . act(w13[e] . hidden_states[t] + b13[e]) + b2[e]), e = top_k_index[t, k]

Shapes: T tokens, D model width, F expert width, E experts, K experts per token; a model's gate_up_proj is (E, 2F, D), or
(E, D, 2F) where its class says `is_transposed`; never told apart by their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

try:
    from transformers import PreTrainedModel
    from transformers.activations import QuickGELUActivation, SiLUActivation
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        f"mxmoe.integrations.transformers needs transformers 5.24 or newer (its experts interface): {error}"
    ) from error

from mxmoe import ops
from mxmoe.checks import check_choice
from mxmoe.formats import FORMATS, MXTensor, copy_shapes
from mxmoe.layer import PreparedExperts, Weight, moe_experts, prepare_experts
from mxmoe.module import QuantizedWeight
from mxmoe.recipes import SwiGLU

WEIGHTS = ("gate_up_proj", "down_proj")
IMPLEMENTATIONS = {"mxmoe": "", "mxmoe_mxfp8": "mxfp8", "mxmoe_nvfp4": "nvfp4"}  # to recipes; "": "fp32" or "bf16", by dtype
QUANTIZED = tuple(filter(None, IMPLEMENTATIONS.values()))
DECODE_TOKENS = 8  # up to here moe_decode is the faster verb; both give the same bytes


def _silu_alpha(experts: nn.Module) -> float:
    """alpha of x * sigmoid(alpha * x), the experts' act_fn; NotImplementedError naming them where it is something else."""
    if isinstance(experts.act_fn, (SiLUActivation, nn.SiLU)):
        return 1.0
    if isinstance(experts.act_fn, QuickGELUActivation):
        return 1.702
    raise NotImplementedError(f"mxmoe computes SiLU and quick GELU, not {experts.act_fn}: {type(experts).__name__} cannot use it")


# What `_apply_gate` computes, by that function's name; classes of experts with a gate of their own are here one by one.
GATES: dict[str, Callable[[nn.Module], SwiGLU]] = {
    _default_apply_gate.__qualname__: lambda experts: SwiGLU(_silu_alpha(experts)),
    "GptOssExperts._apply_gate": lambda experts: SwiGLU(experts.alpha, experts.limit, 1.0),
    "OpenAIPrivacyFilterExperts._apply_gate": lambda experts: SwiGLU(experts.alpha, experts.limit, 1.0),
    "MiniMaxM3VLExperts._apply_gate": lambda experts: SwiGLU(experts.swiglu_alpha, experts.swiglu_limit, 1.0),
    "DeepseekV4Experts._apply_gate": lambda experts: SwiGLU(_silu_alpha(experts), experts.limit),
    "HYV4Experts._apply_gate": lambda experts: SwiGLU(limit=experts.swiglu_limit),
    "HYV4VLExperts._apply_gate": lambda experts: SwiGLU(limit=experts.swiglu_limit),
}


def register() -> tuple[str, ...]:
    """Adds "mxmoe" (BF16, or FP32 where the model computes in it), "mxmoe_mxfp8" and "mxmoe_nvfp4" to transformers' experts
    implementations; returns these names. Calling it again changes nothing.

    Raised by the model's forward: NotImplementedError naming the class of experts whose activation or layout is not supported,
    ValueError for an implementation other than that of quantized weights.
    """
    for name in IMPLEMENTATIONS:
        ALL_EXPERTS_FUNCTIONS.register(name, _experts_function(name))
    return tuple(IMPLEMENTATIONS)


def _experts_function(implementation: str) -> Callable[..., Tensor]:
    def forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, D), (T, K), (T, K) -> (T, D) in hidden_states' dtype."""
        return _forward(implementation, experts, hidden_states, top_k_index, top_k_weights)

    return forward


def _forward(implementation: str, experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    w13, w2, options = _arguments(experts)
    recipe = options["recipe"] = _recipe(implementation, x, w13)
    tensors = (x, weights, w13, w2, options["b13"], options["b2"])
    differentiated = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    prepared = _prepared(experts, w13, w2, recipe)
    if differentiated or x.shape[0] > DECODE_TOKENS or x.dtype == torch.float16:
        return moe_experts(x, ids, weights, w13, w2, prepared=prepared, **options).to(x.dtype)
    if prepared is not None:
        w13, w2 = prepared.w13, prepared.w2
    return ops.moe_decode(x, ids, weights.float(), w13, w2, **options)


def _arguments(experts: nn.Module) -> tuple[Weight, Weight, dict]:
    """(w13 (E, 2F, D), w2 (E, D, F), biases, activation and gate_up); NotImplementedError naming a class that is not supported."""
    name = type(experts).__name__
    if not experts.has_gate or experts.has_post_expert_norm:
        raise NotImplementedError(f"mxmoe has no experts without a gate and no norm after each expert: {name} cannot use it")
    gate = _qualified_name(type(experts)._apply_gate)
    if gate not in GATES:
        raise NotImplementedError(f"mxmoe does not know the gate {gate}: {name} cannot use it")
    w13, w2 = (_weight(experts, getattr(experts, weight)) for weight in WEIGHTS)
    biases = (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)
    gate_up = "concatenated" if experts.is_concatenated else "interleaved"
    return w13, w2, dict(b13=biases[0], b2=biases[1], activation=GATES[gate](experts), gate_up=gate_up)


@torch.compiler.assume_constant_result
def _qualified_name(function: Callable) -> str:
    return function.__qualname__


def _weight(experts: nn.Module, w: Tensor | QuantizedWeight) -> Weight:
    if isinstance(w, QuantizedWeight):
        return w()
    if type(w) not in (Tensor, nn.Parameter):
        raise NotImplementedError(f"mxmoe reads plain tensors, not {type(w).__name__}: {type(experts).__name__} cannot use it")
    return w.transpose(1, 2) if experts.is_transposed else w


def _recipe(implementation: str, x: Tensor, w13: Weight) -> str:
    recipe = IMPLEMENTATIONS[implementation]
    if isinstance(w13, MXTensor) and recipe not in ("", w13.format):
        raise ValueError(
            f"experts quantized to {w13.format} need implementation 'mxmoe_{w13.format}' or 'mxmoe', got {implementation!r}"
        )
    if recipe:
        return recipe
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return "bf16" if dtype == torch.bfloat16 else "fp32"


_PREPARED: WeakKeyDictionary[nn.Module, PreparedExperts] = WeakKeyDictionary()


def _prepared(experts: nn.Module, w13: Weight, w2: Weight, recipe: str) -> PreparedExperts | None:
    """Quantized copies of weights that are not being trained, kept until they change; none in a compiled graph."""
    if recipe not in FORMATS or isinstance(w13, MXTensor) or torch.compiler.is_compiling():
        return None
    training = torch.is_grad_enabled()
    parameters = [experts._parameters.get(name) for name in WEIGHTS]  # None: computed anew for each call, as by an adapter
    if any(p is None or p.is_inference() or (training and p.requires_grad) for p in parameters):
        _PREPARED.pop(experts, None)
        return None
    copies = _PREPARED.get(experts)
    if copies is None or copies.recipe != recipe or not copies.made_from(w13, w2) or (training and copies.w13_dgrad is None):
        copies = _PREPARED[experts] = prepare_experts(w13, w2, recipe, backward=training)
    return copies


# ------------------------------------------------------------------------------------------------- quantized in memory, on disk


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's experts before and after `quantize_model_`."""

    format: str
    num_layers: int
    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        before, after = (f"{size / 2**20:.1f} MiB" for size in (self.before_bytes, self.after_bytes))
        return f"{self.num_layers} layers of experts in {self.format}: {before} -> {after}"


def quantize_model_(model: nn.Module, format: str = "nvfp4", *, backend: str = "auto") -> Sizes:
    """Replaces the expert weights of a transformers model by their row copies in `format` ("mxfp8" or "nvfp4"), layer by layer, and
    selects the implementation of that name. For inference: the weights are frozen buffers, the high-precision ones are gone. On a
    CPU they lie in panels (`mxmoe.to_panels`) where their shapes allow it.

    `state_dict` holds the bytes (`...gate_up_proj.values`, `.scales`, `.global_scale`) and loads into a model quantized alike;
    `save_pretrained` writes them and `from_pretrained` reads them, once this module is imported.
    ValueError: unknown format, a model without experts of the interface or with quantized ones; NotImplementedError: as `register`;
    nothing has changed then.
    """
    check_choice("format", format, QUANTIZED)
    layers = _experts_layers(model)
    register()
    before = after = 0
    for experts in layers:
        for name, w in zip(WEIGHTS, _arguments(experts)[:2], strict=True):
            quantized = ops.quantize(w.detach(), format, "row", backend=backend)
            before, after = before + w.nbytes, after + quantized.nbytes
            _replace(experts, name, quantized).for_inference_()
        _PREPARED.pop(experts, None)
    if isinstance(model, PreTrainedModel):  # so that save_pretrained says what it saves
        model.config.quantization_config = QuantizedExpertsConfig(format)
        model.hf_quantizer = QuantizedExpertsLoader(model.config.quantization_config)
    return Sizes(format, len(layers), before, after)


def _experts_layers(model: nn.Module) -> list[nn.Module]:
    """The experts of the interface, all supported and in high precision; else an error."""
    layers = [module for module in model.modules() if hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")]
    if not layers:
        raise ValueError(f"model must have experts of transformers' experts interface, got {type(model).__name__} without")
    for experts in layers:
        if any(isinstance(w, MXTensor) for w in _arguments(experts)[:2]):
            raise ValueError(f"model must have its experts in high precision, got quantized {type(experts).__name__}")
        if not all(name in experts._parameters for name in WEIGHTS):
            raise ValueError(
                f"model must have expert weights that are parameters (merge adapters first), got {type(experts).__name__}"
            )
    return layers


def _replace(experts: nn.Module, name: str, quantized: MXTensor) -> QuantizedWeight:
    delattr(experts, name)
    weight = QuantizedWeight(quantized)
    setattr(experts, name, weight)
    experts.config._experts_implementation = f"mxmoe_{quantized.format}"
    return weight


@register_quantization_config("mxmoe")
class QuantizedExpertsConfig(QuantizationConfigMixin):
    """What config.json says of a model saved after `quantize_model_`."""

    def __init__(self, format: str, quant_method: str = "mxmoe"):
        check_choice("format", format, QUANTIZED)
        self.format, self.quant_method = format, quant_method


@register_quantizer("mxmoe")
class QuantizedExpertsLoader(HfQuantizer):
    """transformers' hook for `from_pretrained`: makes room for the copies, where the weights would be, before they are read."""

    requires_calibration = True  # reads quantized checkpoints only: others go through quantize_model_
    is_trainable = True  # around the experts, as by adapters
    is_compileable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model, **kwargs):
        f = FORMATS[self.quantization_config.format]
        register()
        for experts in _experts_layers(model):
            for name, w in zip(WEIGHTS, _arguments(experts)[:2], strict=True):
                dtypes = (f.values_dtype, f.scales_dtype, torch.float32)
                parts = [
                    None if shape is None else torch.empty(shape, dtype=dtype, device=w.device)
                    for shape, dtype in zip(copy_shapes(w.shape, f, "row"), dtypes, strict=True)
                ]
                _replace(experts, name, MXTensor(*parts, f.name, "row", tuple(w.shape)))

    def _process_model_after_weight_loading(self, model, **kwargs):
        for module in model.modules():
            if isinstance(module, QuantizedWeight):
                module.for_inference_()
        return model
