"""Answers of the page: JSON of the run's files, read when they are asked for.

    /api/run                            overview.overview
    /api/groups                         index.Index.groups: some at a time, `left` says how many files are to be read yet
    /api/group/G                        index.Index.group
    /api/rollout/G/S                    detail.detail
    /api/experts/G/S/LAYER              detail.experts
    /api/gaps/G/S                       gaps.Gaps.of

A path is numbers only, so that no file outside of the run can be named. A number that is not finite travels as a string.
"""

import json
import math
import socket
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl.view import detail
from rl.view.gaps import Gaps
from rl.view.index import Index
from rl.view.overview import overview, read_object

HERE = Path(__file__).parent
FILES = {"/": "page.html", "/view.js": "view.js", "/parts.js": "parts.js", "/rollout.js": "rollout.js", "/view.css": "view.css"}
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Viewer:
    """Of the run in a directory. base: of the run, where its configuration does not lead to it. FileNotFoundError: no run."""

    def __init__(self, run_dir: str | Path, base: str = ""):
        self.index = Index(Path(run_dir))
        found = detail.base_of(self.config, base)
        self.texts, self.gaps = detail.Texts(found), Gaps(self.index.run_dir, found)

    @property
    def config(self) -> dict:
        """The run's; empty where it has none that can be read."""
        found = self.index.file("config.json", read_object)
        return found if isinstance(found, dict) else {}

    def answer(self, what: str, *numbers: int) -> Any:
        """Raises KeyError, OSError or ValueError for what is not there or damaged."""
        routes = {
            "run": (0, lambda: overview(self.index)),
            "groups": (0, self.index.groups),
            "group": (1, self._group),
            "rollout": (2, self._rollout),
            "experts": (3, lambda group, sample, layer: detail.experts(detail.load(self.index, group, sample), layer)),
            "gaps": (2, self._gaps),
        }
        count, route = routes[what]
        if len(numbers) != count:
            raise KeyError(f"{what} takes {count} numbers")
        return route(*numbers)

    def _group(self, group: int) -> dict:
        return self.index.group(group, bool(self.config.get("standardize")))

    def _rollout(self, group: int, sample: int) -> dict:
        found = detail.detail(detail.load(self.index, group, sample), self.texts)
        around = self._group(group)
        own = [r.get("advantage") for r in around["rollouts"]]
        largest = max((abs(a) for a in own if a is not None), default=0.0)
        at = next(i for i, r in enumerate(around["rollouts"]) if r["sample"] == sample)
        samples = [r["sample"] for r in around["rollouts"]]
        return found | {
            "group": group,
            "sample": sample,
            "step": around["step"],
            "damaged": around["damaged"],
            "advantage": own[at],
            "largest_advantage": largest,
            "neighbours": [samples[at - 1] if at else None, samples[at + 1] if at + 1 < len(samples) else None],
        }

    def _gaps(self, group: int, sample: int) -> dict:
        found = self.index.batches()[0].get(group)
        return self.gaps.of(detail.load(self.index, group, sample), None if found is None else found[0], self.config)


class Handler(BaseHTTPRequestHandler):
    """GET only."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # the reader has gone
            self._get()

    def _get(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host") or ""
        if self.server.is_loopback and host.strip("[]") not in LOOPBACK:  # another site's name that leads here
            return self._send(HTTPStatus.FORBIDDEN, {"error": "the page is for this machine"})
        path = self.path.partition("?")[0]
        if path in self.server.files:
            name, data = self.server.files[path]
            return self._send(HTTPStatus.OK, data, Path(name).suffix)
        empty, api, what, *numbers = [*path.split("/"), "", ""][: max(3, path.count("/") + 1)]
        if (empty, api) != ("", "api") or not all(n.isascii() and n.isdigit() and len(n) < 16 for n in numbers):
            return self._send(HTTPStatus.NOT_FOUND, {"error": f"nothing is at {path}"})
        try:
            found = self.server.viewer.answer(what, *map(int, numbers))
        except (KeyError, FileNotFoundError) as error:
            return self._send(HTTPStatus.NOT_FOUND, {"error": f"not found: {error.args[-1]}"})
        except (OSError, ValueError, RuntimeError) as error:
            return self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": str(error)})
        return self._send(HTTPStatus.OK, found)

    def _send(self, status: HTTPStatus, content: Any, suffix: str = ".json") -> None:
        data = content if isinstance(content, bytes) else encoded(content)
        self.send_response(status)
        self.send_header("Content-Type", f"{KINDS[suffix]}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Serves a viewer. port 0: any that is free. Raises OSError where the address cannot be had."""

    daemon_threads = True

    def __init__(self, viewer: Viewer, host: str = "127.0.0.1", port: int = 0):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.viewer, self.is_loopback = viewer, host in LOOPBACK
        self.files = {path: (name, (HERE / name).read_bytes()) for path, name in FILES.items()}
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def encoded(content: Any) -> bytes:
    """JSON that is safe also where something takes it for HTML."""
    return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c").encode()


def finite(content: Any) -> Any:
    """With strings ("nan", "inf", "-inf") in place of numbers that JSON does not have."""
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
