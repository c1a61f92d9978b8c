"""`python -m rl anyrun up | node | status | top | sim`."""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rl.environments import open_backend
from rl.environments.anyrun import agent, on_ray, service
from rl.environments.anyrun.rpc import Client, Server
from rl.environments.anyrun.scheduler import Config
from rl.environments.anyrun.shapes import RESOURCES
from rl.environments.anyrun.sim import Plan, simulate
from rl.environments.egress.policy import read_policies

TOKEN = "ANYRUN_TOKEN"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rl anyrun", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="serve, with this machine as a node and others by their URL")
    node = commands.add_parser("node", help="serve this machine's sandboxes to a service elsewhere")
    for command in (up, node):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--backend", default="namespaces")
        command.add_argument("--images", type=Path, help="directory of images that tenants may name")
        command.add_argument("--egress", type=Path, metavar="FILE", help="JSON: ways out that tenants may name, each a policy")
        command.add_argument("--audit", type=Path, default=Path("anygress"), help="directory of logs of what went out")
        command.add_argument(
            "--allow-unsafe", action="store_true", help="promises of isolation that the backend cannot keep here are waived"
        )
    up.add_argument("--port", type=int, default=8650)
    up.add_argument("--tenant", action="append", default=[], metavar="NAME=TOKEN")
    up.add_argument("--node", action="append", default=[], metavar="NAME=URL", help="a node elsewhere; its token is the service's")
    up.add_argument("--ray", metavar="ADDRESS", help="every machine of this Ray cluster, too (auto: the running one)")
    up.add_argument(
        "--load", type=float, default=0.95, help="share of the cores in use from which on nothing more starts on a node"
    )
    node.add_argument("--port", type=int, default=8651)
    for name, text in (("status", "what runs where, once"), ("top", "the same, every second")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--url", default="http://127.0.0.1:8650")
    sim = commands.add_parser("sim", help="a cluster in virtual time")
    for field in fields(Plan):
        if field.type in (int, float):
            sim.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    arguments = vars(parser.parse_args(argv))
    command = arguments.pop("command")
    if command == "sim":
        print(json.dumps(simulate(Plan(**arguments)), indent=1))
        return 0
    token = os.environ.get(TOKEN) or (secrets.token_urlsafe(24) if command in ("up", "node") else "")
    if not token:
        parser.error(f"{TOKEN} must hold the administrator's token")
    if command in ("up", "node") and TOKEN not in os.environ:
        print(f"{TOKEN}={token}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run({"up": serve, "node": serve_node, "status": show, "top": watch}[command](token=token, **arguments))
    return 0


def backend_of(backend: str, allow_unsafe: bool):
    return open_backend(backend, **({"allow": "all"} if allow_unsafe else {}))


def agent_options(images: Path | None, egress: Path | None, audit: Path) -> dict:
    return dict(images=images, policies=read_policies(egress) if egress else {}, audit=audit)


async def serve(*, token, host, port, backend, images, egress, audit, allow_unsafe, tenant, node, ray, load):
    options = agent_options(images, egress, audit)
    here = agent.Agent(backend_of(backend, allow_unsafe), **options)
    anyrun = service.Anyrun(Config(fork_away=False, pressure=(load, *Config.pressure[1:])))
    await anyrun.start()
    await anyrun.add_node("local", here)
    for name, url in (entry.split("=", 1) for entry in node):
        await anyrun.add_node(name, Client(url, token))
    if ray:
        import ray as cluster

        cluster.init(ray)
        for name, far in on_ray.start(backend, {"allow": "all"} if allow_unsafe else {}, **options).items():
            await anyrun.add_node(name, far)
    tokens = {secret: name for name, secret in (entry.split("=", 1) for entry in tenant)}
    if service.ADMIN in tokens.values():
        raise ValueError(f"{service.ADMIN} is no tenant: the token in {TOKEN} is the administrator's")
    tokens[token] = service.ADMIN
    server = Server(anyrun, service.METHODS, tokens, anyrun.metrics)
    print(await server.start(host, port), flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
        await anyrun.close()
        await here.close_ways()
        here.close()


async def serve_node(*, token, host, port, backend, images, egress, audit, allow_unsafe):
    here = agent.Agent(backend_of(backend, allow_unsafe), **agent_options(images, egress, audit))
    server = Server(here, agent.METHODS, {token: service.ADMIN})
    print(await server.start(host, port), flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.close()
        await here.close_ways()
        here.close()


def page(status: dict) -> Table:
    """Nodes as rows: reserved / live / capacity."""
    counts = status["environments"]
    waiting = sum(tenant["waiting"] for tenant in status["tenants"])
    table = Table(title=f"{counts['running']} running, {waiting} waiting, {status['placements']} placements so far")
    for column in ("node", "state", "environments", "silent", *RESOURCES):
        table.add_column(column, justify="left" if column in ("node", "state") else "right")
    for node in status["nodes"]:
        cells = [" / ".join(map(str, node[resource])) for resource in RESOURCES]
        table.add_row(node["name"], node["state"], str(node["environments"]), f"{node['silent_s']:.1f} s", *cells)
    return table


async def show(*, token, url):
    client = Client(url, token, timeout_s=10.0)
    try:
        Console().print(page(await client.status()))
    finally:
        await client.aclose()


async def watch(*, token, url):
    client = Client(url, token, timeout_s=10.0)
    try:
        with Live(page(await client.status())) as screen:
            while True:
                await asyncio.sleep(1.0)
                screen.update(page(await client.status()))
    finally:
        await client.aclose()
