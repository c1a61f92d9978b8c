"""The asynchronous loop: samplers, workers with sandboxes, a learner, and the reconciler that says what may begin.

    admit prompts -> workers carry samples out (sampler, tools, verifier) -> ready -> a step -> a version -> samplers

Nothing waits for anything but what the staleness bound asks: the learner steps whenever the reconciler has a batch, the samplers
take new weights between two tokens. One object, one thread that decides (`tick`), and workers that ask it for work.

What survives: state.json has the reconciler and the curriculum; a finished sample is a file before it is ready; a step's files are
written down before it is taken, so that a learner that died takes it again; a dead sampler or node of sandboxes is replaced, and
what it had under way goes on from the answers it had. A run that is started in the same directory goes on.
"""

import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from rl import actors
from rl.actors import ActorDied
from rl.config import RunConfig
from rl.evals.runner import Settings
from rl.harness.builtin import Answers, SamplerModel
from rl.harness.dialect import Dialect
from rl.harness.loop import LoopLimits
from rl.harness.schema import ToolSet
from rl.heldout import Evaluation
from rl.learning import LearnerActor
from rl.prompts import Curriculum, Prompts, level_of
from rl.reconciler import Group, Reconciler, Sample, State
from rl.rewards import BEHAVIOURS, Monitor
from rl.rollout import Rollout, place, write_batch
from rl.sampling import SamplerActor, SamplerClient
from rl.tasks.task import Task
from rl.underway import Kept
from rl.workers import Environments, Job, Workers

STATE = "state.json"
TICK_S = 0.01
LATE_S = 2.0  # for samplers to have a new version
EMPTY_STEPS = 3  # in a row, until the run is given up
SAVE_S = 1.0  # between two states saved without a step
SPACING = 1 << 16  # replies of a sample that have draws of their own
TASKS_KEPT = 256


class Loop:
    """A run. `base`: directory of the weights that it begins with; `heldout`: tasks of its evaluations.

    on_step(values) is told every step's numbers. Raises ValueError for a directory that holds another run.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Path,
        prompts: Prompts,
        heldout: Sequence[Task],
        dialect: Dialect,
        tools: ToolSet,
        *,
        on_step: Callable[[dict], None] = lambda values: None,
    ):
        self.config, self.base, self.heldout, self.dialect, self.on_step = config, base, heldout, dialect, on_step
        self.run_dir = Path(config.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.curriculum = Curriculum(prompts, config.seed)
        self.reconciler = Reconciler(
            group_size=config.group_size, groups_per_step=config.groups_per_step, max_staleness=config.max_staleness
        )
        self.monitor = Monitor()
        self.seconds = 0.0  # of the run, over all its starts
        self._load()
        self._forget_answers()
        self._lock = threading.RLock()
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._samples: dict[str, tuple[object, dict]] = {}  # by file: reference to what is trained on, and what is told of it
        self._evaluations: deque[Evaluation] = deque()
        self._batch: list[Group] = []
        self._stepping: Future | None = None
        self._told: list[Future] = []  # of the learner, beside its steps
        self._started = self._saved = self._stepped = self._asked = time.monotonic()
        self._before = self.seconds
        self._learner_idle_since: float | None = time.monotonic()
        self._waited_s, self._empty = 0.0, 0
        self.learner_restarts = 0
        self.admits = False
        self.failures: deque[str] = deque(maxlen=20)
        if config.place == "ray":
            actors.connect(config.address)
        self.learner = self._start_learner()
        self.clients = [SamplerClient(self._start_sampler, config.capacity) for _ in range(config.samplers)]
        self._next_client = 0
        self.environments = Environments(Path(config.cache_dir), config.backend)
        names = ("turns", "seconds", "reply_tokens", "context_tokens")
        limits = LoopLimits(**{name: getattr(config, name) for name in names})
        settings = Settings("run", "policy", limits=limits)
        fixed = tools, settings, config.reward_weights, config.hint_weight > 0
        self.workers = Workers(config.workers, self._next_job, self.environments, *fixed)

    # Actors

    def _start_learner(self) -> actors.Handle:
        c = self.config
        return actors.start(
            LearnerActor,
            str(self.base),
            str(self.run_dir),
            self.store,
            on=c.place,
            resources={"num_gpus": c.learner_gpus} if c.learner_gpus else {},
            step=self.reconciler.step,
            save_every=c.save_every,
            threads=c.threads,
            changes=self._changes,
            correction={"name": c.correction},
            kl_weight=c.kl_weight,
            kl_estimator=c.kl_estimator,
            hint_weight=c.hint_weight,
            lr=c.lr,
            clip_norm=c.clip_norm,
            temperature=c.temperature,
            standardize=c.standardize,
            replay=c.replay,
            micro_tokens=c.micro_tokens,
        )

    def _start_sampler(self) -> actors.Handle:
        c = self.config
        return actors.start(
            SamplerActor,
            str(self.base),
            self.store,
            on=c.place,
            at_once=("exchange", "status", "pid"),
            resources={"num_gpus": c.sampler_gpus} if c.sampler_gpus else {},
            num_slots=c.slots,
            capacity=c.capacity,
            recompute=c.recompute,
            threads=c.threads,
            changes=self._changes,
            at_least=self.reconciler.version,
        )

    @property
    def pids(self) -> dict[str, int]:
        """Processes of the actors."""
        handles = {"learner": self.learner} | {f"sampler-{i}": client.handle for i, client in enumerate(self.clients)}
        return {name: handle.pid for name, handle in handles.items()}

    @property
    def store(self) -> str:
        return str(self.run_dir / "weights")

    @property
    def _changes(self) -> dict:
        c = self.config
        return ({"recipe": c.recipe} if c.recipe else {}) | ({"deterministic": True} if c.deterministic else {})

    # Work

    def _next_job(self, worker: str) -> Job | None:
        with self._lock:
            for evaluation in self._evaluations:
                if (found := evaluation.next()) is not None:
                    return self._evaluation_job(evaluation, *found)
            sample = self.reconciler.start(worker)
            return None if sample is None else self._sample_job(sample, self.reconciler.groups[sample.group])

    def _client(self) -> SamplerClient:
        """One after the other."""
        with self._lock:
            self._next_client = (self._next_client + 1) % len(self.clients)
            return self.clients[self._next_client]

    def _model(self, answers: Answers, seed: int, sample: int) -> SamplerModel:
        return SamplerModel(answers, self.dialect, temperature=self.config.temperature, seed=seed, sample=sample * SPACING)

    def _task(self, prompt: str) -> Task:
        with self._lock:
            if prompt not in self._tasks:
                self._tasks[prompt] = self.curriculum.prompts.task(prompt)
                if len(self._tasks) > TASKS_KEPT:
                    self._tasks.popitem(last=False)
            return self._tasks[prompt]

    def _sample_job(self, sample: Sample, group: Group) -> Job:
        number, attempt = sample.id, sample.attempt
        answers = Kept(self._client(), self._answers / f"{number:08d}.jsonl")

        def is_current() -> bool:  # not given to somebody else meanwhile
            return number in self.reconciler.samples and sample.attempt == attempt

        def on_end() -> None:
            with self._lock:
                if is_current():
                    self.reconciler.generated(number)

        def done(rollout: Rollout) -> None:
            path = place(self.run_dir, group.id, number)
            rollout.where = {"sample": number, "group": group.id, "attempt": attempt, "worker": sample.worker}
            rollout.save(path)
            reference = actors.keep(rollout.train_sample, self.config.place)
            name = str(path.relative_to(self.run_dir))
            with self._lock:
                if is_current():
                    self._samples[name] = reference, told(rollout)
                    self.reconciler.verified(number, name)
                    answers.drop()

        def failed(error: str, may_be_own: bool) -> None:
            with self._lock:
                self.failures.append(error)
                if is_current():
                    self.reconciler.failed(number, error, counts=may_be_own)
                    if may_be_own:
                        answers.drop()

        return Job(partial(self._task, group.prompt), partial(self._model, answers, self.config.seed, number), done, failed, on_end)

    def _evaluation_job(self, evaluation: Evaluation, task: int, number: int) -> Job:
        def done(rollout: Rollout) -> None:
            with self._lock:
                evaluation.add(task, number, rollout)

        def failed(error: str, may_be_own: bool) -> None:
            with self._lock:
                self.failures.append(error)
                evaluation.again(task, number)

        seed = self.config.seed + ((1 + evaluation.version) << 32)  # no draw of training's
        model = partial(self._model, self._client(), seed, number * len(evaluation.tasks) + task)
        return Job(lambda: evaluation.tasks[task], model, done, failed)

    # Deciding

    def run(self, *, stopped: Callable[[], bool] = lambda: False, on_tick: Callable[[], None] = lambda: None) -> bool:
        """Until `config.steps` steps are taken and their evaluations done; whether they are: False where `stopped` said so."""
        self.admits = True
        while not (self.reconciler.step >= self.config.steps and not self._evaluations):
            if stopped():
                break
            self.tick()
            on_tick()
            time.sleep(TICK_S)
        self.admits = False
        is_done = self.reconciler.step >= self.config.steps
        self._save()
        if is_done:
            self.learner.ask("wait")
            self._check_told()
        return is_done

    def evaluate(self, name: str, tasks: Sequence[Task], samples: int, *, on_tick: Callable[[], None] = lambda: None) -> dict:
        """An evaluation with the newest weights, while nothing is trained; saved in evaluations/. Returns its report."""
        while min(self.versions) < self.reconciler.step:
            self.tick()
            time.sleep(TICK_S)
        evaluation = Evaluation(name, self.reconciler.step, tasks, samples)
        with self._lock:
            self._evaluations.append(evaluation)
        while evaluation in self._evaluations:
            self.tick()
            on_tick()
            time.sleep(TICK_S)
        return evaluation.report()

    def tick(self) -> None:
        """One round of decisions; blocks on nothing."""
        if self.workers.error is not None:
            raise self.workers.error
        if errors := [client.error for client in self.clients if client.error]:
            raise RuntimeError(f"a sampler failed: {errors[0]}")
        with self._lock:
            r = self.reconciler
            r.set_version(max(r.version, min(*self.versions, r.step)))
            while self.admits and r.capacity and self._admitted < self.config.steps * self.config.groups_per_step:
                prompt = self.curriculum.next()
                if prompt is None:
                    break
                r.admit(prompt)
            for evaluation in [e for e in self._evaluations if e.is_done]:
                self._evaluations.remove(evaluation)
                evaluation.save(self.run_dir / "evaluations")
                self.on_step({"step": evaluation.version} | {f"heldout/{k}": v for k, v in evaluation.report().items()})
            if self._stepping is None and self.admits:
                self._begin_step()
        if self._stepping is not None and self._stepping.done():
            self._end_step()
        if self._stepping is None and min(self.versions) < self.reconciler.step and self._is_late():
            self._told.append(self.learner.call("republish"))
        self._check_told()
        if time.monotonic() - self._saved > SAVE_S:
            self._save()

    def _check_told(self) -> None:
        """Raises what the learner could not do beside its steps: a checkpoint on a full disk, say. Its death shows in a step."""
        done, self._told = [f for f in self._told if f.done()], [f for f in self._told if not f.done()]
        for future in done:
            if (error := future.exception()) is not None and not isinstance(error, ActorDied):
                raise error

    def _is_late(self) -> bool:
        """Whether samplers have been behind for a while: at most once in LATE_S."""
        late = time.monotonic() - max(self._stepped, self._asked) > LATE_S
        self._asked = time.monotonic() if late else self._asked
        return late

    @property
    def versions(self) -> list[int]:
        return [client.status.version for client in self.clients]

    @property
    def learner_busy(self) -> bool:
        return self._stepping is not None

    @property
    def evaluating(self) -> list[str]:
        """What evaluations have got to."""
        return [e.progress for e in list(self._evaluations)]

    @property
    def _admitted(self) -> int:
        return self.reconciler.step * self.config.groups_per_step + len(self.reconciler.groups)

    def _begin_step(self) -> None:
        batch = self.reconciler.next_batch()
        if batch is None:
            return
        now = time.monotonic()
        self._waited_s = now - (self._learner_idle_since or now)
        self._batch = batch
        self._files = [[self.reconciler.samples[s].payload for s in g.samples if self._is_training(s)] for g in batch]
        self._empty = 0 if any(self._files) else self._empty + 1
        if self._empty == EMPTY_STEPS:
            raise RuntimeError(f"no sample of {EMPTY_STEPS} steps could be carried out: {self.failures[-1]}")
        self._save()
        write_batch(self.run_dir, self.reconciler.step, self._files)
        self._send()

    def _is_training(self, sample: int) -> bool:
        return self.reconciler.samples[sample].state is State.TRAINING

    def _send(self) -> None:
        self._sent = time.monotonic()
        self._stepping = self.learner.call("step", [[self._sample(name)[0] for name in group] for group in self._files if group])

    def _sample(self, name: str) -> tuple[object, dict]:
        """What is trained on, and what is told of it: of this process's making, or from its file."""
        if name not in self._samples:
            rollout = Rollout.load(self.run_dir / name)
            self._samples[name] = actors.keep(rollout.train_sample, self.config.place), told(rollout)
        return self._samples[name]

    def _end_step(self) -> None:
        stepping, self._stepping = self._stepping, None
        try:
            report, times = stepping.result()
        except ActorDied:
            self.learner_restarts += 1
            self.learner.end()
            self.learner = self._start_learner()
            self._send()  # the same batch
            return
        with self._lock:
            facts = [[self._sample(name)[1] for name in group] for group in self._files]
            for group, samples in zip(self._batch, facts, strict=True):
                if samples:
                    self.curriculum.learned(level_of(group.prompt), sum(fact["solved"] for fact in samples) / len(samples))
            for fact in (fact for group in facts for fact in group):
                self.monitor.add(fact["behaviours"])
            self.reconciler.trained(self._batch)
            for name in (name for group in self._files for name in group):
                del self._samples[name]
        self._save()
        step = self.reconciler.step
        self._told.append(self.learner.call("recorded", step))
        now = time.monotonic()
        self.on_step(self._numbers(report, times, facts, now - self._stepped, now - self._sent))
        self._stepped = self._learner_idle_since = now
        if self.config.eval_every and step % self.config.eval_every == 0 and step < self.config.steps and self.heldout:
            tasks = self.heldout[: self.config.eval_tasks]
            with self._lock:
                self._evaluations.append(Evaluation(f"step-{step:08d}", step, tasks, 1))

    def _numbers(self, report, times: dict, facts: list[list[dict]], seconds: float, step_s: float) -> dict:
        every = [fact for group in facts for fact in group]
        count = max(len(every), 1)
        statuses = [client.status for client in self.clients]
        return {
            "step": self.reconciler.step,
            "reward": report.mean_reward,
            "solved": sum(fact["solved"] for fact in every) / count,
            "best": sum(max((fact["solved"] for fact in group), default=0.0) for group in facts) / max(len(facts), 1),
            "staleness": report.staleness,
            "samples": len(every),
            "samples_per_s": len(every) / seconds,
            "tokens": report.tokens,
            "tokens_per_s": report.tokens / seconds,
            "replies": sum(fact["replies"] for fact in every) / count,
            "invalid_calls": sum(fact["invalid"] for fact in every) / max(sum(fact["calls"] for fact in every), 1),
            **{f"behaviour/{name}": sum(fact["behaviours"].get(name, 0.0) for fact in every) / count for name in BEHAVIOURS},
            "alarms": "; ".join(self.monitor.alarms),
            **{name: value for name in ("kl", "hint_kl") if (value := getattr(report, name)) is not None},
            "loss": report.loss,
            "gradient_norm": report.gradient_norm,
            "mismatch": report.mismatch,
            "largest_log_ratio": report.largest_log_ratio,
            "dropped": report.dropped,
            "nonfinite": report.nonfinite,
            "invalid": report.invalid,
            "step_s": step_s,
            "waited_s": self._waited_s,
            "pause_s": max(status.pause_s for status in statuses),
            "fetch_s": max(status.fetch_s for status in statuses),
            "seconds": self._elapsed,
            **times,
        }

    # State

    @property
    def _elapsed(self) -> float:
        return self._before + time.monotonic() - self._started

    def _save(self) -> None:
        with self._lock:
            state = {
                "reconciler": self.reconciler.to_json(),
                "curriculum": self.curriculum.to_json(),
                "monitor": self.monitor.state,
                "seconds": self._elapsed,
            }
        self._saved = time.monotonic()
        part = self.run_dir / "state.part"
        with part.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.run_dir / STATE)

    def _load(self) -> None:
        path = self.run_dir / STATE
        if not path.exists():
            return
        state = json.loads(path.read_text())
        self.reconciler = Reconciler.from_json(state["reconciler"])
        sizes = ("group_size", "groups_per_step", "max_staleness")
        if wrong := [name for name in sizes if getattr(self.reconciler, name) != getattr(self.config, name)]:
            raise ValueError(f"{self.run_dir} holds a run of another {wrong[0]}")
        self.curriculum.load_json(state["curriculum"])
        self.monitor = Monitor(**state.get("monitor", {}))
        self.seconds = state["seconds"]

    @property
    def _answers(self) -> Path:
        """Directory of those of samples under way."""
        return self.run_dir / "underway"

    def _forget_answers(self) -> None:
        """Those of samples that have ended, or are not known."""
        queued = {f"{s.id:08d}.jsonl" for s in self.reconciler.samples.values() if s.state is State.QUEUED}
        for path in self._answers.glob("*"):
            if path.name not in queued:
                path.unlink()

    def close(self) -> None:
        """Ends the workers, the actors and the sandboxes; the run can be gone on with. Any number of times."""
        for client in self.clients:
            client.close()
        self.workers.close()
        self.environments.close()
        self.learner.end()

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def told(rollout: Rollout) -> dict:
    """What a step's numbers are made of."""
    kinds = rollout.calls
    return {
        "solved": rollout.solved or 0.0,
        "replies": len([step for step in rollout.trajectory["steps"] if step["source"] == "agent"]),
        "calls": len(kinds),
        "invalid": sum(kind == "invalid" for kind in kinds),
        "behaviours": rollout.behaviours,
        "seconds": rollout.seconds,
    }
