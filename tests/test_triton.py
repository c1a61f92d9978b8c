"""The Triton backend without a GPU: its kernels in Triton's interpreter, what it says where it cannot run, that it traces."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mxmoe
from mxmoe import backends
from mxmoe.backends import triton as backend
from mxmoe.formats import QuantizeOptions
from tests import triton_cases

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[str], str | None]]:
    """Runs a case of tests/triton_cases.py by its name, in a process whose Triton interprets; None, or what went wrong."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.triton_cases"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as process:

        def run(name: str) -> str | None:
            print(json.dumps(name), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()


@needs_triton
@pytest.mark.parametrize("name", triton_cases.table())
def test_kernels_are_the_reference(name, interpreted):
    wrong = interpreted(name)
    assert wrong is None, wrong


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(triton_cases.table(every_dtype=True).keys() - triton_cases.table().keys()))
def test_kernels_are_the_reference_in_every_dtype(name, interpreted):
    wrong = interpreted(name)
    assert wrong is None, wrong


@needs_triton
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match=r"backend='triton' needs tensors on a GPU, or Triton's interpreter .*got cpu"):
        mxmoe.quantize(torch.ones(4, 32), "mxfp8", backend="triton")


@needs_triton
def test_options_without_a_kernel_are_refused():
    from mxmoe.backends.triton.kernels import VERBS

    with pytest.raises(NotImplementedError, match="the triton backend has no quantize with option hadamard"):
        VERBS["quantize"](None, torch.ones(1, 4, 32), None, "mxfp8", QuantizeOptions(hadamard=True), None, None)


def test_without_triton_a_verb_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    backend.loaded.cache_clear()
    with pytest.raises(ImportError, match=r"the triton backend needs Triton, which failed to import.*pip install"):
        mxmoe.quantize(torch.ones(4, 32), "mxfp8", backend="triton")
    backend.loaded.cache_clear()
    assert backends.get("triton").SUPPORTS
