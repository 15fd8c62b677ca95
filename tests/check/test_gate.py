"""The comparison: every cell, every status, every reason for not enough evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from plastiscope.check import Result, Rule, check
from plastiscope.errors import NotEnoughEvidenceError, UnreadableError, UsageError
from plastiscope.store import Row, read

Maker = Callable[..., Path]

RANK = Row(
    "effective_rank",
    "feature",
    10.0,
    "fc1",
    0,
    tokens="all",
    standard_error=0.1,
    rows=64,
    columns=32,
)
WEIGHT = Row("weight_magnitude", "weight", 1.0, "fc1", 0, rows=32, columns=16)
DORMANT = Row(
    "dormant_fraction", "unit", 0.0, "activation", 0, tokens="all", parameters="tau=0.025",
    rows=64, columns=20,
)  # fmt: skip

FALLS = Rule("falls", "effective_rank", bad="down", against="baseline", absolute=1.0, relative=0.1)
IN_RUN = replace(FALLS, against="first")


def value(number: float | None, row: Row = RANK, **changes: object) -> Row:
    status = "ok" if number is not None else "non_finite"
    return replace(row, value=number, **{"status": status, **changes})


def kinds(result: Result) -> list[str]:
    return [f.kind for f in result.findings]


# --- the 3 x 3 table ----------------------------------------------------------------------------

OTHER = value(5.0, component="fc2")  # a second place that never changes: something is compared
CELLS = [
    # before, after, kinds, status
    ("number", "number", [], 0),
    ("number", "null", ["null"], 4),
    ("number", "missing", ["missing"], 4),
    ("null", "number", ["measured_now"], 0),
    ("null", "null", ["unchanged_null"], 0),
    ("null", "missing", ["missing"], 4),
    ("missing", "number", ["new"], 0),
    ("missing", "null", ["null"], 4),
    ("missing", "missing", [], 0),
]


def cell(kind: str) -> list[Row]:
    return {"number": [RANK], "null": [value(None)], "missing": []}[kind]


@pytest.mark.parametrize(("before", "after", "expected", "status"), CELLS)
def test_every_cell_has_its_verdict(
    make: Maker, before: str, after: str, expected: list[str], status: int
) -> None:
    old = make("old", {10: [*cell(before), OTHER]})
    new = make("new", {10: [*cell(after), OTHER]})
    result = check(new, old, [FALLS])
    assert (kinds(result), result.status) == (expected, status)
    assert result.compared == 1 + (before == after == "number")
    assert all("block 0 fc1" in f.message for f in result.findings)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_no_value(make: Maker, number: float) -> None:
    result = check(
        make("new", {10: [value(number, status="ok"), OTHER]}),
        make("old", {10: [RANK, OTHER]}),
        [FALLS],
    )
    assert (kinds(result), result.status) == (["null"], 4)


@pytest.mark.parametrize("against", ["first", "trend"])
def test_nan_at_the_last_checkpoint_never_passes_within_a_run(make: Maker, against: str) -> None:
    steps = {s: [RANK, OTHER] for s in range(6)}
    out = make("out", steps | {6: [value(None), OTHER]})
    result = check(out, rules=[replace(FALLS, against=against)])
    assert (kinds(result), result.status) == (["null"], 4)


def test_a_limit_is_not_passed_by_nan(make: Maker) -> None:
    rule = Rule("limit", "effective_rank", bad="down", against="limit", limit=4.0)
    assert check(make("a", {1: [RANK]}), rules=[rule]).status == 0
    assert check(make("b", {1: [value(None)]}), rules=[rule]).status == 4
    assert check(make("c", {1: [value(3.0)]}), rules=[rule]).status == 1


def test_a_status_may_be_accepted_by_name(make: Maker) -> None:
    out = make("out", {10: [value(None, status="no_cls_token"), OTHER]})
    old = make("old", {10: [OTHER]})
    assert check(out, old, [FALLS]).status == 4
    accepted = check(out, old, [replace(FALLS, nulls=("no_cls_token",))])
    assert (kinds(accepted), accepted.status) == (["accepted"], 0)


# --- tolerances ---------------------------------------------------------------------------------

STEPS = [
    # before, after, rule changes, fails
    (10.0, 10.0, {}, False),
    (10.0, 8.0, {}, True),
    (10.0, 9.05, {}, False),  # within the absolute 1.0
    (100.0, 92.0, {}, False),  # beyond the absolute, within the relative 10 %
    (100.0, 85.0, {}, True),
    (10.0, 8.0, {"errors": 15.0}, False),  # 15 * hypot(0.1, 0.1) = 2.12
    (10.0, 8.0, {"errors": 14.0}, True),  # 1.98
    (10.0, 12.0, {}, False),  # the good direction
    (10.0, 12.0, {"bad": "up"}, True),
    (10.0, 12.0, {"bad": "either"}, True),
    (0.0, 1e-12, {"bad": "up", "absolute": 0.0}, False),  # relative tolerance alone, at zero
    (10.0, 10.0 - 1e-6, {"absolute": 0.0, "relative": 0.0, "errors": 0.0}, False),
]


@pytest.mark.parametrize(("before", "after", "changes", "fails"), STEPS)
def test_all_tolerances_must_be_exceeded(
    make: Maker, before: float, after: float, changes: dict[str, object], fails: bool
) -> None:
    new, old = make("new", {10: [value(after)]}), make("old", {10: [value(before)]})
    result = check(new, old, [replace(FALLS, **changes)])
    assert result.status == int(fails)


def test_a_finding_names_place_values_and_tolerance(make: Maker) -> None:
    new, old = make("new", {10: [value(8.0)]}), make("old", {10: [RANK]})
    (finding,) = check(new, old, [FALLS]).findings
    assert finding.message == (
        "block 0 fc1 feature effective_rank 10 -> 8, -20 % (the baseline to step 10), "
        "tolerance 1 (absolute)"
    )
    assert (finding.before, finding.after, finding.step) == (10.0, 8.0, 10)
    assert finding.excess == pytest.approx(2.0)


@pytest.mark.parametrize(("dead", "fails"), [(1, False), (2, True)])
def test_a_fraction_is_never_finer_than_one_unit(make: Maker, dead: int, fails: bool) -> None:
    rule = Rule("dormant", "dormant_fraction", bad="up", against="baseline", errors=0.0)
    new, old = make("new", {1: [value(dead / 20, DORMANT)]}), make("old", {1: [DORMANT]})
    assert check(new, old, [rule]).status == int(fails)


@pytest.mark.parametrize(("units", "fails"), [(20, False), (400, True)])
def test_against_a_baseline_a_narrow_layer_is_a_small_sample(
    make: Maker, units: int, fails: bool
) -> None:
    rule = Rule("dormant", "dormant_fraction", bad="up", against="baseline", absolute=0.1)
    old, new = (value(v, DORMANT, columns=units) for v in (0.1, 0.3))  # 3 errors: 0.37 and 0.08
    assert check(make("new", {1: [new]}), make("old", {1: [old]}), [rule]).status == int(fails)
    within = make("run", {0: [old], 1: [new]})
    assert check(within, rules=[replace(rule, against="first")]).status == 1


def test_identical_tables_pass_with_no_tolerance_at_all(make: Maker) -> None:
    rule = Rule("any", "effective_rank", against="baseline", errors=0.0)
    rows = {10: [value(v, component=f"c{v}") for v in (0.0, 1e-300, 1 / 3, 7e200)]}
    result = check(make("new", rows), make("old", rows), [rule])
    assert (result.status, result.compared, kinds(result)) == (0, 4, [])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("field", ["absolute", "relative", "errors", "share"])
def test_a_tolerance_that_disarms_is_refused(field: str, bad: float) -> None:
    with pytest.raises(UsageError, match=field):
        replace(FALLS, **{field: bad})


def test_a_share_of_the_places_may_be_asked_for(make: Maker) -> None:
    def rows(fallen: int) -> list[Row]:
        return [value(5.0 if i < fallen else 10.0, component=f"c{i}") for i in range(8)]

    rule = replace(FALLS, share=0.25)
    old = make("old", {1: rows(0)})
    alone = check(make("one", {1: rows(1)}), old, [rule])
    assert (alone.status, kinds(alone)) == (0, ["few"])
    assert "1 of 8, the rule asks for 25%" in alone.findings[0].message
    assert check(make("two", {1: rows(2)}), old, [rule]).status == 1


# --- references within a run --------------------------------------------------------------------


def test_the_first_checkpoint_is_the_reference(make: Maker) -> None:
    out = make("out", {0: [value(20.0)], 5: [value(12.0)], 9: [value(10.0)]})
    (finding,) = check(out, rules=[IN_RUN]).findings
    assert (finding.before, finding.after, finding.at) == (20.0, 10.0, "step 0")


def test_all_steps_and_steps_after_are_chosen(make: Maker) -> None:
    out = make("out", {0: [value(20.0)], 5: [value(12.0)], 9: [value(20.0)]})
    assert check(out, rules=[IN_RUN]).status == 0
    found = check(out, rules=[replace(IN_RUN, steps="all")])
    assert [(f.step, f.kind) for f in found.findings] == [(5, "regression")]
    late = check(out, rules=[replace(IN_RUN, steps="after 5")])
    assert (late.status, late.compared) == (0, 1)


def test_nothing_is_compared_across_a_break(make: Maker) -> None:
    out = make("out", {0: [value(90.0)], 5: [value(10.0, segment=1)], 9: [value(9.9, segment=1)]})
    result = check(out, rules=[IN_RUN])
    assert (result.status, result.compared) == (0, 1)
    fresh = make("fresh", {0: [value(90.0)], 5: [value(10.0, segment=1)]})
    assert kinds(check(fresh, rules=[IN_RUN])) == ["reference"]


def test_one_checkpoint_alone_is_not_enough_evidence(make: Maker) -> None:
    result = check(make("out", {0: [RANK]}), rules=[IN_RUN])
    assert (result.status, kinds(result)) == (4, ["reference"])
    assert "the only checkpoint" in result.findings[0].message


def test_the_trend_is_extrapolated(make: Maker) -> None:
    line = {s: [value(100.0 - 5 * s)] for s in range(6)}
    rule = replace(FALLS, against="trend")
    assert check(make("on", line | {6: [value(70.0)]}), rules=[rule]).status == 0
    off = check(make("off", line | {6: [value(55.0)]}), rules=[rule])
    assert off.status == 1 and off.findings[0].before == pytest.approx(70.0)
    assert kinds(check(make("short", {0: [RANK], 1: [RANK]}), rules=[rule])) == ["reference"]


def test_a_trend_that_leaves_the_range_excuses_nothing(make: Maker) -> None:
    rule = Rule("dead", "dormant_fraction", bad="up", against="trend", absolute=0.1)
    fading = [0.6, 0.2, 0.1, 0.05, 0.02]  # a line through them predicts less than nothing
    series = {s: [value(v, DORMANT)] for s, v in enumerate(fading)}
    assert check(make("calm", series | {5: [value(0.05, DORMANT)]}), rules=[rule]).passed
    jump = check(make("jump", series | {5: [value(0.25, DORMANT)]}), rules=[rule])
    assert jump.status == 1 and jump.findings[0].before == 0.02


def test_a_dip_that_recovers_is_not_a_fall(make: Maker) -> None:
    rule = replace(IN_RUN, relative=0.5, steady=0.3)
    dips = make("dips", {s: [value(v)] for s, v in enumerate([20.0, 4.0, 5.0, 6.0, 7.0])})
    falls = make("falls", {s: [value(v)] for s, v in enumerate([20.0, 8.0, 7.5, 7.0, 7.0])})
    assert check(dips, rules=[rule]).status == 0
    assert check(dips, rules=[replace(rule, steady=0.0)]).status == 1
    assert check(falls, rules=[rule]).status == 1
    early = make("early", {s: [value(v)] for s, v in enumerate([20.0, 8.0, 7.5, 7.0])})
    result = check(early, rules=[rule])
    assert kinds(result) == ["reference"]
    assert "a trend needs 4 earlier checkpoints, there are 3" in result.findings[0].message


def test_a_noisy_series_needs_a_larger_step_off_its_trend(make: Maker) -> None:
    noisy = {s: [value(100.0 + (8 if s % 2 else -8))] for s in range(8)}
    rule = replace(FALLS, against="trend")
    assert check(make("a", noisy | {8: [value(80.0)]}), rules=[rule]).status == 0
    assert check(make("b", noisy | {8: [value(40.0)]}), rules=[rule]).status == 1


def test_a_place_that_is_gone_at_the_last_checkpoint_is_named(make: Maker) -> None:
    out = make("out", {0: [RANK, OTHER], 5: [OTHER]})
    result = check(out, rules=[IN_RUN])
    assert (result.status, kinds(result)) == (4, ["missing"])
    assert "block 0 fc1 feature effective_rank at step 5" in result.findings[0].message


# --- partners -----------------------------------------------------------------------------------


def test_a_renamed_component_fails_by_name(make: Maker) -> None:
    new = make("new", {1: [value(10.0, component="fc_one"), OTHER]})
    result = check(new, make("old", {1: [RANK, OTHER]}), [FALLS])
    assert result.status == 4
    assert {(f.kind, f.series.component) for f in result.findings if f.series} == {
        ("missing", "fc1"), ("new", "fc_one"),
    }  # fmt: skip


def test_a_dropped_metric_fails_and_may_be_allowed(make: Maker) -> None:
    weights = Rule("weights", "weight_magnitude", bad="up", against="baseline")
    new, old = make("new", {1: [RANK]}), make("old", {1: [RANK, WEIGHT]})
    result = check(new, old, [FALLS, weights])
    assert (result.status, kinds(result)) == (4, ["missing"])
    assert "weight_magnitude" in result.findings[0].message
    optional = replace(weights, optional=True)
    allowed = check(new, old, [FALLS, optional], allow_missing=["weight_*"])
    assert (allowed.status, kinds(allowed)) == (0, [])
    assert check(new, old, [FALLS, weights], allow_missing=["fc2"]).status == 4


def test_a_lost_checkpoint_fails_unless_the_run_still_grows(make: Maker) -> None:
    old = make("old", {5: [RANK], 10: [RANK]})
    new = make("new", {5: [RANK]})
    assert kinds(check(new, old, [FALLS])) == ["missing"]
    growing = check(new, old, [FALLS], growing=True)
    assert (growing.status, growing.compared) == (0, 1)
    every = [replace(FALLS, steps="all")]
    assert kinds(check(make("gap", {10: [RANK]}), old, every)) == ["missing"]


def test_nothing_in_common_fails(make: Maker) -> None:
    old = make("old", {1: [RANK]})
    result = check(make("new", {2: [RANK]}), old, [FALLS])
    assert (result.status, result.compared) == (4, 0)
    only_new = check(make("other", {1: [value(1.0, component="x")]}), old, [FALLS])
    assert only_new.status == 4


def test_only_nulls_in_common_is_nothing_compared(make: Maker) -> None:
    rows = {1: [value(None)]}
    result = check(make("new", rows), make("old", rows), [FALLS])
    assert result.status == 4
    assert {"unchanged_null", "unmatched"} <= set(kinds(result))


def test_an_empty_table_is_not_enough_evidence(make: Maker) -> None:
    with pytest.raises(NotEnoughEvidenceError):
        check(make("new", {1: []}), rules=[IN_RUN])


def test_a_rule_that_matches_nothing_names_the_nearest_metric(make: Maker) -> None:
    steps = {0: [RANK], 1: [RANK]}
    typo = Rule("typo", "effective_rnk", bad="down")
    result = check(make("out", steps), rules=[IN_RUN, typo])
    assert (result.status, kinds(result)) == (4, ["unmatched"])
    assert "did you mean 'effective_rank'?" in result.findings[0].message
    nowhere = check(make("b", steps), rules=[IN_RUN, replace(IN_RUN, name="n", components=("x",))])
    assert "but not where the rule looks" in nowhere.findings[0].message
    assert check(make("c", steps), rules=[IN_RUN, replace(typo, optional=True)]).status == 0


# --- what may not be compared -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"probe": "digits@2"}, "probe"),
        ({"version": 2}, "version"),
        ({"columns": 48}, "architecture"),
    ],
)
def test_other_conditions_are_not_compared(
    make: Maker, changes: dict[str, object], kind: str
) -> None:
    new, old = make("new", {1: [value(2.0, **changes)]}), make("old", {1: [RANK]})
    result = check(new, old, [FALLS])
    assert (result.status, kinds(result), result.compared) == (4, [kind], 0)


def test_a_probe_that_changed_within_the_run_is_said(make: Maker) -> None:
    out = make("out", {0: [value(10.0, probe="a@1")], 1: [value(2.0, probe="b@1")]})
    assert kinds(check(out, rules=[IN_RUN])) == ["probe"]


def test_another_architecture_is_named_and_not_compared(make: Maker) -> None:
    rule = Rule("grow", "weight_magnitude", bad="up", against="baseline", relative=0.1)
    old = make("old", {1: [WEIGHT, replace(WEIGHT, component="fc2")]})
    deeper = make("deeper", {1: [replace(WEIGHT, value=9.0), replace(WEIGHT, component="fc2"),
                                 replace(WEIGHT, block=1)]})  # fmt: skip
    result = check(deeper, old, [rule])
    assert (result.status, kinds(result), result.compared) == (4, ["architecture"], 0)
    assert "only here: block 1 fc1" in result.findings[0].message
    wider = make("wider", {1: [replace(WEIGHT, rows=64), replace(WEIGHT, component="fc2")]})
    assert (
        "block 0 fc1 (another architecture: (32, 16)"
        in check(wider, old, [rule]).findings[0].message
    )


def test_another_probe_leaves_the_weights_comparable(make: Maker) -> None:
    rule = Rule("grow", "weight_magnitude", bad="up", against="baseline", relative=0.1)
    new = make("new", {1: [WEIGHT, value(2.0)]}, probe="digits@2")
    result = check(new, make("old", {1: [WEIGHT, RANK]}), [rule, FALLS])
    assert (kinds(result), result.matched) == (["probe"], {"grow": 1, "falls": 0})


# --- the baseline as a whole --------------------------------------------------------------------


def test_a_missing_baseline_fails_unless_allowed(make: Maker, tmp_path: Path) -> None:
    out = make("new", {1: [RANK]})
    for absent in (tmp_path / "absent.jsonl", tmp_path):
        result = check(out, absent, [FALLS])
        assert (result.status, kinds(result)) == (4, ["baseline"])
        allowed = check(out, absent, [FALLS], allow_missing_baseline=True)
        assert (allowed.status, kinds(allowed)) == (0, ["note"])


def test_a_missing_baseline_doesnt_excuse_nan(make: Maker, tmp_path: Path) -> None:
    out = make("new", {1: [value(None)]})
    result = check(out, tmp_path / "absent", [FALLS], allow_missing_baseline=True)
    assert result.status == 4


def test_a_baseline_without_the_rules_rows_is_no_baseline(make: Maker) -> None:
    result = check(make("new", {1: [RANK]}), make("old", {1: [WEIGHT]}), [FALLS])
    assert (result.status, kinds(result)) == (4, ["baseline"])


def test_a_rule_against_a_baseline_needs_one(make: Maker) -> None:
    with pytest.raises(UsageError, match="--baseline"):
        check(make("new", {1: [RANK]}), rules=[FALLS])


def test_a_baseline_that_no_rule_looks_at_is_no_gate(make: Maker) -> None:
    steps = {0: [RANK], 1: [RANK]}
    with pytest.raises(UsageError, match="no rule compares with the baseline"):
        check(make("new", steps), make("old", steps), [IN_RUN])


# --- several runs -------------------------------------------------------------------------------


def test_runs_are_paired_by_name(make: Maker, tmp_path: Path) -> None:
    for run in ("a", "b"):
        make("old", {1: [RANK]}, run=run)
    make("new", {1: [RANK]}, run="a")
    result = check(tmp_path / "new", tmp_path / "old", [FALLS])
    assert (result.status, result.findings[0].message) == (4, "run 'b': gone from the new tables")
    make("new", {1: [value(2.0)]}, run="b")
    found = check(tmp_path / "new", tmp_path / "old", [FALLS])
    assert [(f.run, f.kind) for f in found.findings] == [("b", "regression")]
    only = check(tmp_path / "new", tmp_path / "old", [FALLS], runs=["a"])
    assert (only.status, only.compared) == (0, 1)
    with pytest.raises(UsageError, match="known: a, b"):
        check(tmp_path / "new", tmp_path / "old", [FALLS], runs=["aa"])


def test_a_run_alone_is_compared_under_another_name(make: Maker) -> None:
    new, old = make("new", {1: [RANK]}, run="x"), make("old", {1: [RANK]}, run="y")
    assert check(new, old, [FALLS]).compared == 1


def test_a_run_may_be_called_like_a_partition(make: Maker) -> None:
    out = make("out", {0: [RANK], 1: [value(2.0)]}, run="lr=0.1")
    (finding,) = check(out, rules=[IN_RUN]).findings
    assert finding.run == "lr=0.1"


def test_two_checkpoints_at_one_step_are_refused(make: Maker, tmp_path: Path) -> None:
    from plastiscope import store

    out = make("out", {0: [RANK], 1: [RANK]})
    shared = {"run": "r", "checkpoint": "best", "step": 1, "task": None, "branch": "raw"}
    file = store.checkpoint_file(out, "r", "best")
    store.write(file, [RANK], shared | {"checkpoint_fingerprint": "other"}, "k", {})
    with pytest.raises(NotEnoughEvidenceError, match="two checkpoints at step 1"):
        check(out, rules=[IN_RUN])
    store.write(file, [RANK], shared | {"checkpoint_fingerprint": "r1"}, "k", {})
    assert check(out, rules=[IN_RUN]).compared == 1


# --- the result ---------------------------------------------------------------------------------


def test_worst_first_and_severities(make: Maker) -> None:
    values = {"a": 7.0, "b": 2.0, "c": 5.0}
    new = make("new", {1: [value(v, component=c) for c, v in values.items()]})
    old = make("old", {1: [value(10.0, component=c) for c in values] + [OTHER]})
    result = check(new, old, [FALLS])
    assert [f.series.component for f in result.findings if f.series] == ["b", "c", "a", "fc2"]
    assert (result.status, kinds(result)[-1]) == (1, "missing")  # a regression outweighs a gap
    warned = check(new, old, [replace(FALLS, severity="warn")])
    assert (warned.status, len(warned.warnings)) == (0, 4)
    assert check(new, old, [replace(FALLS, severity="informational")]).status == 0


def test_a_frame_an_arrow_table_and_a_folder_agree(make: Maker) -> None:
    new, old = make("new", {1: [value(2.0), WEIGHT]}), make("old", {1: [RANK, WEIGHT]})
    from_folder = check(new, old, [FALLS])
    from_frame = check(read(new), read(old), [FALLS])
    assert from_frame.findings == from_folder.findings != ()
    with pytest.raises(UsageError, match="can't check a int"):
        check(3, old, [FALLS])
    with pytest.raises(UsageError, match="lacks the columns"):
        check(read(new).drop(columns="probe"), old, [FALLS])


def test_what_is_no_table_is_unreadable(make: Maker, tmp_path: Path) -> None:
    out = make("out", {1: [RANK]})
    (out / "metrics" / "r" / "bad.parquet").write_bytes(b"no")
    with pytest.raises(UnreadableError):
        check(out, rules=[IN_RUN])
    with pytest.raises(UsageError, match="run `plastiscope analyze` first"):
        check(tmp_path / "nowhere", rules=[IN_RUN])


def test_the_package_is_a_function_too(make: Maker) -> None:
    import plastiscope.check as module

    out = make("out", {0: [RANK], 1: [value(2.0)]})
    assert module(out, rules=[IN_RUN]).status == 1  # type: ignore[operator]
