"""The proxy of one environment: DNS, HTTP and intercepted TLS, each connection judged, its requests one by one, and logged.

Names are never looked up for the sandbox: an allowed one gets an address of 198.18.0.0/15 made up for it (any other none), and only
when the sandbox connects there does the proxy resolve the name itself and check that the result is public. Host header and TLS
server name must be that name. Messages are parsed and written anew by h11, so nothing ambiguous is passed on.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import h11

from rl.environments.egress.certificates import Authority, asked_name
from rl.environments.egress.policy import Denied, Policy, Rule, host_name, judge, kept
from rl.environments.egress.redirect import open_door

MADE_UP = ipaddress.ip_network("198.18.0.0/15")
CHUNK = 1 << 16
WAIT_S = 30.0  # for a peer to send or take something
NO_ERROR, SERVER_FAILURE, NO_NAME, REFUSED = 0, 2, 3, 5

Resolver = Callable[[str, int], Awaitable[list[tuple[str, int]]]]


async def resolve(host: str, port: int) -> list[tuple[str, int]]:
    """Addresses of a name by this machine's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(entry[4][0], entry[4][1]) for entry in found]


class Names:
    """Made-up addresses of allowed names."""

    def __init__(self, policy: Policy, most: int = 4096):
        self.policy, self.most = policy, most
        self.address: dict[str, str] = {}
        self.name: dict[str, str] = {}

    def host(self, address: str) -> str:
        """The name behind an address; an address that was not given out stands for itself."""
        return self.name.get(address, address)

    def answer(self, query: bytes) -> tuple[bytes, str, int]:
        """(reply, name, code) to a DNS query: one address for an allowed name and type A, nothing else ever."""
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii"))
            at += 1 + query[at]
        kind = int.from_bytes(query[at + 1 : at + 3])
        end, name = at + 5, ".".join(labels)
        code, record = NO_NAME, b""
        with contextlib.suppress(ValueError):
            name = host_name(name)
            if self.policy.resolvable(name) and (name in self.address or len(self.address) < self.most):
                code = NO_ERROR
                if kind == 1:
                    address = self.address.setdefault(name, str(MADE_UP[len(self.address) + 1]))
                    self.name[address] = name
                    record = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + ipaddress.ip_address(address).packed
        flags = (0x8180 | code).to_bytes(2)
        return query[:2] + flags + b"\0\x01" + bool(record).to_bytes(2) + bytes(4) + query[12:end] + record, name, code


class Proxy:
    """`async with Proxy("id", policy, "/proc/PID/ns/net", log=path) as proxy:` is the environment's way out; `proxy.authority.pem`
    and `certificates.variables` go into the sandbox."""

    def __init__(
        self, environment: str, policy: Policy, namespace: str, *, log: Path | Callable[[dict], None], resolver: Resolver = resolve
    ):
        self.environment, self.policy, self.namespace, self.resolver = environment, policy, namespace, resolver
        self.authority, self.names = Authority(environment), Names(policy)
        self.log = log if callable(log) else partial(append, log)
        self.connections: set[asyncio.Task] = set()
        self.bytes = 0

    async def __aenter__(self) -> "Proxy":
        loop = asyncio.get_running_loop()
        self.door = await asyncio.to_thread(open_door, self.namespace)
        loop.add_reader(self.door.dns, self._dns)
        self.acceptors = [asyncio.create_task(self._accept(listener)) for listener in self.door.tcp]
        return self

    async def __aexit__(self, *_):
        asyncio.get_running_loop().remove_reader(self.door.dns)
        tasks = [*self.acceptors, *self.connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.door.close()

    def note(self, verdict: str, **facts):
        self.log({"time": time.time(), "environment": self.environment, "verdict": verdict, **facts})

    def count(self, size: int):
        self.bytes += size
        if self.bytes > self.policy.total_bytes:
            raise Denied("the environment has used up its bytes", 429)

    def _dns(self):
        with contextlib.suppress(BlockingIOError):
            query, sender = self.door.dns.recvfrom(4096)
            try:
                reply, name, code = self.names.answer(query)
            except (IndexError, UnicodeDecodeError):
                self.note("deny", reason="malformed DNS query")
                return
            self.note("allow" if code == NO_ERROR else "deny", reason="dns", host=name)
            with contextlib.suppress(OSError):
                self.door.dns.sendto(reply, sender)

    async def _accept(self, listener: socket.socket):
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            if len(self.connections) >= self.policy.connections:
                self.note("deny", reason="too many connections")
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self.connections.add(task)
            task.add_done_callback(self.connections.discard)

    async def _serve(self, connection: socket.socket):
        """One connection from the sandbox: found allowed, opened, and its requests carried."""
        address, port = connection.getsockname()[:2]
        address = str(getattr(ip := ipaddress.ip_address(address), "ipv4_mapped", None) or ip)
        host = self.names.host(address)
        facts = {"host": host, "port": port}
        client = None
        try:
            rule = self.policy.connect(host, port)
            async with asyncio.timeout(WAIT_S):
                hello = await peek(connection)
            tls = hello[:1] == b"\x16"
            if tls and rule.tls == "tunnel":
                await self._tunnel(connection, rule, host, port, facts)
                return
            reader, writer = await streams(connection, self.authority.context(host) if tls else None)
            client = Side(h11.Connection(h11.SERVER), reader, writer)
            while await self._exchange(client, rule, host, port, tls, facts):
                client.http.start_next_cycle()
        except Denied as denied:
            self.note("deny", reason=denied.reason, **facts)
        except ssl.SSLError as error:
            other_name = error.reason == "CALLBACK_FAILED"  # the only one: of the server's name
            self.note("deny", reason="server name is not the host connected to" if other_name else f"tls: {error.reason}", **facts)
        except (OSError, h11.ProtocolError, TimeoutError, asyncio.IncompleteReadError) as error:
            self.note("error", reason=f"{type(error).__name__}: {error}"[:200], **facts)
        finally:
            connection.close() if client is None else client.close()

    async def _exchange(self, client: "Side", rule: Rule, host: str, port: int, tls: bool, facts: dict) -> bool:
        """One request and its response; whether the connection goes on."""
        request = await client.event()
        if not isinstance(request, h11.Request):
            return False
        facts = {**facts, "method": request.method.decode(), "target": request.target.decode("ascii", "replace")[:500]}
        server, answered = None, False
        try:
            upgrade = self._judge(request, rule, host, facts)
            server = await self._dial(rule, host, port, tls)
            headers = kept(list(request.headers), rule.drop_headers, upgrade)
            await server.send(h11.Request(method=request.method, target=request.target, headers=headers))
            sent = await self._body(client, server, rule.request_bytes, "request", 413)
            response = await server.event()
            while type(response) is h11.InformationalResponse and response.status_code != 101:
                response = await server.event()
            switched = type(response) is h11.InformationalResponse
            headers = kept(list(response.headers), rule.drop_response_headers, switched)
            answered = True
            await client.send(type(response)(status_code=response.status_code, headers=headers, reason=response.reason))
            if switched:
                sent, received = await self._relay(client, server, rule)
            else:
                received = await self._body(server, client, rule.response_bytes, "response", 502)
            self.note("allow", status=response.status_code, sent=sent, received=received, **facts)
            return not switched and client.http.our_state is client.http.their_state is h11.DONE
        except Denied as denied:
            self.note("deny", reason=denied.reason, **facts)
            if not answered:
                await client.refuse(denied.status, denied.reason)
        except (OSError, h11.ProtocolError, TimeoutError) as error:
            self.note("error", reason=f"{type(error).__name__}: {error}"[:200], **facts)
            if not answered:
                await client.refuse(502, "the server cannot be reached")
        finally:
            if server is not None:
                server.close()
        return False

    def _judge(self, request: h11.Request, rule: Rule, host: str, facts: dict) -> bool:
        """Whether this asks for a websocket; Denied unless it may be sent."""
        headers = dict(request.headers)
        asked = headers.get(b"host", b"").decode("ascii", "replace")
        try:
            named = host_name(asked.rsplit(":", 1)[0] if asked.rsplit(":", 1)[-1].isdigit() and not asked.endswith("]") else asked)
        except ValueError:
            named = asked
        if named != host:
            raise Denied(f"host header {named[:100]!r} is not the host connected to", 421)
        upgrade = b"upgrade" in headers
        judge(rule, facts["method"], facts["target"], upgrade)
        if upgrade and headers[b"upgrade"].lower() != b"websocket":
            raise Denied("upgrades are not allowed")
        if int(headers.get(b"content-length", b"0")) > rule.request_bytes:
            raise Denied("request body is too large", 413)
        if b"expect" in headers:
            raise Denied("expect is not supported", 417)
        return upgrade

    async def _connect(self, rule: Rule, host: str, port: int, context: ssl.SSLContext | None):
        """A connection to the host itself, at an address that the rule allows."""
        for address, there in await self.resolver(host, port):
            if not ipaddress.ip_address(address).is_global and not rule.private:
                raise Denied(f"{host} leads to {address}, which is not public")
            name = host if context is not None else None
            async with asyncio.timeout(WAIT_S):
                return await asyncio.open_connection(address, there, ssl=context, server_hostname=name)
        raise OSError(f"{host} has no address")

    async def _dial(self, rule: Rule, host: str, port: int, tls: bool) -> "Side":
        context = None
        if tls:
            context = ssl.create_default_context(cadata=rule.ca_pem or None)
            context.set_alpn_protocols(["http/1.1"])
        return Side(h11.Connection(h11.CLIENT), *await self._connect(rule, host, port, context))

    async def _body(self, source: "Side", target: "Side", most: int, which: str, status: int) -> int:
        """Copies a message's body and end; its size."""
        size = 0
        while True:
            event = await source.event()
            if type(event) is h11.Data:
                size += len(event.data)
                if size > most:
                    raise Denied(f"{which} body is too large", status)
                self.count(len(event.data))
                await target.send(h11.Data(data=bytes(event.data)))
            elif type(event) is h11.EndOfMessage:
                await target.send(h11.EndOfMessage())
                return size
            else:
                raise h11.RemoteProtocolError("the connection ended within a message")

    async def _relay(self, client: "Side", server: "Side", rule: Rule) -> tuple[int, int]:
        """Bytes both ways until one side ends."""
        sizes = {"request": 0, "response": 0}

        async def copy(source: Side, target: Side, which: str, most: int):
            data = source.rest()
            while data or (data := await source.reader.read(CHUNK)):
                sizes[which] += len(data)
                self.count(len(data))
                if sizes[which] > most:
                    raise Denied(f"{which} is too large")
                target.writer.write(data)
                await target.writer.drain()
                data = b""

        both = [
            asyncio.create_task(copy(client, server, "request", rule.request_bytes)),
            asyncio.create_task(copy(server, client, "response", rule.response_bytes)),
        ]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        return sizes["request"], sizes["response"]

    async def _tunnel(self, connection: socket.socket, rule: Rule, host: str, port: int, facts: dict):
        """Encrypted bytes as they are, for the name the client asked for."""
        async with asyncio.timeout(WAIT_S):
            while True:
                hello = await peek(connection, CHUNK)
                try:
                    name = asked_name(hello)
                    break
                except ssl.SSLWantReadError:
                    await asyncio.sleep(0.01)
        if name != host:
            raise Denied(f"server name {name!r} is not the host connected to")
        reader, writer = await streams(connection, None)
        client, server = Side(None, reader, writer), Side(None, *await self._connect(rule, host, port, None))
        try:
            sent, received = await self._relay(client, server, rule)
            self.note("allow", reason="tunnel", sent=sent, received=received, **facts)
        finally:
            client.close()
            server.close()


class Side:
    """One end of a connection with its HTTP state."""

    def __init__(self, http: h11.Connection | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.http, self.reader, self.writer = http, reader, writer

    async def event(self):
        while (event := self.http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(WAIT_S):
                self.http.receive_data(await self.reader.read(CHUNK))
        return event

    async def send(self, event):
        data = self.http.send(event)
        if data:
            self.writer.write(data)
            async with asyncio.timeout(WAIT_S):
                await self.writer.drain()

    async def refuse(self, status: int, reason: str):
        """A response of the proxy itself, and the end of the connection."""
        body = f"anygress: {reason}\n".encode()
        headers = [("content-length", str(len(body))), ("content-type", "text/plain"), ("connection", "close")]
        with contextlib.suppress(OSError, h11.ProtocolError, TimeoutError):
            await self.send(h11.Response(status_code=status, headers=headers))
            await self.send(h11.Data(data=body))
            await self.send(h11.EndOfMessage())

    def rest(self) -> bytes:
        """What was read beyond HTTP."""
        return self.http.trailing_data[0] if self.http is not None else b""

    def close(self):
        self.writer.close()


def append(path: Path, entry: dict):
    """One JSON object a line."""
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")


async def peek(connection: socket.socket, size: int = 1) -> bytes:
    """First bytes of a connection, left in it."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(connection)
    return connection.recv(size, socket.MSG_PEEK)


async def streams(connection: socket.socket, context: ssl.SSLContext | None):
    """Reader and writer of an accepted socket, after the TLS handshake if there is one."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    limit = WAIT_S if context else None
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context, ssl_handshake_timeout=limit)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
