"""The training loop: steps, checkpoints, resuming, signals, the programs."""

import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from training.__main__ import main
from training.checkpoint import Checkpoints
from training.config import PRESETS, Config, field_help
from training.metrics import Metrics, read_metrics
from training.optimizer import Muon, guarded_step, learning_rate, make_optimizer, orthogonalized
from training.report import smooth, table
from training.step import forward_backward, max_violation
from training.train import IGNORE, Trainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A small real corpus: some modules of the standard library, by symbolic link."""
    root = tmp_path_factory.mktemp("corpus")
    for module in ("argparse", "ast", "csv", "difflib", "heapq", "pdb", "shutil", "tarfile", "typing", "zipfile"):
        source = Path(sysconfig.get_path("stdlib"), module + ".py")
        if source.exists():  # zipfile is a package in newer versions
            (root / source.name).symlink_to(source)
    return root


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def config(corpus, cache_dir, tmp_path):
    paths = dict(run_dir=str(tmp_path / "run"), corpus=str(corpus), cache_dir=str(cache_dir))
    return Config(**PRESETS["micro"] | paths | {"recipe": "bf16", "lr": 5e-3})


def options(config, **changes) -> list[str]:
    """The command line of a configuration."""
    values = dict(preset="micro", run_dir=config.run_dir, corpus=config.corpus, cache_dir=config.cache_dir) | changes
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def assert_same_state(a, b):
    """Bitwise, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds", "config"}:
            assert_same_state(a[key], b[key])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same_state(x, y)
    else:
        assert a == b


class Table(nn.Module):
    """The smallest model: row `id` of a table is the logits. It has no experts."""

    def __init__(self, logits: list[list[float]]):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, ids):
        return self.logits[ids], []


# --- one step --------------------------------------------------------------------------------------------------------


def test_t05_learning_rate_of_a_cosine():
    rates = [learning_rate(step, 1e-3, 0, 1000) for step in (0, 400, 401, 800, 1000)]
    assert rates == pytest.approx([1e-3, 6.545085e-4, 6.530138e-4, 9.549150e-5, 0.0], rel=1e-6)


def test_learning_rate_warms_up_and_never_rises_again():
    rates = [learning_rate(step, 1.0, 10, 100) for step in range(120)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] == 0.0


def test_t11_loss_is_the_mean_over_all_tokens():
    log_odds = torch.tensor(4.0).expm1().log().item()  # cross-entropy of [0, log_odds] for target 0 is log(1 + e^x) = 4
    model = Table([[0.0, log_odds], [0.0, -1e4]])
    one_token = (torch.tensor([[0]]), torch.tensor([[0]]))
    three_tokens = (torch.tensor([[1, 1, 1]]), torch.tensor([[0, 0, 0]]))
    loss, _ = forward_backward(model, [one_token, three_tokens])
    assert loss == pytest.approx(1.0)
    accumulated = model.logits.grad.clone()
    model.zero_grad()
    logits = model(torch.tensor([0, 1, 1, 1]))[0]
    F.cross_entropy(logits, torch.zeros(4, dtype=torch.long)).backward()
    torch.testing.assert_close(accumulated, model.logits.grad)


def test_t11_accumulated_gradients_equal_one_big_batch(config):
    trainer = Trainer(replace(config, recipe="fp32"))
    ids, targets, _ = trainer.data.next_batch(4)
    targets[0, 5:] = IGNORE
    whole, loads = forward_backward(trainer.model, [(ids, targets)])
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    pieces = [(ids[:1], targets[:1]), (ids[1:], targets[1:])]
    total, summed = forward_backward(trainer.model, pieces)
    assert total == pytest.approx(whole, rel=1e-6)
    assert_same_state(summed, loads)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_balance_loss_reaches_the_router_in_proportion(config):
    trainer = Trainer(replace(config, recipe="fp32"))
    batch = trainer.data.next_batch(4)
    router = trainer.model.moe_layers[0].router
    grads = []
    for weight in (0.0, 1.0, 2.0):
        trainer.model.zero_grad()
        forward_backward(trainer.model, [batch], balance_loss=weight)
        grads.append(router.grad.clone())
    assert (grads[1] - grads[0]).abs().max() > 1e-4
    torch.testing.assert_close(grads[2] - grads[0], 2 * (grads[1] - grads[0]), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_t13_step_with_a_bad_gradient_changes_nothing(config, bad):
    trainer = Trainer(config)
    trainer.train_step()
    before = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    moments = [v.clone() for s in trainer.optimizer.state.values() for v in s.values()]
    handle = trainer.model.lm_head.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), bad))
    values = trainer.train_step()
    assert (values["skipped"], trainer.step) == (1, 2)
    assert_same_state(dict(trainer.model.state_dict()), before)  # parameters and selection biases
    assert_same_state([v for s in trainer.optimizer.state.values() for v in s.values()], moments)
    handle.remove()
    values = trainer.train_step()
    assert values["skipped"] == 1
    assert values["lr"] == learning_rate(2, config.lr, config.warmup_steps, config.steps)  # the schedule went on
    assert not torch.equal(trainer.model.lm_head.weight, before["lm_head.weight"])


def test_t15_small_updates_are_not_lost():
    """Parameters are their own FP32 master weights: a thousand steps of -0.001 from 1 end at 0."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4, bias=False))
    optimizer = make_optimizer(model, weight_decay=0.0)
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        nn.init.ones_(parameter)
    for _ in range(1000):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert guarded_step(optimizer, lr=1e-3, clip_norm=math.inf)[1]
    assert all(parameter.abs().max() < 1e-3 for parameter in model.parameters())


def test_t09_the_norm_is_that_of_all_gradients_together():
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
    for parameter, squared in zip(model, (8.0, 12.0, 40.0, 60.0), strict=True):
        parameter.grad = torch.full((2,), (squared / 2) ** 0.5)
    norm, _ = guarded_step(torch.optim.SGD(model.parameters(), lr=1.0), lr=1.0, clip_norm=1.0)
    assert float(norm) == pytest.approx(120**0.5)
    steps = torch.cat([parameter.detach() for parameter in model])
    assert float(steps.norm()) == pytest.approx(1.0)
    torch.testing.assert_close(steps[6] / steps[0], torch.tensor(7.5**0.5))  # one factor for all


def test_gradient_is_clipped_and_the_norm_is_the_one_before():
    model = Table([[3.0, 4.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.logits.grad = torch.tensor([[30.0, 40.0]])
    norm, stepped = guarded_step(optimizer, lr=1.0, clip_norm=1.0)
    assert (float(norm), stepped) == (50.0, True)
    torch.testing.assert_close(model.logits.detach(), torch.tensor([[3.0 - 0.6, 4.0 - 0.8]]))
    assert model.logits.grad is None


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (3, 16, 24)])
def test_muon_is_torchs_on_matrices_and_takes_stacks_of_them(shape):
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(shape, generator=generator))
    theirs = [nn.Parameter(m.clone()) for m in p.detach().reshape(-1, *shape[-2:])]
    ours = Muon([p], lr=0.1)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        p.grad = torch.randn(shape, generator=generator)
        for q, gradient in zip(theirs, p.grad.reshape(-1, *shape[-2:]), strict=True):
            q.grad = gradient
        ours.step()
        reference.step()
    torch.testing.assert_close(
        p.detach(), torch.stack(list(theirs)).detach().view(shape), atol=0.02, rtol=0
    )  # its iteration is BF16
    singular = torch.linalg.svdvals(orthogonalized(p.grad))
    assert 0.3 < float(singular.min()) <= float(singular.max()) < 1.3


def test_muon_takes_no_vectors():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"matrices and stacks of them, got a parameter of shape \(3,\)"):
        Muon([p]).step()


def test_norms_do_not_decay(config):
    trainer = Trainer(config)
    matrices, vectors = make_optimizer(trainer.model, 0.1).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    norms = [p for name, p in trainer.model.named_parameters() if "norm" in name]
    assert {id(p) for p in vectors["params"]} == {id(p) for p in norms}


def test_selection_bias_moves_against_the_load(config):
    trainer = Trainer(replace(config, bias_speed=0.5))
    layer = trainer.model.moe_layers[0]
    layer.selection_bias.copy_(torch.tensor([10.0, 0.0, 0.0, 0.0]))  # every token takes expert 0
    trainer.train_step()
    assert layer.selection_bias[0] < 10.0
    assert layer.selection_bias[1:].max() > 0.0


def test_max_violation():
    assert max_violation([torch.tensor([2, 2, 2, 2])]) == 0.0
    assert max_violation([torch.tensor([4, 0]), torch.tensor([3, 1])]) == pytest.approx((1.0 + 0.5) / 2)


# --- runs and resuming -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4"])
def test_training_lowers_the_held_out_loss(config, recipe):
    trainer = Trainer.start(replace(config, recipe=recipe, steps=40))
    before = trainer.evaluate()["heldout_loss"]
    assert trainer.run("") == 0
    result = json.loads((trainer.run_dir / "result.json").read_text())
    assert result["heldout_loss"] < before - 0.5
    assert result["skipped"] == 0
    records = read_metrics(trainer.run_dir / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 41))
    assert [r["step"] for r in records if "heldout_loss" in r] == [10, 20, 30, 40]
    assert list((trainer.run_dir / "tensorboard").glob("events*"))
    assert [path.name for path in trainer.checkpoints.paths()] == ["step-00000040"]


@pytest.mark.parametrize("stop_at", [7, 10])
def test_t05_t07_resumed_run_equals_the_uninterrupted_one(config, stop_at):
    whole = Trainer.start(config)
    assert whole.run("") == 0
    parts = replace(config, run_dir=config.run_dir + "-parts")
    first = Trainer.start(parts)
    for _ in range(stop_at):
        first.train_step()
    first.save()
    torch.manual_seed(99)  # the process that resumes has another generator state
    second = Trainer.resume(parts.run_dir)
    assert_same_state(second.state_dict(), first.state_dict())
    groups = second.optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [config.weight_decay, 0.0]
    assert groups[0]["lr"] == learning_rate(stop_at - 1, config.lr, config.warmup_steps, config.steps)
    assert second.train_step()["lr"] == learning_rate(stop_at, config.lr, config.warmup_steps, config.steps)
    assert second.run("") == 0
    assert_same_state(second.state_dict(), whole.state_dict())


def test_t07_weight_decay_and_schedule_come_from_the_checkpoint_unless_given(config):
    trainer = Trainer.start(replace(config, weight_decay=0.3))
    trainer.train_step()
    trainer.save()
    assert Trainer.resume(config.run_dir).optimizer.param_groups[0]["weight_decay"] == 0.3
    changed = Trainer.resume(config.run_dir, {"weight_decay": 0.01, "steps": 50})
    assert [g["weight_decay"] for g in changed.optimizer.param_groups] == [0.01, 0.0]
    assert changed.config.steps == 50


def test_resume_refuses_to_change_what_the_state_depends_on(config):
    trainer = Trainer.start(config)
    trainer.save()
    with pytest.raises(ValueError, match=r"keeps its dim \(64\), got 128"):
        Trainer.resume(config.run_dir, {"dim": 128})
    with pytest.raises(ValueError, match="seed"):
        Trainer.resume(config.run_dir, {"seed": 1})


def test_resume_refuses_another_corpus(config, corpus, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_text(path.read_text())
    trainer = Trainer.start(replace(config, corpus=str(copy)))
    trainer.save()
    next(iter(copy.iterdir())).write_text("x = 1\n" * 500)
    with pytest.raises(ValueError, match="corpus changed"):
        Trainer.resume(config.run_dir)


def test_metrics_of_steps_that_run_again_are_dropped(tmp_path):
    metrics = Metrics(tmp_path, 0)
    for step in range(1, 6):
        metrics.log(step, loss=float("nan") if step == 2 else 1.0 / step)
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # cut short by a crash
    Metrics(tmp_path, 3).close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [1, 2, 3]
    assert records[1]["loss"] is None


# --- the programs ----------------------------------------------------------------------------------------------------


def test_unwritable_run_directory_is_reported_before_anything_else(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["run", *options(config, run_dir=tmp_path / "file" / "run", cache_dir=tmp_path / "new-cache")]) == 2
    assert f"run directory {tmp_path / 'file' / 'run'} cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "new-cache").exists()


def test_a_run_is_neither_overwritten_nor_resumed_by_accident(config, capsys):
    run = ["run", *options(config, recipe="bf16", steps=2)]
    assert main([*run, "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert main(run) == 0
    assert main(run) == 2
    assert "--resume or replace it with --overwrite" in capsys.readouterr().err
    assert main([*run[:-1], "4", "--resume"]) == 0
    assert json.loads(Path(config.run_dir, "result.json").read_text())["steps"] == 4
    assert main([*run, "--overwrite", "--seq-len", "1000000"]) == 2
    assert Checkpoints(Path(config.run_dir, "checkpoints")).load()["step"] == 4  # a mistake cost nothing
    assert main([*run, "--overwrite"]) == 0
    assert [r["step"] for r in read_metrics(Path(config.run_dir, "metrics.jsonl")) if "loss" in r] == [1, 2]


def start(config, *arguments: str) -> subprocess.Popen:
    """The program in a process of its own; returns once two steps are recorded."""
    process = subprocess.Popen(
        [sys.executable, "-m", "training", *arguments],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    run_dir = Path(config.run_dir)
    deadline = time.monotonic() + 120
    while not any(p.read_text().count("\n") >= 2 for p in run_dir.rglob("metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_a_checkpoint_that_resumes(config, number):
    process = start(config, "run", *options(config, recipe="bf16", steps=100000))
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert f"-m training run --resume --run-dir {config.run_dir}" in out
    resumed = Trainer.resume(config.run_dir)
    assert resumed.step >= 2
    assert f"stopped at step {resumed.step} of 100000" in out
    assert [r["step"] for r in read_metrics(resumed.run_dir / "metrics.jsonl") if "loss" in r][-1] == resumed.step
    step = resumed.step
    assert main(["run", "--resume", "--run-dir", config.run_dir, "--steps", str(step + 2)]) == 0
    records = read_metrics(resumed.run_dir / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, step + 3))


def test_demo_compares_recipes_and_resumes_after_ctrl_c(config, capsys):
    demo = ["demo", *options(config, steps=30), "--recipes", "bf16", "nvfp4"]
    process = start(config, *demo)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert f"-m training demo --resume --run-dir {config.run_dir}" in out
    run_dir = Path(config.run_dir)
    assert (run_dir / "loss.png").exists()
    assert main(demo) == 2
    assert main(["demo", "--resume", "--run-dir", config.run_dir]) == 0
    printed = capsys.readouterr().out
    for word in ("recipe", "held-out loss", "tokens/s", "MoE forward ms", "MoE backward ms", "max violation", "nvfp4"):
        assert word in printed
    results = json.loads((run_dir / "results.json").read_text())
    assert [(r["recipe"], r["steps"]) for r in results] == [("bf16", 30), ("nvfp4", 30)]
    records = read_metrics(run_dir / "metrics.jsonl")
    for recipe in ("bf16", "nvfp4"):
        assert [r["step"] for r in records if r["recipe"] == recipe and "loss" in r] == list(range(1, 31))
    assert (run_dir / "loss.png").stat().st_size > 10000


def test_minutes_choose_the_steps(config):
    demo = ["demo", *options(config, eval_windows=1), "--recipes", "bf16", "--minutes", "0.01"]
    assert main(demo) == 0
    assert json.loads(Path(config.run_dir, "demo.json").read_text())["config"]["steps"] >= 1


def test_every_option_has_a_help_text(capsys):
    assert field_help().keys() == Config.__dataclass_fields__.keys()
    assert len(field_help()) <= 25
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    assert "--bias-speed FLOAT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(recipe="fp8"), "recipe must be one of"),
        (dict(top_k=9, num_experts=8), "top_k must be at most num_experts, got 9 and 8"),
        (dict(steps=0), "steps must be at least 1, got 0"),
        (dict(dim=100), "multiple of 4"),
        (dict(lr=float("nan")), "lr must be a finite number of at least 0, got nan"),
        (dict(weight_decay=-0.1), "weight_decay must be a finite number"),
        (dict(clip_norm=0.0), "clip_norm must be greater than 0"),
        (dict(seed=2**63), r"seed below 2\*\*63"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


@pytest.mark.parametrize("minutes", ["-1", "0", "nan", "inf"])
def test_impossible_minutes_are_refused(minutes, tmp_path, capsys):
    assert main(["demo", "--preset", "micro", "--run-dir", str(tmp_path), "--minutes", minutes]) == 2
    assert "minutes must be greater than 0" in capsys.readouterr().err


def test_table_and_smoothing():
    results = [
        dict(recipe="bf16", heldout_loss=5.0, tokens_per_s=1234.5, moe_forward_ms=1.0, heldout_max_violation=0.5),
        dict(recipe="nvfp4", heldout_loss=5.05, tokens_per_s=1000.0, moe_forward_ms=2.0, heldout_max_violation=0.25),
    ]
    lines = table(results).splitlines()
    assert lines[0].split("  ")[-1] == "max violation"
    assert "+1.00 %" in lines[2]
    assert len({len(line) for line in lines}) == 1
    assert smooth([1.0] * 100) == [1.0] * 100
    assert smooth(list(range(100)))[:96] == pytest.approx(list(range(96)))
