"""Both spectra of one matrix from one tridiagonal form; one BLAS thread, and as many as before."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from plastiscope.observations import in_threads, symmetric
from plastiscope.observations.moments import moment_spectra, row_spectra


def rows_and_folds(n, d, mean, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, dtype=torch.float64, generator=generator)
    x = x * torch.logspace(0, -3, d, dtype=torch.float64)
    offset = mean * torch.randn(d, dtype=torch.float64, generator=generator)
    return x + offset, torch.arange(n) % 3


def svdvals_without_each(x, fold):
    kept = [torch.ones_like(fold, dtype=torch.bool), *(fold != k for k in range(3))]
    parts = [x[one] for one in kept]
    return [(torch.linalg.svdvals(p), torch.linalg.svdvals(p - p.mean(0))) for p in parts]


@pytest.mark.parametrize("mean", [0.0, 1.0, 300.0])
@pytest.mark.parametrize(("n", "d"), [(90, 20), (21, 60)])
def test_both_spectra_equal_the_rows_singular_values(n, d, mean):
    x, fold = rows_and_folds(n, d, mean)
    pivot = x[: n // 3].mean(0)
    if n < d:
        found = row_spectra(x, fold, 3, pivot, 1e-16)
    else:
        shifted = [x[fold == k] - pivot for k in range(3)]
        moments, sums = (
            torch.stack([s.mT @ s for s in shifted]),
            torch.stack([s.sum(0) for s in shifted]),
        )
        counts = np.bincount(fold.numpy())
        found = moment_spectra(moments, sums, counts, pivot, 1e-16)
    for i, pair in enumerate(svdvals_without_each(x, fold)):
        for spectrum, expected in zip(found, pair, strict=True):
            sigma = expected.numpy()
            np.testing.assert_allclose(
                spectrum.values[i][: len(sigma)], sigma, rtol=1e-8, atol=1e-7 * sigma[0]
            )
            assert not spectrum.values[i][len(sigma) :].any()
    # The mean takes no digits from the centred values.
    sigma = svdvals_without_each(x, fold)[0][1].numpy()
    top = sigma > 1e-2 * sigma[0]
    np.testing.assert_allclose(found[1].values[0][: len(sigma)][top], sigma[top], rtol=1e-9)


def test_reflection_takes_a_vector_onto_the_first_axis():
    vector = np.array([0.3, -2.0, 1.0])
    image = symmetric.reflect(vector, symmetric.reflection(vector))
    np.testing.assert_allclose(image, [-np.linalg.norm(vector), 0, 0], atol=1e-15)
    assert not symmetric.reflection(np.zeros(3)).any()


def test_a_matrix_that_is_not_finite_has_no_values():
    bad = np.diag([1.0, np.nan, 2.0])
    diagonal, off = symmetric.tridiagonal(np.asfortranarray(bad))
    assert np.isnan(symmetric.eigenvalues_of_tridiagonal(diagonal, off)).all()


def threads():
    return [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]


def test_blas_has_one_thread_inside_and_as_many_as_before_afterwards():
    before = threads()
    inside = in_threads(lambda _: threads(), range(3))
    assert all(count == 1 for found in inside for count in found)
    assert threads() == before
    with ThreadPoolExecutor(4) as pool:
        x = torch.randn(64, 32, dtype=torch.float64)
        grams = list(pool.map(lambda _: symmetric.gram_of_columns(x), range(200)))
    assert all(torch.equal(gram, grams[0]) for gram in grams)
    assert threads() == before
