"""A server of this process that speaks the OpenAI protocol: it plays answers written beforehand and keeps what it was asked."""

import http.server
import json
import threading
import time
from contextlib import contextmanager


class Handler(http.server.BaseHTTPRequestHandler):
    """Plays (status, content type, body); a body is a text or a list of texts and of seconds to wait."""

    def do_GET(self):
        self.answer(200, "application/json", json.dumps({"data": [{"id": "played"}]}))

    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(*self.server.answers.pop(0))

    def answer(self, status, kind, body):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        for part in body if isinstance(body, list) else [body]:
            if isinstance(part, float):
                time.sleep(part)
                continue
            self.wfile.write(part.encode())
            self.wfile.flush()

    def log_message(self, *_):
        pass


@contextmanager
def serving(*answers):
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.answers = [], list(answers)
    made.url = f"http://127.0.0.1:{made.server_port}/v1"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.shutdown()
        made.server_close()


def stream(*chunks, done=True):
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return (200, "text/event-stream", [*lines, *(["data: [DONE]\n\n"] if done else [])])


def delta(finish=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call(name, index=0, **arguments):
    """A streamed call, cut in two where it hurts."""
    text = json.dumps(arguments)
    first = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": text[:3]}}
    return [delta(tool_calls=[first]), delta(tool_calls=[{"index": index, "function": {"arguments": text[3:]}}])]
