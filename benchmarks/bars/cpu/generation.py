"""Greedy generation by a Qwen3-MoE model of transformers, its experts ours (`mxmoe_nvfp4`) beside its own: tokens per second.

24 layers, D 1024, F 512, E 64, K 8, 16 heads over 4, vocabulary 32,768; a prompt of 128 tokens, 64 new ones, batch 1. Random
weights: the values do not matter here, each layer's lie in memory of their own.
"""

import time
from collections import defaultdict
from functools import partial

import torch
from torch import nn

from benchmarks import peers, timing
from benchmarks.bars.harness import Bar, Run

OURS = "mxmoe_nvfp4"
THEIRS = ("eager", "grouped_mm", "batched_mm")
PARTS = {"experts": "mlp.experts", "router": "mlp.gate", "attention": "self_attn", "head": "lm_head"}


def model_of(run: Run) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32_768, hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=2 if run.quick else 24, num_experts=64,
        num_experts_per_tok=8, num_attention_heads=16, num_key_value_heads=4, head_dim=64, norm_topk_prob=True,
        max_position_embeddings=512, dtype=torch.bfloat16, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    model = model.to_empty(device="cpu").bfloat16().requires_grad_(False).eval()
    for p in model.parameters():
        p.fill_(1) if p.ndim == 1 else peers.fill(p)
    rotary = model.model.rotary_emb  # its buffers were on "meta" too
    model.model.rotary_emb = type(rotary)(config)
    return model


def generate(model: nn.Module, implementation: str, new_tokens: int):
    model.set_experts_implementation(implementation)
    prompt = torch.arange(128)[None] * 37 % 32_768
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False)


def profile(model: nn.Module, implementation: str, new_tokens: int) -> str:
    """Where the time goes, e.g. 'mxmoe_nvfp4: experts 51 %, router 5 %, attention 30 %, head 6 %, rest 8 % of 12.3 ms a token'."""
    spent, started, hooks = defaultdict(float), {}, []

    def before(part, *_):
        started[part] = time.perf_counter()

    def after(part, *_):
        spent[part] += time.perf_counter() - started[part]

    for name, module in model.named_modules():
        for part, suffix in PARTS.items():
            if name.endswith(suffix):
                hooks += [
                    module.register_forward_pre_hook(partial(before, part)),
                    module.register_forward_hook(partial(after, part)),
                ]
    seconds = timing.once(lambda: generate(model, implementation, new_tokens))
    for hook in hooks:
        hook.remove()
    spent["rest"] = seconds - sum(spent.values())
    shares = ", ".join(f"{part} {100 * spent[part] / seconds:.0f} %" for part in (*PARTS, "rest"))
    return f"{implementation}: {shares} of {1e3 * seconds / new_tokens:.1f} ms a token"


@torch.no_grad()
def over_transformers(run: Run) -> float:
    from mxmoe.integrations.transformers import register

    register()
    model = model_of(run)
    calls = {name: partial(generate, model, name) for name in (OURS, *THEIRS)}
    calls[OURS](1)  # quantizes the experts
    best = timing.fastest({name: partial(calls[name], 4) for name in THEIRS})
    new_tokens = 8 if run.quick else 64
    measured = timing.speedup(partial(calls[OURS], new_tokens), partial(calls[best], new_tokens), 1 if run.quick else 5, warmup=0)
    for name in (OURS, best):
        run.note(profile(model, name, new_tokens))
    return measured


BARS = [
    Bar("generation, Qwen3-MoE 24 layers, mxmoe_nvfp4: over transformers", ">=", 1.5, "x tokens/s", over_transformers, kind="ratio")
]
