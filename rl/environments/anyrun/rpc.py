"""Calls over HTTP: `POST /v1/METHOD` with a JSON object of arguments, answered by a JSON value; bytes are {"bytes": base64}.

Every call carries a bearer token and an idempotency key. A server does a key's call once: a repetition, by a client whose
connection broke, waits for or gets the first one's answer. So the client repeats any call after a connection error, with a growing
pause and the same key, until its deadline. Errors come back as the exceptions they were.

Clients are not trusted: numbers must be finite, bodies have a size and a time, a few large ones per tenant are read at once, the
answers kept for repetitions are few and small. A connection that has shown no token is closed after a while, or at once where there
are too many; so strangers keep no one out.
"""

import asyncio
import base64
import hashlib
import hmac
import inspect
import json
import math
import random
import resource
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from rl.environments import sandbox
from rl.environments.anyrun.scheduler import Refused

ERRORS = {
    kind.__name__: kind for kind in vars(sandbox).values() if isinstance(kind, type) and issubclass(kind, sandbox.SandboxError)
}
REMEMBER, REMEMBER_S, REMEMBER_BYTES = 10_000, 600.0, 1 << 28  # answers, for repetitions
LARGEST, LARGE, LARGE_AT_ONCE = 96 << 20, 1 << 20, 4  # bytes of a body; bodies over LARGE, of one tenant
BODY_S, HEAD_S = 60.0, 15.0  # for a request's body to come; for a connection's first request with a known token
CONNECTIONS = 4096  # open at once, or half of what the process may open


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


@dataclass
class Call:
    digest: bytes  # of its body
    since: float
    task: asyncio.Task
    bytes: int = 0  # of its answer


class Closed(asyncio.Protocol):
    """Takes no connection."""

    def connection_made(self, transport):
        transport.abort()


def cut(connection: web.RequestHandler):
    connection.force_close()
    if connection.transport is not None:
        connection.transport.abort()


class Server:
    """Offers `methods` of an object. `tokens`: bearer token -> tenant; a method with a parameter `tenant` is told the caller's."""

    def __init__(
        self, target, methods: tuple[str, ...], tokens: Mapping[str, str], metrics=None, head_s: float = HEAD_S,
        connections: int = CONNECTIONS,
    ):  # fmt: skip
        self.target, self.methods, self.tokens, self.metrics, self.head_s = target, methods, dict(tokens), metrics, head_s
        self.calls: OrderedDict[tuple, Call] = OrderedDict()
        self.running: set[asyncio.Task] = set()
        self.kept = 0  # bytes of answers
        self.large = defaultdict(lambda: asyncio.Semaphore(LARGE_AT_ONCE))
        self.most = min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.known: set = set()  # connections that have shown a token
        app = web.Application(client_max_size=LARGEST)
        app.router.add_post("/v1/{method}", self._handle)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        self.runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Its URL."""
        await self.runner.setup()
        self.listener = await asyncio.get_running_loop().create_server(self._connection, host, port, backlog=128)
        self.reaper = asyncio.create_task(self._reap())
        return f"http://{host}:{self.listener.sockets[0].getsockname()[1]}"

    async def close(self):
        self.listener.close()
        for task in [self.reaper, *self.running]:
            task.cancel()
        await self.runner.cleanup()

    def _connection(self) -> asyncio.BaseProtocol:
        """Speaks on a new connection. Where there are too many, the oldest that has shown no token goes, or else the new one."""
        opened = self.runner.server.connections
        if len(opened) >= self.most:
            stranger = next((connection for connection in opened if connection not in self.known), None)
            if stranger is None:
                return Closed()
            cut(stranger)
        return self.runner.server()

    async def _reap(self):
        """Closes connections that have shown no token for too long after they were opened."""
        since: dict = {}
        while True:
            await asyncio.sleep(self.head_s / 4)
            now, opened = time.monotonic(), self.runner.server.connections
            since = {connection: since.get(connection, now) for connection in opened}
            self.known &= since.keys()
            for connection in opened:
                if connection not in self.known and now - since[connection] > self.head_s:
                    cut(connection)

    def _tenant(self, request: web.Request) -> str:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
        for token, tenant in self.tokens.items():
            if hmac.compare_digest(given, token.encode()):
                self.known.add(request.protocol)
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
        if (request.content_length or 0) > LARGEST:
            raise web.HTTPRequestEntityTooLarge(LARGEST, request.content_length)
        try:
            async with asyncio.timeout(BODY_S):
                body = await self._body(request, tenant)
        except TimeoutError:
            raise web.HTTPRequestTimeout() from None
        known = (tenant, method, request.headers.get("Idempotency-Key") or secrets.token_hex(16))
        digest, now = hashlib.sha256(body).digest(), time.monotonic()
        self._forget(now)
        call = self.calls.get(known)
        if call is None:
            call = self.calls[known] = Call(digest, now, asyncio.create_task(self._answer(method, body, tenant)))
            self.running.add(call.task)
            call.task.add_done_callback(lambda task: self._done(known, call))
        elif call.digest != digest:
            return web.json_response(described(ValueError("the idempotency key was used for another call")), status=422)
        status, answer = await asyncio.shield(call.task)  # the call goes on when the client is gone
        return web.Response(body=answer, status=status, content_type="application/json")

    async def _body(self, request: web.Request, tenant: str) -> bytes:
        if request.content_length is not None and request.content_length <= LARGE:
            return await request.read()
        async with self.large[tenant]:
            return await request.read()

    def _done(self, known: tuple, call: Call):
        self.running.discard(call.task)
        if not call.task.cancelled() and self.calls.get(known) is call:
            call.bytes = len(call.task.result()[1])
            self.kept += call.bytes

    def _forget(self, now: float):
        """The oldest answers, while they are too many, too large or too old."""
        while self.calls:
            oldest = next(iter(self.calls.values()))
            if len(self.calls) <= REMEMBER and self.kept <= REMEMBER_BYTES and oldest.since >= now - REMEMBER_S:
                break
            self.kept -= self.calls.popitem(last=False)[1].bytes

    async def _answer(self, method: str, body: bytes, tenant: str) -> tuple[int, bytes]:
        call = getattr(self.target, method)
        try:
            arguments = unpacked(await asyncio.to_thread(_loads, body))
            if "tenant" in inspect.signature(call).parameters:
                arguments["tenant"] = tenant
            return 200, await asyncio.to_thread(_dumps, await call(**arguments))
        except Exception as error:
            return 422, json.dumps(described(error)).encode()


def _loads(body: bytes) -> dict:
    value = json.loads(body or b"{}", parse_constant=_finite, parse_float=_finite)
    if not isinstance(value, dict):
        raise ValueError("arguments must be a JSON object")
    return value


def _finite(text: str) -> float:
    """NaN and infinities would sit in queues that are ordered by time."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"numbers must be finite, got {text[:20]}")
    return value


def _dumps(value) -> bytes:
    return json.dumps(packed(value)).encode()


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
