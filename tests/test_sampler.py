"""The built-in sampler against the model's own full forward pass, alone and in any company."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl.objective import token_log_probs
from rl.sampler import NO_EXPERT, Request, Sampler, uniform
from training.model import Model, ModelConfig


def config_of(recipe="fp32", deterministic=True):
    return ModelConfig(
        vocab_size=64, dim=32, num_layers=2, num_heads=2, dense_dim=64, num_experts=4, top_k=2, expert_dim=32, recipe=recipe,
        kv_lora_rank=16, qk_nope_dim=16, qk_rope_dim=16, v_dim=16, deterministic=deterministic,
    )  # fmt: skip


def wide_model(recipe="fp32", deterministic=True, seed=0):
    """Of random weights large enough that its distributions are far from flat."""
    model = Model(config_of(recipe, deterministic), seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6)
    return model


@pytest.fixture(scope="module")
def model():
    return wide_model()


def prompts(n, seed=0, shared=0):
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 64, shared).tolist()
    return [tuple(head + rng.integers(0, 64, rng.integers(1, 12)).tolist()) for _ in range(n)]


def alone(model, request, **options):
    sampler = Sampler(model, num_slots=1, capacity=64, **options)
    sampler.submit(request)
    (answer,) = sampler.run()
    return answer


def same(a, b):
    return (a.ids, a.log_probs, a.end) == (b.ids, b.log_probs, b.end) and np.array_equal(a.experts, b.experts)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_log_probs_are_the_learners_to_the_bit(recipe):
    model = wide_model(recipe)
    sampler = Sampler(model, num_slots=4, capacity=64, prefill_tokens=7)
    for i, prompt in enumerate(prompts(6, shared=5)):
        sampler.submit(Request(i, prompt, 12, temperature=0.7, sample=i))
    for answer in sampler.run():
        whole = torch.tensor([*answer.request.prompt, *answer.ids])
        with torch.no_grad():
            logits, routings = model(whole[None])
        start = len(answer.request.prompt) - 1
        expected = token_log_probs(logits[0, start:-1], whole[start + 1 :], 0.7)
        assert answer.log_probs == expected.tolist()
        experts = torch.stack([r.ids for r in routings], 1).numpy()
        assert np.array_equal(answer.experts[:-1], experts[:-1])
        assert (answer.experts[-1] == NO_EXPERT).all()


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_answer_does_not_depend_on_the_company(model, data):
    """Whatever is shared, kept, evicted, cut into parts, aborted and resumed."""
    slots, budget = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    sampler = Sampler(model, num_slots=slots, capacity=64, prefill_tokens=budget)
    pool = prompts(4, seed=data.draw(st.integers(0, 3)), shared=data.draw(st.integers(0, 10)))
    requests = {}
    for i in range(data.draw(st.integers(1, 9))):
        requests[i] = Request(i, data.draw(st.sampled_from(pool)), data.draw(st.integers(1, 8)), frozenset({3, 9}), 1.0, 5, i)
        sampler.submit(requests[i])
    answers, waiting = [], list(requests)
    while sampler.active:
        answers += sampler.step()
        going = [i for i in waiting if i not in {a.request.id for a in answers}]
        if going and data.draw(st.integers(0, 5)) == 0:
            name = data.draw(st.sampled_from(going))
            sampler.submit(requests[name], sampler.abort(name))
    assert sorted(a.request.id for a in answers) == waiting
    for answer in answers:
        assert same(answer, alone(model, answer.request))


def test_a_group_reads_its_prompt_once(model):
    prompt = tuple(range(20, 50))
    sampler = Sampler(model, num_slots=8, capacity=64)
    for i in range(8):
        sampler.submit(Request(i, prompt, 4, sample=i))
    answers = sampler.run()
    assert len({tuple(a.ids) for a in answers}) > 4
    assert sampler.read_tokens == 30 + 7 * 1 + 8 * 3  # the prompt, its last token for each other one, answers but for their last
    assert sampler.copied_tokens == 7 * 29


def test_the_next_turn_goes_on_from_the_cache(model):
    sampler = Sampler(model, num_slots=2, capacity=64)
    sampler.submit(Request("a", tuple(range(30)), 5, session="s"))
    (first,) = sampler.run()
    before = sampler.read_tokens
    following = Request("b", (*first.request.prompt, *first.ids, 7, 8), 5, session="s")
    sampler.submit(following)
    (second,) = sampler.run()
    assert sampler.read_tokens - before == 3 + 4
    assert same(second, alone(model, following))


def set_weights(model, other):
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("recompute", [False, True])
def test_a11_tokens_carry_the_version_that_chose_them(recompute):
    model, later = wide_model(seed=0), wide_model(seed=1)
    sampler = Sampler(model, num_slots=2, capacity=64, version=5, recompute=recompute)
    sampler.submit(Request(0, (1, 2, 3), 7))
    for _ in range(4):
        sampler.step()
    sampler.update(lambda: set_weights(model, later), 6)
    (answer,) = sampler.run()
    assert answer.versions == [5, 5, 5, 5, 6, 6, 6]
    assert min(answer.versions) == 5
    whole = torch.tensor([*answer.request.prompt, *answer.ids])
    with torch.no_grad():
        logits, _ = later(whole[None])
    expected = token_log_probs(logits[0, 6:-1], whole[7:])
    assert (answer.log_probs[4:] == expected.tolist()) == recompute  # kept: the cache is the old weights'


def test_what_old_weights_have_read_starts_nothing_new():
    model, later = wide_model(seed=0), wide_model(seed=1)
    sampler = Sampler(model, num_slots=4, capacity=64)
    prompt = tuple(range(10, 40))
    sampler.submit(Request(0, prompt, 2))
    sampler.run()
    sampler.update(lambda: set_weights(model, later), 1)
    before = sampler.read_tokens
    sampler.submit(Request(1, prompt, 2))
    (answer,) = sampler.run()
    assert sampler.read_tokens - before == 31
    assert same(answer, alone(later, Request(1, prompt, 2)))


def test_weights_that_cannot_be_applied_change_nothing(model):
    sampler = Sampler(model, num_slots=1, capacity=16, version=3)

    def fail():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        sampler.update(fail, 4)
    assert sampler.version == 3
    with pytest.raises(ValueError, match="version must not be less than 3, got 2"):
        sampler.update(lambda: None, 2)


def test_draws_follow_the_distribution(model):
    """Chi-square over 2,000 first tokens, by their expected counts."""
    n, prompt = 2000, (5, 6, 7)
    sampler = Sampler(model, num_slots=64, capacity=8)
    for i in range(n):
        sampler.submit(Request(i, prompt, 1, temperature=1.5, sample=i))
    counts = np.bincount([a.ids[0] for a in sampler.run()], minlength=64)
    with torch.no_grad():
        expected = n * torch.softmax(model(torch.tensor([prompt]))[0][0, -1].double() / 1.5, 0).numpy()
    often = expected >= 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum() - 1
    assert often.sum() >= 5
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)
    assert counts[~often].sum() <= 5 * max(expected[~often].sum(), 1)


def test_temperature_zero_takes_the_likeliest(model):
    answer = alone(model, Request(0, (1, 2), 6, temperature=0.0))
    whole = torch.tensor([1, 2, *answer.ids])
    with torch.no_grad():
        logits, _ = model(whole[None])
    assert answer.ids == logits[0, 1:-1].argmax(-1).tolist()


def test_draws_are_keyed():
    def draw(seed, sample, position):
        from rl.sampler import Answer

        return uniform(Answer(Request(0, (1,), 9, seed=seed, sample=sample), ids=[0] * position))

    keys = [(seed, sample, position) for seed in range(4) for sample in range(4) for position in range(4)]
    drawn = [draw(*key) for key in keys]
    assert drawn == [draw(*key) for key in keys]
    assert len(set(drawn)) == len(keys)


def test_errors(model):
    sampler = Sampler(model, num_slots=1, capacity=16)
    for request, message in [
        (Request(0, (), 1), "at least a token each"),
        (Request(0, (1,), 0), "at least a token each"),
        (Request(0, (1,) * 10, 7), "16 together, got 10 and 7"),
        (Request(0, (64,), 1), "ids from 0 to 63, got 64 to 64"),
        (Request(0, (-1,), 1), "ids from 0 to 63"),
        (Request(0, (1,), 1, temperature=-1.0), "temperature must not be negative"),
        (Request(0, (1,), 1, temperature=float("nan")), "temperature must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            sampler.submit(request)
    sampler.submit(Request(0, (1,), 3))
    with pytest.raises(ValueError, match="request 0 is under way already"):
        sampler.submit(Request(0, (1,), 3))
    with pytest.raises(KeyError):
        sampler.abort(1)
    partial = sampler.abort(0)
    with pytest.raises(ValueError, match="so_far must be an answer to the same prompt"):
        sampler.submit(Request(0, (2,), 3), partial)
    assert sampler.step() == []
    with pytest.raises(ValueError, match="prefill_tokens must be at least 1"):
        Sampler(model, num_slots=1, capacity=16, prefill_tokens=0)


def test_w07_new_weights_do_not_wait_for_requests():
    """Two under way and five queued: the update is done at once, and all seven end, those that were queued on the new weights."""
    model, later = wide_model(seed=0), wide_model(seed=1)
    sampler = Sampler(model, num_slots=2, capacity=64, version=1)
    for i in range(7):
        sampler.submit(Request(i, (10 + i, 2, 3), 5, sample=i))
    sampler.step()
    assert (sampler.active, len(sampler.waiting)) == (7, 5)
    sampler.update(lambda: set_weights(model, later), 2)
    answers = {answer.request.id: answer for answer in sampler.run()}
    assert [answers[i].versions for i in range(7)] == [[1, 2, 2, 2, 2]] * 2 + [[2] * 5] * 5
