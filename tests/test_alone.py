"""Which module's numbers a component gets: shared modules, functions, tied weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from plastiscope.alone import components_alone
from plastiscope.anatomy import trace
from plastiscope.derivatives import jacobian_rows
from plastiscope.models.live import Inputs, Live
from plastiscope.network import Network
from plastiscope.sensitivity import sensitivity_rows
from plastiscope.store import Row

CHOSEN = frozenset({"jacobian_sigma_max", "rate_of_change"})
Rows = dict[tuple[str, int | None, str], Row]


def measured(net: nn.Module, x: Tensor) -> Rows:
    """The mean of each metric of each component, by component, block and metric."""
    net = net.eval().requires_grad_(False)

    def forward(batch: dict[str, Tensor]) -> Tensor:
        return net(batch["inputs"])

    network = opened(net, x, forward)
    rows = [
        *jacobian_rows(network, {"inputs": x}, CHOSEN, 0),
        *sensitivity_rows(network, {"inputs": x}, CHOSEN),
    ]
    return {
        (r.component, r.block, r.metric): r for r in rows if "quantile" not in (r.parameters or "")
    }


def opened(net: nn.Module, x: Tensor, forward: Callable[..., Tensor]) -> Network:
    inputs = Inputs("vector", tuple(x.shape[1:]))
    live = Live(net, inputs, {}, forward, "test")
    anatomy = trace(net, forward, {"inputs": x})
    return Network(anatomy, live, (), None, (), torch.device("cpu"), False)


def rate(x: Tensor, fx: Tensor) -> float:
    """Mean ratio over all pairs; with at most 5 inputs all of them are taken."""
    pairs = itertools.combinations(range(len(x)), 2)
    return float(np.mean([float((fx[i] - fx[j]).norm() / (x[i] - x[j]).norm()) for i, j in pairs]))


class Shared(nn.Module):
    """One pre-norm block called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([block] * 3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def test_blocks_that_share_a_module_have_their_own_numbers() -> None:
    torch.manual_seed(0)
    net, x = Shared().double(), torch.randn(5, 4, 5).double()
    found = measured(net, x)
    stream = net.embed(x)
    block = net.blocks[0]
    for number in range(3):
        wide = torch.stack(
            [jacrev(lambda z: block(z[None])[0])(one).reshape(32, 32) for one in stream]
        )
        sigma = float(torch.linalg.svdvals(wide)[:, 0].mean())
        row = found["block", number, "jacobian_sigma_max"]
        assert row.value == pytest.approx(sigma, rel=1e-6)
        given = block.norm1(stream)
        attended = block.self_attn(given, given, given)[0]
        row = found["attention", number, "rate_of_change"]
        assert row.value == pytest.approx(rate(given, attended), rel=1e-6)
        row = found["norm1", number, "rate_of_change"]
        assert row.value == pytest.approx(rate(stream, given), rel=1e-6)
        stream = block(stream)


class Layers(nn.Module):
    """Three layers, the second called twice, with functions as activations."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.b):
            x = self.function(layer(x))
        return self.out(x)


def test_functions_and_a_layer_used_twice_are_measured() -> None:
    torch.manual_seed(0)
    net, x = Layers(torch.tanh).double(), torch.randn(5, 6).double()
    found = measured(net, x)
    for number, layer in enumerate((net.a, net.b, net.b)):
        before = layer(x)
        after = torch.tanh(before)
        assert found["fc", number, "rate_of_change"].value == pytest.approx(rate(x, before))
        row = found["activation", number, "rate_of_change"]
        assert row.value == pytest.approx(rate(before, after))
        slope = (1 - after**2).max(1).values.mean()
        row = found["activation", number, "jacobian_sigma_max"]
        assert row.value == pytest.approx(float(slope), rel=1e-6)
        x = after
    weight = torch.linalg.svdvals(net.out.weight)[0]
    assert found["head", None, "jacobian_sigma_max"].value == pytest.approx(float(weight))


def test_a_function_that_its_name_does_not_tell_whole_is_a_null_row() -> None:
    torch.manual_seed(0)
    found = measured(Layers(nn.functional.gelu), torch.randn(5, 6))
    for metric in CHOSEN:
        row = found["activation", 0, metric]
        assert (row.value, row.status) == (None, "no_module_of_its_own")


class Again(nn.Module):
    """A layer whose second output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(torch.relu(self.a(x)))
        self.a(x * 2)
        return y


def test_a_call_that_no_component_explains_is_a_null_row() -> None:
    torch.manual_seed(0)
    found = measured(Again(), torch.randn(5, 6))
    for component in ("fc", "activation"):
        row = found[component, 0, "rate_of_change"]
        assert (row.value, row.status) == (None, "called_otherwise")
    assert found["head", None, "rate_of_change"].status == "ok"


class Tied(nn.Module):
    """A language model's head on the table of its tokens; a feed-forward on rows [B*T, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.table(ids))
        return self.head(self.norm(x.flatten(0, 1))).unflatten(0, ids.shape)


def test_a_tied_head_is_its_own_module_and_pairs_are_of_whole_inputs() -> None:
    torch.manual_seed(0)
    net, ids = Tied().double(), torch.randint(0, 9, (5, 4))
    found = measured(net, ids)
    sigma = torch.linalg.svdvals(net.head.weight)[0]
    row = found["head", None, "jacobian_sigma_max"]
    assert row.value == pytest.approx(float(sigma), rel=1e-6)
    x = net.layer(net.table(ids)).flatten(0, 1)
    y = net.norm(x)
    row = found["final_norm", None, "rate_of_change"]
    assert row.value == pytest.approx(rate(x.reshape(5, -1), y.reshape(5, -1)), rel=1e-6)
    for place in (("embedding", None), ("network", None)):
        assert found[(*place, "jacobian_sigma_max")].status == "takes_ids"
    assert found["q", 0, "rate_of_change"].status == "part_of_attention"


def test_every_component_is_measured_or_says_why_not() -> None:
    torch.manual_seed(0)
    net, x = Shared().eval(), torch.randn(5, 4, 5)
    network = opened(net, x, lambda batch: net(batch["inputs"]))
    alone = components_alone(network)
    names = {(c.name, c.block) for c in network.anatomy.components if c.features is not None}
    streams = {(f"residual{k}", block) for k in (1, 2) for block in range(3)}
    assert names - streams <= set(alone.calls) | set(alone.obstacles)
    assert not set(alone.calls) & set(alone.obstacles)
