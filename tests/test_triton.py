"""The Triton backend without a GPU: its kernels in Triton's interpreter, what it says where it cannot run, that it traces."""

import importlib.util
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import mxmoe
from mxmoe import backends
from mxmoe.backends import triton as backend
from mxmoe.formats import QuantizeOptions
from tests import triton_cases
from tests.test_cuda import CALLS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[str], str | None]]:
    """Runs a case of tests/triton_cases.py by its name; None, or what went wrong."""
    with triton_cases.interpreted() as run:
        yield run


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


def test_without_triton_and_kernels_auto_says_what_to_install(monkeypatch):
    """On a GPU that no backend has kernels for: the error of a verb, not of the import."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(backends.get("cuda"), "lacks", lambda: "no kernels")
    assert backends.candidates("auto", "cuda") == ("triton",)
    backend.loaded.cache_clear()
    with pytest.raises(ImportError, match="pip install"):
        backends.get("triton").route(torch.ones(1, 2))
    backend.loaded.cache_clear()


@needs_triton
@pytest.mark.parametrize(("verb", "format"), sorted(backend.SUPPORTS))
def test_nothing_is_read_on_the_host(verb, format):
    """On tensors without values: a launch waits for nothing, and a CUDA graph records it."""
    from mxmoe.backends.triton.kernels import VERBS
    from mxmoe.backends.triton.kernels.target import Target

    launched = []
    target = Target("sm_90", lambda kernel, grid, **arguments: launched.append((kernel, grid)), 132)
    for args in CALLS[verb](format):
        try:
            VERBS[verb](target, *args)
        except NotImplementedError as error:
            assert "option seed" in str(error)  # noqa: PT017
    assert launched
