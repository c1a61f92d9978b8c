"""What `make ablations` has found, from the results it has written: each names the command, the commit and the machine."""

import json
from functools import partial

from benchmarks import ablations
from benchmarks.bars.harness import Bar, NotMeasured, Run


def results(run: Run) -> dict:
    """Of the committed file. NotMeasured where there is none, or where it does not say what it is of."""
    if not ablations.RESULTS.exists():
        raise NotMeasured(f"{ablations.COMMAND} has not been run")
    found = json.loads(ablations.RESULTS.read_text())
    if not (found.get("command") and all(record.get("commit") for record in found["runs"])):
        raise NotMeasured(f"{ablations.RESULTS.name} does not name command and commit")
    run.note(f"{found['command']}, commit {found['runs'][0]['commit']}")
    return found


def excess(recipe: str, number: int, run: Run) -> float:
    """Mean (0) or standard error (1) over the seeds, %."""
    try:
        values = ablations.excess(results(run), recipe)
    except ValueError as reason:
        raise NotMeasured(str(reason)) from None
    run.note(f"{values[2]} seeds, {values[0]:+.3f} % +- {values[1]:.3f} %")
    return values[number]


def fit(run: Run) -> float:
    """R squared of the line through at least four budgets."""
    runs = ablations.budgets(results(run))
    if len(runs) < 4:
        raise NotMeasured(f"four budgets are needed, found {len(runs)}")
    slope, _, value = ablations.line(runs)
    run.note(f"{slope:.3f} nats per factor of ten, {len(runs)} budgets")
    return value


def beyond(run: Run) -> float:
    """Held-out loss at positions beyond the base length over that within it, of the same documents, - 1; %."""
    found = next((record for record in results(run)["runs"] if record["base"]), None)
    if found is None:
        raise NotMeasured("no run with a longer context")
    run.note(f"{found['loss_within']:.3f} within, {found['loss_beyond']:.3f} beyond")
    run.note(f"before: {found['unextended_within']:.3f} and {found['unextended_beyond']:.3f}")
    return 100 * (found["loss_beyond"] / found["loss_within"] - 1)


BARS = [
    Bar("mxfp8 above bf16, held-out loss, paired seeds", "<=", 0.3, "%", partial(excess, "mxfp8", 0)),
    Bar("mxfp8 above bf16: standard error", "<=", 0.15, "%", partial(excess, "mxfp8", 1)),
    Bar("nvfp4 above bf16, held-out loss, paired seeds", "<=", 1, "%", partial(excess, "nvfp4", 0)),
    Bar("nvfp4 above bf16: standard error", "<=", 0.15, "%", partial(excess, "nvfp4", 1)),
    Bar("held-out loss against log compute: R squared", ">=", 0.98, "", fit),
    Bar("context of four times the length: loss beyond the base length", "<=", 5, "% above within", beyond),
]
