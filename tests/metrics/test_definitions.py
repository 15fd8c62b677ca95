"""Every metric explains itself, at once, and the networks' totals say how they were pooled."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from plastiscope.errors import UsageError
from plastiscope.metrics import METRICS, default_metrics, explain, metric_versions, weight_totals
from plastiscope.observations import Magnitude, Weight


@pytest.mark.parametrize("metric", METRICS, ids=lambda m: m.name)
def test_every_metric_is_documented(metric):
    found = explain(metric.name)
    for text in (found.definition, found.formula, found.reading, found.misleads):
        assert len(text) > 5
    assert found.unit and found.range and found.source and found.version >= 1


def test_names_are_unique_and_versions_known():
    assert len({m.name for m in METRICS}) == len(METRICS)
    assert metric_versions().keys() == {m.name for m in METRICS}
    assert default_metrics() < metric_versions().keys()


def test_unknown_name_gets_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'effective_rank'"):
        explain("efective_rank")


def test_explaining_needs_neither_torch_nor_pandas():
    code = (
        "import sys; from plastiscope.metrics import explain; explain('srank');"
        "print({'torch', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def totals(weights, types=None, **options):
    found = weight_totals(weights, types, **options)
    return {(r.component, r.metric, r.parameters): r for r in found}


def test_pooled_and_mean_are_two_rows():
    found = totals({"a": Magnitude.of(torch.ones(9)), "b": Magnitude.of(torch.full((1,), 11.0))})
    assert found["network", "weight_magnitude", "pooled"].value == 2
    assert found["network", "weight_magnitude", "mean"].value == 6
    assert found["network", "weight_l2", "pooled"].value == pytest.approx(np.sqrt(130))
    assert found["network", "weight_magnitude", "pooled"].rows == 10
    scoped = totals({"a": Magnitude.of(torch.ones(9))}, scope="scope=non-embedding")
    assert ("network", "weight_magnitude", "pooled, scope=non-embedding") in scoped


def test_one_bad_tensor_makes_the_total_null():
    bad = torch.ones(3)
    bad[0] = torch.nan
    found = totals({"a": Magnitude.of(torch.ones(3)), "b": Magnitude.of(bad)})
    row = found["network", "weight_magnitude", "pooled"]
    assert row.value is None and row.status == "non_finite"


def test_zero_tensors_count_in_totals():
    found = totals({"a": Magnitude.of(torch.ones(3)), "b": Magnitude.of(torch.zeros(3))})
    assert found["network", "weight_magnitude", "pooled"].value == 0.5


def test_means_over_matrices_by_component():
    weights = {
        "0.q": Weight.of(torch.diag(torch.tensor([2.0, 1.0]))),
        "1.q": Weight.of(torch.diag(torch.tensor([4.0, 1.0]))),
        "head": Weight.of(torch.eye(2)),
    }
    found = totals(weights, {"0.q": "q", "1.q": "q", "head": "head"})
    assert found["q", "condition_number", "mean over matrices"].value == pytest.approx(3)
    assert found["network", "condition_number", "mean over matrices"].value == pytest.approx(7 / 3)
    assert found["q", "squared_singular_value", "mean over matrices, max"].value == pytest.approx(
        10
    )
