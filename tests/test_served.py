"""Samplers behind HTTP: the built-in one served and read back, and servers that cannot be trained from."""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from rl.harness.builtin import Shared
from rl.harness.model import CompletionServer, ModelError, served_name
from rl.sampler import Request, Sampler
from rl.served import ServedSampler, serve
from tests.test_sampler import config_of
from training.data.tokenizer import OWN, Vocabulary, train_tokenizer
from training.model import Model

STOP = frozenset((5,))


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(train_tokenizer(["def f(x):\n    return x\n"] * 4, 300, OWN.special), OWN)


def sampler(vocabulary):
    model = Model(replace(config_of("fp32", True), vocab_size=vocabulary.size), 0)
    return Sampler(model, num_slots=4, capacity=64)


@pytest.fixture
def url(vocabulary):
    with serve(Shared(sampler(vocabulary)), "policy", vocabulary) as url:
        yield url


def soon(seconds=20.0):
    return time.monotonic() + seconds


def test_a_served_answer_is_the_samplers(url, vocabulary):
    client = ServedSampler(url, "policy", capacity=64)
    request = Request("x", (1, 2, 3), 12, STOP, 0.0)
    served = client.answer(request, soon())
    own = sampler(vocabulary)
    own.submit(request)
    (expected,) = own.run()
    assert served.ids == expected.ids
    assert served.end == expected.end
    assert served.log_probs == pytest.approx(expected.log_probs, abs=1e-6)
    assert served.versions == [0] * len(served.ids)
    assert served.request is request


def test_many_at_once(url):
    client = ServedSampler(url, "policy", capacity=64)
    found = {}

    def ask(i):
        found[i] = client.answer(Request(i, (1, 2, 3 + i % 4), 8, STOP, 1.0, sample=i), soon())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(12))
    assert all(1 <= len(answer.ids) <= 8 for answer in found.values())


def test_other_clients_read_it(url):
    assert served_name(url) == "policy"
    reply = CompletionServer(url, "policy", stream=False, retries=0).reply([{"role": "user", "content": "x"}], [], 4, 20.0)
    assert reply.completion_tokens <= 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": []}, "prompt must"),
        ({"prompt": [1, -4]}, "prompt must"),
        ({"prompt": [10**9]}, "prompt must"),
        ({"prompt": None}, "prompt must"),
        ({"max_tokens": 10**6}, "together"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1}, "not negative"),
        ({"temperature": "hot"}, "float"),
    ],
)
def test_requests_that_are_refused(url, change, said):
    response = httpx.post(f"{url}/completions", json={"prompt": [1, 2], "max_tokens": 4} | change)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_a_body_that_is_no_json(url):
    assert httpx.post(f"{url}/completions", content=b"{").status_code == 400
    assert httpx.post(f"{url}/nothing", json={}).status_code == 404


def answering(*contents):
    """A server that answers each request with the next (status, content)."""
    left = list(contents)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, content = left.pop(0) if len(left) > 1 else left[0]
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, ServedSampler(f"http://127.0.0.1:{server.server_address[1]}/v1", "other", capacity=64)


def completion(**changes):
    return {
        "choices": [{"text": "a", "finish_reason": "length", "token_ids": [3], "logprobs": {"token_logprobs": [-0.5]}} | changes]
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (completion(token_ids=None), "no token ids"),
        (completion(logprobs=None), "no token ids or log-prob"),
        (completion(token_ids=[]), "every token"),
        (completion(token_ids=[3, 4]), "every token"),
        (completion(logprobs={"token_logprobs": [0.5]}), "not above 0"),
        (completion(logprobs={"token_logprobs": [None]}), "finite"),
        (completion(finish_reason="stop"), "left out"),
        ({"choices": []}, "no completion"),
        ([], "no completion"),
    ],
)
def test_servers_that_cannot_be_trained_from(content, said):
    server, client = answering((200, content))
    with pytest.raises(ModelError, match=said):
        client.answer(Request(0, (1, 2), 4, STOP), soon())
    server.shutdown()


def test_an_outage_is_waited_out():
    server, client = answering((503, {}), (500, {}), (200, completion()))
    assert client.answer(Request(0, (1, 2), 4, STOP), soon()).ids == [3]
    server.shutdown()
    server.server_close()
    with pytest.raises(ModelError):
        client.answer(Request(0, (1, 2), 4, STOP), soon(0.5))


def test_arguments():
    with pytest.raises(ValueError, match="url must be"):
        ServedSampler("localhost", "x", capacity=1)
