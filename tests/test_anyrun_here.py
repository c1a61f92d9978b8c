"""Anyrun and Anygress on this machine's own sandboxes: the command line from outside, and a way out of one."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from rl.environments.anyrun.agent import Agent
from rl.environments.anyrun.rpc import Client
from rl.environments.anyrun.scheduler import Config
from rl.environments.anyrun.service import Anyrun
from rl.environments.egress.policy import Policy, Rule
from rl.environments.egress.way_out import way_out
from rl.environments.sandbox import SandboxLost, Unsupported
from tests.egress_cases import missing, servers
from tests.sandbox_cases import IMAGES, image, open_or_skip, spec

FETCH = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=8).read().decode())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_sandbox_reaches_one_host_and_nothing_else():
    if missing():
        pytest.skip(missing())
    with servers(["open.test"]) as (seen, authority, ports), open_or_skip("namespaces") as backend:
        log = []

        async def here(host, port):
            return [("127.0.0.1", ports[port])]

        async def main(sandbox):
            def fetch(url, **options):
                return sandbox.exec(["python3", "-c", FETCH, url], **options).stdout.decode()

            assert "hello" not in await asyncio.to_thread(fetch, "http://open.test/before")
            policy = Policy((Rule("open.test", paths=("/", "/a*"), private=True, ca_pem=authority.pem),))
            async with way_out(sandbox, policy, log=log.append, resolver=here) as variables:
                assert await asyncio.to_thread(fetch, "http://open.test/a") == "hello\n"
                assert "403" in await asyncio.to_thread(fetch, "http://open.test/other")
                for url in ("http://other.test/", "http://93.184.216.34/", "http://[2606:4700::1111]/", "http://169.254.169.254/"):
                    assert "hello" not in await asyncio.to_thread(fetch, url), url
                if "no ssl" not in await asyncio.to_thread(fetch, "https://open.test/", env=variables):
                    assert await asyncio.to_thread(fetch, "https://open.test/as", env=variables) == "hello\n"
                    assert "CERTIFICATE_VERIFY" in await asyncio.to_thread(fetch, "https://open.test/as")
            assert "hello" not in await asyncio.to_thread(fetch, "http://open.test/after")

        with backend.create(spec(backend)) as sandbox:
            asyncio.run(main(sandbox))
        assert {path for _, path, _, _ in seen} <= {"/", "/a", "/as"}
        assert {"allow", "deny"} <= {entry["verdict"] for entry in log}
    with open_or_skip("subprocess", allow="all") as backend, backend.create(spec(backend)) as sandbox:

        async def refused():
            async with way_out(sandbox, Policy(), log=log.append):
                pass

        with pytest.raises(Unsupported):
            asyncio.run(refused())


def test_a_tenant_names_a_way_out(tmp_path):
    """It lasts as long as its environment, and is no other's."""
    if missing():
        pytest.skip(missing())

    async def main(here, seen):
        anyrun = Anyrun(Config(fork_away=False, pressure=(1e3,) * 4))
        await anyrun.start()
        await anyrun.add_node("n0", here)
        name, steady = image().parent.name, [100, 128, 64, 32]

        async def fetch(env, url):
            return (await anyrun.exec("me", env, ["python3", "-c", FETCH, url]))["stdout"].decode()

        async def emptied():
            for _ in range(500):
                if not here.sandboxes:
                    return True
                await asyncio.sleep(0.02)

        def make(key, **options):
            return anyrun.create("me", key, name, steady, **options)

        try:
            with pytest.raises(ValueError, match="one of open, shut, got 'other'"):
                await make("0", egress="other")
            assert await emptied()
            one, shut = [(await make(key, egress=key))["id"] for key in ("open", "shut")]
            without = (await make("none"))["id"]
            fork = (await make("fork", parent=one))["id"]
            assert await fetch(one, "http://open.test/a") == "hello\n"
            for env in (shut, without, fork):
                assert "hello" not in await fetch(env, "http://open.test/b")
            assert (await make("open", egress="open"))["id"] == one  # a repetition
            with pytest.raises(ValueError, match="egress is 'open' already, got 'shut'"):
                await make("open", egress="shut")
            assert await fetch(one, "http://open.test/a") == "hello\n"
            again = (await make("again", parent=one, egress="open"))["id"]
            assert await fetch(again, "http://open.test/c") == "hello\n"
            await asyncio.gather(*(anyrun.destroy("me", env) for env in (one, shut, without, fork, again)))
            assert await emptied()
            assert not here.ways
        finally:
            await anyrun.close()
            await here.close_ways()
        assert {path for _, path, _, _ in seen} == {"/a", "/c"}
        logged = [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
        assert {entry["verdict"] for entry in logged} >= {"allow", "deny"}

    with servers(["open.test"]) as (seen, _, ports), open_or_skip("namespaces") as backend:

        async def near(host, port):
            return [("127.0.0.1", ports[port])]

        policies = {"open": Policy((Rule("open.test", private=True),)), "shut": Policy()}
        here = Agent(backend, [10**6] * 4, IMAGES, policies=policies, audit=tmp_path, resolver=near)
        asyncio.run(main(here, seen))


def test_the_command_line_serves_sandboxes():
    open_or_skip("namespaces").close()
    name = image().parent.name
    environment = {**os.environ, "ANYRUN_TOKEN": "root", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rl", "anyrun"]
    options = ["--port", "0", "--tenant", "me=secret", "--images", str(IMAGES), "--load", "1e3"]
    up = subprocess.Popen([*command, "up", *options], env=environment, stdout=subprocess.PIPE, text=True)

    async def main(url):
        client = Client(url, "secret", 60.0)
        steady = [100, 128, 64, 32]
        env = (await client.create(key="k", image=name, steady=steady))["id"]
        await client.write(env=env, path="/tmp/a.py", data=b"print(6 * 7)")
        assert (await client.exec(env=env, command="python3 /tmp/a.py"))["stdout"] == b"42\n"
        fork = (await client.create(key="f", image=name, steady=steady, parent=env))["id"]
        assert await client.read(env=fork, path="/tmp/a.py") == b"print(6 * 7)"
        for stolen in ("/", "../..", str(image())):
            with pytest.raises(SandboxLost, match="ImageError"):
                await client.create(key=stolen, image=stolen, steady=steady)
        await client.destroy(env=env)
        await client.aclose()

    try:
        url = up.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        asyncio.run(main(url))
        shown = subprocess.run([*command, "status", "--url", url], env=environment, capture_output=True, text=True, timeout=60)
        assert re.search(r"1 running, 0 waiting", shown.stdout), shown
        assert "local" in shown.stdout
        top = subprocess.Popen([*command, "top", "--url", url], env=environment, stdout=subprocess.PIPE, text=True)
        time.sleep(4)
        top.send_signal(signal.SIGINT)
        assert "local" in top.communicate(timeout=30)[0]
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(30)
