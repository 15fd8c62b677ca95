"""Each name of the list of definitions is one metric, explained in full.

The list lies beside the repository (shared/metrics.md); without it, what it says can't be tested.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from plastiscope import store
from plastiscope.metrics import METRICS, explain

LIST = Path(__file__).parents[2].parent / "shared" / "metrics.md"
SECTIONS = (*range(2, 11), 12)
NO_METRIC = {
    "inv_freq", "num_batches_tracked",  # buffers
    "logits", "mean_logit",  # functions whose gradients make the kernel
    "shape_changed", "layer_dead", "no_cls_token",  # statuses
}  # fmt: skip
OURS = {"coverage", "jacobian_sigma", "squared_singular_value"}
"""In the list without a name of their own: how much was measured, the quantiles of sigma, the
largest, smallest and mean squared singular value."""
UNVERIFIED = {
    "gram_deviation", "rank_residual", "grama_inactive_fraction", "fisher_effective_rank",
    "ntk_condition_number", "effective_learning_rate", "dormant_fraction_signed",
}  # fmt: skip
"""Whose definition rests on secondary notes or on nothing that was checked (tags S and U)."""


@pytest.fixture(scope="module")
def sections() -> dict[int, str]:
    if not LIST.is_file():
        pytest.skip("there is no shared/metrics.md beside the repository")
    found = re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", LIST.read_text("utf-8"), re.M | re.S)
    return {int(number): text for number, text in found}


def names(text: str) -> list[str]:
    return re.findall(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)*)`", text)


def test_every_name_of_the_list_is_a_metric_and_no_other_is(sections: dict[int, str]) -> None:
    listed = {name for number in SECTIONS for name in names(sections[number])}
    assert len(listed) > 60 and listed >= NO_METRIC
    counts = Counter(metric.name for metric in METRICS)
    assert listed - NO_METRIC == counts.keys() - OURS
    assert set(counts.values()) == {1}


def test_the_first_column_of_every_table_is_explained(sections: dict[int, str]) -> None:
    rows = [line for number in SECTIONS for line in sections[number].splitlines()]
    first = [name for row in rows if row.startswith("| `") for name in names(row.split("|")[1])]
    assert len(first) > 30
    for name in first:
        found = explain(name)
        assert found.name == name and found.version >= 1


def test_what_rests_on_no_code_says_so(sections: dict[int, str]) -> None:
    """A name whose line carries the tag S or U and no other says so where it is explained."""
    for name in UNVERIFIED:
        assert re.search(r"secondary notes|not verified", explain(name).source), name
    rows = [line for number in SECTIONS for line in sections[number].splitlines()]
    tagged = {
        name
        for row in rows
        if row.startswith("| `") and re.search(r"\[[SU]\]", row) and "[A]" not in row
        for name in names(row.split("|")[1])[:1]
    }
    assert {"gram_deviation", "rank_residual", "grama_inactive_fraction"} <= tagged <= UNVERIFIED


def test_every_column_of_the_row_is_kept(sections: dict[int, str]) -> None:
    said = " ".join(sections[12].split()).split(":", 1)[1]
    said = re.sub(r"\(.*?\)", "", said.split(". A metric")[0])
    columns = {word.strip(" .") for word in said.split(",")}
    named = {"its parameters": "parameters", "attainable maximum": "maximum"}
    wanted = {named.get(c, c.replace(" ", "_")) for c in columns}
    assert {"run", "head", "value", "standard_error", "status"} <= wanted
    assert wanted <= set(store.SCHEMA.names)


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_an_explanation_has_formula_shape_range_and_source(metric) -> None:  # type: ignore[no-untyped-def]
    found = explain(metric.name)
    assert len(found.formula) > 5 and found.formula.strip() == found.formula
    assert re.search(r"\[[a-z]+(, [a-z]+)*\]|whole network|parameter's shape", found.subject)
    assert re.search(r"\d", found.range) and " to " in found.range and len(found.source) > 5
