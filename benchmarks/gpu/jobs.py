"""The process that uses the GPU: `python -m benchmarks.gpu.jobs BACKEND`, for benchmarks/gpu_check.py, which may kill it. Standard
input: a JSON list of the jobs that are done. Standard output: a JSON line as each job starts, and one as it ends."""

import json
import sys
import traceback
from collections.abc import Callable


def run(jobs: dict[str, Callable[[], dict]], done: set[str], emit: Callable[[dict], None], healthy: Callable[[], bool]) -> bool:
    """Runs what is not done; False where the device is lost and a new process must go on."""
    for name, job in jobs.items():
        if name in done:
            continue
        emit({"name": name, "outcome": "started"})
        try:
            outcome = job()
        except NotImplementedError as error:
            outcome = {"outcome": "no kernel", "note": str(error)}
        except AssertionError as error:
            outcome = {"outcome": "wrong", "note": str(error)[:500] or traceback.format_exc(limit=-1)}
        except Exception as error:  # one broken job must not hide the others
            outcome = {"outcome": "error", "note": f"{type(error).__name__}: {error}"[:500]}
        if not healthy():
            emit({"name": name, **outcome, "outcome": "error"})
            return False
        emit({"name": name, **outcome})
    return True


def jobs_of(backend: str) -> dict[str, Callable[[], dict]]:
    """Of "cuda" or "triton", which backend="auto" is from now on."""
    import torch

    from benchmarks.gpu import conformance, speed
    from mxmoe import backends

    backends.fast = lambda device_type: (backend if device_type == "cuda" else "host",)
    if backend == "cuda":
        cases = conformance.jobs(backends.get("cuda").LAUNCHER.arch(torch.device("cuda", 0)))
    else:
        cases = conformance.triton_jobs()
    return {f"conformance: {name}": job for name, job in cases.items()} | {
        f"speed: {name}": job for name, job in speed.jobs(backend).items()
    }


def main():
    import torch

    def emit(line: dict):
        print(json.dumps(line), flush=True)

    def healthy() -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    torch.set_num_threads(min(8, torch.get_num_threads()))
    run(jobs_of(sys.argv[1]), set(json.load(sys.stdin)), emit, healthy)


if __name__ == "__main__":
    main()
