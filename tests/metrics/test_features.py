"""Feature ranks from running sums equal those of the stored rows; too few rows say so."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from plastiscope.metrics import Place, absent, measure
from plastiscope.metrics.measurement import jackknife_bias
from plastiscope.observations import FeatureSums, features

PLACE = Place("fc2", 0, "feature")
MODES = {"held, few": (20, 48), "held, many": (70, 48), "moments": (900, 48)}


def summed(x, folds=4, batch=16, inputs=None):
    sums = FeatureSums(folds)
    fold = torch.arange(len(x)) % folds
    for start in range(0, len(x), batch):
        part = slice(start, start + batch)
        where = inputs[part] - inputs[part].min() if inputs is not None else None
        sums.add(x[part], fold[part], where)
    return sums.finish()


def rows(observation, place=PLACE):
    return {(r.metric, r.parameters): r for r in measure(observation, place)}


def data(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -3, d, dtype=torch.float64)
    x = torch.randn(n, d, dtype=torch.float64, generator=generator) * spread
    return (x + torch.randn(d, dtype=torch.float64, generator=generator)).float()


def effective_rank(x):
    sigma = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = sigma[sigma > 0] / sigma.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


@pytest.mark.parametrize("mode", MODES)
def test_sums_equal_an_svd_of_the_stored_rows(mode):
    x = data(*MODES[mode])
    found = summed(x)
    sigma = torch.linalg.svdvals(x.double())
    assert_close(torch.as_tensor(found.spectrum.values[0]), sigma, rtol=1e-6, atol=1e-8)
    centered = torch.linalg.svdvals(x.double() - x.double().mean(0))
    assert_close(torch.as_tensor(found.centered.values[0]), centered, rtol=1e-6, atol=1e-7)
    row = rows(found)["effective_rank", ""]
    assert row.value == pytest.approx(effective_rank(x), rel=1e-6)
    assert (row.rows, row.columns, row.maximum) == (*x.shape, min(x.shape))


@pytest.mark.parametrize("mode", MODES)
def test_standard_error_is_the_jackknife_over_folds(mode):
    x = data(*MODES[mode], seed=1)
    fold = torch.arange(len(x)) % 4
    left = np.array([effective_rank(x[fold != k]) for k in range(4)])
    expected = np.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum())
    row = rows(summed(x))["effective_rank", ""]
    assert row.standard_error == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("n", [12, 300])
def test_heads_equal_their_own_features(n):
    x = data(n, 3 * 16).reshape(n, 3, 16)
    found = measure(summed(x), Place("q", 0, "feature", heads=3))
    for h in range(3):
        single = rows(summed(x[:, h]))
        mine = {(r.metric, r.parameters): r for r in found if r.head == h}
        for key, row in mine.items():
            assert row.value == pytest.approx(single[key].value, rel=1e-7), key
            assert row.rows == n and row.columns == 16


def test_batches_and_their_order_do_not_matter():
    x = data(200, 24)
    one, many = rows(summed(x, batch=200)), rows(summed(x, batch=7))
    for key in ("effective_rank", ""), ("participation_ratio", ""), ("feature_norm", ""):
        assert one[key].value == pytest.approx(many[key].value, rel=1e-9)


@pytest.mark.parametrize("n", [30, 500])
def test_equal_rows_have_no_variation(n):
    """Every CLS token is the same after the embedding."""
    x = torch.randn(24, generator=torch.Generator().manual_seed(2)).expand(n, 24)
    found = rows(summed(x.clone(), batch=8))
    assert found["effective_rank", ""].value == pytest.approx(1, abs=1e-6)
    row = found["effective_rank_centered", ""]
    assert row.value == 0 and row.status == "zero_matrix"
    assert found["participation_ratio", ""].value == 0


def test_tiny_variation_on_a_large_mean_is_resolved():
    """Second moments about 0 would lose it: 1e-5 of the mean in float64 rows."""
    noise = torch.randn(400, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = 1e5 + noise
    found = rows(summed(x))["participation_ratio", ""].value
    lam = torch.linalg.eigvalsh(torch.cov(noise.T))
    assert found == pytest.approx(float(lam.sum() ** 2 / lam.square().sum()), rel=1e-7)


def test_rank_four_features_are_rank_four_with_few_rows_or_many():
    generator = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(64, 4, generator=generator)).Q
    for n in (16, 4000):
        x = torch.randn(n, 4, generator=generator) @ basis.T
        found = rows(summed(x, batch=64))
        assert 3 < found["effective_rank", ""].value <= 4.0001
        assert found["effective_rank", ""].status == "ok"


def test_too_few_rows_say_so_rather_than_look_collapsed():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    few = rows(summed(x))
    assert few["effective_rank", ""].status == "insufficient_rows"
    assert few["effective_rank", ""].maximum == 16
    many = rows(summed(torch.randn(640, 64, generator=torch.Generator().manual_seed(5))))
    assert many["effective_rank", ""].status == "ok"
    one = rows(summed(x[:1], folds=2))["participation_ratio", ""]
    assert one.value is None and one.status == "insufficient_rows"


def long_tail(n: int) -> torch.Tensor:
    """Rows [n, 128] whose directions fall off slowly: what few rows cut without a trace."""
    x = torch.randn(n, 128, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return x / torch.arange(1, 129, dtype=torch.float64)


def test_a_long_tail_that_few_rows_cut_says_so():
    endless = rows(summed(long_tail(20000)))["effective_rank", ""]
    few = rows(summed(long_tail(64)))["effective_rank", ""]
    enough = rows(summed(long_tail(2048)))["effective_rank", ""]
    assert few.value < few.maximum / 2 and few.value < 0.75 * endless.value
    assert few.status == "insufficient_rows"
    assert enough.status == endless.status == "ok"
    assert enough.value == pytest.approx(endless.value, rel=0.05)


def test_the_jackknife_bias_of_a_variance_is_what_it_lacks():
    """The mean square about the sample's mean lacks 1/n of the variance, exactly."""
    x = np.random.default_rng(9).normal(size=40)
    values = np.array([x.var(), *(np.delete(x, i).var() for i in range(40))])
    assert jackknife_bias(values) == pytest.approx(x.var(ddof=1) - x.var(), rel=1e-9)
    assert np.isnan(jackknife_bias(values[:2]))


def test_unresolved_condition_number_is_no_number():
    x = torch.randn(300, 6, generator=torch.Generator().manual_seed(6))
    assert rows(summed(x))["condition_number", ""].value == pytest.approx(
        float(torch.linalg.cond(x.double())), rel=1e-6
    )
    x[:, 5] = x[:, 4]
    row = rows(summed(x))["condition_number", ""]
    assert row.value is None and row.status == "unresolved"


@pytest.mark.parametrize("n", [20, 200])
def test_non_finite_row_makes_null(n):
    x = data(n, 24)
    x[3, 3] = torch.inf
    found = rows(summed(x))
    for key in ("effective_rank", ""), ("effective_rank_centered", ""), ("feature_norm", ""):
        assert found[key].value is None and found[key].status == "non_finite", key


def test_vocabulary_does_not_set_the_memory(monkeypatch):
    monkeypatch.setattr(features, "ROWS_LIMIT", 1 << 16)
    sums = FeatureSums(2)
    for seed in range(40):
        x = torch.randn(16, 2048, generator=torch.Generator().manual_seed(seed))
        sums.add(x, torch.arange(16) % 2)
        assert sums.held.nbytes <= 1 << 16
    found = rows(sums.finish())
    assert found["effective_rank", ""].rows == len(sums.rows()[0])
    assert found["effective_rank", ""].status == "insufficient_rows"
    assert found["feature_norm", ""].value == pytest.approx(2048**0.5, rel=0.01)


def test_rank_residual_is_taken_input_by_input():
    """Tokens that are equal within each input, though not between inputs, are collapsed."""
    inputs = torch.arange(10).repeat_interleave(6)
    token = torch.randn(10, 8, generator=torch.Generator().manual_seed(7))
    collapsed = summed(token[inputs], inputs=inputs, batch=12)
    assert rows(collapsed)["rank_residual", ""].value == pytest.approx(0, abs=1e-7)
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(8))
    expected = [
        float(
            (x[6 * b : 6 * b + 6] - x[6 * b : 6 * b + 6].mean(0)).norm()
            / x[6 * b : 6 * b + 6].norm()
        )
        for b in range(10)
    ]
    found = rows(summed(x, inputs=inputs, batch=12))["rank_residual", ""]
    assert found.value == pytest.approx(np.mean(expected), rel=1e-5)
    assert ("rank_residual", "") not in rows(summed(x))


def test_no_rows_is_an_error():
    with pytest.raises(ValueError, match="no rows"):
        FeatureSums(2).finish()


def test_wide_layers_join_their_folds_to_four():
    x = data(640, 520)
    found = rows(summed(x, folds=8, batch=64))["participation_ratio", ""]
    fold = torch.arange(640) % 4

    def ratio(part):
        lam = torch.linalg.svdvals(part.double() - part.double().mean(0)) ** 2
        return float(lam.sum() ** 2 / lam.square().sum())

    left = np.array([ratio(x[fold != k]) for k in range(4)])
    expected = np.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum())
    assert found.standard_error == pytest.approx(expected, rel=1e-6)


def test_absent_cls_token_is_a_row_with_the_reason():
    found = absent("Features", Place("fc2", 0, "feature", tokens="cls"), "no_cls_token")
    assert {r.status for r in found} == {"no_cls_token"} and {r.value for r in found} == {None}
    assert "effective_rank" in {r.metric for r in found}
    assert {r.tokens for r in found} == {"cls"}


@pytest.mark.parametrize(("first", "n"), [(1, 200), (40, 200), (1, 900)])
def test_room_is_made_for_the_rows_that_come(first, n):
    """Memory for what was foretold, more where more comes, and the same numbers."""
    x, fold = data(n, 48), torch.arange(n) % 4
    sums, known = FeatureSums(4, batches=1.5), FeatureSums(4)
    for part in (slice(0, first), *(slice(k, k + 40) for k in range(first, n, 40))):
        sums.add(x[part], fold[part])
        known.add(x[part], fold[part])
        if part.stop == first:
            assert len(sums.held) == max(2, 1.5 * first) and len(known.held) > 300
    assert (sums.moments is None) == (known.moments is None) == (n == 200)
    assert sums.held is None or n <= len(sums.held) <= 2 * n
    np.testing.assert_array_equal(sums.finish().spectrum.values, known.finish().spectrum.values)
