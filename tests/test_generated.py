"""Tasks that are made: of releases, by breaking a project, and environments found by rules. The projects here are a few lines."""

import json
import random
from dataclasses import replace
from typing import ClassVar

import pytest

from rl.__main__ import main
from rl.harness import patch as patches
from rl.tasks import autoinstall, tiny
from rl.tasks.check import check, difference_of, reference
from rl.tasks.generate import GENERATED, Project, broken, conflicted, functions, generate, mutations, without_body
from rl.tasks.logs import Status
from rl.tasks.pypi import RegistryError, unpacked
from rl.tasks.release import Release, build, catalogue, change_log, lists_of, mine, settings_of_pytest, sources, write_catalogue
from rl.tasks.task import TaskError, load, save
from rl.tasks.verification import verify
from tests.task_cases import sandboxes  # noqa: F401

PRICE = '''"""Prices."""


def _rounded(value):
    """To cents."""
    cents = int(value * 100 + 0.5)
    return cents / 100


def total(prices, tax=0):
    """The sum of all prices, with tax in percent."""
    net = sum(prices)
    return _rounded(net + net * tax / 100)


def cheapest(prices):
    if not prices:
        return None
    best = prices[0]
    for price in prices:
        if price < best:
            best = price
    return best
'''
TESTS = {
    "tests/test_total.py": "from shop.price import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n\n\n"
    "def test_tax():\n    assert total([10], tax=5) == 10.5\n",
    "tests/test_cheapest.py": "from shop.price import cheapest\n\n\ndef test_cheapest():\n    assert cheapest([3, 1, 2]) == 1\n\n\n"
    "def test_none():\n    assert cheapest([]) is None\n",
}
SHOP = Project("shop", {"shop/__init__.py": "", "shop/price.py": PRICE} | TESTS)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("bug", "refactor", "diagnosis") else ()) for kind in GENERATED]
)
def test_generated_tasks_are_sound(sandboxes, kind, tmp_path):  # noqa: F811
    task = generate(SHOP, kind, 1, sandboxes)
    save(task, tmp_path / "task")
    assert load(tmp_path / "task") == task
    if kind == "question":
        expected = json.loads(task.files["tests/answer.json"])
        assert verify(task, "", sandboxes, answer=" and ".join(expected["has"])).reward == 1.0
        assert verify(task, "", sandboxes, answer=" and ".join([*expected["has"], *expected["has_not"]])).reward == 0.0
        return
    assert check(task, sandboxes, times=1).sound
    telling = {name.split("::")[0] for name in task.verifier.fail_to_pass}
    visible = {path.removeprefix("environment/workspace/") for path in task.files}
    assert not telling & visible
    assert 0 <= task.provenance.difficulty <= 1
    if kind == "diagnosis":
        assert b"assert" in task.files["environment/workspace/ci.log"]


def test_mutations_are_one_place_each_and_parse():
    found = [text for _, text in mutations(PRICE)]
    assert len(found) == len(set(found)) > 8
    assert PRICE not in found
    for text in found:
        compile(text, "x", "exec")
        assert difference_of({"a": PRICE}, {"a": text}).count("\n+") == 2  # the header and one line
    assert [f.name for f in functions({"a": PRICE})] == ["_rounded", "total", "cheapest"]
    total = functions({"a": PRICE})[1]
    assert 'in percent."""\n    raise NotImplementedError\n\n\ndef cheapest' in without_body(PRICE, total)
    assert broken(SHOP, random.Random(1)) != SHOP.sources
    odd = 's = "\u2028\x0c"\nx = 1\n'  # neither ends a line of Python or of a patch
    assert [text for _, text in mutations(odd)] == [odd.replace("1", "2")]
    assert patches.applied(odd, patches.parse(difference_of({"a": odd}, {"a": 'y = "\x0c"\n'}))[0]) == 'y = "\x0c"\n'
    conflict = conflicted("a\nb\nc\n", "a\nx\nc\n")
    assert conflict == "a\n<<<<<<< main\nb\n=======\nx\n>>>>>>> experiment\nc\n"


def test_commands_that_cannot_be(tmp_path, capsys):
    base = ["tasks", "--directory", str(tmp_path)]
    for arguments, message in (
        (["build", "release/nope"], "expected names of the catalogue, got release/nope"),
        (["check", "--times", "0"], "--times: expected at least 1, got 0"),
        (["mine", "../x", "1", "2"], "package: expected the name of a package or a version, got '../x'"),
        (["mine", "x", "1", "../2"], "new: expected the name of a package or a version, got '../2'"),
    ):
        assert main([*base, *arguments]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(TaskError, match="times: expected at least 1"):
        check(tiny.instance(1), None, 0)


def test_projects_without_what_a_kind_needs(sandboxes, monkeypatch):  # noqa: F811
    monkeypatch.setattr("rl.tasks.generate.TRIES", 1)
    with pytest.raises(ValueError, match="kind"):
        generate(SHOP, "poem", 0, sandboxes)
    untested = Project("shop", SHOP.files | dict.fromkeys(TESTS, "def test_nothing():\n    pass\n"))
    with pytest.raises(TaskError, match="no test sees"):
        generate(untested, "bug", 0, sandboxes)


class Index:
    """Two releases, without a network."""

    files: ClassVar = {
        "1.0": {path: text.encode() for path, text in SHOP.files.items()} | {"CHANGES": b"1.0\n---\n* first\n"},
        "2.0": {path: text.encode() for path, text in SHOP.files.items()}
        | {
            "CHANGES": b"2.0\n---\n* dearest\n\n1.0\n---\n* first\n",
            "shop/price.py": (PRICE + "\n\ndef dearest(prices):\n    return max(prices, default=None)\n").encode(),
            "tests/test_dearest.py": b"from shop.price import dearest\n\n\ndef test_dearest():\n    assert dearest([1, 2]) == 2\n"
            b"\n\ndef test_no_price():\n    assert dearest([]) is None\n",
            "PKG-INFO": b"Name: shop\nLicense-Expression: MIT\nRequires-Dist: x; extra == 'dev'\n",
            "pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-x'\nmarkers = ['slow: long', 'net']\n",
        },
    }

    def sdist(self, package, version, sha256=None):
        return dict(self.files[version]), f"sha-{version}"


def test_a_release_becomes_a_task(sandboxes, tmp_path):  # noqa: F811
    release, task, log = mine(Release("shop", "1.0", "2.0", request="largest price?"), Index(), sandboxes, times=1)
    assert log == "2.0\n---\n* dearest\n"
    assert (release.counts, release.files, release.licence, release.pypi) == ((2, 4), 1, "MIT", ())
    assert task.verifier.fail_to_pass == ("tests/test_dearest.py::test_dearest", "tests/test_dearest.py::test_no_price")
    assert not any("2.0" in path or b"dearest" in data for path, data in task.files.items() if path.startswith("environment/"))
    write_catalogue([release], tmp_path / "c.json")
    (again,) = catalogue(tmp_path / "c.json")
    assert again == release
    built = build(again, Index(), sandboxes)
    assert built == task
    assert verify(built, reference(built, sandboxes), sandboxes).reward == 1.0
    with pytest.raises(TaskError, match=r"expected .* tests, digest"):
        build(replace(release, lists="other"), Index(), sandboxes)


def test_a_flaky_test_is_left_out_with_all_of_its_parameters(monkeypatch):
    steady, first, second = "t::a[x]", "t::race[1]", "t::race[2]"
    runs = [{steady, first, second, "t::new"}, {steady, second, "t::new"}, {steady, first, second}]  # twice with the change
    monkeypatch.setattr("rl.tasks.release.observe", lambda *_: dict.fromkeys(runs.pop(0), Status.PASSED))
    release, task, _ = mine(Release("shop", "1.0", "2.0"), Index(), None)
    assert release.exclude == ("t::race[",)
    assert (task.verifier.fail_to_pass, task.verifier.pass_to_pass) == (("t::new",), (steady,))


def test_parts_of_a_release():
    old, new = Index.files["1.0"], Index.files["2.0"]
    assert set(sources(new)) == {"shop/__init__.py", "shop/price.py"}
    assert settings_of_pytest(new) == "[pytest]\nmarkers =\n    slow: long\n    net\n"
    assert settings_of_pytest(old) == "[pytest]\n"
    assert change_log(old, old) == ""
    results = {f"t::{name}": Status.PASSED for name in "abc"}
    release = Release("p", "1", "2", only=("t::a*",), exclude=("t::c",))
    assert lists_of(release, {}, results) == (("t::a",), ())
    assert lists_of(replace(release, only=()), {"t::b": Status.PASSED}, results) == (("t::a",), ("t::b",))
    with pytest.raises(Exception, match="gzip"):
        unpacked(b"no archive")
    assert issubclass(RegistryError, Exception)


def test_the_catalogue_is_whole():
    releases = catalogue()
    assert len({r.name for r in releases}) == len(releases) >= 30
    for r in releases:
        assert r.request, r.name
        assert len(r.request) <= 400, r.name
        assert len(r.sha256) == 2, r.name
        assert r.lists, r.name
        assert min(r.counts) >= 1, r.name
        assert r.files >= 2, r.name


def test_proposals_and_rules():
    files = {path: text.encode() for path, text in SHOP.files.items()} | {"Makefile": b"test:\n\tpytest\n"}
    assert autoinstall.propose(files)[:2] == ["python3 -m pytest -q -x tests", "python3 -c 'import shop'"]
    assert "make test" in autoinstall.propose(files)

    def after(said, pypi=()):
        return autoinstall.next_packages(files, autoinstall.Attempt(pypi, (("c", False, said),)))

    assert after("ModuleNotFoundError: No module named 'yaml'") == ["pyyaml"]
    assert after("No module named 'six.moves'", ("x",)) == ["x", "six"]
    assert after("No module named 'shop.gone'") is None
    assert after("E  fixture 'mocker' not found") == ["pytest-mock"]
    assert after("error: unrecognized arguments: --cov=shop") == ["pytest-cov"]
    assert after("assert 1 == 2") is None


def test_a_tree_is_installed_or_discarded(sandboxes, monkeypatch):  # noqa: F811
    files = {path: text.encode() for path, text in SHOP.files.items()}
    found = autoinstall.install(files, sandboxes)
    assert found.pypi == ()
    assert len(found.commands) == 3
    hopeless = autoinstall.install(files | {"tests/test_x.py": b"def test_x():\n    assert 0\n"}, sandboxes)
    assert hopeless.pypi is None
    assert hopeless.reason
    tries = []
    failed = autoinstall.Attempt((), (("c", False, ""),))
    monkeypatch.setattr(autoinstall, "tried", lambda *arguments: failed)
    never = autoinstall.install(files, sandboxes, repair=lambda *arguments: tries.append(1) or ())
    assert (never.pypi, len(tries), len(never.attempts)) == (None, 5, 5)
    assert autoinstall.install({"a.txt": b""}, sandboxes).pypi is None
