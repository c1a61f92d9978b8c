"""Where the parts of a run live: plain objects in this process, or the same classes as Ray actors.

    sampler = start(SamplerActor, base, store, on="ray", num_gpus=1)
    future = sampler.call("exchange", requests)     # a concurrent.futures.Future
    sampler.ask("close")                            # call, and wait

Only this module knows Ray, and imports it when it is asked for.
"""

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

Place = Literal["inline", "ray"]


class ActorDied(RuntimeError):
    """The actor's process has ended; what was under way in it is lost."""


class Inline:
    """An object of this process. Methods run one after the other on a thread of its own, those named in `at_once` on others."""

    def __init__(self, made: Any, at_once: tuple[str, ...] = ()):
        self._made, self._at_once = made, at_once
        self._one, self._more = ThreadPoolExecutor(1), ThreadPoolExecutor(4)
        self.is_alive, self.pid = True, os.getpid()

    def call(self, method: str, *args, **kwargs) -> Future:
        if not self.is_alive:
            failed: Future = Future()
            failed.set_exception(ActorDied(f"{type(self._made).__name__} was ended"))
            return failed
        pool = self._more if method in self._at_once else self._one
        return pool.submit(getattr(self._made, method), *args, **kwargs)

    def ask(self, method: str, *args, **kwargs) -> Any:
        return self.call(method, *args, **kwargs).result()

    def end(self) -> None:
        """Its `close`, then no more calls. Any number of times."""
        if self.is_alive:
            self.is_alive = False
            self._made.close()
            self._one.shutdown(wait=False)
            self._more.shutdown(wait=False)


class OnRay:
    """A Ray actor. Its death shows as ActorDied; what a method raises arrives as it was raised."""

    def __init__(self, cls: type, args: tuple, kwargs: dict, at_once: tuple[str, ...], resources: dict):
        import ray

        # Several calls at once where some are to overlap others: the class says which, and guards its state.
        options = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 4 if at_once else 1} | resources
        self._actor = ray.remote(cls).options(**options).remote(*args, **kwargs)
        self.pid: int = self.ask("pid")

    def call(self, method: str, *args, **kwargs) -> Future:
        from ray.exceptions import RayActorError, RayTaskError

        out: Future = Future()

        def done(found: Future) -> None:
            error = found.exception()
            if error is None:
                out.set_result(found.result())
            elif isinstance(error, RayActorError):
                out.set_exception(ActorDied(str(error).splitlines()[0]))
            else:
                out.set_exception(error.cause if isinstance(error, RayTaskError) and error.cause else error)

        getattr(self._actor, method).remote(*args, **kwargs).future().add_done_callback(done)
        return out

    def ask(self, method: str, *args, **kwargs) -> Any:
        return self.call(method, *args, **kwargs).result()

    def end(self) -> None:
        """Ends the process. Any number of times."""
        import ray

        with contextlib.suppress(Exception):
            ray.get(self._actor.close.remote(), timeout=5)
        ray.kill(self._actor)


Handle = Inline | OnRay


def start(cls: type, *args, on: Place = "inline", at_once: tuple[str, ...] = (), resources: dict | None = None, **kwargs) -> Handle:
    """An object of `cls`, here or as an actor. at_once: methods that may overlap others. resources: of Ray (num_cpus, num_gpus).

    The class has methods `pid` and `close`. Raises ValueError for an unknown place, ActorDied where an actor does not come up.
    """
    if on == "ray":
        return OnRay(cls, args, kwargs, at_once, resources or {})
    if on != "inline":
        raise ValueError(f"on must be inline or ray, got {on!r}")
    return Inline(cls(*args, **kwargs), at_once)


def keep(value: Any, on: Place) -> Any:
    """A reference to a value: in Ray's object store, from which actors read it without a copy through this process; or itself."""
    if on == "ray":
        import ray

        return ray.put(value)
    return value


def kept(reference: Any) -> Any:
    """The value of what `keep` returned."""
    if type(reference).__name__ == "ObjectRef":
        import ray

        return ray.get(reference)
    return reference


def connect(address: str = "") -> None:
    """Ray's cluster at `address` ("auto": the one that this machine is part of), or one of this machine, made for this process.

    Does nothing where one is connected.
    """
    import ray

    if not ray.is_initialized():
        own = {} if address else {"include_dashboard": False, "num_cpus": 16, "object_store_memory": 256 << 20}
        ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **own)
