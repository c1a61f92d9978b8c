"""The model: the text architecture of DeepSeek-V3 and Kimi-K2, and that of Qwen3-MoE.

    x = embed(ids);  per layer: x += attention(norm(x)); x += mlp(norm(x));  logits = lm_head(norm(x))

| | DeepSeek-V3, Kimi-K2 | Qwen3-MoE |
|---|---|---|
| attention | latent (MLA), rotary part apart | grouped-query, normed queries and keys |
| router | sigmoid, a bias that balances the load without a loss, groups | softmax |
| experts | routed and shared, the first layers dense | routed |

Parameters are FP32 or BF16; the recipe chooses the arithmetic: `fp32` computes everything in FP32, all others run the dense GEMMs
and the attention in BF16 (autocast), the experts as the recipe says, norms, router and residual in FP32. One definition trains and
samples: packed documents (`positions`), a cache (`KVCache`), and a deterministic mode in which a token's logits are the same bytes
alone, in any batch, packed, prefilled or decoded.

Sources: DeepSeek-V2 (arXiv 2405.04434) for MLA, DeepSeek-V3 (arXiv 2412.19437) for the router, Qwen3 (arXiv 2505.09388);
`training/hf.py` reads and writes Hugging Face checkpoints. Left out: multi-token prediction, attention biases, sliding windows.

| file | what |
|---|---|
| `config.py` | `ModelConfig`, `Yarn` |
| `model.py` | `Model`: embedding, layers, head; roles of its parameters |
| `layers.py` | projections, norms, SwiGLU, experts |
| `attention.py` | MLA and GQA |
| `attend.py` | softmax attention, ordinary and deterministic |
| `sequences.py` | which tokens see which |
| `rotary.py` | position |
| `cache.py` | `KVCache` |
"""

from training.model.cache import KVCache
from training.model.config import ModelConfig, Yarn
from training.model.model import ROLES, Model, parameter_roles

__all__ = ["ROLES", "KVCache", "Model", "ModelConfig", "Yarn", "parameter_roles"]
