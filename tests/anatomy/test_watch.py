"""Watching a forward pass: what is seen, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import AttentionCall, Site, trace, watch
from plastiscope.errors import NotEnoughEvidenceError
from tests.anatomy.nets import ExplicitAttention, FlashAttention, FusedGPT, inputs_to


def ignore(*_: object) -> None:
    pass


def test_rewritten_tensor_is_recorded_as_it_was() -> None:
    """R04: a Linear before ReLU(inplace) has negative outputs; the model's own are zeroed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True))
    seen: dict[str, torch.Tensor] = {}
    sites = {"before": Site("0"), "after": Site("1"), "input": Site("1", port="input")}
    with torch.no_grad(), watch(net, sites, {}, seen.__setitem__, ignore) as watching:
        net(torch.randn(16, 6))
        watching.check()
    assert seen["before"].min() < -0.3
    assert seen["after"].min() == 0.0
    torch.testing.assert_close(seen["input"], seen["before"])


def test_one_module_used_twice_gives_two_records() -> None:
    """R05: two Linears of widths 6 and 5 around one ReLU."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.act(self.b(self.act(self.a(x)))))

    net = Shared()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.randn(2, 4)})
    sites = {c.block: c.features for c in anatomy.components if c.name == "activation"}
    seen: dict[object, torch.Tensor] = {}
    with torch.no_grad(), watch(net, sites, {}, seen.__setitem__, ignore) as watching:
        net(torch.randn(3, 4))
        watching.check()
    assert {k: tuple(v.shape) for k, v in seen.items()} == {0: (3, 6), 1: (3, 5)}
    assert all(v.min() >= 0 for v in seen.values())


def test_functional_activation_and_module_give_the_same_values() -> None:
    """R06: fc2(F.relu(fc1(x))) and its nn.ReLU twin."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 9), nn.Linear(9, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc2(F.relu(self.fc1(x)))

    torch.manual_seed(1)
    net = Functional()
    twin = nn.Sequential(net.fc1, nn.ReLU(), net.fc2)
    x = torch.randn(5, 4)
    found = []
    for each in (net, twin):
        anatomy = trace(each, inputs_to(each), {"inputs": x})
        (activation,) = [c for c in anatomy.components if c.name == "activation"]
        assert activation.function == "relu"
        seen: dict[str, torch.Tensor] = {}
        sites = {"after": activation.features, "before": activation.pre_activation}
        with torch.no_grad(), watch(each, sites, {}, seen.__setitem__, ignore) as watching:
            each(x)
            watching.check()
        found.append(seen)
    torch.testing.assert_close(found[0], found[1])
    assert found[0]["before"].min() < 0 <= found[0]["after"].min()


def test_flags_buffers_and_random_state_are_put_back() -> None:
    """R08: a model in train mode with one BatchNorm frozen in eval."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    net.train()
    net[3].eval()
    flags = [m.training for m in net.modules()]
    before = {k: v.clone() for k, v in net.state_dict().items()}
    random = torch.random.get_rng_state()
    outputs = []
    for _ in range(2):
        with torch.no_grad(), watch(net, {"x": Site("1")}, {}, ignore, ignore) as watching:
            outputs.append(net(torch.ones(3, 4)))
            watching.check()
    assert [m.training for m in net.modules()] == flags
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    assert torch.equal(outputs[0], outputs[1])
    net.eval()
    with torch.no_grad():
        assert torch.equal(net(torch.ones(3, 4)), outputs[0])


def test_everything_is_restored_after_an_exception() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    check = F.has_torch_function
    with (
        pytest.raises(RuntimeError, match="shapes"),
        watch(net, {"x": Site("0")}, {}, ignore, ignore),
    ):
        net(torch.ones(3, 5))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert F.has_torch_function is check
    assert torch.backends.mha.get_fastpath_enabled()
    assert net.training


def test_site_never_reached_is_an_error_by_name() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad(), watch(net, {"block 7 fc1": Site("7")}, {}, ignore, ignore) as watching:
        net(torch.ones(3, 4))
        with pytest.raises(NotEnoughEvidenceError, match="block 7 fc1"):
            watching.check()


def test_gradients_can_be_taken_of_what_was_seen() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    seen: dict[str, torch.Tensor] = {}
    with watch(
        net, {"h": Site("1")}, {}, seen.__setitem__, ignore, clone=False, detach=False
    ) as watching:
        output = net(torch.ones(2, 4))
        watching.check()
        (gradient,) = torch.autograd.grad(output.sum(), seen["h"])
    torch.testing.assert_close(gradient, net[2].weight.detach().expand(2, 3))


def attention_of(net: nn.Module, tokens: torch.Tensor) -> dict[object, AttentionCall]:
    anatomy = trace(net, inputs_to(net), {"inputs": tokens})
    seen: dict[object, AttentionCall] = {}
    with torch.no_grad(), watch(net, {}, anatomy.attention, ignore, seen.__setitem__) as watching:
        net(tokens)
        watching.check()
    return seen


@pytest.mark.parametrize("attention", [FlashAttention, ExplicitAttention])
def test_uniform_causal_rows(attention: type[nn.Module]) -> None:
    """R01, R10: with q = 0 row i is uniform over i + 1 keys: entropies 0, ln 2, ln 3, ln 4."""
    net = FusedGPT(attention, width=12, heads=3, layers=1, vocabulary=7, length=4)
    weight = net.blocks[0].attn.c_attn.weight
    with torch.no_grad():
        weight[:12] = 0.0
        net.blocks[0].attn.c_attn.bias.zero_()
    call = attention_of(net, torch.randint(7, (2, 4)))[0]
    p = call.probabilities
    assert p.shape == (2, 3, 4, 4)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().expand(2, 3, 4)
    torch.testing.assert_close(entropy, expected)
    assert call.visible is not None
    assert torch.equal(call.visible.expand(2, 3, 4, 4)[1, 2], torch.ones(4, 4).bool().tril())


def test_fused_and_explicit_attention_agree() -> None:
    torch.manual_seed(0)
    nets = [FusedGPT(a, 12, 3, 2, 7, 6) for a in (FlashAttention, ExplicitAttention)]
    nets[1].load_state_dict(nets[0].state_dict())
    tokens = torch.randint(7, (2, 6))
    first, second = (attention_of(net, tokens) for net in nets)
    assert list(first) == list(second) == [0, 1]
    for block in first:
        for name in ("q", "k", "v", "output", "probabilities"):
            torch.testing.assert_close(getattr(first[block], name), getattr(second[block], name))
        rebuilt = first[block].probabilities @ first[block].v
        torch.testing.assert_close(rebuilt, first[block].output)
