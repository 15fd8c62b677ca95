"""Mixtures of experts: every expert's units over the tokens sent to it, in every stored form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy import Anatomy, Routed, trace, watch
from plastiscope.models.live import Inputs, Live
from plastiscope.replay import Replay, Sampling
from plastiscope.store import Row
from tests.anatomy import zoo
from tests.anatomy.nets import FusedBlock, FusedGPT, inputs_to

EXPERTS, TOP, WIDTH, UNITS = 4, 2, 12, 10
DEAD = 3
"""This unit of expert 1 is never on; expert 3 gets no token."""


class Mixture(nn.Module):
    """A router and experts; how the experts are stored and called is a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.make()

    def make(self) -> None:
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, UNITS), nn.ReLU(), nn.Linear(UNITS, WIDTH))
            for _ in range(EXPERTS)
        )

    def first(self, expert: int) -> tuple[Tensor, Tensor]:
        layer = self.experts[expert][0]
        return layer.weight, layer.bias

    def second(self, expert: int) -> tuple[Tensor, Tensor]:
        layer = self.experts[expert][2]
        return layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP)
        return self.mix(tokens, weights, chosen).reshape(x.shape)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


class BySlot(Mixture):
    """The first choice of every token, then the second, so that an expert runs twice."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for slot in range(TOP):
            for number, expert in enumerate(self.experts):
                rows = (chosen[:, slot] == number).nonzero().flatten()
                if len(rows):
                    out[rows] = out[rows] + expert(x[rows]) * weights[rows, slot, None]
        return out


class Dense(Mixture):
    """Every expert computes every token, and the router's zeros leave out what isn't wanted."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)
        return sum(e(x) * shares[:, [k]] for k, e in enumerate(self.experts))  # type: ignore[return-value]


class Fused(Mixture):
    """One tensor [E, d, u] and one [E, u, d], and a product for each expert that is chosen."""

    def make(self) -> None:
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, UNITS) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, UNITS, WIDTH) * 0.3)

    def first(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.up[expert].T, torch.zeros(UNITS)

    def second(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.down[expert].T, torch.zeros(WIDTH)

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique():
            rows, place = torch.where(chosen == number)
            made = torch.relu(x[rows] @ self.up[number]) @ self.down[number]
            out.index_add_(0, rows, made * weights[rows, place, None])
        return out


class Together(Fused):
    """All experts on all tokens in one batched product."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)
        units = torch.relu(torch.bmm(x.expand(EXPERTS, -1, -1), self.up))
        return (torch.bmm(units, self.down) * shares.T[..., None]).sum(0)


class Picked(Fused):
    """The weights of every token's experts are picked, and one batched product takes them all."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids = chosen.flatten()
        rows = x.repeat_interleave(TOP, 0)[:, None]
        made = torch.bmm(torch.relu(torch.bmm(rows, self.up[ids])), self.down[ids])
        return (made[:, 0] * weights.reshape(-1, 1)).unflatten(0, (-1, TOP)).sum(1)


class Deep(Mixture):
    """Experts of three layers aren't feed-forward parts as they are known."""

    def make(self) -> None:
        super().make()
        for expert in self.experts:
            expert.insert(2, nn.Sequential(nn.Linear(UNITS, UNITS), nn.ReLU()))


class Scaled(Mixture):
    """Tokens are scaled before they go to an expert: they can't be found again."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows] * weights[rows, place, None]))
        return out


class MixtureBlock(FusedBlock):
    def __init__(self, mixture: type[Mixture]) -> None:
        super().__init__(FusedGPT().blocks[0].attn.__class__, WIDTH, 3)
        del self.c_fc, self.c_proj
        self.moe = mixture()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


def network(mixture: type[Mixture]) -> FusedGPT:
    torch.manual_seed(0)
    net = FusedGPT(width=WIDTH, layers=2).eval()
    net.blocks = nn.ModuleList(MixtureBlock(mixture) for _ in range(2))
    with torch.no_grad():
        for block in net.blocks:
            block.moe.router.bias[3] = -1e4
            weight, bias = block.moe.first(1)
            weight[DEAD] = 0.0
            bias[DEAD] = -1.0
    return net


def probe() -> dict[str, Tensor]:
    inputs = torch.randint(20, (12, 8), generator=torch.Generator().manual_seed(2))
    inputs[1] = inputs[0]  # equal tokens in two inputs, so in two folds
    return {"inputs": inputs}


UNIT_METRICS = ("dormant_fraction", "active_fraction", "dead_fraction")


def replayed(
    net: nn.Module,
    forward: Callable[..., Tensor],
    batch: dict[str, Tensor],
    metrics: tuple[str, ...] = UNIT_METRICS,
) -> list[Row]:
    anatomy = trace(net, forward, {k: v[:2] for k, v in batch.items()})
    live = Live(net, Inputs("tokens", (8,), 20), {}, forward, "test")
    replay = Replay(anatomy, len(batch["inputs"]), Sampling(4, 4096, 5, 0))
    replay.run(live, batch, torch.device("cpu"))
    return replay.rows(metrics)


def routed(net: FusedGPT, batch: dict[str, Tensor], block: int) -> list[Tensor]:
    """An independent account: each expert's pre-activations over its tokens [n, u]."""
    return [x @ weight.detach().T + bias.detach() for x, weight, bias in given(net, batch, block)]


def given(
    net: FusedGPT, batch: dict[str, Tensor], block: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each expert's tokens [n, d], its first matrix and its bias."""
    moe = net.blocks[block].moe
    kept: list[Tensor] = []
    hook = moe.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone()))
    with torch.no_grad():
        net(batch["inputs"])
    hook.remove()
    x = kept[0].flatten(0, 1)
    chosen = moe.router(x).topk(TOP).indices
    if "mask" in batch:
        x, chosen = x[batch["mask"].flatten()], chosen[batch["mask"].flatten()]
    parts = [moe.first(k) for k in range(EXPERTS)]
    return [(x[(chosen == k).any(1)], *part) for k, part in enumerate(parts)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mixture", [Mixture, BySlot, Dense, Fused, Together, Picked])
def test_units_are_measured_over_the_tokens_sent_there(
    mixture: type[Mixture], masked: bool
) -> None:
    """A dead unit in one expert, and an expert that no token was sent to: not_routed, no value."""
    net, batch = network(mixture), probe()
    if masked:
        batch["mask"] = torch.arange(8)[None] < torch.arange(12)[:, None] % 5 + 3
    rows = replayed(net, inputs_to(net), batch)
    for block in (0, 1):
        own = routed(net, batch, block)
        for number, before in enumerate(own):
            found = {
                (r.metric, r.parameters): r
                for r in rows
                if (r.component, r.block) == (f"expert {number} activation", block)
            }
            dead, active = found["dead_fraction", ""], found["active_fraction", ""]
            dormant = found["dormant_fraction", "tau=0"]
            if number == 3:
                assert {r.status for r in found.values()} == {"not_routed"}
                assert {r.value for r in found.values()} == {None}
                continue
            assert dormant.rows == len(before) and dormant.columns == UNITS
            off = (before <= 0).all(0)
            assert bool(off[DEAD]) or number != 1
            assert dead.value == dormant.value == pytest.approx(off.double().mean().item())
            assert active.value == pytest.approx((before > 0).double().mean().item())
            assert active.standard_error is not None and active.standard_error > 0
    (pooled,) = [r for r in rows if r.component == "network" and r.parameters == "pooled, tau=0"]
    every = [b for block in (0, 1) for b in routed(net, batch, block)[:3]]
    share = sum((b <= 0).all(0).sum().item() for b in every) / (len(every) * UNITS)
    assert pooled.value == pytest.approx(share)  # the unrouted expert counts nowhere


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the singular values' shares."""
    p = torch.linalg.svdvals(x.double())
    p = p[p > 0] / p.sum()
    return float((-(p * p.log()).sum()).exp())


@pytest.mark.parametrize("mixture", [Mixture, BySlot, Dense, Fused, Together, Picked])
def test_every_part_of_an_expert_has_features(mixture: type[Mixture]) -> None:
    """Of fc1, the activation and fc2 over the tokens sent there; an unrouted expert says so."""
    net, batch = network(mixture), probe()
    batch["mask"] = torch.arange(8)[None] < torch.arange(12)[:, None] % 5 + 3
    rows = replayed(net, inputs_to(net), batch, ("effective_rank", "feature_norm"))
    found = {(r.component, r.block, r.metric): r for r in rows if r.tokens == "all"}
    for block in (0, 1):
        for number, before in enumerate(routed(net, batch, block)):
            weight, bias = (p.detach() for p in net.blocks[block].moe.second(number))
            units = before.relu()
            parts = {"fc1": before, "activation": units, "fc2": units @ weight.T + bias}
            for name, x in parts.items():
                rank, norm = (
                    found[f"expert {number} {name}", block, m]
                    for m in ("effective_rank", "feature_norm")
                )
                if number == 3:
                    assert (rank.value, rank.status) == (None, "not_routed")
                    continue
                assert (rank.rows, rank.columns) == tuple(x.shape)
                assert rank.value == pytest.approx(effective_rank(x), rel=1e-4)
                assert norm.value == pytest.approx(float(x.norm(dim=-1).mean()), rel=1e-5)


def test_a_bound_on_the_rows_takes_the_same_tokens_for_experts() -> None:
    """Those that every other component is measured on: no more in all than are asked for."""
    net, batch = network(Mixture), probe()
    anatomy = trace(net, inputs_to(net), {k: v[:2] for k, v in batch.items()})
    live = Live(net, Inputs("tokens", (8,), 20), {}, inputs_to(net), "test")
    replay = Replay(anatomy, 12, Sampling(4, 24, 5, 0))
    replay.run(live, batch, torch.device("cpu"))
    rows = {r.component: r for r in replay.rows(("feature_norm",)) if r.block == 0}
    sent = [rows[f"expert {k} fc2"].rows or 0 for k in range(3)]
    assert rows["residual1"].rows == 24 and sum(sent) == 24 * TOP


@pytest.mark.parametrize(
    ("mixture", "reason"), [(Scaled, "inputs_not_told_apart"), (Deep, "expert_not_read")]
)
def test_what_isnt_seen_of_an_expert_says_why(mixture: type[Mixture], reason: str) -> None:
    """Never a number of half the tokens, never not_routed for an expert that ran, never nothing."""
    net = network(mixture)
    rows = replayed(net, inputs_to(net), probe(), ("effective_rank", "dead_fraction"))
    rows = [r for r in rows if str(r.component).startswith("expert ")]
    deep = mixture is Deep
    parts = [""] if deep else [" fc1", " activation", " fc2"]
    names = {str(r.component) for r in rows if r.metric == "effective_rank"}
    assert names == {f"expert {k}{p}" for k in range(4) for p in parts}
    unrouted = reason if deep else "not_routed"
    assert {r.status for r in rows if "expert 3" in str(r.component)} == {unrouted}
    assert {r.status for r in rows if "expert 3" not in str(r.component)} == {reason}
    assert all(r.value is None for r in rows)


def hugging_face(name: str, implementation: str) -> tuple[zoo.Model, Anatomy]:
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kinds = {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {**extra, "decoder_sparse_step": 1, "head_dim": 8},
        "Qwen2Moe": {**extra, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 24},
        "GptOss": {"num_local_experts": 4, "head_dim": 8, "num_experts_per_tok": 2},
    }
    values = {**zoo.TEXT, **kinds[name]}
    model = zoo.hugging_face(f"{name}ForCausalLM", f"{name}Config", "eager", **values)
    model.module.config._experts_implementation = implementation
    return model, trace(model.module, model.forward, model.batch)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Qwen2Moe", "GptOss"])
def test_fused_experts_of_a_library(name: str, implementation: str) -> None:
    """Units and tokens against the library's own weights and choice."""
    torch.manual_seed(0)
    model, anatomy = hugging_face(name, implementation)
    seen: dict[int, list[Routed]] = {}
    given: dict[str, Tensor] = {}
    mlp = model.module.model.layers[0].mlp
    hook = mlp.experts.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(
            zip(("x", "chosen"), [*args, *kwargs.values()][:2], strict=True)
        ),
        with_kwargs=True,
    )
    with (
        torch.no_grad(),
        watch(
            model.module, {}, {}, lambda *_: None, lambda *_: None,
            experts={0: anatomy.experts[0]},
            on_expert=lambda _, k, r: seen.setdefault(k, []).append(r),
        ) as watching,
    ):  # fmt: skip
        model.forward(model.batch)
        watching.check()
    hook.remove()
    x, chosen = given["x"].reshape(-1, 32), given["chosen"].reshape(-1, 2)
    experts = mlp.experts
    for number in range(4):
        tokens = (chosen == number).any(1).nonzero().flatten()
        if not len(tokens):
            assert number not in seen
            continue
        (found,) = seen[number]
        assert found.numbers.sort().values.tolist() == tokens.tolist() and found.tokens == 14
        rows = x[found.numbers]
        if name == "GptOss":
            both = rows @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
            units = experts._apply_gate(both)
            assert found.before is None and not found.outputs  # biases are added later
        else:
            gate, up = F.linear(rows, experts.gate_up_proj[number]).chunk(2, -1)
            units = F.silu(gate) * up
            torch.testing.assert_close(found.before, gate)
            made = {"gate": gate, "fc1": up, "fc2": F.linear(units, experts.down_proj[number])}
            torch.testing.assert_close(dict(found.outputs), made)
        torch.testing.assert_close(found.units, units)


def test_parts_of_experts_are_cut_from_their_tensors() -> None:
    """Each expert's gate, fc1 and fc2, and the shared expert under the block's own names."""
    model, anatomy = hugging_face("Qwen2Moe", "grouped_mm")
    weights = dict(model.module.named_parameters())
    parts = {c.name: c for c in anatomy.components if c.block == 0}
    gate_up = weights["model.layers.0.mlp.experts.gate_up_proj"]
    (gate,), (fc1,), (fc2,) = (parts[f"expert 2 {n}"].weights for n in ("gate", "fc1", "fc2"))
    assert torch.equal(gate.of(gate_up), gate_up[2, :16])
    assert torch.equal(fc1.of(gate_up), gate_up[2, 16:])
    down = weights["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(fc2.of(down), down[2])
    assert parts["expert 2 activation"].function == "silu"
    assert parts["fc1"].path == "model.layers.0.mlp.shared_expert.up_proj"
    assert parts["activation"].function == "silu"
    assert parts["router"].path == "model.layers.0.mlp.gate"


def test_experts_that_got_no_token_in_the_trace_are_listed_too() -> None:
    """Their matrices are those of the expert that ran, under their own numbers."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 12, bias=False)
            self.heap = nn.ModuleList(
                nn.ModuleDict({"w1": nn.Linear(8, 4), "w2": nn.Linear(4, 8)}) for _ in range(12)
            )

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1, keepdim=True)
            out = torch.zeros_like(x)
            for k, expert in enumerate(self.heap):
                rows = (chosen[..., 0] == k).nonzero(as_tuple=True)
                if len(rows[0]):
                    out[rows] = expert["w2"](F.silu(expert["w1"](x[rows]))) * weight[rows]
            return out

    net = FusedGPT(width=8, heads=2, layers=1)
    net.blocks[0].c_fc, net.blocks[0].c_proj = nn.Identity(), Listed()
    anatomy = trace(net, inputs_to(net), {"inputs": torch.arange(4)[None]})
    found = {c.name: [m.tensor for m in c.weights] for c in anatomy.components if "ert " in c.name}
    assert list(found) == [
        f"expert {k} {part}" for k in range(12) for part in ("fc1", "activation", "fc2")
    ]
    assert found["expert 11 fc2"] == ["blocks.0.c_proj.heap.11.w2.weight"]
    assert anatomy.experts[0].count == 12
