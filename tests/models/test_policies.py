"""Policies by their libraries' names, against their layers written out."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import checkpoints
from plastiscope.config import Settings
from plastiscope.models import ModelError, build, load


def opened(corpus, name):
    state = checkpoints.discover(corpus / "rl-trained-agents" / name)[0].checkpoints[0].open()
    live = build(state)
    assert load(live, state).full
    return state, live


def layer(state, path, inputs):
    return nn.functional.linear(inputs, state.read(f"{path}.weight"), state.read(f"{path}.bias"))


def test_a2c(corpus):
    state, live = opened(corpus, "a2c")
    inputs = torch.randn(6, 4)
    hidden = torch.tanh(layer(state, "mlp_extractor.policy_net.0", inputs))
    hidden = torch.tanh(layer(state, "mlp_extractor.policy_net.2", hidden))
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), layer(state, "action_net", hidden))
    assert live.inputs.shape == (4,) and "tanh" in live.assumptions[0]


def test_the_value_branch_is_replayed_too(corpus):
    state, live = opened(corpus, "a2c")
    seen = {}
    live.module.get_submodule("value_net").register_forward_hook(
        lambda module, args, output: seen.update(value=output)
    )
    inputs = torch.randn(6, 4)
    with torch.no_grad():
        live.forward({"inputs": inputs})
    hidden = torch.tanh(layer(state, "mlp_extractor.value_net.0", inputs))
    hidden = torch.tanh(layer(state, "mlp_extractor.value_net.2", hidden))
    assert torch.equal(seen["value"], layer(state, "value_net", hidden))


def test_dqn(corpus):
    state, live = opened(corpus, "dqn")
    inputs = torch.randn(6, 4)
    hidden = torch.relu(layer(state, "q_net.q_net.0", inputs))
    hidden = torch.relu(layer(state, "q_net.q_net.2", hidden))
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), layer(state, "q_net.q_net.4", hidden))


def test_sac_s_mean_is_clipped_and_its_critics_see_the_action(corpus):
    state, live = opened(corpus, "sac")
    inputs = torch.randn(6, 3) * 5
    seen = {}
    live.module.get_submodule("critic.qf1.4").register_forward_hook(
        lambda module, args, output: seen.update(value=output)
    )
    hidden = torch.relu(layer(state, "actor.latent_pi.0", inputs))
    hidden = torch.relu(layer(state, "actor.latent_pi.2", hidden))
    mean = layer(state, "actor.mu.0", hidden).clamp(-2, 2)
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), mean)
    value = torch.relu(layer(state, "critic.qf1.0", torch.cat([inputs, mean], 1)))
    value = layer(state, "critic.qf1.4", torch.relu(layer(state, "critic.qf1.2", value)))
    assert torch.equal(seen["value"], value)
    assert "actor.log_std" in live.unused


def test_her_takes_its_dictionary_joined(corpus):
    state, live = opened(corpus, "her")
    inputs = torch.randn(6, 12)
    hidden = torch.relu(layer(state, "actor.latent_pi.0", inputs))
    hidden = torch.relu(layer(state, "actor.latent_pi.2", hidden))
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), layer(state, "actor.mu", hidden))


def test_ars_is_linear(corpus):
    state, live = opened(corpus, "ars")
    inputs = torch.randn(6, 4)
    with torch.no_grad():
        expected = inputs @ state.read("action_net.weight").T
        assert torch.equal(live.forward({"inputs": inputs}), expected)


class Nature(nn.Module):
    """The convolutional extractor and Q-network under Stable-Baselines3's names."""

    def __init__(self) -> None:
        super().__init__()
        cnn = nn.Sequential(
            nn.Conv2d(4, 8, 8, 4),
            nn.ReLU(),
            nn.Conv2d(8, 8, 4, 2),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        extractor = nn.ModuleDict(
            {"cnn": cnn, "linear": nn.Sequential(nn.Linear(392, 16), nn.ReLU())}
        )
        self.q_net = nn.ModuleDict(
            {"features_extractor": extractor, "q_net": nn.Sequential(nn.Linear(16, 3))}
        )

    def forward(self, images):
        extractor = self.q_net["features_extractor"]
        return self.q_net["q_net"](extractor["linear"](extractor["cnn"](images)))


def test_nature_cnn(state_of):
    model = Nature()
    images = torch.rand(2, 4, 84, 84)
    state = state_of(model.state_dict())
    live = build(state)
    assert load(live, state).full
    assert live.inputs.shape == (4, 84, 84)
    assert torch.equal(live.forward({"inputs": images}), model(images))
    space = {"observation_space": {"_shape": [4, 84, 84], "dtype": "uint8"}}
    assert build(state_of(model.state_dict(), data=space)).inputs.shape == (4, 84, 84)


def mlp(taken: int, given: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(taken, 8), nn.ELU(), nn.Linear(8, 6), nn.ELU(), nn.Linear(6, given)
    )


class ActorCritic(nn.Module):
    def __init__(self, privileged: int = 5) -> None:
        super().__init__()
        self.actor, self.critic = mlp(5, 2), mlp(privileged, 1)
        self.std = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("privileged", [5, 9])
def test_rsl_rl(state_of, privileged):
    model = ActorCritic(privileged)
    state = state_of(model.state_dict())
    live = build(state)
    assert load(live, state).full
    inputs = torch.randn(4, 5)
    assert torch.equal(live.forward({"inputs": inputs}), model.actor(inputs))
    assert ("critic.0.weight" in live.unused) == (privileged == 9)


def test_rsl_rl_normalises_its_observations(state_of):
    actor = mlp(5, 2)
    mean, std = torch.randn(1, 5), torch.rand(1, 5) + 0.5
    tensors = {
        "obs_normalizer._mean": mean,
        "obs_normalizer._var": std**2,
        "obs_normalizer._std": std,
        "obs_normalizer.count": torch.tensor(7),
        "distribution.std_param": torch.ones(2),
        **{f"mlp.{name}": value for name, value in actor.state_dict().items()},
    }
    state = state_of(tensors)
    live = build(state)
    assert load(live, state).full
    inputs = torch.randn(4, 5)
    assert torch.equal(live.forward({"inputs": inputs}), actor((inputs - mean) / (std + 1e-2)))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lstm_actor.weight_ih_l0", "recurrent"),
        ("features_extractor.extractors.image.0.weight", "dictionary of observations"),
    ],
)
def test_what_isn_t_replayed_is_said(state_of, name, why):
    tensors = {
        "mlp_extractor.policy_net.0.weight": torch.zeros(4, 4),
        "action_net.weight": torch.zeros(2, 4),
        name: torch.zeros(4, 4),
    }
    with pytest.raises(ModelError, match=why):
        build(state_of(tensors))


@pytest.mark.parametrize("kind", ["Stable-Baselines3", "rsl_rl"])
def test_recurrent_policies_are_measured_by_weight(tmp_path, kind):
    """Every tensor has its magnitude, every matrix its rank, and what isn't replayed is said."""
    torch.manual_seed(0)
    names = ("lstm_actor", "lstm_critic") if kind[0] == "S" else ("memory_a.rnn", "memory_c.rnn")
    cell = nn.LSTM if kind[0] == "S" else nn.GRU
    tensors = {f"{n}.{k}": t for n in names for k, t in cell(5, 8).state_dict().items()}
    if kind[0] == "S":
        for name, (rows, columns) in {
            "mlp_extractor.policy_net.0": (6, 8),
            "mlp_extractor.value_net.0": (6, 8),
            "action_net": (2, 6),
            "value_net": (1, 6),
        }.items():
            linear = nn.Linear(columns, rows)
            tensors |= {f"{name}.{k}": t for k, t in linear.state_dict().items()}
        with zipfile.ZipFile(tmp_path / "model_100_steps.zip", "w") as archive:
            content = io.BytesIO()
            torch.save(tensors, content)
            archive.writestr("policy.pth", content.getvalue())
            archive.writestr("data", "{}")
    else:
        tensors["std"] = torch.ones(2)
        for name in ("actor", "critic"):
            tensors |= {f"{name}.{k}": t for k, t in mlp(8, 2).state_dict().items()}
        torch.save({"model_state_dict": tensors, "iter": 100}, tmp_path / "model_100.pt")
    table = plastiscope.analyze(tmp_path, Settings(out=tmp_path / "out")).table()
    sizes = table[(table["metric"] == "weight_l2") & table["tensor"].notna()]
    found = dict(zip(sizes["tensor"], sizes["value"], strict=True))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name] == pytest.approx(tensor.double().norm().item())
    ranks = table[(table["metric"] == "effective_rank") & table["tensor"].notna()]
    assert set(ranks["tensor"]) == {n for n, t in tensors.items() if t.ndim == 2 and len(t) > 1}
    replayed = table[table["subject"].isin(["feature", "unit", "attention"])]
    assert replayed["value"].isna().all()
    with pytest.raises(ModelError, match=rf"is recurrent \({names[0]}.*isn't replayed.*--model"):
        build(checkpoints.discover(tmp_path)[0].checkpoints[0].open())


def test_against_the_library(state_of):
    policies = pytest.importorskip("stable_baselines3.common.policies")
    gym = pytest.importorskip("gymnasium")
    policy = policies.ActorCriticPolicy(
        gym.spaces.Box(-1, 1, (6,)), gym.spaces.Discrete(3), lambda _: 1e-3
    ).eval()
    state = state_of(policy.state_dict())
    live = build(state)
    assert load(live, state).full
    inputs = torch.randn(4, 6)
    expected = policy.action_net(
        policy.mlp_extractor.forward_actor(policy.extract_features(inputs))
    )
    assert torch.equal(live.forward({"inputs": inputs}), expected)
