"""Nodes as Ray actors, one on each machine of a Ray cluster: Ray brings the code there, and ends the actor with its machine.

    anyrun = Anyrun(); await anyrun.start()
    for name, node in start().items():
        await anyrun.add_node(name, node)

Only this module knows Ray, and imports it when called. Ray schedules nothing here: an actor claims no CPU of Ray's.
"""

from rl.environments import open_backend
from rl.environments.anyrun.agent import METHODS, Agent
from rl.environments.anyrun.rpc import Unreachable, described, revived

AT_ONCE = 4096  # calls under way in one actor


class Actor:
    """An `Agent` in the actor's process. Errors are answers, as over HTTP: not every exception can be pickled."""

    def __init__(self, backend: str, options: dict, agent: dict):
        self.agent = Agent(open_backend(backend, **options), **agent)

    async def call(self, method: str, arguments: dict) -> tuple[bool, object]:
        if method not in METHODS:
            raise AttributeError(method)
        try:
            return True, await getattr(self.agent, method)(**arguments)
        except Exception as error:
            return False, described(error)

    async def close(self):
        await self.agent.close_ways()
        self.agent.close()


class RayNode:
    """What `Anyrun.add_node` takes: the agent's methods, of an actor. Unreachable when Ray cannot reach it."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, method: str):
        if method not in METHODS:
            raise AttributeError(method)

        async def call(**arguments):
            from ray.exceptions import RayError

            try:
                ok, value = await self._actor.call.remote(method, arguments)
            except RayError as error:
                raise Unreachable(f"{method}: {type(error).__name__}: {error}") from error
            if not ok:
                raise revived(value)
            return value

        return call

    async def close(self):
        """Its sandboxes end, and then the actor."""
        import ray

        await self._actor.close.remote()
        ray.kill(self._actor)


def start(backend: str = "namespaces", options: dict | None = None, **agent) -> dict[str, RayNode]:
    """An actor on every machine of the cluster that `ray.init` has connected to, by node name; `agent`: options of `Agent`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    made = {}
    for machine in (node for node in ray.nodes() if node["Alive"]):
        here = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
        actor = ray.remote(Actor).options(num_cpus=0, max_concurrency=AT_ONCE, scheduling_strategy=here)
        made[f"ray-{machine['NodeID'][:12]}"] = RayNode(actor.remote(backend, options or {}, agent))
    return made
