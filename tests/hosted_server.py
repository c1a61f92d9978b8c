"""E2B's API as a local HTTP server, written from its documentation and not from the adapter: sandboxes are those of `namespaces`.

The service is below /api, each sandbox's agent below /envd/<id>. As the real agent does, a command's stream ends only when nobody
holds its output any more, and commands get whatever environment the request names.
"""

import base64
import json
import secrets
import selectors
import shutil
import struct
import subprocess
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from rl.environments.sandbox import SandboxError
from tests.sandbox_cases import spec

KEY = "e2b_0123456789"


class Service:
    """State, and `faults`: {path: status or seconds} for what shall go wrong."""

    def __init__(self, backend):
        self.backend, self.boxes, self.snapshots, self.faults, self.lock = backend, {}, {}, {}, threading.Lock()
        self.made = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"service": self}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def options(self) -> dict:
        return {"allow": "all", "key": KEY, "api": f"{self.url}/api", "envd": f"{self.url}/envd/{{id}}"}

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        for box in list(self.boxes.values()):
            box["sandbox"].destroy()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, *_):
        pass

    def answer(self, status: int, body=None, raw: bytes | None = None):
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status: int, message: str):
        self.answer(status, {"code": status, "message": message})

    def do_GET(self):
        self.route()

    def do_POST(self):
        self.route()

    def do_DELETE(self):
        self.route()

    def route(self):
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        side, *rest = url.path.strip("/").split("/")
        fault = self.service.faults.get(f"{self.command} /{'/'.join(rest)}")
        if isinstance(fault, float):
            time.sleep(fault)
        elif fault:
            return self.fail(fault, "as the test asked")
        with suppress(ConnectionError):
            self.api(*rest) if side == "api" else self.envd(*rest)

    def api(self, kind, id="", verb=""):
        service = self.service
        if self.headers.get("X-API-Key") != KEY:
            return self.fail(401, "Invalid API key")
        if (self.command, kind, id) == ("POST", "sandboxes", ""):
            return self.create(json.loads(self.body))
        if (self.command, kind, id) == ("GET", "sandboxes", ""):
            wanted = dict([self.query["metadata"].split("=")])
            return self.answer(200, [{"sandboxID": name} for name, box in service.boxes.items() if box["metadata"] == wanted])
        if (self.command, kind) == ("DELETE", "templates"):
            return self.answer(204 if service.snapshots.pop(id, None) else 404)
        with service.lock:
            box = service.boxes.get(id)
            if box is not None and self.command == "DELETE":
                del service.boxes[id]
        if box is None:
            return self.fail(404, f"Sandbox {id} not found")
        if self.command == "DELETE":
            box["sandbox"].destroy()
            return self.answer(204)
        if verb == "timeout":
            box["sandbox"].renew(json.loads(self.body)["timeout"])
            return self.answer(204)
        if verb == "snapshots":
            name = f"{secrets.token_hex(10)}:default"
            service.snapshots[name] = box["sandbox"].snapshot()
            return self.answer(201, {"snapshotID": name, "names": [name]})
        return self.fail(404, "no such route")

    def create(self, request):
        service = self.service
        template = request["templateID"]
        if template != "base" and template not in service.snapshots:
            return self.fail(404, f"template '{template}' not found")
        options = {"lease_s": request["timeout"], "workdir": "/"}
        if template != "base":
            options["image"] = service.snapshots[template]
        sandbox = service.backend.create(spec(service.backend, **options))
        id, token = secrets.token_hex(10), secrets.token_hex(8)
        service.boxes[id] = {"sandbox": sandbox, "token": token, "metadata": request["metadata"]}
        service.made += 1
        made = {"sandboxID": id, "templateID": template, "clientID": "x", "envdVersion": "0.5.0", "envdAccessToken": token}
        return self.answer(201, made)

    def envd(self, id, *route):
        box = self.service.boxes.get(id)
        if box is None:
            return self.fail(502, "The sandbox was not found")
        if self.headers.get("X-Access-Token") != box["token"]:
            return self.fail(401, "unauthorized")
        if route == ("health",):
            try:
                box["sandbox"].check()
            except SandboxError:
                return self.fail(502, "The sandbox was not found")
            return self.answer(204)
        if route == ("files",):
            return self.files(box["sandbox"])
        if route == ("process.Process", "Start"):
            return self.start(box["sandbox"])
        return self.fail(404, "no such route")

    def files(self, sandbox):
        path = self.query["path"]
        try:
            if self.command == "GET":
                return self.answer(200, raw=sandbox.read(path))
            boundary = self.headers["Content-Type"].split("boundary=")[1].encode()
            content = self.body.partition(b"\r\n\r\n")[2]
            sandbox.write(path, content[: content.rindex(b"\r\n--" + boundary)])
        except FileNotFoundError as error:
            return self.fail(404, str(error))
        except OSError as error:
            return self.fail(507 if error.errno == 28 else 400, str(error))
        return self.answer(200, [{"path": path, "type": "file"}])

    def start(self, sandbox):
        (size,) = struct.unpack_from(">xI", self.body)
        process = json.loads(self.body[5 : 5 + size])["process"]
        self.send_response(200)
        self.send_header("Content-Type", "application/connect+json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        inside = [
            "/bin/sh",
            "-c",
            'cd "$1" && shift && exec "$@"',
            "sh",
            process.get("cwd") or "/",
            process["cmd"],
            *process["args"],
        ]
        child = subprocess.Popen(
            [shutil.which("nsenter"), "--target", str(sandbox.host_pid), "--all", *inside],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", **process["envs"]},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.event({"start": {"pid": child.pid}})
        with selectors.DefaultSelector() as selector:
            for name in ("stdout", "stderr"):
                selector.register(getattr(child, name), selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select():
                    data = key.fileobj.read1(32 << 10)
                    if data:
                        self.event({"data": {key.data: base64.b64encode(data).decode()}})
                    else:
                        selector.unregister(key.fileobj)
                        key.fileobj.close()
        code = child.wait()
        self.event({"end": {"exitCode": code, "exited": code >= 0, "status": f"exit status {code}"}})
        self.envelope({}, flags=2)
        self.wfile.write(b"0\r\n\r\n")

    def event(self, event: dict):
        self.envelope({"event": event})

    def envelope(self, message: dict, flags: int = 0):
        data = json.dumps(message).encode()
        data = struct.pack(">BI", flags, len(data)) + data
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()
