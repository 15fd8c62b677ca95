"""Jacobians of components at their own inputs: exact where they can be, honest where not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import KINDS, network
from torch import nn

from plastiscope.errors import UsageError
from plastiscope.metrics import Place, measure
from plastiscope.observations import Jacobian, capture, observe_jacobians

PLACE = Place("fc1", 0, "jacobian")


def observed(module, x, **options):
    return observe_jacobians(
        module.eval(), lambda b: module(b["inputs"]), {"inputs": x}, {0: ""}, **options
    )[0]


def means(jacobian):
    found = measure(jacobian, PLACE)
    return {
        r.metric: r
        for r in found
        if r.parameters.startswith("mean") and "sigma q" not in r.parameters
    }


def dense(function, x):
    """One input at a time through torch.func."""
    found = []
    for i in range(len(x)):
        jacobian = torch.func.jacrev(lambda one: function(one * 1))(x[i : i + 1])
        found.append(torch.linalg.svdvals(jacobian.reshape(-1, x[0].numel())))
    return found


def test_linear_layer_has_the_spectrum_of_its_weight_for_every_sample():
    """R14: not the spectrum of all samples pooled."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    found = observed(layer, torch.randn(5, 3, dtype=torch.float64))
    expected = torch.linalg.svdvals(layer.weight).detach().numpy()
    assert found.nodes.shape == (5, 2) and found.method == "weight"
    for row in found.nodes:
        np.testing.assert_allclose(np.sort(row)[::-1], expected, rtol=1e-12)
    assert (found.rows, found.columns) == (2, 3)


def test_orthogonal_layer_is_an_isometry():
    layer = nn.Linear(16, 16).double()
    nn.init.orthogonal_(layer.weight)
    found = means(observed(layer, torch.randn(3, 4, 16, dtype=torch.float64)))
    assert found["isometry_score"].value == pytest.approx(1, abs=1e-12)
    assert found["isometry_distance"].value == pytest.approx(0, abs=1e-7)
    assert found["jacobian_condition_number"].value == pytest.approx(1)
    assert found["jacobian_mean_log_sigma"].value == pytest.approx(0, abs=1e-9)
    assert found["jacobian_frobenius"].value == pytest.approx(4)
    assert found["isometry_score"].maximum == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8))
def test_score_stays_in_bounds_and_is_one_only_for_an_isometry(sigma):
    nodes = np.array([sigma])
    found = Jacobian(nodes, np.full(nodes.shape, 1 / len(sigma)), 8, 8, 8, "dense")
    score = means(found)["isometry_score"].value
    assert 0 <= score <= 1 + 1e-12
    if score > 1 - 1e-12:
        assert np.allclose(sigma, 1, atol=1e-5)
    if min(sigma) > 1e-3:
        inverse = Jacobian(1 / nodes, found.weights, 8, 8, 8, "dense")
        assert means(inverse)["isometry_score"].value == pytest.approx(score, rel=1e-9)


def test_closed_forms_of_two_and_a_half():
    found = means(Jacobian(np.array([[2.0, 0.5]]), np.array([[0.5, 0.5]]), 2, 2, 2, "dense"))
    assert found["jacobian_sigma_max"].value == 2 and found["jacobian_sigma_min"].value == 0.5
    assert found["jacobian_condition_number"].value == 4
    assert found["isometry_distance"].value == pytest.approx(np.sqrt((1 + 0.25) / 2))
    assert found["isometry_score"].value == pytest.approx(0.8)
    assert found["jacobian_frobenius"].value == pytest.approx(np.sqrt(4.25))


def test_layer_norm_is_exact_token_by_token():
    torch.manual_seed(0)
    norm = nn.LayerNorm(8).double()
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = observed(norm, x, positions=5)
    assert found.method == "positions" and found.side == 8
    expected = np.sort(
        np.concatenate(
            [dense(norm, x[i : i + 1, t])[0].detach().numpy() for i in range(3) for t in range(5)]
        )
    )
    np.testing.assert_allclose(np.sort(found.nodes.ravel()), expected, atol=1e-9)
    assert means(found)["jacobian_sigma_min"].value == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "part",
    [
        nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
        nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True)),
        nn.ReLU(inplace=True),
    ],
)
def test_feed_forward_equals_the_dense_jacobian(part):
    torch.manual_seed(0)
    part = part.double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    found = observed(part, x, positions=3)
    assert found.method == "positions"
    for i in range(2):
        expected = np.concatenate(
            [dense(part, x[i : i + 1, t].clone())[0].detach().numpy() for t in range(3)]
        )
        np.testing.assert_allclose(np.sort(found.nodes[i]), np.sort(expected), atol=1e-9)


def test_batch_norm_of_images_is_position_wise_and_a_convolution_is_not():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4).double().eval()
    norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    found = observed(norm, x)
    gain = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach().numpy()
    np.testing.assert_allclose(np.sort(found.nodes[0])[:: found.positions], np.sort(gain))
    convolution = nn.Conv2d(4, 3, 3, padding=1).double()
    found = observed(convolution, x)
    assert found.method == "dense" and found.side == 75
    np.testing.assert_allclose(
        np.sort(found.nodes[1]), np.sort(dense(convolution, x)[1].detach().numpy()), atol=1e-9
    )


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("gpt2", "llama")])
def test_whole_networks_equal_the_dense_jacobian(kind):
    module, forward, batch = network(kind, inputs=2)
    found = observe_jacobians(module, forward, batch, {"network": ""})["network"]
    expected = dense(lambda x: forward({"inputs": x}), batch["inputs"])
    for i in range(2):
        np.testing.assert_allclose(found.nodes[i], expected[i].detach().numpy(), rtol=1e-7)
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "path"),
    [("timm vit", "blocks.0.attn"), ("gpt2", "transformer.h.1"), ("llama", "model.layers.0")],
)
def test_mixing_components_are_exact_or_estimated(kind, path):
    module, forward, batch = network(kind, inputs=2)
    exact = observe_jacobians(module, forward, batch, {0: path})[0]
    assert exact.method == "dense"
    (call,) = capture(module, forward, batch, {0: path}).values()

    def alone(x):
        both = torch.cat([x, call.x[1:]])
        return call.again(both)[:1]

    expected = torch.func.jacrev(alone)(call.x[:1]).reshape(exact.side, -1)
    np.testing.assert_allclose(
        exact.nodes[0], torch.linalg.svdvals(expected).detach().numpy(), atol=1e-8
    )
    # A quarter of the steps that would be exact.
    free = observe_jacobians(
        module, forward, batch, {0: path}, dense_side=1, steps=exact.side // 2, probes=32
    )[0]
    assert free.method == "lanczos"
    np.testing.assert_allclose(free.weights.sum(1), 1)
    a, b = means(exact), means(free)
    for metric in (
        "jacobian_sigma_max",
        "jacobian_frobenius",
        "isometry_score",
        "isometry_distance",
    ):
        assert b[metric].value == pytest.approx(a[metric].value, rel=0.05), metric
    for metric in ("jacobian_sigma_min", "jacobian_condition_number"):
        assert b[metric].value is None and b[metric].status == "unresolved"
    logarithm = b["jacobian_mean_log_sigma"]
    if exact.nodes.min() < 1e-3 * exact.nodes.max():  # Attention loses directions.
        assert logarithm.value is None and logarithm.status == "unresolved"
    else:
        assert logarithm.value == pytest.approx(a["jacobian_mean_log_sigma"].value, abs=0.02)


class Mixing(nn.Module):
    """x [B, 2, n / 2] times a matrix, positions mixed, with known singular values."""

    def __init__(self, sigma, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        n = len(sigma)
        left, right = (
            torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator)).Q
            for _ in range(2)
        )
        self.register_buffer("matrix", left * torch.as_tensor(sigma) @ right)

    def forward(self, x):
        return (x.flatten(1) @ self.matrix.mT).reshape(x.shape)


SPECTRA = {
    "near an isometry": 1 + 0.1 * np.linspace(-1, 1, 1200),
    "a bulk and some that stick out": np.r_[np.linspace(0.5, 1.5, 1150), np.linspace(3, 9, 50)],
    "many lost": np.geomspace(1e-6, 1.0, 1200),
    "of low rank": np.r_[np.linspace(0.5, 2, 200), np.zeros(1000)],
    "the identity": np.ones(1200),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_estimates_equal_the_values_of_known_spectra(name):
    sigma = SPECTRA[name]
    # Where a mean hangs on few of many values, 1 input's probes leave a standard error of 2 %.
    within = 0.07 if name in ("of low rank", "many lost") else 0.02
    module, x = Mixing(sigma, 0), torch.randn(1, 2, 600, dtype=torch.float64)
    found = observed(module, x)
    assert found.method == "lanczos" and found.nodes.shape == found.weights.shape
    np.testing.assert_allclose(found.weights.sum(1), 1)
    assert found.weights.min() >= 0
    rows = means(found)
    score, distance = (2 * sigma / (1 + sigma**2)).mean(), np.sqrt(((sigma - 1) ** 2).mean())
    assert rows["isometry_score"].value == pytest.approx(score, rel=within)
    assert rows["isometry_distance"].value == pytest.approx(distance, rel=within, abs=1e-6)
    assert rows["jacobian_sigma_max"].value == pytest.approx(sigma.max(), rel=0.02)
    logarithm = rows["jacobian_mean_log_sigma"]
    if sigma.min() > 0.1:
        assert logarithm.value == pytest.approx(np.log(sigma).mean(), abs=0.01)
    else:
        assert logarithm.status == "unresolved"


def test_a_first_position_that_differs_is_told_from_the_rest():
    """A CLS token among many positions: a sample of equals would miss it or count it too often."""
    norm = nn.LayerNorm(64, eps=0.0).double()
    x = torch.randn(1, 100, 64, dtype=torch.float64)
    x[:, 0] *= 0.01
    found = observed(norm, x, positions=4)
    assert found.positions == 4 and found.method == "positions"
    exact = np.concatenate([dense(norm, x[:, t])[0].detach().numpy() for t in range(100)])
    assert found.nodes.max() == pytest.approx(exact.max())
    distance = np.sqrt(((exact - 1) ** 2).mean())
    assert means(found)["isometry_distance"].value == pytest.approx(distance, rel=0.02)


def test_standard_error_is_over_inputs():
    nodes = np.array([[1.0], [2.0], [4.0]])
    row = means(Jacobian(nodes, np.ones_like(nodes), 1, 1, 1, "dense"))["jacobian_sigma_max"]
    assert row.value == pytest.approx(7 / 3)
    assert row.standard_error == pytest.approx(np.std([1, 2, 4], ddof=1) / np.sqrt(3))


def test_train_mode_unknown_paths_and_bad_values():
    module, forward, batch = network("mlp")
    with pytest.raises(UsageError, match="unknown module '4'"):
        observe_jacobians(module, forward, batch, {0: "4"})
    with torch.no_grad():
        module[0].weight[0, 0] = torch.nan
    found = observe_jacobians(module, forward, batch, {0: "0"})[0]
    rows = measure(found, PLACE)
    assert {r.value for r in rows} == {None} and {r.status for r in rows} <= {
        "non_finite",
        "unresolved",
    }
    with pytest.raises(UsageError, match="train mode"):
        observe_jacobians(module.train(), forward, batch, {0: "0"})
