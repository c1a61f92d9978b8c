"""What the benchmarks compare with: transformers' MoE block, torchao's casts, torch's own operators."""

import torch
from torch import Tensor, nn

from benchmarks.cases import MoECase, Shape

GATHERED_LIMIT = 2**31  # bytes; `batched_mm` copies the weights of every routed row


def qwen3_blocks(case: MoECase, names: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """transformers' Qwen3-MoE block in BF16, one per experts implementation (default: all that fit); all share their weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    fits = 2 * 2 * case.rows * case.expert_dim * case.dim < GATHERED_LIMIT
    blocks, state = {}, None
    for name in names or ("eager", "grouped_mm", *(("batched_mm",) if fits else ())):
        config = Qwen3MoeConfig(
            hidden_size=case.dim, moe_intermediate_size=case.expert_dim, num_experts=case.num_experts,
            num_experts_per_tok=case.top_k, norm_topk_prob=True, experts_implementation=name,
        )  # fmt: skip
        block = Qwen3MoeSparseMoeBlock(config).bfloat16()
        assert block.experts.config._experts_implementation == name
        if state is None:
            for p in block.parameters():
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
            state = block.state_dict()
        block.load_state_dict(state, assign=True)
        blocks[name] = block.requires_grad_()
    return blocks


@torch.no_grad()
def fill(weight: Tensor):
    """Normal numbers over the square root of the contraction's length, repeated: quick, and as good as fresh ones to a kernel."""
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).to(weight.dtype) * weight.shape[-1] ** -0.5
    flat = weight.view(-1)
    for start in range(0, flat.shape[0], noise.shape[0]):
        part = flat[start : start + noise.shape[0]]
        part.copy_(noise[: part.shape[0]])


def experts_modules(shape: Shape, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """transformers' experts in BF16 (gpt-oss's where `shape.gpt_oss`), one per implementation; all share their weights."""
    from transformers import GptOssConfig, Qwen3MoeConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    modules, state = {}, None
    for name in names:
        options = dict(hidden_size=shape.dim, num_experts_per_tok=shape.top_k, experts_implementation=name)
        with torch.device("meta"):
            if shape.gpt_oss:
                config = GptOssConfig(num_local_experts=shape.num_experts, intermediate_size=shape.expert_dim, **options)
                module = GptOssExperts(config)
            else:
                config = Qwen3MoeConfig(num_experts=shape.num_experts, moe_intermediate_size=shape.expert_dim, **options)
                module = Qwen3MoeExperts(config)
        assert module.config._experts_implementation == name
        if state is None:
            state = {key: torch.empty(p.shape, dtype=torch.bfloat16) for key, p in module.state_dict().items()}
            for weight in state.values():
                fill(weight)
        module.load_state_dict(state, assign=True)
        modules[name] = module
    return modules


def forward_backward(block: nn.Module, x: Tensor, dy: Tensor):
    """One step of a block on (T, D) tokens: gradients of the tokens and of every parameter, which are dropped."""
    leaf = x.clone().requires_grad_()
    block(leaf[None])[0].backward(dy)
    for p in block.parameters():
        p.grad = None


def torchao_mxfp8(x: Tensor):
    """torchao's MXFP8 quantization, eager: (scales, values)."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    return to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)


def torchao_nvfp4(x: Tensor):
    """torchao's NVFP4 quantization, eager: (scales, values), under one global scale for the tensor."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    return nvfp4_quantize(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))


def torch_route(logits: Tensor, bias: Tensor, top_k: int):
    """Sigmoid router with a selection bias: (ids, weights, offs, permutation, inverse)."""
    scores = logits.sigmoid()
    ids = (scores + bias).topk(top_k).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    flat = ids.flatten()
    permutation = flat.argsort(stable=True)
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(flat.shape[0])
    return ids, weights, flat.bincount(minlength=logits.shape[1]).cumsum(0), permutation, inverse.view_as(ids)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return nn.functional.silu(gate) * up


def weighted_sum(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """unpermute of torch operators: (T, K, D) gathered, then a batched product with the weights."""
    gathered = rows[inverse.long().flatten()].view(*inverse.shape, -1)
    return torch.bmm(weights.to(rows.dtype).unsqueeze(1), gathered).squeeze(1)
