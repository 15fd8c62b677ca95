"""Sentences of a diagnosis: they say the numbers of the series, and what was short of a sign."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from plastiscope.diagnosis import SIGNS, Diagnosis, Finding, Movement, Sign, shortfall
from plastiscope.sentences import REASONS, change, coverage, error, evidence, floors, number, rule

RANK, UNITS = SIGNS[0], SIGNS[3]


def moved(
    first: float, last: float, sign: Sign = RANK, error: float | None = 0.5, trend: float = -1.0
) -> Movement:
    size = last - first if not sign.relative else float(np.log(last / first))
    return Movement("fc1", 2, None, first, last, error, trend, sign.worse * size)


def sentence(sign: Sign, *movements: Movement, present: bool = False) -> str:
    count = sum(not shortfall(sign, m) for m in movements)
    found = Diagnosis("r", 5, 0, 900, (Finding(sign, movements, count, present),), "", ())
    (said,) = evidence(found)
    return said


def test_a_present_sign_says_how_many_and_the_largest() -> None:
    said = sentence(RANK, moved(40, 10), moved(40, 39), present=True)
    assert said == (
        "Features lose rank: 1 of 2 components; most in block 2 fc1, from 40 at step 0 to 10 at "
        "step 900 (-75 % ± 1)."
    )


def test_units_are_counted_in_points() -> None:
    rising = moved(0.05, 0.45, UNITS, error=0.02, trend=1.0)
    assert (number(0.05, UNITS), change(rising, UNITS), error(rising, UNITS)) == (
        "5 %", "+40 pts", "2",
    )  # fmt: skip


def test_a_rank_that_is_gone_fell_by_all_of_it() -> None:
    gone = Movement("activation", 2, None, 17.6, 0.0, 0.14, -0.8, np.inf)
    assert (change(gone, RANK), error(gone, RANK)) == ("-100 %", "0.8")


def test_too_few_series_are_no_sign() -> None:
    said = sentence(RANK, moved(40, 10), *[moved(40, 40)] * 9)
    assert said.startswith("Features lose rank: 1 of 10 components, under the 25 % that make a ")


def test_what_keeps_the_largest_change_from_counting_is_said() -> None:
    assert sentence(RANK, moved(40, 10, trend=0.0)).endswith("not counted: not steady.")
    assert sentence(RANK, moved(40, 10, error=20)).endswith("under 3 standard errors.")
    assert sentence(RANK, moved(40, 39)).endswith("not counted: too small.")
    assert sentence(RANK, moved(40, 50)) == (
        "Features lose rank: 0 of 1 components; none changed in that direction."
    )


def test_the_one_that_counts_is_named_before_a_larger_one_that_does_not() -> None:
    said = sentence(RANK, moved(40, 5, trend=0.0), moved(40, 20), present=True)
    assert "from 40 at step 0 to 20" in said and "not counted" not in said


def test_growth_is_a_factor() -> None:
    assert change(moved(0.1, 0.44), SIGNS[4]) == "x4.4"
    assert change(moved(0.1, 0.15), SIGNS[4]) == "+50 %"
    assert error(moved(0.1, 0.15, error=None), SIGNS[4]) == ""


def test_the_rule_says_the_thresholds_in_force() -> None:
    said = rule()
    for part in ("rank down by 20 %", "up by 50 %", "entropy down by 33 %", "10 more points"):
        assert part in said


def test_only_part_measured_is_told() -> None:
    found = Diagnosis("r", 5, 0, 9, (), "", (), (("parameters", 0.755), ("components", 1.0)))
    assert coverage(found) == "measured only 75.5 % of the parameters"


def test_every_status_without_a_value_has_its_reason() -> None:
    from plastiscope.metrics.measurement import NO_VALUE

    assert set(REASONS) >= NO_VALUE


def test_ranks_that_are_floors_are_counted() -> None:
    shares = [
        floors(replace(Diagnosis("r", 5, 0, 9, (), "", ()), floors=f)) for f in (0, 0.004, 0.3)
    ]
    assert shares == [
        "",
        "under 1 % of the ranks are floors (insufficient_rows)",
        "30 % of the ranks are floors (insufficient_rows)",
    ]
