"""Log-probabilities of the sampler against the learner's, of the same tokens."""

import copy
from functools import partial

import numpy as np

from benchmarks.bars.harness import Bar, Run
from rl.sampler import Request, Sampler
from tests.test_learner import groups_of, learner_of
from tests.test_sampler import wide_model

SAMPLES = 64


def largest_difference(recipe: str, deterministic: bool, run: Run) -> float:
    """|log ratio|, the largest of any token: prompts shared, batches mixed, packed anew by the learner, experts replayed."""
    model = wide_model(recipe, deterministic)
    rng = np.random.default_rng(0)
    head = rng.integers(0, 64, 12).tolist()
    sampler = Sampler(model, num_slots=16, capacity=96, prefill_tokens=40)
    count = run.count(SAMPLES, 8)
    for i in range(count):
        prompt = (*head, *rng.integers(0, 64, 1 + i % 7).tolist())
        sampler.submit(Request(i, prompt, 8 + i % 40, temperature=0.9, sample=i))
    answers = sorted(sampler.run(), key=lambda answer: answer.request.id)
    learner, _ = learner_of(copy.deepcopy(model), micro_tokens=300)
    report = learner.step(groups_of(answers, [float(i % 3 == 0) for i in range(count)]))
    run.note(f"{report.tokens} tokens, mismatch {report.mismatch:.1e}")
    return report.largest_log_ratio


def mismatch(run: Run) -> float:
    """Mean of r - 1 - log r."""
    model = wide_model("fp32", deterministic=False)
    sampler = Sampler(model, num_slots=16, capacity=96, prefill_tokens=40)
    for i in range(run.count(SAMPLES, 8)):
        sampler.submit(Request(i, tuple(range(1, 4 + i % 5)), 8 + i % 40, temperature=0.9, sample=i))
    answers = sorted(sampler.run(), key=lambda answer: answer.request.id)
    learner, _ = learner_of(copy.deepcopy(model), micro_tokens=300)
    report = learner.step(groups_of(answers, [float(i % 3 == 0) for i in range(len(answers))]))
    run.note(f"largest |log ratio| {report.largest_log_ratio:.1e}")
    return report.mismatch


BARS = [
    *(
        Bar(f"parity in deterministic mode, {recipe}", "<=", 0, "of the log ratio", partial(largest_difference, recipe, True))
        for recipe in ("bf16", "mxfp8", "nvfp4")
    ),
    Bar("parity in FP32 with replay, other batches", "<", 1e-6, "mismatch", mismatch),
]
