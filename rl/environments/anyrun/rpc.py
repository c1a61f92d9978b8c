"""Calls over HTTP: `POST /v1/METHOD` with a JSON object of arguments, answered by a JSON value; bytes are {"bytes": base64}.

Every call carries a bearer token and an idempotency key. A server does a key's call once: a repetition, by a client whose
connection broke, waits for or gets the first one's answer. So the client repeats any call after a connection error, with a growing
pause and the same key, until its deadline. Errors come back as the exceptions they were.
"""

import asyncio
import base64
import hmac
import inspect
import json
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from rl.environments import sandbox
from rl.environments.anyrun.scheduler import Refused

ERRORS = {
    kind.__name__: kind for kind in vars(sandbox).values() if isinstance(kind, type) and issubclass(kind, sandbox.SandboxError)
}
REMEMBER, REMEMBER_S, LARGEST = 10_000, 600.0, 1 << 28


class Unreachable(sandbox.SandboxError):
    """No answer until the deadline; whether the call was carried out is not known."""

    retryable = True


ERRORS["Unreachable"] = Unreachable


def packed(value):
    """JSON of a value with bytes in it."""
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {key: packed(item) for key, item in value.items()}
    return [packed(item) for item in value] if isinstance(value, (list, tuple)) else value


def unpacked(value):
    if isinstance(value, dict):
        if value.keys() == {"bytes"}:
            return base64.b64decode(value["bytes"])
        return {key: unpacked(item) for key, item in value.items()}
    return [unpacked(item) for item in value] if isinstance(value, list) else value


def described(error: Exception) -> dict:
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in ERRORS), None)
    if isinstance(error, Refused):
        return {"error": "Refused", "message": str(error), "reason": error.reason}
    if kind is None and isinstance(error, OSError):
        return {"error": "OSError", "message": error.strerror, "errno": error.errno}
    if kind is None and not isinstance(error, (ValueError, TypeError, PermissionError)):
        return {"error": "SandboxError", "message": f"{type(error).__name__}: {error}"}
    return {"error": kind or "ValueError", "message": str(error)}


def revived(facts: dict) -> Exception:
    match facts["error"]:
        case "Refused":
            return Refused(facts["reason"], facts["message"])
        case "OSError":
            return OSError(facts["errno"], facts["message"])
        case "ValueError":
            return ValueError(facts["message"])
        case kind:
            error = ERRORS.get(kind, sandbox.SandboxError)
            revived = error.__new__(error)  # some take other arguments than their message
            Exception.__init__(revived, facts["message"])
            return revived


class Server:
    """Offers `methods` of an object. `tokens`: bearer token -> tenant; a method with a parameter `tenant` is told the caller's."""

    def __init__(self, target, methods: tuple[str, ...], tokens: Mapping[str, str], metrics=None):
        self.target, self.methods, self.tokens, self.metrics = target, methods, dict(tokens), metrics
        self.answers: OrderedDict[tuple, tuple[float, asyncio.Task]] = OrderedDict()
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/v1/{method}", self._handle)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Its URL."""
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port)
        await site.start()
        return f"http://{host}:{site._server.sockets[0].getsockname()[1]}"

    async def close(self):
        for _, task in self.answers.values():
            task.cancel()
        await self.runner.cleanup()

    def _tenant(self, request: web.Request) -> str:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        for token, tenant in self.tokens.items():
            if hmac.compare_digest(given, token.encode()):
                return tenant
        raise web.HTTPUnauthorized(text="a known bearer token is needed")

    async def _health(self, _):
        return web.json_response({"ok": True})

    async def _metrics(self, _):
        return web.Response(body=self.metrics() if self.metrics else b"", headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _handle(self, request: web.Request):
        tenant, method = self._tenant(request), request.match_info["method"]
        if method not in self.methods:
            raise web.HTTPNotFound(text=f"no method {method}")
        body = await request.read()
        known = (tenant, method, request.headers.get("Idempotency-Key") or secrets.token_hex(16))
        while self.answers and (
            len(self.answers) > REMEMBER or next(iter(self.answers.values()))[0] < time.monotonic() - REMEMBER_S
        ):
            self.answers.popitem(last=False)
        if known not in self.answers:
            self.answers[known] = time.monotonic(), asyncio.create_task(self._answer(method, body, tenant))
        status, answer = await asyncio.shield(self.answers[known][1])  # the call goes on when the client is gone
        return web.json_response(answer, status=status)

    async def _answer(self, method: str, body: bytes, tenant: str) -> tuple[int, object]:
        call = getattr(self.target, method)
        try:
            arguments = unpacked(await asyncio.to_thread(_loads, body))
            if "tenant" in inspect.signature(call).parameters:
                arguments["tenant"] = tenant
            return 200, packed(await call(**arguments))
        except Exception as error:
            return 422, described(error)


def _loads(body: bytes) -> dict:
    value = json.loads(body or b"{}")
    if not isinstance(value, dict):
        raise ValueError("arguments must be a JSON object")
    return value


class Client:
    """Calls a `Server`; `client.exec(env=..., command=...)` is the method `exec` there."""

    def __init__(self, url: str, token: str, timeout_s: float = 60.0):
        self._url, self._token, self._timeout_s = url, token, timeout_s
        self._session: aiohttp.ClientSession | None = None

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(deadline_s: float | None = None, **arguments):
            return await self._call(method, deadline_s or self._timeout_s, arguments)

        return call

    async def _call(self, method: str, deadline_s: float, arguments: dict):
        if self._session is None:
            self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"})
        end, pause, key = time.monotonic() + deadline_s, 0.05, secrets.token_hex(16)
        while True:
            left = end - time.monotonic()
            try:
                async with self._session.post(
                    f"{self._url}/v1/{method}", json=packed(arguments), headers={"Idempotency-Key": key},
                    timeout=aiohttp.ClientTimeout(total=max(0.01, left), sock_connect=5.0),
                ) as response:  # fmt: skip
                    if response.status in (200, 422):
                        answer = await response.json()
                        if response.status == 422:
                            raise revived(answer)
                        return unpacked(answer)
                    if response.status < 500:
                        raise ValueError(f"{method}: HTTP {response.status}: {await response.text()}")
                    problem = f"HTTP {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            pause = min(2.0, pause * 2) * random.uniform(0.5, 1.0)
            if time.monotonic() + pause >= end:
                raise Unreachable(f"{self._url}: {method}: {problem}")
            await asyncio.sleep(pause)

    async def aclose(self):
        if self._session is not None:
            await self._session.close()
            self._session = None
