"""Singular values: exact in every dtype, right where LAPACK or the Gram matrix go wrong."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from plastiscope.metrics import METRICS, Place, measure
from plastiscope.observations import Magnitude, Weight, spectra, spectra_of

PLACE = Place("fc1", 0, "weight")
RANKS = {"effective_rank", "effective_rank_squared", "srank", "approximate_rank", "stable_rank"}


def rows(matrix, only=None, **earlier):
    return {(r.metric, r.parameters): r for r in measure(Weight.of(matrix, **earlier), PLACE, only)}


def value(matrix, metric, parameters=""):
    return rows(matrix)[metric, parameters].value


def log_spaced(n=64, last=-8, dtype=torch.float64):
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for _ in range(2))
    sigma = torch.logspace(0, last, n, dtype=torch.float64)
    return (u * sigma @ v).to(dtype), sigma


@pytest.mark.parametrize("n", [1, 4, 40])
def test_identity_has_every_rank_n(n):
    found = rows(torch.eye(n))
    for (metric, _), row in found.items():
        if metric in RANKS | {"numerical_rank"}:
            assert row.value == pytest.approx(n), metric
            assert row.maximum == n and row.rows == row.columns == n and row.status == "ok"
    assert found["condition_number", ""].value == pytest.approx(1)


def test_rank_one_has_every_rank_one():
    matrix = torch.outer(torch.arange(1.0, 51), torch.arange(1.0, 41))
    for (metric, _), row in rows(matrix).items():
        if metric in RANKS | {"numerical_rank"}:
            assert row.value == pytest.approx(1, abs=1e-6), metric


def test_closed_forms_of_three_one():
    matrix = torch.diag(torch.tensor([3.0, 1.0]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    squared = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert value(matrix, "effective_rank") == pytest.approx(math.exp(entropy), rel=1e-12)
    assert value(matrix, "effective_rank_squared") == pytest.approx(math.exp(squared), rel=1e-12)
    assert value(matrix, "stable_rank") == pytest.approx(10 / 9)
    assert value(matrix, "condition_number") == pytest.approx(3)
    assert value(matrix, "spectral_norm") == pytest.approx(3)
    assert value(matrix, "frobenius_norm") == pytest.approx(math.sqrt(10))
    assert value(matrix, "gram_deviation") == pytest.approx(64)
    assert value(matrix, "gram_deviation_normalized") == pytest.approx(32)
    assert value(matrix, "squared_singular_value", "mean") == pytest.approx(5)
    assert value(matrix, "weight_magnitude") == pytest.approx(1)
    assert value(matrix, "weight_rms") == pytest.approx(math.sqrt(2.5))


def test_share_reached_exactly_needs_no_further_value():
    assert value(torch.diag(torch.tensor([99.0, 1.0])), "srank", "delta=0.01") == 1
    assert value(torch.diag(torch.tensor([98.0, 1.0, 1.0])), "srank", "delta=0.01") == 2
    assert value(torch.eye(100), "srank", "delta=0.01") == 99
    assert value(torch.diag(torch.tensor([10.0, 1.0])), "approximate_rank", "delta=0.01") == 1


@pytest.mark.parametrize(
    ("sigma", "rank"), [([2.0, 2, 0, 0], 2.0), ([5.0], 1.0), ([2.0, 2, 2, 2], 4.0)]
)
def test_zero_singular_values_add_nothing(sigma, rank):
    """N05."""
    assert value(torch.diag(torch.tensor(sigma)), "effective_rank") == pytest.approx(rank)


def test_zero_matrix_is_rank_zero_and_says_so():
    """N04: zero-initialised projections are normal at step 0."""
    found = rows(torch.zeros(4, 4))
    for (metric, _), row in found.items():
        assert row.status == "zero_matrix", metric
        if metric in RANKS | {"numerical_rank", "spectral_norm", "weight_magnitude"}:
            assert row.value == 0, metric
    assert found["condition_number", ""].value is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_weight_is_null_and_its_neighbours_are_not(bad):
    """N02: a matrix with Inf gives NaN values and no error in torch and numpy."""
    heads = torch.eye(3).repeat(3, 1, 1)
    heads[1, 0, 2] = bad
    for row in measure(Weight.of(heads), Place("q", 0, "weight", heads=3)):
        assert row.status == ("non_finite" if row.head == 1 else "ok")
        assert (row.value is None) == (row.head == 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_its_upcast_copy(dtype):
    """N01; the tolerance of numerical_rank alone knows the stored dtype."""
    matrix = torch.randn(48, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    half, full = rows(matrix), rows(matrix.double())
    for key, row in half.items():
        if key[0] != "numerical_rank":
            assert row.value == pytest.approx(full[key].value, rel=1e-9), key
    eps = torch.finfo(dtype).eps
    sigma = torch.linalg.svdvals(matrix.double())
    count = int((sigma > 96 * eps * sigma[0]).sum())
    assert half["numerical_rank", f"tolerance={96 * eps:.3g}"].value == count


def test_half_precision_sums_do_not_overflow():
    """N09: the sum of squares is infinite in float16."""
    found = Magnitude.of(torch.full((10_000,), 100.0, dtype=torch.float16))
    assert {r.metric: r.value for r in measure(found, PLACE)}["weight_l2"] == 10_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_singular_values_survive(dtype):
    """N06: a float32 Gram counts 49 directions above the float32 tolerance; there are 41."""
    matrix, _ = log_spaced(dtype=dtype)
    found = rows(matrix)
    assert found["effective_rank", ""].value == pytest.approx(9.3298, abs=1e-4)
    exact = torch.linalg.svdvals(matrix.double())
    assert_close(torch.as_tensor(spectra_of(matrix).values), exact, rtol=1e-7, atol=1e-16)
    if dtype == torch.float32:
        assert found["numerical_rank", "tolerance=7.63e-06"].value == 41
        assert found["condition_number", ""].value == pytest.approx(
            float(exact[0] / exact[-1]), rel=1e-6
        )


def test_gram_path_agrees_with_a_float64_svd():
    matrix = torch.randn(80, 200, generator=torch.Generator().manual_seed(2))
    assert_close(
        torch.as_tensor(spectra_of(matrix).values),
        torch.linalg.svdvals(matrix.double()),
        rtol=1e-9,
        atol=0,
    )


def test_range_of_sixty_decades_gives_values():
    """N03: rows that are powers of one row, 1e-30 to 1e30."""
    base = torch.linspace(0.1, 1, 30, dtype=torch.float64)
    matrix = torch.stack([base * 10.0**p for p in range(-30, 31)])
    found = rows(matrix)
    assert found["effective_rank", ""].value == pytest.approx(1, abs=1e-6)
    assert found["spectral_norm", ""].value == pytest.approx(
        float(base.norm()) * math.sqrt(sum(100.0**p for p in range(-30, 31))), rel=1e-12
    )
    huge = torch.eye(40, dtype=torch.float64) * 1e200
    assert rows(huge)["spectral_norm", ""].value == pytest.approx(1e200)
    assert rows(huge)["stable_rank", ""].value == pytest.approx(40)


def test_solver_that_fails_once_is_replaced(monkeypatch):
    """N03."""
    real = torch.linalg.svdvals
    calls = []

    def fails_once(matrix, **options):
        calls.append(matrix)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return real(matrix, **options)

    monkeypatch.setattr(torch.linalg, "svdvals", fails_once)
    assert value(torch.diag(torch.tensor([3.0, 1.0])), "stable_rank") == pytest.approx(10 / 9)
    assert len(calls) > 1


def test_solver_that_returns_zeros_is_found_out(monkeypatch):
    """N08: LAPACK with a 32-bit workspace has been seen to return zeros without an error."""
    matrix = torch.randn(60, 60, generator=torch.Generator().manual_seed(3))
    expected = rows(matrix)["effective_rank", ""].value
    monkeypatch.setattr(np.linalg, "eigvalsh", lambda m: np.zeros(m.shape[:-1]))
    assert value(matrix, "effective_rank") == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(torch.linalg, "svdvals", lambda m: m.new_zeros(m.shape[:-1]))
    assert value(matrix, "effective_rank") == pytest.approx(expected, rel=1e-9)
    monkeypatch.setattr(np.linalg, "svd", lambda m, **_: np.zeros(m.shape[:-1]))
    row = rows(matrix)["effective_rank", ""]
    assert row.value is None and row.status == "not_converged"


def test_long_embedding_is_summed_in_chunks(monkeypatch):
    """N08: 50000 x 64, with the working memory of 2 MB."""
    matrix = torch.randn(50_000, 64, generator=torch.Generator().manual_seed(4))
    monkeypatch.setattr(spectra, "_CHUNK", 1 << 18)
    expected = torch.linalg.svdvals(torch.linalg.qr(matrix.double(), mode="r").R)
    assert_close(torch.as_tensor(spectra_of(matrix).values), expected, rtol=1e-9, atol=0)
    matrix[:, 1] = matrix[:, 0]
    assert value(matrix, "numerical_rank", "tolerance=0.00596") == 63
    assert spectra_of(matrix).values[-1] < 1e-8


def test_threads_do_not_move_the_value():
    """N13."""
    matrix = torch.randn(128, 128, generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(value(matrix, "effective_rank"))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_empty_matrix_has_a_reason():
    found = rows(torch.zeros(0, 5))
    assert {row.status for key, row in found.items() if key[0] in RANKS} == {"empty"}


def test_earlier_checkpoints():
    now, before, first = torch.full((2, 3), 3.0), torch.full((2, 3), 1.0), torch.zeros(2, 3)
    found = rows(now, previous=before, first=first)
    assert found["weight_change", ""].value == 2 and found["weight_drift", ""].value == 3
    changed = rows(now, previous=torch.zeros(4, 3))
    assert changed["weight_change", ""].value is None
    assert changed["weight_change", ""].status == "shape_changed"
    assert ("weight_drift", "") not in changed
    same = rows(torch.zeros(2, 3), previous=torch.zeros(2, 3))["weight_change", ""]
    assert same.value == 0 and same.status == "ok"


def test_a_matrix_says_its_sides_and_a_vector_its_entries():
    """So that a gate can tell a matrix from a gain."""
    only = frozenset({"weight_magnitude"})
    place = Place("fc1", 0, "weight")
    for shape, sides in (((3, 4), (3, 4)), ((2, 3, 4), (3, 4))):
        heads = Place("q", 0, "weight", heads=2) if len(shape) == 3 else place
        found = measure(Weight.of(torch.ones(shape)), heads, only)
        assert {(row.rows, row.columns) for row in found} == {sides}
    (row,) = measure(Magnitude.of(torch.ones(5)), place, only)
    assert (row.rows, row.columns) == (5, None)


def test_heads_are_rows_and_equal_their_own_matrices():
    heads = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(6))
    found = measure(Weight.of(heads), Place("q", 1, "weight", heads=3, tensor="w"))
    for h in range(3):
        mine = {(r.metric, r.parameters): r.value for r in found if r.head == h}
        single = {key: row.value for key, row in rows(heads[h]).items()}
        assert mine.keys() == single.keys()
        for key in mine:
            assert mine[key] == pytest.approx(single[key], rel=1e-9), key
    assert {r.tensor for r in found} == {"w"} and {r.block for r in found} == {1}


INVARIANT = [m for m in METRICS if m.needs in ("Spectrum", "Weight", "Magnitude")]


def changed(matrix, law, generator):
    r = len(matrix)
    if law.startswith("scale: "):
        return matrix * 4
    if law.startswith("rotation"):
        q = torch.linalg.qr(torch.randn(r, r, dtype=torch.float64, generator=generator)).Q
        return q @ matrix
    if law.startswith("permutation"):
        return matrix[torch.randperm(r, generator=generator)]
    if law.startswith("sign flip"):
        return -matrix
    return None


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.integers(0, 10_000))
def test_declared_laws_hold(r, c, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(r, c, dtype=torch.float64, generator=generator)
    before = rows(matrix)
    for metric in INVARIANT:
        for law in metric.laws:
            after_matrix = changed(matrix, law, generator)
            if after_matrix is None:
                continue
            after = rows(after_matrix)
            factor = {"proportional": 4, "squared": 16}.get(law.split(": ")[1], 1)
            for key, row in before.items():
                if key[0] == metric.name:
                    # A minimum of sigma^2 of a nearly singular matrix has few digits.
                    assert after[key].value == pytest.approx(
                        factor * row.value, rel=1e-5, abs=1e-9
                    ), (key, law)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10_000))
def test_ranks_keep_their_order_and_bounds(r, c, seed):
    matrix = torch.randn(r, c, generator=torch.Generator().manual_seed(seed))
    found = {key[0]: row.value for key, row in rows(matrix).items()}
    most = min(r, c) + 1e-9
    assert 1 - 1e-9 <= found["stable_rank"] <= found["effective_rank_squared"] + 1e-9
    assert found["effective_rank_squared"] <= found["effective_rank"] + 1e-9 <= most + 1e-9
    assert found["approximate_rank"] <= found["srank"] <= found["numerical_rank"] <= most
