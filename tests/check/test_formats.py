"""The formats tell one result, hold nothing else, and are valid by their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema

from plastiscope.check import Result, Rule, check
from plastiscope.check.formats import FORMATS
from plastiscope.store import Row

Maker = Callable[..., Path]
SCHEMAS = Path(__file__).parent / "schemas"
JUNIT = xmlschema.XMLSchema(SCHEMAS / "junit.xsd")
SARIF = jsonschema.Draft7Validator(
    json.loads((SCHEMAS / "sarif-2.1.0-subset.json").read_text("utf-8")),
    format_checker=jsonschema.FormatChecker(),
)
AWKWARD = 'w<|>&"`:,%\x07\né'
ROW = Row("effective_rank", "feature", 10.0, "fc1", 0, tokens="all", standard_error=0.1, columns=32)


def row(value: float | None, component: str, **changes: object) -> Row:
    status = "ok" if value is not None else "non_finite"
    return replace(ROW, value=value, component=component, **{"status": status, **changes})


RULES = [
    Rule("falls", "effective_rank", bad="down", against="baseline", absolute=1.0, relative=0.1),
    Rule("grows", "weight_magnitude", bad="up", against="baseline", severity="warn"),
    Rule("unused", "accuracy", bad="down", against="baseline", optional=True),
]


@pytest.fixture
def results(make: Maker) -> dict[str, Result]:
    """A failing, a gappy, a passing and an awkwardly named result."""
    weight = Row("weight_magnitude", "weight", 1.0, "fc1", 0, rows=4, columns=4)
    rows = [row(10.0, "fc1"), row(10.0, "fc2"), row(10.0, "q", head=1), weight]
    old = make("old", {1: rows})
    bad = [row(5.0, "fc1"), row(None, "fc2"), row(1.0, "q", head=1), replace(weight, value=2.0)]
    odd = {1: [row(10.0, AWKWARD), row(10.0, "b")]}
    return {
        "failing": check(make("bad", {1: bad}), old, RULES),
        "gappy": check(make("gap", {1: [row(10.0, "fc1"), weight]}), old, RULES),
        "passing": check(make("good", {1: rows}), old, RULES),
        "no baseline": check(make("good", {1: rows}), "absent", RULES),
        "awkward": check(
            make("o1", {1: [row(1.0, AWKWARD), row(None, "b")]}, run="r<&>"),
            make("o2", odd, run="r<&>"),
            RULES[:1],
        ),
    }


NAMES = ["failing", "gappy", "passing", "no baseline", "awkward"]


def test_the_four_results_are_what_they_are_called(results: dict[str, Result]) -> None:
    assert [results[name].status for name in NAMES] == [1, 4, 0, 4, 1]


@pytest.mark.parametrize("name", NAMES)
def test_junit_is_valid_and_counts(results: dict[str, Result], name: str) -> None:
    result = results[name]
    text = FORMATS["junit"](result)
    JUNIT.validate(ElementTree.fromstring(text.encode()))
    root = ElementTree.fromstring(text.encode())
    red = len(root.findall(".//failure")) + len(root.findall(".//error"))
    assert (red == 0) is result.passed
    assert int(root.get("failures", "")) + int(root.get("errors", "")) == red
    assert int(root.get("tests", "")) == len(root.findall(".//testcase"))


def test_junit_tells_failures_errors_and_skips_apart(results: dict[str, Result]) -> None:
    root = ElementTree.fromstring(FORMATS["junit"](results["failing"]).encode())
    cases = {case.get("name"): case for case in root.iter("testcase")}
    failure = cases["falls"].find("failure")
    assert failure is not None and failure.text is not None
    assert "block 0 q head 1 feature effective_rank 10 -> 1" in str(failure.get("message"))
    assert "block 0 fc2" in failure.text and "plastiscope show" in failure.text
    assert cases["unused"].find("skipped") is not None
    assert "warn: block 0 fc1 weight weight_magnitude" in str(cases["grows"].findtext("system-out"))
    gap = ElementTree.fromstring(FORMATS["junit"](results["gappy"]).encode())
    assert [e.get("type") for e in gap.iter("error")] == ["missing"]


def test_the_junit_schema_can_fail() -> None:
    with pytest.raises(xmlschema.XMLSchemaException):
        JUNIT.validate(ElementTree.fromstring("<testsuites><testcase/></testsuites>"))


@pytest.mark.parametrize("name", NAMES)
def test_sarif_is_valid(results: dict[str, Result], name: str) -> None:
    result = results[name]
    content = json.loads(FORMATS["sarif"](result))
    SARIF.validate(content)
    (run,) = content["runs"]
    assert len(run["results"]) == len(result.findings)
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(rules[r["ruleIndex"]] == r["ruleId"] for r in run["results"])
    assert run["invocations"][0]["exitCode"] == result.status
    assert any(r["level"] == "error" for r in run["results"]) is not result.passed


def test_the_sarif_schema_can_fail(results: dict[str, Result]) -> None:
    content = json.loads(FORMATS["sarif"](results["failing"]))
    content["runs"][0]["results"][0]["level"] = "bad"
    with pytest.raises(jsonschema.ValidationError):
        SARIF.validate(content)


def test_sarif_also_fits_an_independent_model(results: dict[str, Result]) -> None:
    model = pytest.importorskip("sarif_pydantic", reason="sarif-pydantic isn't installed")
    for result in results.values():
        parsed = model.Sarif.model_validate_json(FORMATS["sarif"](result))
        assert len(parsed.runs[0].results) == len(result.findings)


@pytest.mark.parametrize("name", NAMES)
def test_json_holds_everything_and_agrees(results: dict[str, Result], name: str) -> None:
    result = results[name]
    content = json.loads(FORMATS["json"](result))
    assert (content["status"], content["passed"]) == (result.status, result.passed)
    assert [f["message"] for f in content["findings"]] == [f.message for f in result.findings]
    assert content["compared"] == sum(rule["compared"] for rule in content["rules"])


def test_json_gives_the_numbers_of_a_regression(results: dict[str, Result]) -> None:
    first = json.loads(FORMATS["json"](results["failing"]))["findings"][0]
    assert (first["before"], first["after"], first["series"]["head"]) == (10.0, 1.0, 1)
    assert first["tolerance"]["decisive"] == 1.0 and first["excess"] == 9.0


def test_text_lists_all_failures_worst_first(results: dict[str, Result]) -> None:
    text = FORMATS["text"](results["failing"])
    lines = text.splitlines()
    assert lines[0] == "failed: 2 regressions, 1 gap (3 comparisons by 3 rules)"
    order = [text.index(s) for s in ("q head 1", "fc1 feature", "Not enough evidence", "fc2")]
    assert order == sorted(order)
    out = results["failing"].out
    assert (
        f"      plastiscope show {out} --metric effective_rank --component q --block 0 --head 1"
        in lines
    )
    assert FORMATS["text"](results["passing"]) == (
        f"passed (4 comparisons by 3 rules)\nbaseline {results['passing'].baseline}\n"
    )


def test_many_regressions_are_counted_by_rule_before_they_are_listed(make: Maker) -> None:
    old = make("old", {1: [row(10.0, f"part{i}") for i in range(13)]})
    new = make("new", {1: [row(1.0 if i < 11 else 10.0, f"part{i}") for i in range(13)]})
    lines = FORMATS["text"](check(new, old, RULES[:1])).splitlines()
    assert lines[2] == f"  {RULES[0].name}  11 of 13"
    assert sum(line.startswith("  block 0 part") for line in lines) == 11


def test_text_fits_80_columns_and_breaks_no_name_and_no_command(make: Maker) -> None:
    long = "encoder.layers." + "x" * 90
    names = ["a component with several words in its name", long]
    old = make("old", {1: [row(10.0, name) for name in names]})
    new = make("new", {1: [row(1.0, name) for name in names]})
    result = check(new, old, RULES[:1])
    lines = FORMATS["text"](result).splitlines()
    wide = [line.strip() for line in lines if len(line) > 80]
    commands = [line for line in wide if line.startswith("plastiscope show ")]
    assert len(commands) == 2  # to be copied
    assert [line for line in wide if line not in commands] in ([long], [long, lines[1]])
    said = " ".join(" ".join(lines).split())
    assert all(finding.message in said for finding in result.regressions)


def test_a_drawn_figure_is_pointed_to(results: dict[str, Result]) -> None:
    result = results["failing"]
    figure = Path(str(result.out), "figures", "r", "head-rank.png")
    assert str(figure) not in FORMATS["text"](result)
    figure.parent.mkdir(parents=True)
    figure.touch()
    assert str(figure) in FORMATS["text"](result)


def test_markdown_escapes_what_would_be_markup(results: dict[str, Result]) -> None:
    text = FORMATS["markdown"](results["awkward"])
    (line,) = [line for line in text.splitlines() if line.startswith("| fail")]
    assert 'w\\<\\|\\>&"\\`:,%' in line
    assert line.replace("\\|", "").count("|") == 9
    assert "failed: 1 regression" in text and "Not enough evidence" in text


def test_github_annotations_are_one_line_each(results: dict[str, Result]) -> None:
    result = results["awkward"]
    lines = FORMATS["github"](result).split("\n")
    assert lines[-1] == "" and len(lines) == 4
    assert lines[0].startswith('::error title=plastiscope%3A falls::block 0 w<|>&"`:,%25\x07%0A')
    assert lines[2].startswith("::error title=plastiscope check::failed")
    passing = FORMATS["github"](results["passing"])
    assert passing == "::notice title=plastiscope check::passed (4 comparisons by 3 rules)\n"
    warned = FORMATS["github"](results["failing"])
    assert "::warning title=plastiscope%3A grows::" in warned
