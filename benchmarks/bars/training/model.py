"""The model beside transformers' own on the same random weights, of the tiny preset's sizes; and its deterministic mode."""

import copy
import tempfile
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.bars.harness import Bar, Run
from tests.deterministic_cases import alone, differing_bytes, documents
from tests.model_cases import KIMI_YARN, SMALL_HF, SMALL_QWEN, TINY_HF, TINY_QWEN, hf_model, model_like
from training.hf import export, state_to_hf
from training.model import KVCache

BATCHES, ROWS, LENGTH = 8, 2, 128
SPLITS = 50
FAMILIES = {"DeepSeek-V3": TINY_HF, "Qwen3-MoE": TINY_QWEN}
VARIANTS = {
    "DeepSeek-V3": [{}, dict(rope_parameters=KIMI_YARN), dict(n_group=8, topk_group=4), dict(q_lora_rank=None, n_shared_experts=2)],
    "Qwen3-MoE": [{}, dict(rope_parameters=KIMI_YARN), dict(norm_topk_prob=False), dict(decoder_sparse_step=2)],
}
DETERMINISTIC = [SMALL_HF | dict(rope_parameters=KIMI_YARN, n_group=4, topk_group=2), SMALL_QWEN]


def pairs(family: str, run: Run):
    """(theirs, ours, token ids) of every variant, FP32."""
    for variant in VARIANTS[family][: 1 if run.quick else None]:
        theirs = hf_model(**FAMILIES[family] | variant)
        ours = model_like(theirs)
        for seed in range(run.count(BATCHES)):
            yield theirs, ours, torch.randint(8192, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def total(family: str, run: Run) -> int:
    return run.count(BATCHES) * (1 if run.quick else len(VARIANTS[family]))


@torch.no_grad()
def logits(family: str, run: Run) -> float:
    """Largest |difference| of logits."""
    worst = 0.0
    for theirs, ours, ids in run.steps(pairs(family, run), total(family, run)):
        expected = theirs(ids).logits
        assert expected.std() > 0.1, expected.std()  # a model whose logits are all near zero would prove nothing
        worst = max(worst, float((ours(ids)[0] - expected).abs().max()))
    return worst


def gradients(family: str, run: Run) -> float:
    """Largest |difference| of a parameter's gradient over its largest |element|, of the mean cross-entropy."""
    worst = 0.0
    for theirs, ours, ids in run.steps(pairs(family, run), total(family, run)):
        for model, values in ((theirs, theirs(ids).logits), (ours, ours(ids)[0])):
            model.zero_grad()
            F.cross_entropy(values.flatten(0, 1), ids.roll(-1).flatten()).backward()
        found = state_to_hf({name: p.grad for name, p in ours.named_parameters()})
        for name, p in theirs.named_parameters():
            worst = max(worst, float((found[name] - p.grad).abs().max() / p.grad.abs().max()))
    return worst


@torch.no_grad()
def decoding(family: str, run: Run) -> float:
    """Largest |difference| of logits of a prompt and single tokens through the cache from those of the whole."""
    worst = 0.0
    for theirs, ours, ids in run.steps(pairs(family, run), total(family, run)):
        expected, prompt = theirs(ids).logits, int(ids[0, 0]) % (LENGTH // 2) + 1
        cache = KVCache(ours.config, ROWS, LENGTH)
        slots = [cache.allocate() for _ in range(ROWS)]
        steps = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
        got = torch.cat([ours(step.contiguous(), cache=cache, slots=slots)[0] for step in steps], dim=1)
        worst = max(worst, float((got - expected).abs().max()))
    return worst


@torch.no_grad()
def bf16_error(family: str, run: Run) -> float:
    """Root mean square error of BF16 logits against FP32 ones of the same BF16 weights, over transformers' error."""
    theirs = hf_model(**FAMILIES[family]).bfloat16()
    ours, exact = model_like(theirs, "bf16").bfloat16(), copy.deepcopy(theirs).float()
    errors = torch.zeros(2)
    for seed in run.steps(range(run.count(BATCHES))):
        ids = torch.randint(8192, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
        truth = exact(ids).logits
        errors += torch.stack([(values.float() - truth).square().sum() for values in (ours(ids)[0], theirs(ids).logits)])
    return float((errors[0] / errors[1]).sqrt())


@torch.no_grad()
def exported(family: str, run: Run) -> float:
    """Logits that change by `export` and `from_pretrained`, FP32."""
    from transformers import AutoModelForCausalLM

    changed = 0
    for variant in run.steps(VARIANTS[family]):
        theirs = hf_model(**FAMILIES[family] | variant)
        ids = torch.randint(8192, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        with tempfile.TemporaryDirectory() as directory:
            path = export(model_like(theirs), f"{directory}/out", torch.float32)
            read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            changed += int((read(ids).logits != theirs(ids).logits).sum())
    return changed


def company(recipe: str, run: Run) -> float:
    """Bytes of logits that differ from those of the document alone, over random splits into batches, packings, prefill, decode."""
    differing, splits = 0, range(run.count(SPLITS, least=2))
    models = [model_like(hf_model(**config), recipe, deterministic=True) for config in DETERMINISTIC]
    docs = documents(SMALL_HF["vocab_size"])
    expected = [alone(model, docs) for model in models]
    for seed in run.steps(splits):
        differing += sum(differing_bytes(m, docs, values, seed) for m, values in zip(models, expected, strict=True))
    return differing


BARS = [
    *(
        Bar(f"{family}: {what}", "<=", bound, unit, partial(measure, family))
        for family in FAMILIES
        for what, bound, unit, measure in (
            ("FP32 logits = transformers", 1e-5, "largest difference", logits),
            ("FP32 gradients = transformers", 1e-4, "of the largest", gradients),
            ("decoding = full forward", 1e-5, "largest difference", decoding),
            ("BF16 error / transformers' BF16 error", 1.1, "x", bf16_error),
            ("export read by transformers", 0, "changed logits", exported),
        )
    ),
    *(
        Bar(f"deterministic mode {recipe}: {SPLITS} splits", "<=", 0, "differing bytes", partial(company, recipe))
        for recipe in ("fp32", "bf16", "mxfp8", "nvfp4")
    ),
]
