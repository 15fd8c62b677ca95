"""Plain MLPs and CNNs from names and shapes: the same outputs as the network that was saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from plastiscope import checkpoints
from plastiscope.models import ModelError, build, load


def rebuilt(state, assume=None):
    live = build(state, None, assume or {})
    assert load(live, state).full
    return live


def assert_same(model: nn.Module, inputs: torch.Tensor, state_of, assume=None, **extras):
    model.eval()
    live = rebuilt(state_of(model.state_dict(), **extras), assume)
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), model(inputs))
    return live


class Held(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, inputs):
        return self.net(inputs)


def test_mlp_with_relu_is_assumed_and_said(state_of):
    model = Held(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    live = assert_same(model, torch.randn(8, 6), state_of)
    assert (live.inputs.kind, live.inputs.shape, live.inputs.classes) == ("vector", (6,), 3)
    assert len(live.assumptions) == 1
    assert "relu after 2 hidden layers" in live.assumptions[0]
    assert "--assume activation" in live.assumptions[0]
    assert set(live.module.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize(
    ("kind", "word"),
    [(nn.Tanh, "tanh"), (nn.GELU, "gelu"), (nn.SiLU, "swish"), (nn.LeakyReLU, "leaky_relu")],
)
def test_activation_from_the_settings_or_the_user(state_of, kind, word):
    model = Held(nn.Linear(6, 5), kind(), nn.Linear(5, 3))
    inputs = torch.randn(8, 6)
    assert_same(model, inputs, state_of, hyper_parameters={"model": {"activation": word}})
    assert_same(model, inputs, state_of, {"activation": word})
    as_class = f"<class 'torch.nn.modules.activation.{kind.__name__}'>"
    assert_same(model, inputs, state_of, config={"activation_fn": as_class})
    assert_same(model, inputs, state_of, {"activation": word}, config={"activation": "sigmoid"})


def test_an_unknown_activation_is_an_error(state_of):
    with pytest.raises(ModelError, match=r"known: .*relu"):
        build(state_of({"0.weight": torch.zeros(2, 3)}), None, {"activation": "rleu"})


@pytest.mark.parametrize(
    "layers",
    [
        # Norm before or after the activation, dropout, no gap at all, linear layers in a row.
        (nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        (nn.Linear(6, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)),
        (nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
        (nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)),
        (nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
        (nn.Flatten(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        (nn.Linear(6, 5), nn.PReLU(), nn.Linear(5, 3)),
    ],
)
def test_what_a_sequential_leaves_out(state_of, layers):
    model = Held(*layers)
    model.train()
    model(torch.randn(32, 6) * 3 + 1)
    assert_same(model, torch.randn(8, 6), state_of)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.fc10, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs):
        for layer in (self.fc1, self.fc2, self.fc10):
            inputs = functional.relu(layer(inputs))
        return self.out(inputs)


def test_attributes_run_in_stored_order(state_of):
    assert_same(Named(), torch.randn(4, 6), state_of)


def test_numbers_are_ordered_by_value(state_of):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 5) for _ in range(12)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
    shuffled = dict(sorted(model.state_dict().items()))  # "10." before "2.", as safetensors sorts
    live = rebuilt(state_of(shuffled))
    # A trailing activation leaves no trace.
    inputs = torch.randn(4, 5)
    assert torch.equal(live.forward({"inputs": inputs}), model[:-1](inputs))


def test_an_order_that_the_file_lost_is_found_from_widths_or_refused(state_of):
    found = {"encoder.weight": torch.randn(4, 6), "decoder.weight": torch.randn(6, 4)}
    unique = {
        "b_in.weight": torch.randn(4, 6),
        "c_out.weight": torch.randn(2, 3),
        "d_middle.weight": torch.randn(3, 4),
    }
    live = rebuilt(state_of(unique))
    inputs = torch.randn(2, 6)
    hidden = functional.relu(inputs @ unique["b_in.weight"].T)
    hidden = functional.relu(hidden @ unique["d_middle.weight"].T)
    expected = hidden @ unique["c_out.weight"].T
    torch.testing.assert_close(live.forward({"inputs": inputs}), expected)
    with pytest.raises(ModelError, match="more than one order"):
        build(state_of(dict(sorted(found.items()))))


CNN = (
    nn.Conv2d(1, 4, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(4, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32, 6),
    nn.ReLU(),
    nn.Linear(6, 3),
)


@pytest.mark.parametrize(
    ("assume", "extras"),
    [
        ({}, {}),
        ({"input": "1x8x8"}, {}),
        ({"input": "8"}, {}),
        ({}, {"hyper_parameters": {"input_shape": [1, 8, 8], "stride": 1, "padding": 1}}),
        ({}, {"hyper_parameters": {"input_dim": 64, "pool_size": 2}}),
    ],
)
def test_cnn_sizes_that_agree_with_the_flattened_layer(state_of, assume, extras):
    live = assert_same(Held(*CNN), torch.randn(5, 1, 8, 8), state_of, assume, **extras)
    assert live.inputs.shape == (1, 8, 8) and live.inputs.classes == 3
    said = live.assumptions[0]
    for part in ("stride 1", "padding 1", "max pooling of 2 after convolution 1, 2", "1x8x8"):
        assert part in said


def test_the_probe_s_shape_is_a_hint_that_may_be_wrong(state_of):
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 13 * 17, 3))
    state = state_of(Held(*layers).state_dict())
    with pytest.raises(ModelError, match="no usual"):
        build(state)
    assert build(state, None, {"probe": "1x13x17"}).inputs.shape == (1, 13, 17)
    usual = state_of(Held(*CNN).state_dict(), hparams={"input_shape": [1, 8, 8]})
    for wrong in ("3x8x8", "1x51x50"):
        assert build(usual, None, {"probe": wrong}).inputs.shape == (1, 8, 8)
    assert build(usual, None, {"probe": "1x9x9", "input": "1x8x8"}).inputs.shape == (1, 8, 8)


class Functional(nn.Module):
    """As in torch's own tutorials: names without gaps, pooling and flattening in forward."""

    def __init__(self, channels: int, kernel: int, widths: tuple[int, int], flat: int, every: bool):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], kernel)
        self.conv2 = nn.Conv2d(*widths, kernel)
        self.fc1, self.fc2 = nn.Linear(flat, 7), nn.Linear(7, 5)
        self.every = every

    def forward(self, images):
        hidden = functional.relu(self.conv1(images))
        hidden = functional.max_pool2d(hidden, 2) if self.every else hidden
        hidden = functional.max_pool2d(functional.relu(self.conv2(hidden)), 2)
        return self.fc2(functional.relu(self.fc1(hidden.flatten(1))))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Functional(1, 3, (4, 6), 6 * 12 * 12, every=False), (1, 28, 28)),
        (Functional(3, 5, (6, 16), 400, every=True), (3, 32, 32)),
    ],
)
def test_well_known_cnns_without_any_hint(state_of, model, shape):
    live = assert_same(model, torch.randn(3, *shape), state_of)
    assert live.inputs.shape == shape
    assert "other readings fit" in live.assumptions[0]


@pytest.mark.parametrize(
    ("layers", "assume"),
    [
        (
            (nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
            {"input": "2x8x8", "stride": "2"},
        ),
        (
            (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(16, 3)),
            {"input": "2x8x8", "pool": "avg3", "padding": "0"},
        ),
        (
            (
                nn.Conv2d(2, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(4, 3),
            ),
            {"input": "2x8x8", "pool": "global"},
        ),
        (
            (
                nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
                nn.ReLU(),
                nn.Conv2d(4, 6, 1),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(6 * 64, 3),
            ),
            {"input": "4x8x8", "pool": "none"},
        ),
    ],
)
def test_the_user_overrides_the_geometry(state_of, layers, assume):
    if layers[0].groups == 4:
        # Which channels a first convolution groups isn't in its shape, so it needs its input said.
        layers = (nn.Conv2d(1, 4, 1), nn.ReLU(), *layers)
        assume = {**assume, "input": "1x8x8"}
    channels = int(assume["input"][0])
    assert_same(Held(*layers), torch.randn(3, channels, 8, 8), state_of, assume)


def test_sizes_that_fit_nothing_are_refused(state_of):
    state = state_of(Held(*CNN).state_dict())
    with pytest.raises(ModelError, match=r"no usual stride.*--assume input"):
        build(state, None, {"input": "1x50x50", "pool": "none", "stride": "1"})
    with pytest.raises(ModelError, match="takes 1 channels"):
        build(state, None, {"input": "3x8x8"})
    with pytest.raises(ModelError, match="isn't a shape"):
        build(state, None, {"input": "8 by 8"})


def test_convolutions_along_one_axis(state_of):
    """Batch norm, pooling and the length found from the sizes; a length that's said counts."""
    layers = (
        nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(8, 6, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(150, 4),
    )  # fmt: skip
    model = Held(*layers)
    model(torch.randn(16, 3, 100) + 1)
    live = assert_same(model, torch.randn(2, 3, 100), state_of)
    assert (live.inputs.kind, live.inputs.shape, live.inputs.classes) == ("vector", (3, 100), 4)
    assert (
        "padding 2,1, max pooling of 2 after convolution 1, 2, input 3x100" in live.assumptions[0]
    )
    mean = (
        nn.Conv1d(1, 8, 7, stride=2), nn.ReLU(), nn.Conv1d(8, 6, 3), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    assume = {"input": "1x187", "stride": "2,1", "padding": "0", "pool": "global"}
    live = assert_same(Held(*mean), torch.randn(2, 1, 187), state_of, assume)
    assert live.inputs.shape == (1, 187)
    with pytest.raises(ModelError, match="takes 3 channels along one axis"):
        build(state_of(model.state_dict()), None, {"input": "1x28x28"})


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 6)
        self.value, self.advantage = nn.Linear(6, 6), nn.Linear(6, 6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 6), nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Dueling(), "separate branches"),
        (Attention(), "plain MLP or CNN"),
        (nn.Sequential(Block(), Block()), "skip connections"),
        (Recurrent(), "plain MLP or CNN"),
        (nn.Sequential(nn.Embedding(5, 6), nn.LayerNorm(3), nn.Linear(6, 3)), "widths"),
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(4, 3)), "widths"),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Linear(6, 3)), "widths"),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)), "along one axis"),
        (
            nn.Sequential(
                nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
            ),
            "how long its inputs are",
        ),
        (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
            "groups",
        ),
        (nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.Linear(6, 3)), "shape alone"),
        (nn.Conv2d(2, 4, 3), "no linear layer"),
        (nn.LayerNorm(3), "no linear or convolution"),
    ],
)
def test_what_may_not_be_one_chain_is_never_guessed(state_of, model, why):
    with pytest.raises(ModelError, match=why) as error:
        build(state_of(model.state_dict()))
    assert "--model" in str(error.value) and "\n" not in str(error.value)


def test_settings_that_speak_of_skip_connections_refuse(state_of):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    build(state_of(model.state_dict(), config={"model": {"use_residual": False}}))
    with pytest.raises(ModelError, match="use_residual"):
        build(state_of(model.state_dict(), config={"model": {"use_residual": True}}))


def test_willmore(corpus):
    """A tanh MLP with BatchNorm whose settings say so, against the layers written out."""
    run = checkpoints.discover(corpus / "willmore-pinn" / "checkpoints")[0]
    state = run.checkpoints[-1].open()
    live = rebuilt(state)
    hidden = inputs = torch.randn(7, 12)
    for at in (0, 3, 6, 9, 12):
        stored = {
            part: state.read(f"network.{at + 1}.{part}")
            for part in ("running_mean", "running_var", "weight", "bias")
        }
        hidden = functional.linear(
            hidden, state.read(f"network.{at}.weight"), state.read(f"network.{at}.bias")
        )
        hidden = torch.tanh(functional.batch_norm(hidden, **stored))
    expected = functional.linear(
        hidden, state.read("network.15.weight"), state.read("network.15.bias")
    )
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": inputs}), expected)
    assert "tanh after 5 hidden layers" in live.assumptions[0]
    assert "the settings say 2 inputs and the first stored layer takes 12" in live.assumptions[0]


def test_the_same_network_from_a_format_that_sorts_its_names(corpus):
    orders = []
    for name in ("mnist.pt", "mnist.safetensors"):
        run = checkpoints.discover(corpus / "burn" / "mnist" / name)[0]
        live = rebuilt(run.checkpoints[0].open())
        assert live.inputs.shape == (1, 28, 28)
        orders.append([path for path in live.module.order if "_" not in path])
    assert orders[0] == orders[1] == ["conv1", "conv2", "conv3", "norm1", "fc1", "fc2", "norm2"]
