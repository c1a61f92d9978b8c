"""A sandbox's way out while a policy lasts: the proxy, its root certificate inside, and names that it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rl.environments.egress.certificates import variables
from rl.environments.egress.policy import Policy
from rl.environments.egress.proxy import Proxy, Resolver, resolve
from rl.environments.sandbox import Sandbox

ROOT = "/etc/anygress.pem"


@asynccontextmanager
async def way_out(
    sandbox: Sandbox, policy: Policy, *, log: Path | Callable[[dict], None], resolver: Resolver = resolve
) -> AsyncIterator[dict[str, str]]:
    """Inside, the sandbox reaches what `policy` allows; the variables are for the `env` of its commands. Unavailable where the
    machine cannot redirect, Unsupported where the backend has no network of its own (capability `egress`): nothing leaves then."""
    network = f"/proc/{await asyncio.to_thread(lambda: sandbox.host_pid)}/ns/net"
    async with Proxy(sandbox.id, policy, network, log=log, resolver=resolver) as proxy:
        await asyncio.to_thread(sandbox.write, ROOT, proxy.authority.pem.encode())
        await asyncio.to_thread(sandbox.write, "/etc/resolv.conf", b"nameserver 127.0.0.1\n")
        yield variables(ROOT)
