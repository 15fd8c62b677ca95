"""Plain stacks of layers: what the trace finds in MLPs, CNNs and recurrent networks."""

from __future__ import annotations

import torch
from torch import nn

from plastiscope.anatomy import Site, trace
from tests.anatomy import zoo
from tests.anatomy.nets import inputs_to
from tests.anatomy.test_trace import part


def test_mlp_and_cnn_blocks_are_their_layers() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3), nn.LeakyReLU(), nn.Flatten(), nn.Linear(20, 7), nn.Tanh(),
        nn.Linear(7, 3),
    )  # fmt: skip
    anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(2, 1, 8, 8)})
    rows = [(c.name, c.block, c.path, c.function, c.channel_axis) for c in anatomy.components]
    assert rows == [
        ("conv", 0, "0", None, 1),
        ("norm", 0, "1", None, 1),
        ("activation", 0, "2", "relu", 1),
        ("conv", 1, "4", None, 1),
        ("activation", 1, "5", "leaky_relu", 1),
        ("fc", 2, "7", None, -1),
        ("activation", 2, "8", "tanh", -1),
        ("head", None, "9", None, -1),
    ]


def test_resnet_activations_are_counted_once_each() -> None:
    model = zoo.build("tv_resnet")
    anatomy = trace(model.module, model.forward, model.batch)
    names = [c.name for c in anatomy.components]
    assert (names.count("conv"), names.count("norm"), names.count("activation")) == (12, 12, 9)
    assert {c.channel_axis for c in anatomy.components if c.name == "conv"} == {1}
    assert part(anatomy, "head", None).path == "fc"


def test_layouts_of_convolutions() -> None:
    """M10: [out, in/groups k]; a transposed one is stored with its inputs first."""
    layers = {
        (8, 12): nn.ConvTranspose2d(3, 8, 2),
        (16, 9): nn.Conv2d(16, 16, 3, groups=16),
        (8, 20): nn.Conv1d(4, 8, 5),
        (8, 4): nn.Conv2d(4, 8, 1),
    }
    for shape, layer in layers.items():
        net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        size = (2, layer.in_channels, *[6] * (layer.weight.ndim - 2))
        net(torch.zeros(size))
        anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(size)})
        matrix = part(anatomy, "conv").weights[0].of(layer.weight)
        assert tuple(matrix.shape) == shape
    weight = layers[8, 4].weight
    torch.testing.assert_close(matrix, weight[:, :, 0, 0])


def test_written_out_activation_is_one_function() -> None:
    """x * sigmoid(x) is silu, not a sigmoid; its output is what the next layer consumes."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            h = h * torch.sigmoid(h)
            z = self.b(h)
            return self.c(h + z * torch.sigmoid(1.702 * z))

    net = Written()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(2, 4)})
    assert part(anatomy, "activation", 0).function == "silu"
    assert part(anatomy, "activation", 0).features == Site("b", port="input")
    assert part(anatomy, "activation", 1).function == "gelu"
    assert part(anatomy, "activation", 1).features == Site("", op="mul", ordinal=2)


def test_recurrent_parts_are_measured_by_weight() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.cell, self.head = nn.Linear(4, 6), nn.LSTM(6, 5), nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cell(torch.relu(self.embed(x)))[0])

    net = Recurrent()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(3, 2, 4)})
    names = [(c.name, c.block) for c in anatomy.components]
    assert ("cell.weight_ih_l0", None) in names and ("cell.weight_hh_l0", None) in names
    assert part(anatomy, "head", None).path == "head"
    assert part(anatomy, "activation", 0).function == "relu"
    assert anatomy.unexplained == ()
