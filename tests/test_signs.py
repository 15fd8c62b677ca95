"""The arithmetic of docs/signs.py: courses, when they move, and what a rank correlation means."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def signs() -> ModuleType:
    if not (DOCS / "signs.py").exists():
        pytest.skip("the documentation is not part of this distribution")
    sys.path.insert(0, str(DOCS))
    try:
        return importlib.import_module("signs")
    finally:
        sys.path.remove(str(DOCS))


def course(signs: ModuleType, values: list[float], error: float = 0.0, share: bool = False):
    steps = tuple(range(len(values)))
    return signs.Course(steps, np.array(values), np.full(len(values), error), share)


def test_a_rank_correlation_of_few_points_means_little(signs: ModuleType) -> None:
    """Exact: 2 of 24 orders of four values are as extreme as a perfect one; 0.74 at eight."""
    a = np.array([1.0, 2, 3, 4])
    assert signs.spearman(a, a**3) == pytest.approx(1) and signs.spearman(a, -a) == pytest.approx(
        -1
    )
    assert np.isnan(signs.spearman(a, np.ones(4)))
    assert signs.chance(1.0, 4) == pytest.approx(2 / 24)
    assert signs.chance(0.0, 4) == 1
    assert signs.chance(0.738, 8) == pytest.approx(0.046, abs=0.001)
    assert signs.chance(0.71, 8) > 0.05


def test_a_course_has_moved_from_where_it_stays_away(signs: ModuleType) -> None:
    """By a fifth (1.25 times) at least, three errors at least, and for good."""
    assert course(signs, [10, 10, 7, 6, 5]).moved() == (2, -1)
    assert course(signs, [10, 5, 10, 6, 5]).moved() == (3, -1)
    assert course(signs, [10, 15, 5, 4]).moved() == (2, -1)
    assert course(signs, [10, 11, 12]).moved() is None
    assert course(signs, [10, 12.4, 12.6]).moved() == (2, 1)
    assert course(signs, [10, 7, 6, 5], error=2).moved() is None
    assert course(signs, [0.0, 0.02, 0.3], share=True).moved() == (2, 1)
    assert course(signs, [0.0, 0.0, 1.0]).moved() == (2, 1)


def test_a_run_parts_from_its_twin_where_it_stays_away(signs: ModuleType) -> None:
    twin = course(signs, [10, 8, 8, 8])
    assert course(signs, [10, 8, 5, 4]).parted(twin) == (2, -1)
    assert course(signs, [10, 8, 8, 8]).parted(twin) is None


def test_verdicts(signs: ModuleType) -> None:
    def verdict(metric: str, moved=None, twin=None, parted=None, onset=5) -> str:
        nan = float("nan")
        sign = signs.Sign(metric, "", 1.0, 1.0, nan, nan, nan, moved, twin, parted)
        return sign.verdict(onset)

    assert verdict("effective_rank") == "unmoved"
    assert verdict("effective_rank", (3, 1)) == "wrong way"
    assert [verdict("effective_rank", (at, -1)) for at in (3, 5, 7)] == ["early", "with", "late"]
    assert verdict("effective_rank", (3, -1), (4, -1)) == "twin too"
    assert verdict("effective_rank", (3, -1), (4, -1), (5, -1)) == "with*"
    assert verdict("effective_rank", (3, -1), (4, 1)) == "early"
    assert verdict("effective_rank", (7, -1), onset=None) == "early"


def test_the_mean_over_places_lets_none_outweigh_the_others(signs: ModuleType) -> None:
    """The geometric mean of 1 and 100 is 10; of shares the plain one; a place without a value at
    some checkpoint is left out; errors are means of the places' own."""
    rows = [
        ("spectral_norm", "weight", place, step, value * (1 + step), 0.1 * value)
        for step in range(4)
        for place, value in (("fc1", 1.0), ("fc2", 100.0), ("fc3", 5.0))
        if not (place == "fc3" and step == 2)
    ]
    names = ["metric", "subject", "component", "step", "value", "standard_error"]
    table = pd.DataFrame(rows, columns=names)
    table = table.assign(
        block=0, head=None, tokens=None, tensor=None, parameters="", probe=None, index=None
    )
    (found,) = signs.courses(table).values()
    assert found.steps == (0, 1, 2, 3)
    np.testing.assert_allclose(found.values, [10, 20, 30, 40])
    np.testing.assert_allclose(found.errors[0], 1.0)
