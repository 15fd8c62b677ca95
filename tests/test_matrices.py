"""Jacobians of components that are a matrix: rows of a fused projection, a tensor of all heads, an
expert; and what isn't one says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

from plastiscope.anatomy import trace
from plastiscope.derivatives import jacobian_rows, parameter_owners
from plastiscope.models.live import Inputs, Live
from plastiscope.network import Network
from plastiscope.observations import observe_jacobians, observe_ntk
from plastiscope.sensitivity import sensitivity_rows
from plastiscope.store import Row
from tests.anatomy.nets import ExplicitAttention, FusedGPT, inputs_to
from tests.anatomy.test_experts import Fused, hugging_face, network, probe

CHOSEN = frozenset({"jacobian_sigma_max", "jacobian_frobenius", "rate_of_change_bound"})
WIDTH, HEADS = 12, 3


def opened(net: nn.Module, x: Tensor) -> Network:
    net = net.eval().requires_grad_(False)
    live = Live(net, Inputs("vector", tuple(x.shape[1:])), {}, inputs_to(net), "test")
    anatomy = trace(net, inputs_to(net), {"inputs": x[:2]})
    return Network(anatomy, live, (), None, (), torch.device("cpu"), False)


def jacobians(net: nn.Module, x: Tensor) -> dict[tuple[str, int | None, str], Row]:
    """The mean over inputs of each metric."""
    rows = list(jacobian_rows(opened(net, x), {"inputs": x[:3]}, CHOSEN, 0))
    return {
        (str(r.component), r.block, r.metric): r for r in rows if "quantile" not in r.parameters
    }


class Separate(ExplicitAttention):
    """q, k and v are Linears of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.c_attn
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def split(self, x: Tensor) -> list[Tensor]:
        return [f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]


class Einsum(Separate):
    """q, k and v are tensors [H, d, dh]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.q, self.k, self.v
        self.w = nn.Parameter(torch.randn(3, heads, width, width // heads))

    def split(self, x: Tensor) -> list[Tensor]:
        return list(torch.einsum("btd,shde->sbhte", x, self.w))


def of_token(split: Callable[..., list[Tensor]], place: int) -> Callable[[Tensor], Tensor]:
    """q, k or v, all heads, as a function of one token."""
    return lambda token: split(token[None, None])[place].flatten()


@pytest.mark.parametrize("attention", [ExplicitAttention, Separate, Einsum])
def test_q_k_and_v_have_the_singular_values_of_their_own_rows(
    attention: type[ExplicitAttention],
) -> None:
    """Against the derivative of the model's own function, token by token."""
    torch.manual_seed(0)
    net = FusedGPT(attention, WIDTH, HEADS, 2).double()
    with torch.no_grad():
        for number, parameter in enumerate(net.blocks.parameters()):
            parameter *= 1 + 0.1 * number  # no two matrices alike
    x = torch.randint(20, (4, 6))
    found = jacobians(net, x)
    token = torch.randn(WIDTH).double()
    for block in (0, 1):
        split = net.blocks[block].attn.split
        for place, name in enumerate("qkv"):
            sigma = np.linalg.svd(jacrev(of_token(split, place))(token).numpy(), compute_uv=False)
            most, whole = (
                found[name, block, m] for m in ("jacobian_sigma_max", "jacobian_frobenius")
            )
            assert most.value == pytest.approx(sigma[0], rel=1e-9)
            assert whole.value == pytest.approx(np.sqrt((sigma**2).sum()), rel=1e-9)
            assert (most.rows, most.columns) == (WIDTH, WIDTH)


class Neighbours(Separate):
    """q takes neighbouring tokens in: its matrix isn't its Jacobian."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.q = nn.Conv1d(width, width, 3, padding=1)

    def split(self, x: Tensor) -> list[Tensor]:
        parts = [self.q(x.mT).mT, self.k(x), self.v(x)]
        return [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in parts]


class Apart(Separate):
    """Each head has its own slice of the token as its input: a matrix of blocks, not W."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.q
        self.w = nn.Parameter(torch.randn(heads, width // heads, width // heads))

    def split(self, x: Tensor) -> list[Tensor]:
        q = torch.einsum("bthd,hde->bhte", x.unflatten(-1, (HEADS, -1)), self.w)
        return [q, *(f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.k, self.v))]


@pytest.mark.parametrize("attention", [Neighbours, Apart])
def test_what_a_matrix_doesn_t_tell_is_refused(attention: type[nn.Module]) -> None:
    torch.manual_seed(0)
    found = jacobians(FusedGPT(attention, WIDTH, HEADS, 1), torch.randint(20, (4, 6)))
    q, k = (found[name, 0, "jacobian_sigma_max"] for name in "qk")
    assert (q.value, q.status) == (None, "part_of_attention")
    assert k.value is not None


def test_experts_have_the_singular_values_of_their_own_slices() -> None:
    """Also one that no token went to; what isn't linear, or isn't given inputs, says so."""
    net, x = network(Fused), probe()["inputs"]
    rows = jacobians(net, x)
    for number in (0, 3):
        for name, tensor in (("fc1", "up"), ("fc2", "down")):
            sigma = torch.linalg.svdvals(getattr(net.blocks[1].moe, tensor)[number].double())
            found = rows[f"expert {number} {name}", 1, "jacobian_sigma_max"]
            assert found.value == pytest.approx(float(sigma[0]), rel=1e-6)
        found = rows[f"expert {number} activation", 1, "jacobian_sigma_max"]
        assert (found.value, found.status) == (None, "part_of_experts")
    opening = opened(net, x)
    bounds = {
        (r.component, r.block): r.value
        for r in sensitivity_rows(opening, {"inputs": x[:3]}, frozenset({"rate_of_change_bound"}))
    }
    sigma = torch.linalg.svdvals(net.blocks[1].moe.down[3].double())
    assert bounds["expert 3 fc2", 1] == pytest.approx(float(sigma[0]), rel=1e-6)
    owners = parameter_owners(opening)
    assert owners["blocks.1.moe.down"] == ("experts fc2", 1)


def test_the_embedding_protocol_without_blocks_is_a_row_with_the_reason() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    x = torch.randn(4, 5)
    chosen = frozenset({"rate_of_change_embedding"})
    rows = list(sensitivity_rows(opened(net, x), {"inputs": x}, chosen))
    assert [(r.component, r.value, r.status) for r in rows] == [("network", None, "no_attention")]


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_layers_of_zeros_with_channels_last_have_their_own_jacobian(skip: float) -> None:
    """As initialised after a residual: nothing, or what was skipped, and no error."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            nn.init.zeros_(self.norm.weight)

        def forward(self, x: Tensor) -> Tensor:
            return skip * x + self.norm(self.linear(x))

    net = Part().eval().requires_grad_(False)
    x = torch.randn(2, 5, 3, 4)
    found = observe_jacobians(net, lambda b: net(b["x"]), {"x": x}, {"whole": ""})["whole"]
    np.testing.assert_allclose(found.nodes, skip, atol=1e-6)


def test_a_cache_of_keys_is_found_as_it_was() -> None:
    """Or a block called again would attend to the keys of earlier calls too."""

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.k(x))
            keys = torch.cat(cache, 1)
            return (self.q(x) @ keys.mT).softmax(-1) @ keys

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Remembering()

        def forward(self, x: Tensor) -> Tensor:
            cache: list[Tensor] = []
            return self.block(x, cache)

    torch.manual_seed(0)
    net, x = Net().eval().double(), torch.randn(2, 5, 6).double()
    found = observe_jacobians(net, lambda b: net(b["x"]), {"x": x}, {0: "block"})[0]
    own = [jacrev(lambda t: net(t[None]).flatten())(one).flatten(1) for one in x]
    sigma = torch.linalg.svdvals(torch.stack(own).detach())
    np.testing.assert_allclose(np.sort(found.nodes)[:, ::-1], sigma.numpy(), rtol=1e-7, atol=1e-9)


def test_experts_have_the_kernel_of_their_own_gradients() -> None:
    """Those of all experts in one tensor, which are taken input by input."""
    model, anatomy = hugging_face("Mixtral", "eager")
    net, name = model.module, "model.layers.0.mlp.experts.down_proj"
    live = Live(net, Inputs("tokens", (7,), 60), {}, model.forward, "test")
    opening = Network(anatomy, live, (), None, (), torch.device("cpu"), False)
    found = observe_ntk(net, model.forward, model.batch, components=parameter_owners(opening))
    weight = net.get_parameter(name)
    own = []
    for one in model.batch["inputs"]:
        (gradient,) = torch.autograd.grad(model.forward({"inputs": one[None]}).mean(), weight)
        own.append(gradient.flatten().double())
    expected = torch.stack(own) @ torch.stack(own).T
    gram = found["experts fc2", 0].gram
    np.testing.assert_allclose(gram, expected.numpy(), rtol=1e-4, atol=1e-5 * float(expected.max()))
    assert name not in found
