"""What the hosted backend makes of a service that refuses, hangs or goes; the contract itself is in test_sandbox.py."""

import time

import pytest

from rl.environments import open_backend
from rl.environments.sandbox import CannotIsolate, LeaseExpired, NoCapacity, SandboxError, SandboxLost, SandboxSpec, StartTimeout
from tests.hosted_server import Service
from tests.sandbox_cases import open_or_skip, spec


@pytest.fixture(scope="module")
def node():
    with open_or_skip("namespaces") as opened:
        yield opened


@pytest.fixture
def service(node):
    made = Service(node)
    yield made
    made.close()


def test_sizes_are_the_services_and_must_be_waived():
    with pytest.raises(CannotIsolate, match="template decides"):
        open_backend("hosted", key="x")
    with pytest.raises(SandboxError, match="needs a key"):
        open_backend("hosted", allow="all", key="")


@pytest.mark.parametrize(("status", "error"), [(401, SandboxError), (429, NoCapacity), (503, NoCapacity), (500, SandboxError)])
def test_what_the_service_refuses_is_typed(service, status, error):
    with open_backend("hosted", **service.options()) as backend:
        service.faults["POST /sandboxes"] = status
        with pytest.raises(error) as caught:
            backend.create(spec(backend))
        assert caught.value.retryable == (error is NoCapacity)
        service.faults.clear()
        with backend.create(spec(backend)) as sandbox:
            assert sandbox.exec("true").ok


def test_a_create_that_is_not_waited_for_is_undone(service):
    with open_backend("hosted", **service.options()) as backend:
        service.faults["POST /sandboxes"] = 0.6
        with pytest.raises(StartTimeout):
            backend.create(spec(backend, start_s=0.2))
        assert not backend.sandboxes()
        end = time.monotonic() + 5
        while service.made == 0 or service.boxes:
            assert time.monotonic() < end, "it was made, and is still there"
            time.sleep(0.05)


def test_a_sandbox_or_service_that_is_gone(service):
    with open_backend("hosted", **service.options()) as backend:
        lost, other = backend.create(spec(backend)), backend.create(spec(backend))
        service.boxes.pop(lost.remote)["sandbox"].destroy()
        for call in (lambda: lost.exec("true"), lambda: lost.read("/etc/passwd"), lost.check):
            with pytest.raises(SandboxLost):
                call()
        assert other.exec("echo here").stdout == b"here\n"
        service.close()
        with pytest.raises(SandboxError):
            other.exec("true")
        with pytest.raises(NoCapacity, match="cannot be reached"):
            backend.create(spec(backend))


def test_the_service_ends_leases_itself(service):
    with open_backend("hosted", **service.options()) as backend:
        sandbox = backend.create(SandboxSpec("base", lease_s=0.3))
        time.sleep(0.7)
        with pytest.raises(LeaseExpired):
            sandbox.exec("true")
        assert sandbox.remote not in service.boxes


def test_other_keys_and_tokens_are_refused(service):
    with open_backend("hosted", **service.options() | {"key": "other"}) as backend, pytest.raises(SandboxError, match="401"):
        backend.create(spec(backend))
