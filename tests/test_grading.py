"""Test logs and grades: small logs written by hand, every rule by a test that breaks it, and SWE-bench's own grader."""

import importlib.util
import json
import re
import subprocess
import sys
import time
import xml.sax.saxutils

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.tasks.grading import grade, suspicion
from rl.tasks.logs import ERROR, FAILED, PARSERS, PASSED, SKIPPED, XFAIL, parse
from tests.grading_cases import synthetic_logs

LOGS = {
    "pytest": (
        "t.py::a PASSED                [ 50%]\nPASSED t.py::c[x y]\nPASSED t.py::c[x z]\nFAILED t.py::b - AssertionError: x\n"
        "FAILED t.py::d[a - b] - assert [1] - 2\nERROR u.py - ImportError: no\nXFAIL t.py::e - later\nt.py::p SKIPPED\n"
        "SKIPPED [1] t/x.py:774: Need 2 or more cores\nPASSED\n\x1b[32mPASSED\x1b[0m t.py::\x1b[1mf\x1b[0m\n= 3 failed, 1 passed =",
        {
            "t.py::a": PASSED,
            "t.py::c[x y]": PASSED,
            "t.py::c[x z]": PASSED,
            "t.py::b": FAILED,
            "t.py::d[a - b]": FAILED,
            "u.py": ERROR,
            "t.py::e": XFAIL,
            "t.py::p": SKIPPED,
            "t.py::f": PASSED,
        },
    ),
    "pytest_short_paths": (
        "PASSED t.py::a[/tmp/x/y.txt]\nPASSED t.py::b[//x/y]",
        {"t.py::a[/y.txt]": PASSED, "t.py::b[//x/y]": PASSED},
    ),
    "pytest_mouse_buttons": ("PASSED t.py::a[MouseButton.LEFT]", {"t.py::a[1]": PASSED}),
    "unittest": (
        "test_a (m.C) ... ok\ntest_b (m.C)\nWhat it does. ... FAIL\ntest_c (m.C) ... skipped 'no'\ntest_d (m.C) ... ERROR\n"
        "test_e (m.C) ... noise\nmore noise\nok\ntest_f (m.C) ... expected failure\nERROR: setUpClass (m.D)\n",
        {
            "test_a (m.C)": PASSED,
            "What it does.": FAILED,
            "test_c (m.C)": SKIPPED,
            "test_d (m.C)": ERROR,
            "test_e (m.C)": PASSED,
            "test_f (m.C)": XFAIL,
            "setUpClass (m.D)": ERROR,
        },
    ),
    "seaborn": ("t.py::a PASSED [ 1%]\nFAILED t.py::b - x", {"t.py::a": PASSED, "t.py::b": FAILED}),
    "sympy": (
        "test_a ok\ntest_b F\ntest_c E\n____ sympy/x.py:test_b ____\n",
        {"test_a": PASSED, "test_b": FAILED, "test_c": ERROR, "sympy/x.py:test_b": FAILED},
    ),
    "jest": ("  ✓ adds (5 ms)\n  ✕ subtracts\n  ○ later", {"adds": PASSED, "subtracts": FAILED, "later": SKIPPED}),
    "jest_json": ("[PASSED] a b\n[FAILED] c", {"a b": PASSED, "c": FAILED}),
    "jest_files": ("PASS src/a.js (5.2 s)\nFAIL src/b.js", {"src/a.js": PASSED, "src/b.js": FAILED}),
    "vitest": (" ✓ a > b 12ms\n × c\n ↓ d [skipped]", {"a > b": PASSED, "c": FAILED, "d": SKIPPED}),
    "tap": ("ok 1 adds\nnot ok 2 subtracts\n# tests 2", {"adds": PASSED, "subtracts": FAILED}),
    "karma": (
        "noise\n  ✔ early\nStarting browser Chrome\n  suite\n    ✔ a\n    inner\n      ✖ b\n  other\n"
        "    ✔ c\nSUMMARY:\n  ✔ 2 tests",
        {"suite > a": PASSED, "suite > inner > b": FAILED, "other > c": PASSED},
    ),
    "gotest": (
        "--- SKIP: TestA (0.00s)\n--- FAIL: TestB (0.01s)\n    --- PASS: TestB/sub (0.00s)\nFAIL\tgithub.com/x/y\t0.1s",
        {"TestA": SKIPPED, "TestB": FAILED, "TestB/sub": PASSED},
    ),
    "cargo": ("test a::b ... ok\ntest c ... FAILED\ntest d ... ignored\ntest result: ok.", {"a::b": PASSED, "c": FAILED}),
    "maven": ("+ mvn test -Dtest=A#a\n[INFO] BUILD SUCCESS\n+ mvn -Dtest=B -q\n[INFO] BUILD FAILURE", {"A#a": PASSED, "B": FAILED}),
    "gradle": ("a.B > c PASSED\na.B > d\nwarning: x\nFAILED\n> Task :test FAILED", {"a.B > c": PASSED, "a.B > d": FAILED}),
    "ant": ("   [junit] [PASS] a\n   [junit] [ERR] b", {"a": PASSED, "b": FAILED}),
    "googletest": ("[       OK ] A.b (0 ms)\n[  FAILED  ] A.c (1 ms)\n[  FAILED  ] A.c", {"A.b": PASSED, "A.c": FAILED}),
    "ctest": (
        " 1/12 Test  #1: alpha ...   Passed    0.01 sec\n10/12 Test #10: beta ......***Failed  0.02 sec\n"
        "11/12 Test #11: gamma ...***Skipped 0 sec\n"
        "12/12 Test #12: delta ...***Exception: SegFault 0.1 sec",
        {"alpha": PASSED, "beta": FAILED, "gamma": SKIPPED, "delta": FAILED},
    ),
    "doctest_cpp": (
        'x<doctest><TestSuite><TestCase name="a"><SubCase name="b"><Expression success="true"/></SubCase>'
        '<SubCase name="c"><Expression success="false"/></SubCase></TestCase></TestSuite></doctest>y',
        {"a > b": PASSED, "a > c": FAILED},
    ),
    "tcl": (
        "[ok]: a (12 ms)\n[err]: b in tests/b.tcl\n[skip]: c\n[ignore]: d",
        {"a": PASSED, "b": FAILED, "c": SKIPPED, "d": SKIPPED},
    ),
    "automake": ("PASS: tests/a\nFAIL: tests/b", {"tests/a": PASSED, "tests/b": FAILED}),
    "micropython": ("pass  a.py\nFAIL  b.py\nskip  c.py", {"a.py": PASSED, "b.py": FAILED, "c.py": SKIPPED}),
    "minitest": ("TestA#test_b. 0.01 s = .\nTestA#test_c. 0.01 s = F", {"TestA#test_b": PASSED, "TestA#test_c": FAILED}),
    "cucumber": ("features/a.feature ...\nfeatures/b.feature ..F", {"features/a.feature": PASSED, "features/b.feature": FAILED}),
    "test_unit": ("test: a b:\t.: (0.1)\nc:\tF\nd: O", {"a b": PASSED, "c": FAILED, "d": SKIPPED}),
    "rspec": ("a b - passed\nc - failed", {"a b": PASSED, "c": FAILED}),
    "phpunit": (
        "Money (Tests\\Money)\n ✔ Adds\n ✘ Subtracts\n ↩ Later",
        {"Money > Adds": PASSED, "Money > Subtracts": FAILED, "Money > Later": SKIPPED},
    ),
    "junit": (
        '<testsuites><testsuite><testcase classname="t.test_a.TestB" file="t/test_a.py" name="test_c[x y]"/>'
        '<testcase classname="t.test_a" file="t/test_a.py" name="test_d"><failure/></testcase>'
        '<testcase classname="q.R" name="s"><error/></testcase><testcase name="u"><skipped/></testcase>'
        '<testcase name="v"><skipped type="pytest.xfail"/></testcase>'
        '<testcase name="w"/><testcase name="w"><error/></testcase></testsuite></testsuites>',
        {
            "t/test_a.py::TestB::test_c[x y]": PASSED,
            "t/test_a.py::test_d": FAILED,
            "q.R::s": ERROR,
            "u": SKIPPED,
            "v": XFAIL,
            "w": ERROR,
        },
    ),
    "ctrf": (
        '{"results": {"tests": [{"name": "a", "status": "passed", "filePath": "x.js"}, {"name": "b", "status": "failed"}]}}',
        {"x.js::a": PASSED, "b": FAILED},
    ),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_every_parser_reads_its_runner(parser):
    log, expected = LOGS[parser]
    assert parse(log, parser) == expected
    assert parse(log.replace("\n", "\r\n"), parser) == expected
    if parser not in ("junit", "ctrf"):
        assert parse("", parser) == {}


@given(st.sampled_from(sorted(PARSERS)), st.text(max_size=200))
def test_no_parser_breaks_on_any_text(parser, text):
    try:
        results = parse(text, parser)
    except ValueError:
        assert parser in ("junit", "ctrf", "doctest_cpp")
    else:
        assert all(name for name in results)


LONG = [(" ", "x"), (". ", "=" * 100_000), ("[ OK ] x (", ""), ("x: ", ""), (" - [", ""), ("_ a.py:", ""), ("x (", ""), ("1", "")]


@pytest.mark.parametrize("parser", sorted({*PARSERS} - {"junit", "ctrf"}))
def test_no_line_takes_a_parser_long(parser):
    """A pattern that goes back over a line at each of its characters would take minutes."""
    start = time.process_time()
    for unit, end in LONG:
        for begin in ("", "x ", "PASSED ", "--- PASS: ", "[err]: "):
            parse(begin + unit * 100_000 + end, parser)
    grade({}, ["a"], [], log="1" * 100_000)
    assert time.process_time() - start < 30


MINITEST = re.compile(r"(?P<name>.+)\. .*=.*(?P<status>[.FE]).*")


@given(st.text("a.FE= ", max_size=20))
def test_minitest_is_what_its_pattern_says(line):
    found = MINITEST.fullmatch(line.strip())
    assert parse(line, "minitest") == ({found["name"]: PASSED if found["status"] == "." else FAILED} if found else {})


NAMES = st.text("abc[]- .é'\"<&", min_size=1, max_size=12).map(str.strip).filter(bool)


@given(st.dictionaries(NAMES, st.sampled_from(["", "<failure/>", "<error/>", "<skipped/>"])))
def test_junit_names_survive(cases):
    quoted = (f"<testcase name={xml.sax.saxutils.quoteattr(name)}>{inside}</testcase>" for name, inside in cases.items())
    statuses = {"": PASSED, "<failure/>": FAILED, "<error/>": ERROR, "<skipped/>": SKIPPED}
    assert parse(f"<testsuite>{''.join(quoted)}</testsuite>", "junit") == {name: statuses[i] for name, i in cases.items()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: parse("", "nose"), "parser: expected one of .*'nose'"),
        (lambda: parse("<a", "junit"), "JUnit report: expected XML"),
        (lambda: parse('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "junit"), "without a document type"),
        (lambda: parse("{}", "ctrf"), "CTRF report: expected results.tests"),
        (lambda: parse("[1]", "ctrf"), "CTRF report"),
        (lambda: parse("[" * 100_000, "ctrf"), "CTRF report"),
        (lambda: grade({}, [], []), "fail_to_pass: expected at least one test"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_all_listed_tests_must_pass():
    done = grade({"a": PASSED, "b": XFAIL, "c": PASSED, "other": FAILED}, ["a", "b"], ["c"])
    assert done.resolved
    assert done.failed == ()
    assert done.invalid is None
    half = grade({"a": PASSED, "b": FAILED, "c": PASSED}, ["a", "b"], ["c"])
    assert not half.resolved
    assert (half.fail_to_pass, half.pass_to_pass, half.failed) == (0.5, 1.0, ("b",))


def test_skips_are_no_fix_and_no_regression():
    assert not grade({"a": SKIPPED, "b": PASSED}, ["a"], ["b"]).resolved
    assert grade({"a": PASSED, "b": SKIPPED}, ["a"], ["b"]).resolved
    assert not grade({"a": PASSED, "b": SKIPPED}, ["a"], ["b"], strict_skips=True).resolved


def test_tests_that_did_not_run_failed():
    assert not grade({"b": PASSED}, ["a"], ["b"]).resolved
    assert not grade({"a": PASSED}, ["a"], ["b"]).resolved


def test_cut_names_stand_for_tests_that_agree():
    results = {"t::c[x y]": PASSED, "t::c[x z]": PASSED, "t::d[1 2]": PASSED, "t::d[1 3]": FAILED}
    assert grade(results, ["t::c[x"], []).resolved
    assert grade(results, ["t::d[1"], []).failed == ("t::d[1",)
    assert not grade(results, ["t::c"], []).resolved  # a whole name stands for itself only


def test_runs_that_cannot_be_graded():
    assert grade({}, ["a"], [], log="Killed\n").suspicion == "machine"
    assert grade({}, ["a"], [], log="collected 0 items").suspicion == "unclear"
    assert grade({}, ["a"], [], log="").invalid == "no test reported a result"
    forged = grade({"a": PASSED}, ["a"], [], exit_code=3)
    assert not forged.resolved
    assert forged.invalid == "the test command exited with 3 and reported no failure"
    assert grade({"a": PASSED, "z": FAILED}, ["a"], [], exit_code=1).resolved


def test_runners_that_print_failures_only():
    assert grade({}, ["a"], ["b"], log="Executed 12 of 12 SUCCESS", fail_only=True).resolved
    assert not grade({}, ["a"], ["b"], log="Executed 0 of 0", fail_only=True).resolved
    assert not grade({"a": FAILED}, ["a"], [], fail_only=True).resolved


def test_a_log_that_says_nothing_is_no_suspicion():
    assert suspicion("t.py::a PASSED") is None


@pytest.mark.skipif(importlib.util.find_spec("swebench") is None, reason="the package swebench is not installed")
def test_swebench_agrees():
    program = "import json, sys; from tests.grading_cases import swebench_verdicts; json.dump(swebench_verdicts(40), sys.stdout)"
    theirs = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    ours = [
        grade(parse(case.log, case.parser), case.fail_to_pass, case.pass_to_pass, exit_code=case.exit_code, log=case.log).resolved
        for case in synthetic_logs(40)
    ]
    assert ours == theirs
    assert 5 < sum(ours) < 35
