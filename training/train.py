"""One training run: data in, metrics and checkpoints out, exactly resumable.

A step: `accumulation` micro-batches, the loss is the mean over all their tokens; the gradient is clipped; AdamW steps;
the selection biases of the routers move towards balance. A step whose loss or gradient is not finite changes neither
parameters nor biases; its data and its place in the learning-rate schedule are used up, and it is counted in
`skipped`. After more than `bad_steps` of them in a row the run saves its state, names the layer and the tensor, and stops.
"""

import json
import math
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import mxmoe
from training.base import find_base, model_config, read_model, stretched
from training.checkpoint import Checkpoints, read_state, read_values
from training.config import Config, flat
from training.data import IGNORE, Samples, Stream, batch, load_tokens
from training.metrics import Metrics
from training.model import Model
from training.optimizer import guarded_step, learning_rate, load_moments, make_optimizer, moments, named_gradients
from training.phases import keep_high_precision
from training.rundir import StopRequest, clear_run_dir, prepare_run_dir, resumed_config
from training.step import bad_tensors, first_bad_module, forward_backward, loss_sum, max_violation


class Trainer:
    """Everything a run holds in memory. `Trainer.start` begins one, `Trainer.resume` continues one."""

    def __init__(self, config: Config, saved: dict | None = None):
        """saved: what a checkpoint of the run holds beside tensors; then nothing is read of what the run once began with."""
        self.config, phase = config, config.phase
        self.run_dir = Path(config.run_dir)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", phase.keep)
        base = find_base(phase.init) if phase.init and saved is None else None
        given = phase.tokenizer or (base and base.tokenizer)
        if saved and (phase.tokenizer or phase.init):
            given = self.run_dir / "tokenizer.json"
        self.tokens = load_tokens(
            config.corpus, config.vocab_size, config.cache_dir, tokenizer=str(given or ""), similarity=phase.similarity,
            fim=phase.fim, max_bytes=1_000_000 * phase.corpus_mb, seed=config.seed,
        )  # fmt: skip
        self.data = Stream(Samples(self.tokens, "train", config.seq_len, config.seed, self.tokens.weights), workers=phase.workers)
        self.heldout = Samples(self.tokens, "heldout", config.seq_len).spread(config.eval_windows)
        torch.manual_seed(config.seed)
        options = dict(recipe=config.recipe, recompute=phase.recompute)
        if base:
            self.model = read_model(base, **options, yarn=stretched(base.config, phase.yarn, base.window).yarn)
        else:
            fresh = stretched(config.model, phase.yarn, int(config.seq_len / phase.yarn))
            self.model = Model(replace(model_config(saved["model_config"]) if saved else fresh, **options), config.seed)
        self.model_config = self.model.config
        keep_high_precision(self.model, phase.high_precision)
        self.optimizer = make_optimizer(self.model, config.weight_decay)
        self.step = self.skipped = self.bad_in_a_row = 0
        self.seconds = 0.0  # spent in steps
        self.loads: list[torch.Tensor] | None = None  # of the experts, since they were last recorded

    @classmethod
    def start(cls, config: Config, *, overwrite: bool = False) -> "Trainer":
        prepare_run_dir(Path(config.run_dir), overwrite=overwrite)
        trainer = cls(config)
        clear_run_dir(trainer.run_dir)  # only now: a mistake in the configuration must not cost the old run
        (trainer.run_dir / "config.json").write_text(json.dumps(flat(config), indent=1) + "\n")
        trainer.tokens.vocabulary.save(trainer.run_dir)
        return trainer

    @classmethod
    def resume(cls, run_dir: Path | str, changes: dict | None = None) -> "Trainer":
        """From the newest intact checkpoint; `changes` are the CHANGEABLE fields the caller wants different from then
        on."""
        prepare_run_dir(Path(run_dir), resume=True)
        checkpoints = Checkpoints(Path(run_dir) / "checkpoints")
        path = checkpoints.newest()
        saved = read_values(path)
        trainer = cls(resumed_config(saved["config"], {**(changes or {}), "run_dir": str(run_dir)}), saved)
        trainer.checkpoints.intact = checkpoints.intact
        trainer.load_state_dict(read_state(path, {"model": trainer.model.state_dict()}))
        print(f"resuming {run_dir} at step {trainer.step}")
        return trainer

    def state_dict(self) -> dict:
        return {
            "config": flat(self.config),
            "model_config": asdict(self.model_config),
            "step": self.step,
            "skipped": self.skipped,
            "bad_in_a_row": self.bad_in_a_row,
            "seconds": self.seconds,
            "model": dict(self.model.state_dict()),
            "optimizer": moments(self.optimizer),
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "data": self.data.state_dict(),
            "tokens_key": self.tokens.key,
            "rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restores everything. The weight decay is the configuration's, like the learning rate: it may have been
        changed."""
        if state["tokens_key"] != self.tokens.key:
            raise ValueError(f"the corpus changed: the checkpoint was trained on {state['tokens_key']}, found {self.tokens.key}")
        for name in ("step", "skipped", "bad_in_a_row", "seconds"):
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        load_moments(self.optimizer, state["optimizer"])
        for group, lr in zip(self.optimizer.param_groups, state["lr"], strict=True):
            group["lr"] = lr
        self.data.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])

    def learning_rate(self, step: int) -> float:
        c = self.config
        return learning_rate(step, c.lr, c.warmup_steps, c.steps, c.phase.schedule, c.phase.decay, c.phase.final_lr)

    def train_step(self) -> dict:
        """One optimizer step; returns its metrics."""
        c, start = self.config, time.perf_counter()
        micro_batches = [self.data.next_batch(c.batch_size) for _ in range(c.accumulation)]
        data_seconds = time.perf_counter() - start
        loss, loads = forward_backward(self.model, micro_batches, c.phase.balance_loss, c.phase.z_loss)
        lr, bad = self.learning_rate(self.step), []
        if math.isfinite(loss):
            norm, stepped = guarded_step(self.optimizer, lr, c.clip_norm, lambda: bad.extend(self._bad(micro_batches)))
        else:
            norm, stepped = math.nan, False
            bad = [f"loss {loss}", *self._bad(micro_batches)]
            self.optimizer.zero_grad()
        if stepped:
            for layer, load in zip(self.model.moe_layers, loads, strict=True):
                mxmoe.update_selection_bias_(layer.selection_bias, load, c.bias_speed)
        self.skipped += not stepped
        self.bad_in_a_row = 0 if stepped else self.bad_in_a_row + 1
        self.step += 1
        self.loads = loads if self.loads is None else [a + b for a, b in zip(self.loads, loads, strict=True)]
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        values = {
            "loss": loss,
            "lr": lr,
            "grad_norm": float(norm),
            "tokens": self.step * c.tokens_per_step,
            "tokens_per_s": c.tokens_per_step / elapsed,
            "data_share": data_seconds / elapsed,
            "max_violation": max_violation(loads),
            "skipped": self.skipped,
        }
        return values | ({"bad": "; ".join(bad)} if bad else {})

    def _bad(self, micro_batches: list) -> list[str]:
        """Where this step's numbers went bad: the first module whose output did, then the gradients."""
        module = first_bad_module(self.model, micro_batches)
        tensors = bad_tensors(named_gradients(self.optimizer))
        more = [f"and {len(tensors) - 3} more gradients"] if len(tensors) > 3 else []
        return ([f"first in {module}"] if module else []) + [f"gradient of {line}" for line in tensors[:3]] + more

    @torch.no_grad()
    def evaluate(self) -> dict:
        """Held-out loss per token, bits per byte of text, and the balance of the experts on the held-out windows."""
        total, tokens, loads = 0.0, 0, 0
        for first in range(0, len(self.heldout), self.config.batch_size):
            rows = batch(self.heldout[first : first + self.config.batch_size])
            loss, routings = loss_sum(self.model, *rows)
            total, tokens = total + float(loss), tokens + int((rows.targets != IGNORE).sum())
            loads = loads + torch.stack([routing.counts for routing in routings])
        loss = total / tokens
        bits = loss / math.log(2) / self.tokens.bytes_per_token("heldout")
        return {"heldout_loss": loss, "heldout_bits_per_byte": bits, "heldout_max_violation": max_violation(loads)}

    def save(self, *, background: bool = False) -> Path:
        return self.checkpoints.save(self.step, self.state_dict(), background=background)

    def run(self, resume_command: str) -> int:
        """Trains to the last step and writes result.json. Where SIGINT or SIGTERM stops it, it saves, says how to go
        on and returns the exit status that goes with the signal; 1 where a loss or gradient that is not finite does; else 0."""
        c = self.config
        metrics = Metrics(self.run_dir, self.step, c.phase.trackers, flat(c))
        evaluation, values = None, {}
        with StopRequest() as stop, _progress() as progress:
            task = progress.add_task(c.recipe, total=c.steps, completed=self.step, shown="")
            while self.step < c.steps and not stop.signal and self.bad_in_a_row <= c.phase.bad_steps:
                values = self.train_step()
                metrics.log(self.step, recipe=c.recipe, **values)
                if self.step % c.eval_every == 0 or self.step == c.steps:
                    evaluation = self.evaluate()
                    metrics.log(self.step, recipe=c.recipe, peak_gb=peak_gb(), **evaluation)
                    metrics.log_loads(self.step, [load.tolist() for load in self.loads])
                    self.loads = None
                if self.step % c.save_every == 0:
                    self.save(background=True)
                progress.update(task, completed=self.step, shown=self._shown(values, evaluation))
            path = self.save()
        metrics.close()
        if self.bad_in_a_row > c.phase.bad_steps:
            reason = f"step {self.step} was not made: {values.get('bad', 'its loss or gradient is not finite')}"
            print(f"{reason}\nthe state before it is kept: {path}\nresume after its data with: {resume_command}")
            return 1
        if self.step < c.steps:
            print(f"stopped at step {self.step} of {c.steps}; checkpoint: {path}\nresume with: {resume_command}")
            return 128 + stop.signal
        result = {"recipe": c.recipe, **(evaluation or self.evaluate()), "tokens_per_s": self.tokens_per_s}
        result |= {"steps": self.step, "tokens": self.step * c.tokens_per_step, "skipped": self.skipped}
        (self.run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
        self.checkpoints.prune(1)
        return 0

    def _shown(self, values: dict, evaluation: dict | None) -> str:
        """Beside the progress bar."""
        parts = {"loss": f"{values['loss']:.3f}", "tok/s": f"{self.tokens_per_s:.0f}"}
        parts |= {"held-out": f"{evaluation['heldout_loss']:.3f}"} if evaluation else {}
        parts |= {"skipped": str(self.skipped)} if self.skipped else {}
        return "  ".join(f"{name} {value}" for name, value in parts.items())

    @property
    def tokens_per_s(self) -> float:
        """Over all steps of the run, without evaluations and checkpoints."""
        return self.step * self.config.tokens_per_step / self.seconds


def peak_gb() -> float:
    """Most memory this process has held, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description:>6}"), BarColumn(bar_width=None), TaskProgressColumn(),
        TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn(), TextColumn("{task.fields[shown]}"),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), expand=True)
