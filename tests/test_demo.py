"""The demo's base: made once and as a whole, from demonstrations that real sandboxes would have given."""

import json
import random
from dataclasses import replace

import pytest
import torch

from rl.demo.base import load_base, make_base, tasks
from rl.demo.expert import TOOLS, demonstration
from rl.demo.recipe import BaseRecipe, Demonstrations
from rl.environments import open_backend
from rl.environments.sandbox import SandboxSpec
from rl.harness.session import Session
from rl.tasks.workspace import WORKSPACE

MINUTE = BaseRecipe(
    vocab_size=300, dim=32, num_layers=2, num_heads=2, num_experts=4, expert_dim=16, kv_lora_rank=16, num_modules=40,
    num_demonstrations=40, pretrain_steps=3, sft_steps=3, batch_tokens=512, warmup_steps=1, max_length=1024,
)  # fmt: skip


def test_a_base_is_made_once_and_is_its_seed(tmp_path):
    told = []
    path = make_base(tmp_path, MINUTE, on_progress=lambda *what: told.append(what))
    assert [(name, done, steps) for name, done, steps, _ in told] == [
        *((name, done, 6) for name, done in zip(["pretraining"] * 3 + ["demonstrations"] * 3, range(1, 7), strict=True))
    ]
    assert make_base(tmp_path, MINUTE, on_progress=lambda *_: pytest.fail("made again")) == path
    again, other = make_base(tmp_path / "b", MINUTE), make_base(tmp_path, MINUTE, seed=1)
    assert again.name == path.name != other.name != make_base(tmp_path, replace(MINUTE, lr=1e-3)).name
    (model, words, recipe), (same, _, _) = load_base(path), load_base(again)
    assert (recipe, words.size) == (MINUTE, 300)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), same.state_dict().values(), strict=True))
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".")} == set()


def test_a_base_that_fails_leaves_nothing(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_base(tmp_path, MINUTE, on_progress=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        load_base(tmp_path)


def test_demonstrations_are_what_a_sandbox_would_say():
    """The rehearsal's answers are those of the same calls in a directory of real processes."""
    ways = Demonstrations(quits=0.1, careless=0.3)
    with open_backend("subprocess", allow="all") as backend:
        for seed, task in enumerate(tasks(MINUTE, 500, 12)):
            talk = demonstration(task, random.Random(seed), ways)
            with backend.create(SandboxSpec(workdir="/")) as sandbox:
                for path, data in task.files.items():
                    if path.startswith(WORKSPACE):
                        sandbox.write(f"/workspace/{path.removeprefix(WORKSPACE)}", data)
                session = Session(sandbox)
                for said, gave in zip(talk[1::2], talk[2::2], strict=True):
                    function = said["tool_calls"][0]["function"]
                    assert TOOLS.call(session, function["name"], function["arguments"]).text == gave["content"]


def test_experts_behave_in_the_shares_that_are_asked_for():
    made = list(tasks(MINUTE, 0, 300))

    def names(ways):
        talks = [demonstration(task, random.Random(i), ways) for i, task in enumerate(made)]
        return [[m["tool_calls"][0]["function"]["name"] for m in talk if m["role"] == "assistant"] for talk in talks]

    assert all(calls == ["read_file", "finish"] for calls in names(Demonstrations(quits=1.0)))
    hasty = names(Demonstrations(quits=0.0, careless=1.0))
    assert all(calls == ["read_file", "edit_line", "finish"] for calls in hasty)
    careful = names(Demonstrations(quits=0.0, careless=0.0, mistakes=0.0))
    assert all(calls == ["read_file", "edit_line", "run_check", "finish"] for calls in careful)
    clumsy = names(Demonstrations(quits=0.0, careless=0.0, mistakes=1.0, attempts=3, gives_up=0.0))
    assert all(calls[-1] == "finish" and calls.count("edit_line") in (1, 2, 3, 4) for calls in clumsy)
    assert sum(calls.count("edit_line") == 3 for calls in clumsy) > 150


def test_every_careful_demonstration_without_mistakes_passes_its_check():
    for seed, task in enumerate(tasks(MINUTE, 900, 60, "heldout")):
        talk = demonstration(task, random.Random(seed), Demonstrations(quits=0.0, careless=0.0, mistakes=0.0))
        assert talk[-3]["content"] == "ok", json.dumps(talk, indent=1)
