"""A network namespace, servers on this machine's loopback, and a proxy between them, for the tests of egress."""

import asyncio
import http.client
import http.server
import socket
import ssl
import subprocess
import threading
from contextlib import contextmanager
from functools import cache

from rl.environments.egress.certificates import Authority
from rl.environments.egress.policy import Policy
from rl.environments.egress.proxy import Proxy
from rl.environments.egress.redirect import Unavailable, inside, open_door


@contextmanager
def namespace():
    """The path of a new network namespace; it lives as long as a sleeping process in it."""
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo in; exec sleep 300"], stdout=subprocess.PIPE, text=True)
    try:
        if holder.stdout.readline() != "in\n":
            raise Unavailable("no network namespace can be made")
        yield f"/proc/{holder.pid}/ns/net"
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


@cache
def missing() -> str:
    """Why this machine cannot redirect, or nothing."""
    try:
        with namespace() as path:
            open_door(path).close()
    except (OSError, Unavailable) as error:
        return str(error)
    return ""


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path, and notes every request in `server.seen`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_GET(self):
        if self.path == "/ws":
            self.server.seen.append((self.command, self.path, dict(self.headers), b""))
            self.connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
            while data := self.connection.recv(4096):
                self.connection.sendall(data.upper())
            self.close_connection = True
            return
        try:
            body = self.body()
        except (ValueError, OSError):
            self.close_connection = True
            return
        self.server.seen.append((self.command, self.path, dict(self.headers), body))
        answer = b"x" * int(self.path.split("/big/")[1]) if "/big/" in self.path else b"hello"
        self.send_response(302 if "/away" in self.path else 200)
        if "/away" in self.path:
            self.send_header("Location", "http://other.test/")
        self.send_header("Set-Cookie", "secret=1")
        self.send_header("X-Kept", "yes")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_POST = do_PUT = do_HEAD = do_DELETE = do_GET


@contextmanager
def servers(hosts: list[str]):
    """(seen, authority, ports): an HTTP and an HTTPS server; the second speaks as any of the hosts."""
    authority, seen = Authority("upstream"), []

    def choose(connection, name, _):
        connection.context = authority.context(name or hosts[0])

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = choose
    made = []
    for secure in (False, True):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.seen = True, seen
        server.handle_error = lambda *_: None
        if secure:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        made.append(server)
    try:
        yield seen, authority, {80: made[0].server_address[1], 443: made[1].server_address[1]}
    finally:
        for server in made:
            server.shutdown()
            server.server_close()


class Place:
    """The inside of a sandbox with a way out, and what was seen outside."""

    def __init__(self, path: str, policy: Policy, ports: dict[int, int], seen: list):
        self.path, self.ports, self.seen, self.log, self.resolved = path, ports, seen, [], []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.proxy = Proxy("env-1", policy, path, log=self.log.append, resolver=self.resolve)
        self.run(self.proxy.__aenter__())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(20)

    def close(self):
        self.run(self.proxy.__aexit__())
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def resolve(self, host, port):
        self.resolved.append(host)
        return [("127.0.0.1", self.ports.get(port, self.ports[80]))]

    def clear(self):
        for notes in (self.seen, self.log, self.resolved):
            notes.clear()

    def make_socket(self, family=socket.AF_INET, kind=socket.SOCK_STREAM, protocol=0) -> socket.socket:
        made = inside(self.path, lambda: socket.socket(family, kind, protocol))
        made.settimeout(5)
        return made

    def query(self, name: str, kind: int = 1) -> tuple[int, list[str]]:
        """(DNS code, IPv4 addresses)."""
        question = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0" + kind.to_bytes(2) + b"\0\1"
        with self.make_socket(kind=socket.SOCK_DGRAM) as client:
            client.sendto(b"\x12\x34\1\0\0\1\0\0\0\0\0\0" + question, ("127.0.0.1", 53))
            reply = client.recv(4096)
        assert reply[:2] == b"\x12\x34"
        records = int.from_bytes(reply[6:8])
        return reply[3] & 15, [socket.inet_ntoa(reply[-4:])] * records

    def connect(self, host: str, port: int, address: str | None = None) -> socket.socket:
        """As a client inside does: a look-up, unless the address is given, and a connection."""
        if address is None:
            code, found = self.query(host)
            if code or not found:
                raise socket.gaierror(f"{host}: {code}")
            address = found[0]
        client = self.make_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        client.connect((address, port))
        return client

    def tls(self, host: str, ca_pem: str, name: str | None = None, address: str | None = None) -> ssl.SSLSocket:
        context = ssl.create_default_context(cadata=ca_pem)
        return context.wrap_socket(self.connect(host, 443, address), server_hostname=name or host)

    def request(self, method: str, url: str, body=None, headers=(), *, over=None, chunked=False, address=None):
        """(status, headers, body) of one request to "host/path"."""
        host, path = url.split("/", 1)
        connection = http.client.HTTPConnection(host)
        connection.sock = over or self.connect(host, 80, address)
        try:
            connection.request(method, "/" + path, body, {"Host": host, **dict(headers)}, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()
            connection.sock and connection.sock.close()

    def reasons(self) -> list[str]:
        return [f"{entry['verdict']}: {entry.get('reason', '')}" for entry in self.log if entry.get("reason") != "dns"]
