"""One training run: data in, metrics and checkpoints out, exactly resumable.

A step: `accumulation` micro-batches, the loss is the mean over all their tokens; the gradient is clipped; AdamW steps;
the selection biases of the routers move towards balance. A step whose gradient is not finite changes neither
parameters nor biases; its data and its place in the learning-rate schedule are used up, and it is counted in
`skipped`.
"""

import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import mxmoe
from mxmoe.routing import Routing
from training.checkpoint import Checkpoints
from training.config import CHANGEABLE, Config
from training.data import Windows, batch, load_tokens
from training.metrics import Metrics
from training.model import Model
from training.optimizer import guarded_step, learning_rate, make_optimizer

IGNORE = -100  # target of a position without loss
BAR = "{desc:>6} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {remaining} left{postfix}"


class StopRequest:
    """While entered, SIGINT and SIGTERM set `signal` instead of ending the process; a second one ends it as usual."""

    def __init__(self):
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        on_main = threading.current_thread() is threading.main_thread()
        self._previous = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)} if on_main else {}
        return self

    def _receive(self, number: int, frame) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *exception) -> None:
        self._restore()


def loss_sum(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, list[Routing]]:
    """Cross-entropy in nats, FP32, summed over the targets that are not IGNORE."""
    logits, routings = model(ids)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"), routings


def forward_backward(
    model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]], balance_loss: float = 0.0
) -> tuple[float, list[Tensor]]:
    """Accumulates the gradient of the mean loss over all tokens of the micro-batches (not the mean of their means).

    Returns that mean and the load (rows per expert) of every MoE layer.
    """
    num_tokens = [int((targets != IGNORE).sum()) for _, targets in micro_batches]
    total, loads = 0.0, None
    for (ids, targets), tokens in zip(micro_batches, num_tokens, strict=True):
        loss, routings = loss_sum(model, ids, targets)
        loss = loss / sum(num_tokens)
        total += float(loss.detach())
        if balance_loss:
            share = balance_loss * tokens / sum(num_tokens)
            loss = loss + share * sum(routing.load_balance_loss() for routing in routings)
        loss.backward()
        counts = [routing.counts for routing in routings]
        loads = counts if loads is None else [a + b for a, b in zip(loads, counts, strict=True)]
    return total, loads


def max_violation(loads: Iterable[Tensor]) -> float:
    """How much more than its fair share the busiest expert gets: max / mean - 1, averaged over layers (0 is
    balanced)."""
    violations = [float(load.max() / load.float().mean()) - 1.0 for load in loads]
    return sum(violations) / len(violations)


def prepare_run_dir(run_dir: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Makes the directory and proves that it can be written, before any time is spent.

    FileExistsError where it holds a run and neither `resume` nor `overwrite` is given; FileNotFoundError where there
    is nothing to resume; OSError where it cannot be written.
    """
    has_checkpoint = any((run_dir / "checkpoints").glob("step-*.pt"))
    if resume and not has_checkpoint:
        raise FileNotFoundError(f"nothing to resume: no checkpoint in {run_dir / 'checkpoints'}")
    if has_checkpoint and not (resume or overwrite):
        raise FileExistsError(f"{run_dir} holds a run: continue it with --resume or replace it with --overwrite")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise OSError(f"run directory {run_dir} cannot be written: {error.strerror}") from error


def clear_run_dir(run_dir: Path) -> None:
    """Removes what a run has written there and nothing else."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in ("metrics.jsonl", "config.json", "result.json"):
        (run_dir / name).unlink(missing_ok=True)


def resumed_config(saved: dict, changes: dict) -> Config:
    """The checkpoint's configuration with what the command line changed. ValueError where that may not change."""
    fixed = {n: v for n, v in changes.items() if n not in (*CHANGEABLE, "run_dir") and v != saved[n]}
    if fixed:
        name, value = next(iter(fixed.items()))
        raise ValueError(
            f"a resumed run keeps its {name} ({saved[name]!r}), got {value!r}; only {', '.join(CHANGEABLE)} may change"
        )
    return replace(Config(**saved), **changes)


class Trainer:
    """Everything a run holds in memory. `Trainer.start` begins one, `Trainer.resume` continues one."""

    def __init__(self, config: Config):
        self.config = config
        self.run_dir = Path(config.run_dir)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints")
        tokens = load_tokens(config.corpus, config.vocab_size, config.cache_dir)
        self.tokens_key = tokens.key
        self.data = Windows(tokens.train, config.seq_len, config.seed)
        self.heldout = Windows(tokens.heldout, config.seq_len).spread(config.eval_windows)
        torch.manual_seed(config.seed)
        self.model = Model(config.model, config.seed)
        self.optimizer = make_optimizer(self.model, config.weight_decay)
        self.step = self.skipped = 0
        self.seconds = 0.0  # spent in steps

    @classmethod
    def start(cls, config: Config, *, overwrite: bool = False) -> "Trainer":
        prepare_run_dir(Path(config.run_dir), overwrite=overwrite)
        trainer = cls(config)
        clear_run_dir(trainer.run_dir)  # only now: a mistake in the configuration must not cost the old run
        (trainer.run_dir / "config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
        return trainer

    @classmethod
    def resume(cls, run_dir: Path | str, changes: dict | None = None) -> "Trainer":
        """From the newest intact checkpoint; `changes` are the CHANGEABLE fields the caller wants different from then
        on."""
        prepare_run_dir(Path(run_dir), resume=True)
        state = Checkpoints(Path(run_dir) / "checkpoints").load()
        trainer = cls(resumed_config(state["config"], {**(changes or {}), "run_dir": str(run_dir)}))
        trainer.load_state_dict(state)
        print(f"resuming {run_dir} at step {trainer.step}")
        return trainer

    def state_dict(self) -> dict:
        return {
            "config": asdict(self.config),
            "step": self.step,
            "skipped": self.skipped,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.state_dict(),
            "tokens_key": self.tokens_key,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores everything. The weight decay is the configuration's, like the learning rate: it may have been
        changed."""
        if state["tokens_key"] != self.tokens_key:
            raise ValueError(f"the corpus changed: the checkpoint was trained on {state['tokens_key']}, found {self.tokens_key}")
        self.step, self.skipped, self.seconds = state["step"], state["skipped"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["weight_decay"] = self.config.weight_decay
        self.data.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])

    def train_step(self) -> dict:
        """One optimizer step; returns its metrics."""
        c, start = self.config, time.perf_counter()
        micro_batches = [self.data.next_batch(c.batch_size) for _ in range(c.accumulation)]
        loss, loads = forward_backward(self.model, micro_batches, c.balance_loss)
        lr = learning_rate(self.step, c.lr, c.warmup_steps, c.steps)
        norm, stepped = guarded_step(self.optimizer, lr, c.clip_norm)
        if stepped:
            for layer, load in zip(self.model.moe_layers, loads, strict=True):
                mxmoe.update_selection_bias_(layer.selection_bias, load, c.bias_speed)
        self.skipped += not stepped
        self.step += 1
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        return {
            "loss": loss,
            "lr": lr,
            "grad_norm": float(norm),
            "tokens": self.step * c.tokens_per_step,
            "tokens_per_s": c.tokens_per_step / elapsed,
            "max_violation": max_violation(loads),
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Held-out loss per token and the balance of the experts on the held-out windows."""
        total, tokens, loads = 0.0, 0, 0
        for first in range(0, len(self.heldout), self.config.batch_size):
            ids, targets = batch(self.heldout[first : first + self.config.batch_size])
            loss, routings = loss_sum(self.model, ids, targets)
            total, tokens = total + float(loss), tokens + targets.numel()
            loads = loads + torch.stack([routing.counts for routing in routings])
        return {"heldout_loss": total / tokens, "heldout_max_violation": max_violation(loads)}

    def save(self) -> Path:
        return self.checkpoints.save(self.step, self.state_dict())

    def run(self, resume_command: str) -> int:
        """Trains to the last step and writes result.json. Where SIGINT or SIGTERM stops it, it saves, says how to go
        on and returns the exit status that goes with the signal, else 0."""
        c = self.config
        metrics = Metrics(self.run_dir, self.step)
        bar = tqdm(total=c.steps, initial=self.step, desc=c.recipe, bar_format=BAR, dynamic_ncols=True)
        shown = {}
        evaluation = None
        with StopRequest() as stop, bar:
            while self.step < c.steps and not stop.signal:
                values = self.train_step()
                metrics.log(self.step, recipe=c.recipe, **values)
                shown |= {"loss": f"{values['loss']:.3f}", "tok/s": f"{self.tokens_per_s:.0f}"}
                shown |= {"skipped": self.skipped} if self.skipped else {}
                if self.step % c.eval_every == 0 or self.step == c.steps:
                    evaluation = self.evaluate()
                    metrics.log(self.step, recipe=c.recipe, **evaluation)
                    shown["held-out"] = f"{evaluation['heldout_loss']:.3f}"
                if self.step % c.save_every == 0:
                    self.save()
                bar.set_postfix(shown, refresh=False)
                bar.update()
            path = self.save()
        metrics.close()
        if self.step < c.steps:
            print(f"stopped at step {self.step} of {c.steps}; checkpoint: {path}\nresume with: {resume_command}")
            return 128 + stop.signal
        result = {"recipe": c.recipe, **(evaluation or self.evaluate()), "tokens_per_s": self.tokens_per_s}
        result |= {"steps": self.step, "tokens": self.step * c.tokens_per_step, "skipped": self.skipped}
        (self.run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        self.checkpoints.prune(1)
        return 0

    @property
    def tokens_per_s(self) -> float:
        """Over all steps of the run, without evaluations and checkpoints."""
        return self.step * self.config.tokens_per_step / self.seconds
