"""What a run shows in the terminal while it goes on: a live panel where there is a screen, a line for each step elsewhere."""

import time
from collections import deque

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl.loop import Loop
from rl.reconciler import State

BARS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.25
SHOWN = 48  # steps


class Dashboard:
    """`on_step` takes the loop's numbers, `on_tick` draws. Use as a context."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.loop: Loop | None = None
        self.title = ""
        self._steps: deque[dict] = deque(maxlen=SHOWN)
        self._heldout: dict = {}
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        self._drawn = self._told = 0.0

    def __enter__(self) -> "Dashboard":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live:
            self._live.stop()

    def on_step(self, values: dict) -> None:
        if "reward" in values:
            self._steps.append(values)
            if not self._live:
                names = ("reward", "solved", "best", "staleness", "samples_per_s", "tokens_per_s", "step_s")
                self.say(f"step {values['step']:4d}  " + "  ".join(f"{name} {values[name]:.3g}" for name in names))
                if values["alarms"]:
                    self.say(f"alarms: {values['alarms']}")
        else:
            self._heldout = values
            if not self._live:
                self.say(f"held out, version {values['step']}: " + ", ".join(rates(values, "heldout/")))

    def on_tick(self) -> None:
        now = time.monotonic()
        if self._live and now - self._drawn > REFRESH_S:
            self._drawn = now
            self._live.update(self.panel(), refresh=True)
        elif not self._live and now - self._told > 10 and self.loop and self.loop.evaluating:
            self._told = now
            self.say("  ".join(self.loop.evaluating))

    def on_progress(self, what: str, done: int, of: int, loss: float) -> None:
        """The base is being made."""
        now = time.monotonic()
        if done == of or now - self._told > (REFRESH_S if self._live else 10):
            self._told = now
            text = f"base: {what}, step {done} of {of}, loss {loss:.3f}"
            self._live.update(Panel(text, title=self.title, expand=False), refresh=True) if self._live else self.say(text)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def panel(self) -> Panel:
        """What is drawn now."""
        table = Table.grid(padding=(0, 2))
        loop = self.loop
        if loop is not None:
            counts = loop.reconciler.counts
            under_way = "  ".join(f"{state} {counts[state]}" for state in State if counts[state])
            table.add_row("step", f"{loop.reconciler.step} of {loop.config.steps}   samplers at {min(loop.versions)}")
            table.add_row("samples", under_way)
            table.add_row("sandboxes", f"{loop.workers.busy} busy, {loop.environments.renewals} nodes replaced")
            for name in loop.evaluating:
                table.add_row("evaluation", name)
        if self._steps:
            last = self._steps[-1]
            for name in ("reward", "solved", "best"):
                values = [step[name] for step in self._steps]
                table.add_row(name, f"{last[name]:.3f}  {sparkline(values)}")
            table.add_row("speed", f"{last['samples_per_s']:.1f} samples/s, {last['tokens_per_s']:.0f} tokens/s")
            table.add_row("staleness", f"{last['staleness']} versions, log ratio up to {last['largest_log_ratio']:.2g}")
            table.add_row("sync", f"fetch {1e3 * last['fetch_s']:.0f} ms, pause {1e3 * last['pause_s']:.0f} ms")
            if last["alarms"]:
                table.add_row("alarms", Text(last["alarms"], "red"))
            table.add_row("learner", f"{last['train_s']:.2f} s a step, waited {last['waited_s']:.2f} s")
        if self._heldout:
            table.add_row("held out", ", ".join(rates(self._heldout, "heldout/")) + f" at {self._heldout['step']}")
        return Panel(Group(table), title=self.title or "rl", expand=False)


def rates(values: dict, prefix: str = "") -> list[str]:
    """Mean and best of an evaluation's report, in per cent, with standard errors."""
    pairs = ((name, values[f"{prefix}{name}"], values[f"{prefix}{name}_error"]) for name in ("mean", "best"))
    return [f"{name} {100 * value:.1f} ± {100 * error:.1f} %" for name, value, error in pairs]


def sparkline(values: list[float]) -> str:
    """Values as bars between their least and largest."""
    low, high = min(values), max(values)
    return "".join(BARS[int((value - low) / ((high - low) or 1) * (len(BARS) - 1))] for value in values)
