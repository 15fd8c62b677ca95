"""Component sensitivity in both protocols and its bounds; optimizer state; tasks; GraMa."""

import numpy as np
import pytest
import torch
from networks import network
from torch import nn

from plastiscope.metrics import Place, measure
from plastiscope.observations import (
    Called,
    OptimizerState,
    TaskAccuracies,
    UnitGradientSums,
    attention_bound,
    linear_bound,
    norm_bound,
    observe_rate_of_change,
    observe_rate_of_change_embedding,
    token_radius,
)

PLACE = Place("fc1", 0, "weight")


def one(observation, metric):
    (row,) = measure(observation, PLACE, frozenset({metric}))
    return row


def test_scaled_rotation_has_its_scale():
    layer = nn.Linear(6, 6)
    nn.init.orthogonal_(layer.weight, gain=3.0)
    batch = {"inputs": torch.randn(5, 6)}
    found = observe_rate_of_change(layer, lambda b: layer(b["inputs"]), batch, {0: ""})[0]
    row = one(found, "rate_of_change")
    assert row.value == pytest.approx(3, rel=1e-5) and row.standard_error < 1e-6
    assert row.rows == 20
    assert measure(found, PLACE, frozenset({"rate_of_change_embedding"})) == []


def test_own_inputs_and_embedding_inputs_are_two_metrics():
    module, forward, batch = network("timm vit", inputs=4)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    paths = {"attention": "blocks.1.attn", "fc1": "blocks.1.mlp.fc1", "fc2": "blocks.1.mlp.fc2"}
    own = observe_rate_of_change(module, forward, batch, paths)
    fed = observe_rate_of_change_embedding(module, forward, batch, paths, "blocks.0")
    with torch.no_grad():
        x = module._pos_embed(module.patch_embed(batch["inputs"]))
        y = torch.cat([x, torch.zeros(*x.shape[:2], 36, dtype=x.dtype)], -1)
        outputs = {
            "attention": module.blocks[1].attn(x),
            "fc1": module.blocks[1].mlp.fc1(x),
            "fc2": module.blocks[1].mlp.fc2(y),
        }
    for key, fx in outputs.items():
        ratios = [
            float((fx[i] - fx[j]).norm() / (x[i] - x[j]).norm())
            for i in range(4)
            for j in range(4)
            if i != j
        ]
        found = one(fed[key], "rate_of_change_embedding").value
        assert found == pytest.approx(np.mean(ratios), rel=1e-9), key
        assert found != pytest.approx(one(own[key], "rate_of_change").value, rel=0.01), key


def test_attention_that_is_given_its_input_three_times_is_fed_it_three_times():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).double().eval()
    net = nn.Sequential(nn.Linear(5, 6).double(), layer, layer).requires_grad_(False)
    batch = {"inputs": torch.randn(5, 4, 5).double()}
    found = observe_rate_of_change_embedding(
        net, lambda b: net(b["inputs"]), batch, {0: Called("1.self_attn", 1, 2)}, Called("1", 0, 2)
    )[0]
    x = net[0](batch["inputs"])
    fx = layer.self_attn(x, x, x)[0]
    ratios = [
        float((fx[i] - fx[j]).norm() / (x[i] - x[j]).norm()) for i in range(5) for j in range(i)
    ]
    assert one(found, "rate_of_change_embedding").value == pytest.approx(np.mean(ratios))


def test_two_data_sets_are_paired_by_index():
    layer = nn.Linear(4, 3).double().requires_grad_(False)
    a, b = ({"inputs": torch.randn(5, 4, dtype=torch.float64)} for _ in range(2))
    found = observe_rate_of_change(layer, lambda x: layer(x["inputs"]), a, {0: ""}, b)[0]
    d = a["inputs"] - b["inputs"]
    expected = ((d @ layer.weight.T).norm(dim=1) / d.norm(dim=1)).mean()
    row = one(found, "rate_of_change")
    assert row.value == pytest.approx(float(expected), rel=1e-12)
    apart = (d @ layer.weight.T).norm(dim=1) / d.norm(dim=1)
    assert row.standard_error == pytest.approx(float(apart.std() / 5**0.5), rel=1e-9)


@pytest.mark.parametrize("inputs", [8, 24])
def test_the_standard_error_is_the_spread_over_fresh_probes(inputs):
    """Inputs of different lengths, so that pairs which share one move together."""
    torch.manual_seed(0)
    layer = nn.LayerNorm(6)
    found = []
    for _ in range(250):
        x = torch.randn(inputs, 6) * (0.5 + torch.rand(inputs, 1))
        rates = observe_rate_of_change(layer, lambda b: layer(b["inputs"]), {"inputs": x}, {0: ""})
        found.append(one(rates[0], "rate_of_change"))
    spread = np.std([row.value for row in found])
    assert 1 / 1.3 < np.mean([row.standard_error for row in found]) / spread < 1.3


def test_the_standard_error_leaves_out_every_pair_of_an_input():
    x = torch.randn(7, 6)
    x[3] = x[2]  # a pair without a rate
    layer = nn.LayerNorm(6)
    rates = observe_rate_of_change(layer, lambda b: layer(b["inputs"]), {"inputs": x}, {0: ""})[0]
    pairs = [(i, (i - s) % 7, rates.ratios[i, s - 1]) for i in range(7) for s in range(1, 5)]
    pairs = [pair for pair in pairs if np.isfinite(pair[2])]
    means = [np.mean([r for i, j, r in pairs if out not in (i, j)]) for out in range(7)]
    error = np.sqrt(6 * np.var(means))
    assert one(rates, "rate_of_change").standard_error == pytest.approx(error, rel=1e-9)


def test_equal_inputs_give_no_rate():
    layer = nn.Linear(4, 3)
    batch = {"inputs": torch.ones(4, 4)}
    found = observe_rate_of_change(layer, lambda x: layer(x["inputs"]), batch, {0: ""})[0]
    row = one(found, "rate_of_change")
    assert row.value is None and row.status == "no_pairs"


def test_bounds_hold_and_have_their_closed_forms():
    assert one(norm_bound(torch.tensor([1.0, -3.0])), "rate_of_change_bound").value == 3
    weight = torch.diag(torch.tensor([2.0, 5.0]))
    assert one(linear_bound(weight), "rate_of_change_bound").value == pytest.approx(5)
    eye = torch.eye(4).reshape(1, 4, 4)
    found = attention_bound(eye, 2 * eye, 3 * eye, eye, tokens=5, radius=1.5)
    scores = 2 / np.sqrt(4)
    expected = 3 * np.sqrt(15 + 63 * 1.5**4 * scores**2)
    assert one(found, "rate_of_change_bound").value == pytest.approx(expected)
    assert token_radius(torch.full((2, 3, 4), 0.5)) == pytest.approx(1)


def test_measured_attention_stays_under_its_bound():
    torch.manual_seed(0)
    h, dh, d, n = 2, 3, 6, 4
    q, k, v = (torch.randn(h, dh, d) / 3 for _ in range(3))
    o = torch.randn(h, d, dh) / 3

    def attend(x):
        a = torch.softmax(torch.einsum("btd,hed,hfe,buf->bhtu", x, q, k.mT, x) / dh**0.5, -1)
        return torch.einsum("bhtu,bud,hed,hfe->btf", a, x, v, o)

    x = torch.randn(200, n, d)
    x = x / x.square().sum(-1).mean(-1).sqrt()[:, None, None]
    fx = attend(x)
    rate = (fx - fx.roll(1, 0)).flatten(1).norm(dim=1) / (x - x.roll(1, 0)).flatten(1).norm(dim=1)
    bound = attention_bound(q, k, v, o, tokens=n, radius=token_radius(x)).value
    assert 0 < float(rate.max()) < bound


def test_adam_update_equals_the_next_step():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = torch.optim.Adam([w], lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    for _ in range(3):
        w.grad = torch.randn_like(w)
        before = w.detach().clone()
        optimizer.step()
    state = optimizer.state[w]
    found = OptimizerState.adam(
        before, state["exp_avg"], state["exp_avg_sq"], 3, lr=0.01, betas=(0.8, 0.9), eps=1e-6
    )
    step = (w.detach() - before).square().mean().sqrt()
    expected = float(step / before.square().mean().sqrt())
    assert one(found, "update_to_weight_ratio").value == pytest.approx(expected, rel=1e-9)
    norm = float(before.norm())
    row = one(found, "effective_learning_rate")
    assert row.value == pytest.approx(0.01 / norm) and row.parameters == "updates=adam"
    sigma = torch.linalg.svdvals(state["exp_avg_sq"])
    p = sigma / sigma.sum()
    rank = float(torch.exp(-(p * p.log()).sum()))
    assert one(found, "second_moment_effective_rank").value == pytest.approx(rank, rel=1e-9)


def test_sgd_and_unusable_states():
    w = torch.full((2, 2), 2.0)
    found = OptimizerState.sgd(w, torch.full((2, 2), 0.5), lr=0.1)
    assert one(found, "update_to_weight_ratio").value == pytest.approx(0.025)
    assert one(found, "effective_learning_rate").value == pytest.approx(0.1 / 16)
    plain = one(OptimizerState.sgd(w, None, lr=0.1), "update_to_weight_ratio")
    assert plain.value is None and plain.status == "no_momentum"
    other = OptimizerState.adam(w, torch.zeros(3), torch.zeros(3), 5, lr=0.1)
    assert one(other, "update_to_weight_ratio").status == "shape_changed"
    fresh = OptimizerState.adam(w, torch.zeros(2, 2), torch.zeros(2, 2), 0, lr=0.1)
    assert one(fresh, "update_to_weight_ratio").status == "no_steps"


def test_average_accuracy_across_tasks():
    row = one(TaskAccuracies((0.9, 0.8, 0.4)), "average_accuracy_across_tasks")
    assert row.value == pytest.approx(0.7) and row.parameters == "tasks=3"
    missing = one(TaskAccuracies((0.9, float("nan"))), "average_accuracy_across_tasks")
    assert missing.value is None and missing.status == "non_finite"


def test_units_without_gradient_are_inactive():
    gradients = torch.rand(20, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    gradients[:, 0] = 0
    gradients[:, 1] *= 0.01
    sums = UnitGradientSums(4)
    sums.add(gradients, torch.arange(20) % 4)
    found = measure(sums.finish(), PLACE, frozenset({"grama_inactive_fraction"}))
    values = {r.parameters: r.value for r in found}
    assert values == {"tau=0": 0.125, "tau=0.01": 0.125, "tau=0.025": 0.25, "tau=0.1": 0.25}
