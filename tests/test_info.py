"""`mxmoe info`, and the README where it repeats it."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import torch

import mxmoe
from mxmoe import info
from mxmoe.__main__ import main
from mxmoe.backends import cuda, triton

README = Path(__file__).parents[1] / "README.md"


def test_table_lists_every_verb_and_format_of_every_backend():
    supports, missing = info.support()
    assert not missing
    pairs = set().union(*supports.values())
    assert {verb for verb, _ in pairs} == set(info.VERBS)
    assert {format for _, format in pairs} == set(info.FORMATS)


def test_every_supported_verb_is_a_function_of_its_backend():
    for name, pairs in info.support()[0].items():
        for verb, _ in pairs:
            assert callable(getattr(mxmoe.backends.get(name), verb)), (name, verb)


def test_table_cells():
    rows = info.table({"reference": frozenset({("route", "fp32")}), "host": frozenset({("route", "fp32"), ("swiglu", "bf16")})})
    assert re.search(r"\| `route` +\| R H +\| - +\|", rows)
    assert re.search(r"\| `swiglu` +\| - +\| H +\|", rows)


def test_report_names_versions_and_isa(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part in (mxmoe.__version__, torch.__version__, "portable", info.table(info.support()[0])):
        assert part in text


def test_what_a_machine_lacks_for_its_gpus(monkeypatch):
    """Without Triton and without kernels of its own: the report says of either how to get it."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(cuda, "module", missing_kernels)
    triton.loaded.cache_clear()
    try:
        text = info.report()
    finally:
        triton.loaded.cache_clear()
    assert re.search(r"^triton   .*failed to import.*pip install 'mxmoe\[gpu\]'$", text, re.M)
    assert re.search(r"^cuda     no kernels here", text, re.M)


def missing_kernels():
    raise ImportError("no kernels here")


def test_as_a_program():
    run = subprocess.run([sys.executable, "-m", "mxmoe", "info"], capture_output=True, text=True, check=True)
    assert "`grouped_mm`" in run.stdout


def test_info_into_a_pipe_that_closes_early():
    process = subprocess.Popen([sys.executable, "-m", "mxmoe", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_readme_has_the_table():
    table = re.search(r"<!-- table -->\n(.*?)\n<!-- end -->", README.read_text(), re.S)
    assert table, "README.md must have the markers <!-- table --> and <!-- end -->"
    assert table[1] == info.table(info.support()[0]), "put the table of `mxmoe info` between the markers"


def test_readme_example():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "README.md", "README.md", 0)
    assert not doctest.DocTestRunner().run(example).failed
