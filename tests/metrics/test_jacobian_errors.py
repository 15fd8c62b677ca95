"""What a Jacobian's rows don't know: stated errors hold the truth, and noise is no value."""

import numpy as np
import pytest
import torch
from torch import nn

from plastiscope.metrics import Place, measure
from plastiscope.observations import observe_jacobians

PLACE = Place("fc1", 0, "jacobian")
DRAWS = np.random.default_rng(0)
N = 200
SPECTRA = {
    "lognormal": np.exp(2 * DRAWS.standard_normal(N)),
    "log-uniform": np.logspace(2, -2, N),
    "twelve decades": np.logspace(3, -9, N),
    "a few decades": np.logspace(0.5, -2.5, N),
    "half of them 0": np.r_[np.ones(N // 2), np.zeros(N // 2)],
    "clusters": np.r_[np.full(50, 3.0), np.full(100, 1.0), np.full(50, 0.1)],
    "Gaussian": np.linalg.svd(DRAWS.standard_normal((N, N)) / np.sqrt(N), compute_uv=False),
    "six Gaussians": np.linalg.svd(
        np.linalg.multi_dot(list(DRAWS.standard_normal((6, N, N)) / np.sqrt(N))), compute_uv=False
    ),
    "one dead": np.r_[np.ones(N - 1), 0.0],
    "one large": np.r_[10.0, np.ones(N - 1)],
    "a tail": 1 / np.arange(1, N + 1),
}


class Mixing(nn.Module):
    """x [B, n] times a matrix of known singular values."""

    def __init__(self, sigma, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        left, right = (
            torch.linalg.qr(torch.randn(N, N, dtype=torch.float64, generator=generator)).Q
            for _ in range(2)
        )
        self.register_buffer("matrix", left * torch.as_tensor(sigma) @ right)

    def forward(self, x):
        return x @ self.matrix.mT


def rows_of(module, x, **options):
    found = observe_jacobians(
        module.eval(), lambda b: module(b["inputs"]), {"inputs": x}, {0: ""}, **options
    )[0]
    rows = measure(found, PLACE)
    return {
        (r.metric + r.parameters.partition("sigma quantile")[2]): r
        for r in rows
        if r.parameters.startswith("mean")
    }


def truth(sigma):
    return {
        "jacobian_sigma_max": sigma.max(),
        "isometry_distance": np.sqrt(((sigma - 1) ** 2).mean()),
        "jacobian_mean_log_sigma": np.log(np.maximum(sigma, 1e-10)).mean(),
        "jacobian_frobenius": np.sqrt((sigma**2).sum()),
        "isometry_score": (2 * sigma / (1 + sigma**2)).mean(),
        **{
            f"jacobian_sigma={q}": np.quantile(sigma, q / 100, method="inverted_cdf")
            for q in (5, 25, 50, 75, 95)
        },
    }


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("inputs", [1, 3])
def test_the_true_value_lies_within_three_standard_errors(name, inputs):
    sigma = SPECTRA[name]
    for seed in range(3):
        x = torch.zeros(inputs, N, dtype=torch.float64)
        rows = rows_of(Mixing(sigma, seed), x, dense_side=1, seed=seed)
        given = 0
        for metric, expected in truth(sigma).items():
            row = rows[metric]
            if row.value is None:
                assert row.status == "unresolved" and "score" not in metric, metric
                continue
            given += 1
            assert row.standard_error is not None, metric
            off = abs(row.value - expected)
            assert off <= 3 * row.standard_error + 1e-7 * expected, (metric, seed)
            if metric.startswith("jacobian_sigma="):
                assert row.value == pytest.approx(expected, rel=0.05)
        assert given >= 4


def test_quantiles_are_given_near_an_isometry_and_refused_near_zero():
    near = rows_of(Mixing(SPECTRA["one large"], 0), torch.zeros(1, N).double(), dense_side=1)
    wide = rows_of(Mixing(SPECTRA["lognormal"], 0), torch.zeros(1, N).double(), dense_side=1)
    for q in (5, 25, 50, 75, 95):
        assert near[f"jacobian_sigma={q}"].value == pytest.approx(1)
    for q in (5, 25):
        assert wide[f"jacobian_sigma={q}"].value is None


def test_extremes_of_some_positions_are_not_the_extremes_of_all():
    """100 tokens of unequal length, of which 4 are taken."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(64).double()
    x = torch.randn(4, 100, 64, dtype=torch.float64)
    x = x * torch.exp(torch.randn(4, 100, 1, dtype=torch.float64) / 2)
    rows = rows_of(norm, x)
    for metric in ("max", "min"):
        row = rows[f"jacobian_sigma_{metric}"]
        assert row.value is None and row.status == "positions_sampled"
    assert rows["jacobian_condition_number"].status == "positions_sampled"
    # J = (I - 1 1^T / d - z z^T / d) / s of every token, with s its root variance.
    variance = x.var(-1, correction=0).numpy()
    scale, d = np.sqrt(variance + norm.eps), 64
    last = norm.eps / (variance + norm.eps)
    square = ((d - 2) * (1 / scale - 1) ** 2 + (last / scale - 1) ** 2 + 1) / d
    distance = np.sqrt(square.mean(1)).mean()
    row = rows["isometry_distance"]
    assert "positions=4 of 100" in row.parameters
    assert abs(row.value - distance) <= 3 * row.standard_error
    one = rows_of(norm, x[:1])["isometry_distance"]
    assert one.standard_error is not None and one.standard_error > 0.01
    every = rows_of(norm, x, positions=100)
    assert every["isometry_distance"].value == pytest.approx(distance)
    assert every["jacobian_sigma_max"].value == pytest.approx((1 / scale).max(1).mean())


def test_a_norm_in_float32_has_its_dead_direction_at_zero():
    torch.manual_seed(0)
    norm, x = nn.LayerNorm(16), torch.randn(4, 5, 16)
    rows = rows_of(norm, x)
    variance = x.double().var(-1, correction=0).numpy()
    scale = np.sqrt(variance + norm.eps)
    log = (14 * np.log(1 / scale) + np.log(norm.eps / scale**3) + np.log(1e-10)) / 16
    assert rows["jacobian_mean_log_sigma"].value == pytest.approx(log.mean(), abs=1e-6)
    assert rows["jacobian_sigma_min"].value == pytest.approx(0, abs=1e-10)
    expected = ((1 / scale).max(1) / 1e-10).mean()
    assert rows["jacobian_condition_number"].value == pytest.approx(expected, rel=1e-6)


class Float32Inside(nn.Module):
    """A norm that turns to float32, as those of Hugging Face do."""

    def forward(self, x):
        return nn.functional.layer_norm(x.float(), x.shape[-1:]).to(x.dtype)


class Twice(nn.Module):
    """Mixes positions; its last direction is dead."""

    def forward(self, x):
        mean = x.mean((1, 2), keepdim=True)
        return (x - mean) * 1.1


@pytest.mark.parametrize("part", [Float32Inside(), Twice()])
def test_noise_of_the_precision_is_unresolved(part):
    torch.manual_seed(0)
    rows = rows_of(part, torch.randn(3, 5, 16))
    for metric in ("sigma_min", "condition_number", "mean_log_sigma"):
        row = rows[f"jacobian_{metric}"]
        assert row.value is None and row.status == "unresolved", metric
    assert rows["jacobian_sigma_max"].value is not None
    assert rows["isometry_score"].value is not None


def test_an_exact_zero_is_resolved():
    x = torch.tensor([[[-1.0, 2.0, 3.0, -4.0]]]).expand(2, 3, 4).clone()
    rows = rows_of(nn.ReLU(), x)
    assert rows["jacobian_sigma_min"].value == 0
    assert rows["jacobian_condition_number"].value == pytest.approx(1e10)
    assert rows["jacobian_mean_log_sigma"].value == pytest.approx(np.log(1e-10) / 2)
