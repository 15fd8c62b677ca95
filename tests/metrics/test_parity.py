"""The same quantities as other tools give, each re-derived from its published definition."""

import numpy as np
import pytest
import torch

from plastiscope.metrics import Place, measure
from plastiscope.observations import AttentionSums, UnitSums, Weight


def values(observation, subject="weight"):
    found = measure(observation, Place("fc1", 0, subject))
    return {(r.metric, r.parameters): r.value for r in found}


def test_one_relu_matrix_and_its_four_stable_ranks():
    """Four published quantities called "stable rank" on one 1024 x 256 ReLU matrix."""
    rng = np.random.default_rng(0)
    h = np.maximum(rng.standard_normal((1024, 64)) @ rng.standard_normal((64, 256)), 0)
    sigma = np.linalg.svd(h, compute_uv=False)
    found = values(Weight.of(torch.as_tensor(h)))
    srank = int(np.argmax(np.cumsum(sigma) / sigma.sum() >= 0.99)) + 1
    assert found["srank", "delta=0.01"] == srank
    assert found["stable_rank", ""] == pytest.approx((h**2).sum() / sigma[0] ** 2, rel=1e-10)
    assert found["srank", "delta=0.01"] > 10 * found["stable_rank", ""]


def test_effective_rank_of_the_loss_of_plasticity_code():
    """Dohare et al.: exp of the natural entropy of the L1-normalised singular values."""
    matrix = np.random.default_rng(1).standard_normal((50, 30)) @ np.diag(np.geomspace(1, 1e-3, 30))
    sigma = np.sqrt(np.linalg.eigvalsh(matrix.T @ matrix))
    entropy = 0.0
    for share in sigma / np.abs(sigma).sum():
        entropy -= share * np.log(share)
    found = values(Weight.of(torch.as_tensor(matrix)))
    assert found["effective_rank", ""] == pytest.approx(np.e**entropy, rel=1e-6)


def test_redo_score_of_dopamine():
    """Mean |activation| per neuron over the batch, over the mean of that across neurons."""
    h = torch.relu(torch.randn(200, 40, generator=torch.Generator().manual_seed(2)))
    h[:, :6] *= torch.tensor([0.0, 0.001, 0.02, 0.05, 0.09, 0.2])
    score = h.abs().mean(0) / (h.abs().mean(0).mean() + 1e-9)
    sums = UnitSums(4, "relu")
    sums.add(h, h, torch.arange(200) % 4)
    found = values(sums.finish(), "unit")
    for tau in (0, 0.01, 0.025, 0.1):
        expected = float((score <= tau).double().mean())
        assert found["dormant_fraction", f"tau={tau:g}"] == pytest.approx(expected)
    assert found["dormant_fraction", "tau=0.1"] == pytest.approx(5 / 40)
    for q in (1, 5, 25, 50):
        expected = np.percentile(score.double().numpy(), q)
        assert found["dormancy_score", f"quantile={q}"] == pytest.approx(expected, rel=1e-6)


def test_heads_are_bounded_by_the_llm_study():
    """Positions 256 to 2048 of a causal map: a head is lazy above 6.2293 nats and collapsed below
    0.6921 (0.9 and 0.1 of 6.9215): heads 0.002 nats to either side of both fall on their own."""
    seen = torch.arange(2048)[None] < torch.arange(256, 2049)[:, None]
    counts = seen.sum(1).double()

    def head(entropy):
        """One key has 1 - share (1 - 1/n) and each other one share / n of a row of n keys."""
        low, high = 0.0, 1.0
        while high - low > 1e-12:
            share = (low + high) / 2
            one, rest = 1 - share * (1 - 1 / counts), share / counts
            mean = -(one * one.log() + (counts - 1) * rest * rest.log()).mean()
            low, high = (share, high) if mean < entropy else (low, share)
        rows = torch.where(seen, (low / counts)[:, None], 0.0)
        rows[:, 0] += 1 - low
        return rows

    found = {}
    for name, at in (("lazy_head", 6.2293), ("collapsed_head", 0.6921)):
        sums = AttentionSums(1, causal=True)
        maps = torch.stack([head(at - 0.002), head(at + 0.002)])[None]
        sums.add(maps, seen, torch.zeros(1, dtype=torch.long))
        rows = measure(sums.finish(), Place("attention", 0, "attention", heads=2))
        found |= {(name, r.metric, r.head): r for r in rows}
    for name, at in (("lazy_head", 6.2293), ("collapsed_head", 0.6921)):
        values = [found[name, "attention_entropy", h].value for h in (0, 1)]
        assert values == pytest.approx([at - 0.002, at + 0.002], abs=1e-4)
        assert found[name, name, None].value == 0.5
    assert found["lazy_head", "attention_entropy", 0].maximum == pytest.approx(6.9215, abs=2e-4)


def test_weightwatcher_agrees_on_shared_layers():
    """Stable rank, spectral norm and entropy-type values of the same layers, to 1e-6."""
    ww = pytest.importorskip("weightwatcher", reason="parity needs: pip install weightwatcher")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(120, 80, bias=False), torch.nn.Tanh(), torch.nn.Linear(80, 60, bias=False)
    )
    watcher = ww.WeightWatcher(model=model)
    details = watcher.analyze(min_evals=10, plot=False).sort_values("layer_id")
    layers = [model[0].weight, model[2].weight]
    assert len(details) == 2
    for (_, theirs), weight in zip(details.iterrows(), layers, strict=True):
        found = values(Weight.of(weight.detach()))
        assert found["stable_rank", ""] == pytest.approx(theirs["stable_rank"], rel=1e-6)
        assert found["spectral_norm", ""] ** 2 == pytest.approx(theirs["spectral_norm"], rel=1e-6)
        # Their entropy is that of sigma^2 over its sum, divided by ln(smaller side).
        share = np.linalg.svd(weight.detach().double().numpy(), compute_uv=False) ** 2
        share /= share.sum()
        entropy = -(share * np.log(share)).sum()
        assert np.log(found["effective_rank_squared", ""]) == pytest.approx(entropy, rel=1e-6)
        assert theirs["entropy"] == pytest.approx(entropy / np.log(min(weight.shape)), rel=1e-6)
