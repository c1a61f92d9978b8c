"""Test logs: what each test did, read from the output of the usual runners of eight languages.

Where a runner can write a report (`junit`, `ctrf`) it says more than its output does, and cannot be confused with what a
test prints: tasks of this project use reports. The parsers of printed logs exist for foreign tasks, whose lists of tests hold
the names that SWE-bench (https://www.swebench.com, version 5) reads from such logs; each parser therefore names a test as
SWE-bench does, with three exceptions that its lists do not depend on: the reason behind a skipped test is not a test called
`[1]`, names of parametrized tests keep their spaces (`grading` finds lists that cut them), and a line with nothing but a
status names nothing.
"""

import enum
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator


class Status(enum.StrEnum):
    """What a test did. XFAIL: it failed as it should; ERROR: it could not run."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    ERROR = "ERROR"
    SKIPPED = "SKIPPED"
    XFAIL = "XFAIL"


PASSED, FAILED, ERROR, SKIPPED, XFAIL = Status
Results = dict[str, Status]  # by the test's name; a test that ran twice has its last status
Parser = Callable[[str], Results]

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")


# A line may be megabytes of what the code under test prints: no pattern here goes over a line again at every character of it.


def lines(log: str) -> Iterator[str]:
    """The log's lines without terminal colours and control characters."""
    for line in log.splitlines():
        yield CONTROL.sub("", ANSI.sub("", line))


def by_line(pattern: str, statuses: dict[str, Status], cut: str = "(?!)") -> Parser:
    """A parser of logs that say all about a test in one line: `pattern` has the groups `name` and `status`, `cut` is what does
    not belong to the name of a test that failed."""
    compiled, useless = re.compile(pattern), re.compile(cut)

    def parse(log: str) -> Results:
        results = {}
        for line in lines(log):
            if found := compiled.fullmatch(line.strip()):
                status = statuses[found["status"]]
                results[useless.sub("", found["name"]) if status is FAILED else found["name"]] = status
        return results

    return parse


def reason_cut(text: str) -> str:
    """`name - reason` without the reason: a dash between brackets belongs to the name of a parametrized test."""
    open_brackets = done = 0
    while (end := text.find(" - ", done)) >= 0:
        open_brackets += text.count("[", done, end) - text.count("]", done, end)
        if open_brackets == 0:
            return text[:end]
        done = end + 1
    return text


def pytest(log: str) -> Results:
    """pytest's short summary (`-rA`: `STATUS name - reason`) and its verbose progress (`name STATUS [ 10%]`)."""
    results = {}
    for line in lines(log):
        line = re.sub(r"(?<!\s)\s+\[\s*\d+%\]$", "", line.rstrip())
        first, _, rest = line.partition(" ")
        before, _, last = line.rpartition(" ")
        if first in Status.__members__ and rest.strip() and not (first == SKIPPED and re.match(r"\[\d+\]", rest)):
            results[reason_cut(rest.strip())] = Status(first)
        elif last in Status.__members__ and before.strip() and first not in Status.__members__:
            results[before.strip()] = Status(last)
    return results


def pytest_short_paths(log: str) -> Results:
    """pytest, where a parameter that is an absolute path is named by its last part: the directory differs by machine."""

    def short(name: str) -> str:
        main, bracket, option = name.partition("[")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            return f"{main}[/{option.rsplit('/', 1)[1]}"
        return name

    return {short(name): status for name, status in pytest(log).items()}


def pytest_mouse_buttons(log: str) -> Results:
    """pytest on matplotlib, whose enumeration of mouse buttons prints differently by version of Python."""
    return pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def unittest(log: str) -> Results:
    """unittest and Django's runner: `test_a (module.Class) ... ok`; what a test prints may stand before the `ok` of its line."""
    outcomes = {"ok": PASSED, "OK": PASSED, "FAIL": FAILED, "ERROR": ERROR, "expected failure": XFAIL}
    results, open_test = {}, None
    for line in lines(log):
        line = line.strip()
        name, dots, outcome = line.rpartition(" ... ")
        if header := re.fullmatch(r"(FAIL|ERROR): (.+)", line):
            results[header[2]] = Status(FAILED if header[1] == "FAIL" else ERROR)
        elif dots and outcome.strip() in outcomes:
            results[name.rstrip()], open_test = outcomes[outcome.strip()], None
        elif dots and outcome.startswith("skipped"):
            results[name], open_test = SKIPPED, None
        elif " ... " in line:
            open_test = line.split(" ... ")[0]
        elif open_test and line in outcomes:
            results[open_test], open_test = outcomes[line], None
    return results


def seaborn(log: str) -> Results:
    """pytest as seaborn's tasks print it: names end at the first space, skipped tests are left out."""
    return {name.split()[0]: status for name, status in pytest(log).items() if status in (PASSED, FAILED)}


def sympy(log: str) -> Results:
    """sympy's own runner: `test_a ok|F|E`, and a header of underscores for each failure."""
    results = {}
    for line in lines(log):
        inside = line.strip("_")
        if line[:1] == line[-1:] == "_" and inside[:1] == inside[-1:] == " " and ".py:" in inside[1:-1]:
            results[inside[1:-1]] = FAILED
    return results | by_line(r"(?P<name>test_\S*)(?: .*)? (?P<status>ok|F|E)", {"ok": PASSED, "F": FAILED, "E": ERROR})(log)


def karma(log: str) -> Results:
    """Karma's mocha reporter: suites by indentation, names joined by ` > `; ends at its summary."""
    results, suites = {}, []
    for line in lines(log.partition("Starting browser")[2].partition("\n")[2]):
        if line.startswith("SUMMARY:"):
            break
        found = re.fullmatch(r"(?P<indent>\s*)(?:(?P<status>[✔✖])\s)?(?P<name>\S.*)", line)
        if not found or not (found["indent"] or found["status"]):
            continue
        depth = len(found["indent"])
        while suites and suites[-1][0] >= depth:
            suites.pop()
        if found["status"]:
            results[" > ".join([name for _, name in suites] + [found["name"]])] = PASSED if found["status"] == "✔" else FAILED
        else:
            suites.append((depth, found["name"]))
    return results


def maven(log: str) -> Results:
    """Maven says nothing of tests that pass: one `-Dtest=name` run each, whose n-th BUILD result belongs to the n-th run."""
    tests, builds = [], []
    for line in lines(log):
        if found := re.search(r"-Dtest=(\S+)", line):
            tests.append(found[1])
        if found := re.search(r"BUILD (SUCCESS|FAILURE)$", line.rstrip()):
            builds.append(PASSED if found[1] == "SUCCESS" else FAILED)
    return dict(zip(tests, builds, strict=False))


def gradle(log: str) -> Results:
    """Gradle: `Class > method PASSED`; other output may push the status to a later line."""
    results, open_test = {}, None
    for line in lines(log):
        line = line.strip()
        name, status = line[:-6], line[-6:]
        if status in (PASSED, FAILED) and len(name) > 2 and name[0] != ">" and name[-1].isspace():
            results[name.rstrip()], open_test = Status(status), None
        elif re.fullmatch(r"[^>]\S*\s+>\s+\S+", line):
            open_test = line
        elif open_test and line in (PASSED, FAILED):
            results[open_test], open_test = Status(line), None
    return results


def phpunit(log: str) -> Results:
    """PHPUnit's `--testdox`: a suite's line, then its tests; names joined by ` > `."""
    results, suite = {}, None
    for line in lines(log):
        if found := re.fullmatch(r"(?=.*\)$)(\w.+) \(.+\)", line):
            suite = found[1]
        elif found := re.fullmatch(r"\s*([✔✘↩])\s*(.*)", line):
            results[f"{suite} > {found[2]}"] = {"✔": PASSED, "✘": FAILED, "↩": SKIPPED}[found[1]]
    return results


def parsed_xml(text: str, what: str) -> ElementTree.Element:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:  # entities that grow without bound are no report
        raise ValueError(f"{what}: expected a report without a document type")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"{what}: expected XML, got {error}") from None


def doctest_cpp(log: str) -> Results:
    """C++ doctest with `-s -r=xml`: a subcase passes if all of its expressions do."""
    start, end = log.find("<doctest"), log.rfind("</doctest>")
    if start < 0 or end < start:
        return {}
    results = {}
    for case in parsed_xml(log[start : end + len("</doctest>")], "doctest log").iter("TestCase"):
        for sub in case.iter("SubCase"):
            passed = all(expression.get("success") == "true" for expression in sub.iter("Expression"))
            results[f"{case.get('name')} > {sub.get('name')}"] = PASSED if passed else FAILED
    return results


def junit(report: str) -> Results:
    """A JUnit XML report, as pytest, Maven, Gradle, gotestsum, jest-junit and others write it.

    Names: `file::Class::test` where the report has files (pytest's `junit_family=xunit1`), else `classname::test`.
    Raises ValueError for what is no such report.
    """
    results = {}
    for case in parsed_xml(report, "JUnit report").iter("testcase"):
        name, owner, file = case.get("name", ""), case.get("classname", ""), case.get("file", "")
        if file:
            module = re.sub(r"\.\w+$", "", file).replace("/", ".")
            inside = owner.removeprefix(module).strip(".") if owner.startswith(module) else ""
            owner = "::".join([file, *filter(None, inside.split("."))])
        failed = case.find("failure") is not None
        skipped = case.find("skipped")
        status = FAILED if failed else ERROR if case.find("error") is not None else PASSED
        if skipped is not None and status is PASSED:
            status = XFAIL if skipped.get("type") == "pytest.xfail" else SKIPPED
        key = f"{owner}::{name}" if owner else name
        # a test that passed and whose teardown failed is reported twice: the worse counts
        results[key] = status if results.get(key, PASSED) is PASSED else results[key]
    return results


def ctrf(report: str) -> Results:
    """A Common Test Report Format JSON report (https://ctrf.io): `results.tests[].{name, status, filePath}`.

    Raises ValueError for what is no such report.
    """
    statuses = {"passed": PASSED, "failed": FAILED, "skipped": SKIPPED, "pending": SKIPPED, "other": ERROR}
    try:
        tests = json.loads(report)["results"]["tests"]
        return {"::".join(filter(None, [t.get("filePath"), t["name"]])): statuses[t["status"]] for t in tests}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"CTRF report: expected results.tests with name and status, got {type(error).__name__}: {error}") from None


def googletest(log: str) -> Results:
    """googletest: `[ OK ] Suite.test (1 ms)`; what a test prints may stand before it."""
    results = {}
    for line in map(str.strip, lines(log)):
        times = [found.start() for found in re.finditer(r"\s\(", line[:-1])] if line.endswith(")") else []
        if marks := [m for m in re.finditer(r"\[\s*(OK|FAILED)\s*\]\s", line) if times and m.end() <= times[-1]]:
            results[line[marks[-1].end() : times[-1]]] = PASSED if marks[-1][1] == "OK" else FAILED
    return results


def minitest(log: str) -> Results:
    """Minitest's `-v`: `name. ... = 0.01 s = .`."""
    statuses = {".": PASSED, "F": FAILED, "E": FAILED}
    results = {}
    for line in map(str.strip, lines(log)):
        at = max(map(line.rfind, statuses))
        name = line[: max(line.rfind(". ", 0, max(line.rfind("=", 0, max(at, 0)), 0)), 0)]
        if name:
            results[name] = statuses[line[at]]
    return results


DURATION = r"(?:\s\(\d+\s*m?s\))?"
PASS_FAIL = {"PASS": PASSED, "FAIL": FAILED}
PARSERS: dict[str, Parser] = {
    # reports
    "junit": junit,
    "ctrf": ctrf,
    # Python
    "pytest": pytest,
    "pytest_short_paths": pytest_short_paths,
    "pytest_mouse_buttons": pytest_mouse_buttons,
    "unittest": unittest,
    "seaborn": seaborn,
    "sympy": sympy,
    # JavaScript
    "jest": by_line(rf"(?P<status>[✓✕○])\s(?P<name>.+?){DURATION}", {"✓": PASSED, "✕": FAILED, "○": SKIPPED}),
    "jest_json": by_line(r"\[(?P<status>PASSED|FAILED)\]\s(?P<name>.+)", {"PASSED": PASSED, "FAILED": FAILED}),
    "jest_files": by_line(r"(?P<status>PASS|FAIL)\s(?P<name>.+?)(?:\s\([\d.]+\s?m?s\))?", PASS_FAIL),
    "vitest": by_line(
        r"(?P<status>[✓×↓])\s(?P<name>.+?)(?:\s(?:\d+\s*m?s?|\[skipped\]))?", {"✓": PASSED, "×": FAILED, "↓": SKIPPED}
    ),
    "tap": by_line(r"(?P<status>ok|not ok) \d+ (?P<name>.+)", {"ok": PASSED, "not ok": FAILED}),
    "karma": karma,
    # Go, Rust
    "gotest": by_line(r"(?=.*\)$)--- (?P<status>PASS|FAIL|SKIP): (?P<name>.+) \(.+\)", PASS_FAIL | {"SKIP": SKIPPED}),
    # an ignored test is left out, which grades as failed: `#[ignore]` must not hide a regression
    "cargo": by_line(r"test\s+(?P<name>\S+)\s+\.\.\.\s+(?P<status>ok|FAILED)", {"ok": PASSED, "FAILED": FAILED}),
    # Java
    "maven": maven,
    "gradle": gradle,
    "ant": by_line(r"\[junit\]\s+\[(?P<status>PASS|FAIL|ERR)\]\s+(?P<name>.*)", PASS_FAIL | {"ERR": FAILED}),
    # C, C++
    "googletest": googletest,
    "ctest": by_line(
        r"\d+/\d+ Test\s+#\d+: (?P<name>\S+) [ .]*(?P<status>Passed|\*\*\*(?:Failed|Timeout|Not Run|Skipped|Exception))\b.*",
        {"Passed": PASSED, "***Skipped": SKIPPED} | {f"***{bad}": FAILED for bad in ("Failed", "Timeout", "Not Run", "Exception")},
    ),
    "doctest_cpp": doctest_cpp,
    "tcl": by_line(
        rf"\[(?P<status>ok|err|skip|ignore)\]:\s(?P<name>.+?){DURATION}",
        {"ok": PASSED, "err": FAILED, "skip": SKIPPED, "ignore": SKIPPED},
        cut=r"(?<!\s)\s+in\s+\S+$",
    ),
    "automake": by_line(r"(?P<status>PASS|FAIL):\s(?P<name>.+)", PASS_FAIL),
    "micropython": by_line(r"(?P<status>pass|FAIL|skip)\s+(?P<name>.+)", {"pass": PASSED, "FAIL": FAILED, "skip": SKIPPED}),
    # Ruby, PHP
    "minitest": minitest,
    "cucumber": by_line(r"(?P<name>.*) \.+(?P<status>[.F]).*", {".": PASSED, "F": FAILED}),
    "test_unit": by_line(
        r"(?:test: )?(?P<name>.+):\s+(?P<status>\.|[EFO]\b).*", {".": PASSED, "E": FAILED, "F": FAILED, "O": SKIPPED}
    ),
    "rspec": by_line(r"(?P<name>.+) - (?P<status>passed|failed).*", {"passed": PASSED, "failed": FAILED}),
    "phpunit": phpunit,
}


def parse(log: str, parser: str) -> Results:
    """What each test did, by its name, from a runner's output or report.

    Raises ValueError for an unknown parser or a malformed report.
    """
    if parser not in PARSERS:
        raise ValueError(f"parser: expected one of {sorted(PARSERS)}, got {parser!r}")
    return PARSERS[parser](log)
