"""The verdict: planted movements are found, healthy and thin runs aren't blamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from plastiscope import store
from plastiscope.diagnosis import Diagnosis, diagnose
from plastiscope.store import Row

STEADY = [10.0, 10.1, 9.9, 10.05, 9.95, 10.0]
FALLING = [10.0, 8.0, 6.0, 5.0, 4.0, 3.0]
GROWING = [1.0, 1.3, 1.7, 2.1, 2.6, 3.0]


def rank(values: Sequence[float], block: int = 0, error: float | None = 0.1) -> list[Row]:
    return [
        Row("effective_rank", "feature", v, "fc1", block, tokens="all", standard_error=error)
        for v in values
    ]


def weights(values: Sequence[float], name: str = "fc1") -> list[Row]:
    return [Row("weight_magnitude", "weight", v, name, 0) for v in values]


def norms(values: Sequence[float]) -> list[Row]:
    return [Row("spectral_norm", "weight", v, "fc1", 0) for v in values]


def dormant(values: Sequence[float]) -> list[Row]:
    return [
        Row("dormant_fraction", "unit", v, "activation", 0, tokens="all",
            parameters="tau=0.025", standard_error=0.01)
        for v in values
    ]  # fmt: skip


def table(out: Path, *series: list[Row]) -> pd.DataFrame:
    for step, rows in enumerate(zip(*series, strict=True)):
        shared = {"run": "r", "checkpoint": f"c{step}", "step": step, "task": None}
        shared |= {"branch": "raw", "checkpoint_fingerprint": str(step)}
        store.write(store.checkpoint_file(out, "r", f"c{step}"), rows, shared, "k", {})
    return store.read(out)


def only(frame: pd.DataFrame) -> Diagnosis:
    (diagnosis,) = diagnose(frame)
    return diagnosis


def test_agreeing_signs_are_a_diagnosis(tmp_path: Path) -> None:
    found = only(table(tmp_path, rank(FALLING), weights(GROWING), norms(GROWING)))
    assert [f.sign.name for f in found.present] == ["features lose rank", "weights grow"]
    assert found.verdict.startswith("Losing plasticity: 2 of 2 signs")
    top = found.findings[0].movements[0]
    assert (top.where, top.first, top.last) == ("block 0 fc1", 10.0, 3.0)
    assert top.error == pytest.approx(0.1 * 2**0.5)
    assert top.trend == -1.0


def test_a_healthy_run_shows_no_sign(tmp_path: Path) -> None:
    found = only(table(tmp_path, rank(STEADY), weights(STEADY), norms(STEADY), dormant([0.0] * 6)))
    assert found.present == ()
    assert found.verdict == "No sign of plasticity loss (3 looked for)."


def test_growing_weights_alone_are_healthy_training(tmp_path: Path) -> None:
    found = only(table(tmp_path, rank(STEADY), weights(GROWING), norms(GROWING)))
    assert found.verdict.startswith("No sign of plasticity loss (2 looked for). Weights grow, as")
    assert [f.sign.name for f in found.present] == ["weights grow"]


def test_one_kind_of_sign_is_not_a_diagnosis(tmp_path: Path) -> None:
    cls = [Row(**{**vars(r), "tokens": "cls"}) for r in rank(FALLING)]
    found = only(table(tmp_path, rank(FALLING), cls, weights(STEADY), norms(STEADY)))
    assert len(found.present) == 2
    assert found.verdict.startswith("Only one kind of sign: features lose rank, CLS token loses")


def test_too_few_moved_series_are_told_beside_a_clear_verdict(tmp_path: Path) -> None:
    steady = [rank(STEADY, block) for block in range(1, 5)]
    found = only(table(tmp_path, rank(FALLING), *steady, weights(GROWING), norms(GROWING)))
    assert found.verdict == (
        "No sign of plasticity loss (2 looked for). Features lose rank in 1 of 5 components, too "
        "few to be a sign. Weights grow, as in healthy training too."
    )


def test_shrinking_weights_and_rising_rank_are_not_signs(tmp_path: Path) -> None:
    found = only(table(tmp_path, rank(FALLING[::-1]), weights(FALLING), norms(FALLING)))
    assert found.present == ()
    assert [f.movements[0].size < 0 for f in found.findings] == [True, True]


def test_a_fall_within_its_error_does_not_count(tmp_path: Path) -> None:
    assert only(table(tmp_path, rank(FALLING, error=2.0))).present == ()
    assert len(only(table(tmp_path / "b", rank(FALLING, error=1.0))).present) == 1


def test_a_single_bad_last_value_is_not_a_trend(tmp_path: Path) -> None:
    late = [10.0, 10.2, 10.4, 10.6, 10.8, 3.0]
    assert only(table(tmp_path, rank(late))).present == ()


def test_what_only_the_last_checkpoints_show_is_no_trend(tmp_path: Path) -> None:
    late = only(table(tmp_path, dormant([0.0] * 6 + [0.27, 0.29]), rank(STEADY * 2)[:8]))
    jump = only(table(tmp_path / "b", dormant([0.0] * 4 + [0.29])))
    for found in (late, jump):
        sizes = [f.movements[0].size for f in found.findings if f.sign.name == "units go dormant"]
        assert sizes == [pytest.approx(0.29)] and found.present == ()


def test_a_growing_bias_is_not_a_growing_matrix(tmp_path: Path) -> None:
    bias = [Row("weight_magnitude", "weight", v, "head.bias") for v in GROWING]
    matrix = [Row("spectral_norm", "weight", v, "head") for v in STEADY]
    found = only(table(tmp_path, bias, matrix, rank(STEADY)))
    assert [f.sign.name for f in found.findings] == ["features lose rank"]


def test_units_that_die_are_counted_in_points(tmp_path: Path) -> None:
    found = only(table(tmp_path, dormant([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])))
    assert found.findings[0].movements[0].size == pytest.approx(0.5)


def test_too_few_checkpoints_is_not_enough_evidence(tmp_path: Path) -> None:
    found = only(table(tmp_path, rank(FALLING[:3])))
    assert found.verdict.startswith("Not enough evidence: 3 comparable checkpoints")


def test_weights_alone_are_not_enough_evidence(tmp_path: Path) -> None:
    found = only(table(tmp_path, weights(GROWING), norms(GROWING)))
    assert found.verdict.startswith("Not enough evidence: only weights")


def test_nothing_is_compared_across_a_break(tmp_path: Path) -> None:
    rows = rank([90.0, 80.0, *STEADY])
    broken = [r if i < 2 else Row(**{**vars(r), "segment": 1}) for i, r in enumerate(rows)]
    found = only(table(tmp_path, broken))
    assert (found.checkpoints, found.first) == (6, 2)
    assert found.findings[0].movements[0].first == 10.0


def test_a_run_that_goes_nan_is_never_cleared(tmp_path: Path) -> None:
    bad = [Row("weight_magnitude", "weight", None, "fc2", 1, status="non_finite")]
    good = [Row("weight_magnitude", "weight", 1.0, "fc2", 1)]
    nan = [Row("effective_rank", "feature", None, "fc1", 0, tokens="all", status="non_finite")]
    found = only(table(tmp_path, rank(STEADY)[:4] + nan * 2, good * 3 + bad * 3))
    assert found.verdict == "Broken: NaN or infinity since step 3, first in block 1 fc2."
    assert found.findings == ()


def test_the_least_coverage_is_told(tmp_path: Path) -> None:
    shares = [Row("coverage", "network", v, "network", parameters="of=components")
              for v in (1.0, 1.0, 0.75, 1.0, 1.0, 1.0)]  # fmt: skip
    assert only(table(tmp_path, rank(STEADY), shares)).coverage == (("components", 0.75),)


def test_a_null_is_counted_with_its_reason(tmp_path: Path) -> None:
    null = [Row("effective_rank", "weight", None, "fc2", 0, status="non_finite")] * 6
    assert only(table(tmp_path, rank(STEADY), null)).unmeasured == (("non_finite", 6),)


def test_ranks_that_are_floors_are_counted(tmp_path: Path) -> None:
    few = [replace(row, status="insufficient_rows") for row in rank(STEADY, block=1)]
    assert only(table(tmp_path, rank(STEADY), few, weights(STEADY))).floors == 0.5
