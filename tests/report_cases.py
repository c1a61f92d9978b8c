"""Runs as the runner leaves them, and their page opened and clicked through in a browser without a screen."""

import json

from rl.evals.page import page
from rl.evals.runner import Evaluation, Result, Settings
from rl.evals.suites import TARGETED
from rl.evals.summary import summarize
from rl.evals.targeted import SUITES
from rl.harness.toolsets import tool_set
from rl.harness.trajectory import Trajectory
from tests import browser


def written(directory, model, rate, tokens):
    """A run as the runner leaves it, without having run."""
    made = Evaluation(directory, Settings("eager", model, passes=2), [e for name in TARGETED for e in SUITES[name]], tool_set())
    with open(directory / "results.jsonl", "w") as file:
        for i, entry in enumerate(made.entries):
            for n in range(2):
                score = float((i * 2 + n) % 10 < 10 * rate)
                result = Result(
                    entry.task.name,
                    n,
                    score,
                    "resolved",
                    "",
                    {"works <b>": True},
                    "answered",
                    2.0,
                    50,
                    tokens,
                    2,
                    3,
                    0,
                    tokens / 1e5,
                    2,
                )
                file.write(json.dumps(vars(result)) + "\n")
                for kind, suffix in (("trajectories", "json"), ("patches", "diff")):
                    place = directory / kind / entry.task.name.replace("/", "--")
                    place.mkdir(parents=True, exist_ok=True)
                    run = Trajectory(model, [], "d")
                    if suffix == "diff":
                        (place / f"{n}.diff").write_text("diff --git a/x b/x\n-a\n+<script>b</script>\n")
                    else:
                        run.save(place / f"{n}.json")
    return summarize(directory)


CLICKS = """<script>
addEventListener("load", () => setTimeout(() => {
  const found = {}, see = e => !!e && e.checkVisibility() && e.getBoundingClientRect().height > 0;
  found.points = document.querySelectorAll("svg a.point").length;
  found.plots = [...document.querySelectorAll("svg")].every(see);
  found.wide = document.documentElement.scrollWidth > innerWidth;
  const point = document.querySelector("svg a.point");
  point.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));
  found.reached = location.hash == "#run-a";
  const task = document.querySelector("details.task");
  found.hidden = !see(task.querySelector(".attempt"));
  for (const e of [task, task.querySelector(".attempt"), task.querySelector(".diff"), task.querySelector(".transcript")])
    e.querySelector("summary").click();
  const diff = task.querySelector(".diff pre");
  found.diff = see(diff) && diff.textContent.includes("<script>b</" + "script>");
  found.transcript = task.querySelector(".transcript").open && see(task.querySelector(".transcript summary"));
  document.title = JSON.stringify(found);
}, 100));
</script>"""


def two_runs(directory):
    return [written(directory / "a", "small <i>", 0.3, 100), written(directory / "b", "large", 0.8, 300)]


def clicked(directory):
    """What is seen after clicks on a point of the plot, a task, an attempt, its diff and its transcript; None without a browser."""
    copy = directory / "page.html"
    copy.write_text(page(two_runs(directory)).replace("</body>", f"{CLICKS}</body>"))
    return browser.seen(copy.as_uri(), directory)
