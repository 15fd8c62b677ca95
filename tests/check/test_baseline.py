"""The baseline file: small, sorted, rounded to its error, and never a reason to fail by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plastiscope.check import Rule, baseline_values, check
from plastiscope.check.baseline import read_baseline, write_baseline
from plastiscope.check.values import Series, Value
from plastiscope.errors import NotEnoughEvidenceError, UnreadableError, UsageError
from plastiscope.store import Row

Maker = Callable[..., Path]
RANK = Row("effective_rank", "feature", 12.3456789, "fc1", 0, tokens="all", standard_error=0.123,
           rows=64, columns=32)  # fmt: skip
WEIGHT = Row("weight_magnitude", "weight", 1 / 3, "fc1", 0, rows=32, columns=16)
EXACT = [
    Rule("rank", "effective_rank", against="baseline", errors=0.0),
    Rule("weight", "weight_magnitude", against="baseline", errors=0.0),
]


def keep(out: Path, file: Path, rules: list[Rule] = EXACT) -> str:
    write_baseline(file, baseline_values(out, rules))
    return file.read_text("utf-8")


def test_values_are_rounded_to_their_errors(make: Maker, tmp_path: Path) -> None:
    text = keep(make("out", {7: [WEIGHT, RANK]}), tmp_path / "b.jsonl")
    header, rank, weight = map(json.loads, text.splitlines())
    assert header == {
        "plastiscope_baseline": 1,
        "versions": {"effective_rank": 1, "weight_magnitude": 1},
    }
    assert rank == {
        "run": "r", "step": 7, "metric": "effective_rank", "subject": "feature",
        "component": "fc1", "block": 0, "tokens": "all", "branch": "raw", "value": 12.35,
        "error": 0.12, "rows": 64, "columns": 32, "probe": "digits@1",
    }  # fmt: skip
    assert weight["value"] == 0.3333333 and "error" not in weight and "probe" not in weight


def test_the_file_is_sorted_and_one_change_is_one_line(make: Maker, tmp_path: Path) -> None:
    rows = [replace(RANK, component=c, block=b) for c in ("v", "q") for b in (10, 2)]
    first = keep(make("a", {7: rows}), tmp_path / "a.jsonl").splitlines()
    assert first == keep(make("b", {7: rows[::-1]}), tmp_path / "b.jsonl").splitlines()
    order = [(json.loads(r)["block"], json.loads(r)["component"]) for r in first[1:]]
    assert order == [(2, "q"), (2, "v"), (10, "q"), (10, "v")]
    moved = [replace(rows[0], value=3.0), *rows[1:]]
    second = keep(make("c", {7: moved}), tmp_path / "c.jsonl").splitlines()
    assert sum(a != b for a, b in zip(first, second, strict=True)) == 1
    quiver = [replace(rows[0], value=12.3456789 + 1e-4), *rows[1:]]
    assert keep(make("d", {7: quiver}), tmp_path / "d.jsonl").splitlines() == first


@given(
    value=st.floats(-1e12, 1e12, allow_subnormal=False),
    error=st.none() | st.floats(1e-6, 1e6),
)
@example(value=0.125, error=0.5)
def test_a_run_passes_against_its_own_baseline_with_no_tolerance(
    tmp_path_factory: pytest.TempPathFactory, value: float, error: float | None
) -> None:
    from plastiscope.check.judgement import judge
    from plastiscope.check.pairs import Pair

    file = tmp_path_factory.mktemp("b") / "b.jsonl"
    kept = Value(Series("m", "feature", component="c"), 1, value, error)
    write_baseline(file, {"r": [kept]})
    (read,) = read_baseline(file, ["m"])["r"]
    rule = Rule("exact", "m", against="baseline", errors=0.0)
    assert judge(Pair(rule, "r", read, kept, "the baseline")) is None
    assert read.value == pytest.approx(value, rel=1e-6, abs=(error or 0.0) * 0.06)


def test_a_change_beyond_the_tolerance_still_fails(make: Maker, tmp_path: Path) -> None:
    file = tmp_path / "b.jsonl"
    keep(make("old", {7: [WEIGHT, RANK]}), file)
    assert check(make("same", {7: [WEIGHT, RANK]}), file, EXACT).status == 0
    new = make("new", {7: [replace(WEIGHT, value=0.334), replace(RANK, value=12.0)]})
    result = check(new, file, EXACT)
    assert [f.rule for f in result.findings] == ["weight", "rank"] and result.status == 1


def test_nulls_are_kept_with_their_reason(make: Maker, tmp_path: Path) -> None:
    null = replace(RANK, value=None, standard_error=None, status="no_cls_token", component="z")
    out = make("out", {7: [RANK, null]})
    text = keep(out, tmp_path / "b.jsonl")
    assert json.loads(text.splitlines()[2])["status"] == "no_cls_token"
    result = check(out, tmp_path / "b.jsonl", EXACT[:1])
    assert [f.kind for f in result.findings] == ["unchanged_null"] and result.passed


def test_only_what_the_rules_want_is_kept(make: Maker, tmp_path: Path) -> None:
    out = make("out", {1: [RANK, WEIGHT], 7: [RANK, WEIGHT]})
    assert keep(out, tmp_path / "a", EXACT[:1]).count("\n") == 2
    every = [replace(EXACT[0], steps="all")]
    assert keep(out, tmp_path / "b", every).count("\n") == 3


def test_a_baseline_without_a_number_is_refused(make: Maker, tmp_path: Path) -> None:
    out = make("out", {1: [replace(RANK, value=None, status="non_finite")]})
    with pytest.raises(NotEnoughEvidenceError):
        keep(out, tmp_path / "b.jsonl")
    assert not (tmp_path / "b.jsonl").exists()
    with pytest.raises(UsageError, match="no rule compares with the baseline"):
        baseline_values(out, [Rule("x", "effective_rank")])


HEADER = '{"plastiscope_baseline": 1, "versions": {"effective_rank": 1}}\n'
LINE = '{"run": "r", "step": 1, "metric": "effective_rank", "subject": "feature", "value": %s}\n'


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("", NotEnoughEvidenceError, "is empty"),
        (HEADER, NotEnoughEvidenceError, "holds no values"),
        ("{}", UnreadableError, "header"),
        ("not json", UnreadableError, "isn't a baseline"),
        ("[1]\n", UnreadableError, "header"),
        (HEADER.replace(": 1,", ": 99,"), UnreadableError, "format 99"),
        (HEADER + LINE % "NaN", UnreadableError, "line 2"),
        (HEADER + LINE % "null", UnreadableError, "line 2"),
        (HEADER + LINE % '1, "typo": 2', UnreadableError, "line 2"),
        (HEADER + "[]\n", UnreadableError, "line 2"),
        (HEADER + LINE.replace("effective_rank", "other") % "1", UnreadableError, "line 2"),
    ],
)
def test_a_broken_baseline_says_so(
    tmp_path: Path, text: str, error: type[Exception], said: str
) -> None:
    file = tmp_path / "b.jsonl"
    file.write_text(text, "utf-8")
    with pytest.raises(error, match=said) as caught:
        read_baseline(file, ["effective_rank"])
    assert "\n" not in str(caught.value)
