"""Hidden units: planted dead and dormant units are found, whatever the shape and function."""

import math

import numpy as np
import pytest
import torch

from plastiscope.metrics import METRICS, Place, duplicate_totals, measure, unit_totals
from plastiscope.observations import FeatureSums, UnitGradients, UnitSums, rows_of

PLACE = Place("activation", 0, "unit")


def units(post, pre=None, function="relu", folds=4):
    sums = UnitSums(folds, function)
    half = max(1, len(post) // 2)
    fold = torch.arange(len(post)) % folds
    for part in (slice(0, half), slice(half, None)):
        sums.add(post[part], pre[part] if pre is not None else None, fold[part])
    return sums.finish()


def rows(*given, **options):
    found = measure(units(*given, **options), PLACE)
    return {(r.metric, r.parameters): r for r in found}


@pytest.mark.parametrize("shape", [(40, 8), (10, 4, 8), (10, 8, 3, 3)])
def test_half_dead_relu_layer_is_half_in_any_shape(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).abs() + 0.1
    is_conv = len(shape) == 4
    (x if not is_conv else x.movedim(1, -1))[..., ::2] *= -1
    pre = rows_of(x, is_conv)
    found = rows(pre.relu(), pre)
    for metric in ("dead_fraction", "active_fraction"):
        assert found[metric, ""].value == 0.5
    assert found["dormant_fraction", "tau=0"].value == 0.5
    assert found["dead_fraction", ""].columns == 8


def test_rows_of_keeps_channels_apart():
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert rows_of(x, is_conv=True).shape == (12, 2)
    assert rows_of(x, is_conv=True)[:, 0].tolist() == list(range(12))


def test_one_dead_unit_of_four():
    """N14: after the activation; a pre-activation would hide it; GELU needs tau above 0."""
    pre = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    pre[:, 2] = -6 - pre[:, 2].abs()
    assert rows(pre.relu(), pre)["dormant_fraction", "tau=0"].value == 0.25
    smooth = rows(torch.nn.functional.gelu(pre.double()), pre, function="gelu")
    assert smooth["dormant_fraction", "tau=0"].value == 0
    assert smooth["dormant_fraction", "tau=0.025"].value == 0.25
    assert smooth["dead_fraction", ""].value == 0.25
    assert rows(pre, pre)["dormant_fraction", "tau=0.025"].value == 0


@pytest.mark.parametrize("function", ["relu", "gelu"])
def test_layer_that_is_dead_altogether(function):
    """N15: naive scores are NaN, and NaN <= tau is false: 0 % dormant."""
    nothing = torch.zeros(10, 4)
    found = rows(nothing, nothing, function=function)
    for tau in ("0", "0.01", "0.025", "0.1"):
        assert found["dormant_fraction", f"tau={tau}"].value == 1
        assert found["dormant_fraction_signed", f"tau={tau}"].value == 1
    assert found["dead_fraction", ""].value == 1 and found["active_fraction", ""].value == 0
    assert found["dormancy_score", "quantile=50"].value is None
    assert {row.status for row in found.values()} == {"layer_dead"}


def test_unknown_function_and_missing_pre_activation_refuse():
    post = torch.randn(10, 4)
    unknown = rows(post, None, function=None)
    for metric in ("active_fraction", "dead_fraction"):
        assert unknown[metric, ""].value is None
        assert unknown[metric, ""].status == "unknown_activation"
    missing = rows(post, None, function="gelu")["active_fraction", ""]
    assert missing.value is None and missing.status == "no_pre_activation"
    assert rows(post.relu(), None)["active_fraction", ""].value == pytest.approx(
        float((post > 0).double().mean())
    )


def test_gate_is_read_from_its_pre_activation():
    gate, up = torch.tensor([[1.0, -1.0], [2.0, -2.0]]), torch.tensor([[-3.0, 5.0], [-1.0, 4.0]])
    found = rows(gate.relu() * up, gate, folds=2)
    assert found["active_fraction", ""].value == 0.5 and found["dead_fraction", ""].value == 0.5


def test_rarely_active_and_saturated():
    pre = -torch.ones(1000, 4)
    pre[:9, 0] = pre[:10, 1] = pre[:, 2] = 1.0
    found = rows(pre.relu(), pre)
    assert found["rarely_active_fraction", "below=0.01"].value == 0.5
    assert found["dead_fraction", ""].value == 0.25
    x = torch.tensor([[0.5, 3.0, -3.0, 0.0]])
    tanh = rows(x.tanh(), x, function="tanh", folds=1)
    assert tanh["saturated_fraction", ""].value == 0.5
    assert ("saturated_fraction", "") not in found


def test_sign_entropy_is_a_bit_for_an_even_unit():
    pre = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [1.0, -1.0, -1.0]])
    quarter = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    row = rows(pre.relu(), pre)["unit_sign_entropy", ""]
    assert row.value == pytest.approx((0 + 1 + quarter) / 3)


def test_signed_mean_that_cancels_has_no_score():
    post = torch.tensor([[1.0, -2.0], [1.0, -2.0]])
    row = rows(post, post, function="silu", folds=2)["dormant_fraction_signed", "tau=0.1"]
    assert row.value is None and row.status == "negative_mean"


def test_unrouted_expert_is_not_dormant():
    sums = UnitSums(4, "silu")
    sums.add(torch.zeros(0, 8), None, torch.zeros(0, dtype=torch.long))
    found = measure(sums.finish(), PLACE)
    assert {r.status for r in found} == {"not_routed"} and {r.value for r in found} == {None}
    healthy = units(torch.ones(10, 4), torch.ones(10, 4))
    total = {(r.metric, r.parameters): r.value for r in unit_totals([healthy, sums.finish()])}
    assert total["dormant_fraction", "pooled, tau=0.025"] == 0


def test_non_finite_activation_is_null():
    post = torch.ones(4, 3)
    post[2, 1] = torch.nan
    found = rows(post, None)
    assert {row.value for row in found.values()} == {None}
    assert {row.status for row in found.values()} == {"non_finite"}


def test_network_counts_units_or_layers():
    dead, alive = units(torch.zeros(8, 2), None), units(torch.ones(8, 6), None)
    total = {(r.metric, r.parameters): r for r in unit_totals([dead, alive])}
    assert total["dormant_fraction", "pooled, tau=0"].value == 0.25
    assert total["dormant_fraction", "mean, tau=0"].value == 0.5
    assert total["active_fraction", "pooled"].value == 0.75
    assert total["active_fraction", "pooled"].component == "network"


def test_saturation_of_the_network_is_of_its_bounded_layers():
    x = torch.tensor([[0.5, 3.0, -3.0, 0.0], [0.1, 0.2, 0.3, -4.0]])
    relu, four = units(x.relu(), x), units(x.tanh(), x, function="tanh")
    two = units(x[:, :2].tanh(), x[:, :2], function="tanh")
    total = {(r.metric, r.parameters): r for r in unit_totals([relu, four, two])}
    pooled, mean = (total["saturated_fraction", name] for name in ("pooled", "mean"))
    assert pooled.value == pytest.approx(4 / 12) and pooled.columns == 6
    assert mean.value == pytest.approx((3 / 8 + 1 / 4) / 2)
    assert total["active_fraction", "pooled"].columns == 10
    only_relu = {(r.metric, r.parameters) for r in unit_totals([relu])}
    assert ("saturated_fraction", "pooled") not in only_relu


def test_jackknife_of_a_mean_is_its_standard_error():
    """Of equal folds: sqrt(var / K) of the fold means."""
    pre = torch.randn(40, 1, generator=torch.Generator().manual_seed(3))
    fold_means = (pre > 0).double().reshape(10, 4).mean(0)
    expected = float(fold_means.std(unbiased=True) / 2)
    row = rows(pre.relu(), pre)["active_fraction", ""]
    assert row.standard_error == pytest.approx(expected, rel=1e-9)
    assert rows(pre.relu(), pre, folds=1)["active_fraction", ""].standard_error is None


def test_duplicates_are_units_of_activations_alone():
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(4))
    x[:, 1], x[:, 3] = 3 * x[:, 0], -x[:, 2]
    x[:, 4] = x[:, 5] = 0
    sums = FeatureSums(3)
    sums.add(x, torch.arange(60) % 3)
    feature = sums.finish()
    only = frozenset({"duplicate_fraction"})
    (row,) = measure(feature, Place("activation", 0, "feature"), only)
    assert row.value == pytest.approx(2 / 6) and row.subject == "unit"
    assert measure(feature, Place("fc2", 0, "feature"), only) == []


def test_declared_laws_hold():
    pre = torch.randn(50, 7, generator=torch.Generator().manual_seed(5))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(6))
    before = rows(pre.relu(), pre)
    for metric in (m for m in METRICS if m.needs == "Units"):
        for law, (post, pre_) in {
            "permutation of units: unchanged": (pre.relu()[:, order], pre[:, order]),
            "scale of the layer: unchanged": (4 * pre.relu(), 4 * pre),
        }.items():
            if law not in metric.laws:
                continue
            after = rows(post, pre_)
            for key in (k for k in before if k[0] == metric.name):
                assert after[key].value == pytest.approx(before[key].value, rel=1e-9), (key, law)


def test_inactive_gradients_of_the_network_count_units_or_layers():
    some, other = (UnitGradients(np.tile(row, (3, 1)), 8, "ok") for row in ([0.0, 3.0], [1.0] * 6))
    total = {(r.metric, r.parameters): r for r in unit_totals([some, other])}
    pooled, mean = (total["grama_inactive_fraction", f"{n}, tau=0.1"] for n in ("pooled", "mean"))
    assert (pooled.value, mean.value) == (1 / 8, 1 / 4) and pooled.component == "network"
    assert pooled.columns == 8 and pooled.subject == "unit"


def test_duplicates_of_the_network_count_units_or_layers():
    x = torch.eye(8)[:, :6]
    sums = [FeatureSums(2) for _ in range(2)]
    sums[0].add(x, torch.arange(8) % 2)
    sums[1].add(torch.stack([x[:, 0], x[:, 0]], 1), torch.arange(8) % 2)
    found = [
        measure(s.finish(), Place("activation", i, "feature", "all")) for i, s in enumerate(sums)
    ]
    total = {r.parameters: r for r in duplicate_totals([row for part in found for row in part])}
    assert total["pooled, cosine=0.95"].value == 2 / 8 and total["pooled, cosine=0.95"].columns == 8
    assert total["mean, cosine=0.95"].value == 1 / 2
    assert duplicate_totals([]) == []
