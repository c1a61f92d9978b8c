"""Samplers behind HTTP: a client of OpenAI-compatible completion servers that tell token ids and log-probabilities (vLLM's
`return_token_ids`), and such a server of the built-in sampler.

    answers = ServedSampler("http://host:8000/v1", "policy", capacity=32768)     # in place of a SamplerClient
    with serve(client, "policy", vocabulary) as url: ...

Prompts go as token ids and come back as token ids: nothing is decoded and encoded again on the way.
"""

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Protocol

import httpx

from rl.harness.model import ModelError
from rl.sampler import Answer, Request
from training.data.tokenizer import Vocabulary

RETRIED = (408, 425, 429, 500, 502, 503, 504)
MAX_BODY = 64 << 20


class Answers(Protocol):
    """What answers requests: `rl.sampling.SamplerClient`, `ServedSampler`."""

    capacity: int

    def answer(self, request: Request, deadline: float) -> Answer | None: ...


class ServedSampler:
    """Answers of a completion server. capacity: tokens of a prompt and its answer, as the server has it.

    The server's answers carry `version` where it says one (else 0 for all tokens), and no experts: router replay is off for them.
    """

    def __init__(self, url: str, model: str, *, capacity: int, key: str = "", max_connections: int = 256):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must be http:// or https://, got {url!r}")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        self.client = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, limits=limits)
        self.model, self.capacity = model, capacity

    def answer(self, request: Request, deadline: float) -> Answer | None:
        """Blocks; None where it is not there at the deadline (of time.monotonic). ModelError: refused, or no ids or log-probs."""
        body = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new,
            "temperature": request.temperature,
            "seed": (request.seed * 0x9E3779B1 + request.sample) % 2**31,
            "stop_token_ids": sorted(request.stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        wait = 0.1
        while (left := deadline - time.monotonic()) > 0:
            try:
                response = self.client.post("completions", json=body, timeout=left)
                if response.status_code not in RETRIED:
                    break
                said = f"status {response.status_code}"
            except httpx.TimeoutException:
                return None
            except httpx.HTTPError as error:  # away for a while
                said = f"{type(error).__name__}: {error}"
            if time.monotonic() + wait > deadline:
                raise ModelError(f"{self.model}: {said}")
            time.sleep(wait)
            wait = min(2 * wait, 5.0)
        else:
            return None
        if response.is_error:
            raise ModelError(f"{self.model}: status {response.status_code}: {response.text[:300]}")
        return self._read(request, response)

    def _read(self, request: Request, response: httpx.Response) -> Answer:
        try:
            content = response.json()
            choice = content["choices"][0]
            ids, found = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
            version, finish = int(content.get("version", 0)), choice.get("finish_reason")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(f"{self.model}: no completion: {type(error).__name__}: {error}") from None
        if not isinstance(ids, list) or not isinstance(found, list):
            raise ModelError(f"{self.model}: the server tells no token ids or log-probabilities, which training needs")
        if not ids or len(ids) != len(found) or not all(isinstance(token, int) for token in ids):
            raise ModelError(f"{self.model}: expected a log-probability for every token, got {len(ids)} and {len(found)}")
        if not all(isinstance(p, int | float) and math.isfinite(p) and p <= 1e-6 for p in found):
            raise ModelError(f"{self.model}: log-probabilities must be finite and not above 0")
        if ids[-1] not in request.stop and finish == "stop":  # a server that leaves out what ended it
            raise ModelError(f"{self.model}: the server left out the token that ended the answer")
        end = "stop" if ids[-1] in request.stop else "length"
        return Answer(request, ids, [float(p) for p in found], content.get("versions") or [version] * len(ids), None, end)

    def close(self) -> None:
        self.client.close()


@contextmanager
def serve(answers: Answers, model: str, vocabulary: Vocabulary, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serves /v1/completions and /v1/models until the context ends; gives the URL that ends in /v1. Prompts: text or token ids."""
    server = ThreadingHTTPServer((host, port), _handler(answers, model, vocabulary))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Refused(Exception):
    """A request that the client has to change."""


def _handler(answers: Answers, model: str, vocabulary: Vocabulary) -> type[BaseHTTPRequestHandler]:
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            known = self.path.rstrip("/") == "/v1/models"
            self.send(200 if known else 404, {"object": "list", "data": [{"id": model, "object": "model"}]} if known else {})

        def do_POST(self):
            try:
                if self.path.rstrip("/") != "/v1/completions":
                    self.send(404, {"error": {"message": f"no {self.path}"}})
                    return
                length = int(self.headers.get("Content-Length") or 0)
                if length > MAX_BODY:
                    raise _Refused(f"a body of {length} bytes, more than {MAX_BODY}")
                body = json.loads(self.rfile.read(length))
                timeout = float(body.get("timeout", 600.0))
                answer = answers.answer(_request(body, next(numbers), vocabulary, answers.capacity), time.monotonic() + timeout)
                if answer is None:
                    self.send(503, {"error": {"message": f"not in {timeout:g} s"}})
                else:
                    self.send(200, _completion(answer, model, vocabulary))
            except (_Refused, ValueError, TypeError, KeyError, AttributeError) as error:
                self.send(400, {"error": {"message": f"{type(error).__name__}: {error}"}})
            except ModelError as error:
                self.send(500, {"error": {"message": str(error)}})

        def send(self, status: int, content: dict) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    return Handler


def _request(body: dict, number: int, vocabulary: Vocabulary, capacity: int) -> Request:
    prompt = body["prompt"]
    ids = [vocabulary.bos, *vocabulary.encode(prompt)] if isinstance(prompt, str) else prompt
    if not (isinstance(ids, list) and ids and all(isinstance(token, int) and 0 <= token < vocabulary.size for token in ids)):
        raise _Refused(f"prompt must be a text or ids from 0 to {vocabulary.size - 1}")
    max_new = int(body.get("max_tokens", 16))
    if max_new < 1 or len(ids) + max_new > capacity:
        raise _Refused(f"prompt and max_tokens must be at least 1 and {capacity} together, got {len(ids)} and {max_new}")
    stop = frozenset(map(int, body.get("stop_token_ids") or [vocabulary.eos]))
    temperature = float(body.get("temperature", 1.0))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise _Refused(f"temperature must be finite and not negative, got {temperature}")
    seed = body.get("seed")
    return Request(("served", number), tuple(ids), max_new, stop, temperature, number if seed is None else int(seed), 0)


def _completion(answer: Answer, model: str, vocabulary: Vocabulary) -> dict:
    ended = answer.end == "stop"
    prompt, ids = len(answer.request.prompt), answer.ids
    return {
        "id": f"cmpl-{answer.request.id[1]}",
        "object": "text_completion",
        "model": model,
        "versions": answer.versions,
        "choices": [
            {
                "index": 0,
                "text": vocabulary.decode(ids[:-1] if ended else ids),
                "finish_reason": "stop" if ended else "length",
                "token_ids": ids,
                "logprobs": {"token_logprobs": answer.log_probs, "tokens": [vocabulary.decode([token]) for token in ids]},
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)},
    }
