"""How often the CPU waits for a device: never while a batch runs, and a few times a component."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from plastiscope.anatomy import trace
from plastiscope.metrics import METRICS
from plastiscope.models.live import Inputs, Live
from plastiscope.observations import observe_ntk, observe_rate_of_change, plan_ntk
from plastiscope.replay import Replay, Sampling
from tests.devices import networks
from tests.devices.present import DEVICES

if "sim" not in DEVICES:
    pytest.skip("this PyTorch makes no device in Python", allow_module_level=True)

from tests.devices.accelerator import waits

EVERYTHING = [metric.name for metric in METRICS]


def vit(depth: int) -> tuple[Live, dict[str, Tensor]]:
    torch.manual_seed(0)
    net = networks.TinyViT(depth).eval().to("sim")
    live = Live(net, Inputs("image", (3, 8, 8)), {}, lambda batch: net(batch["inputs"]), "test")
    return live, {"inputs": torch.randn(12, 3, 8, 8), "labels": torch.arange(12) % 4}


def replayed(depth: int) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]], Replay]:
    """Waits while 3 batches run and while the rows are made of them."""
    live, batch = vit(depth)
    anatomy = trace(live.module, live.forward, {"inputs": batch["inputs"][:2].to("sim")})
    replay = Replay(anatomy, 12, Sampling(4, 48, 4, 0, maps=4))
    with waits() as running:
        replay.run(live, batch, torch.device("sim"))
    sums = (*replay.features.values(), *replay.per_head.values())
    # Features: the moments, then the rest; units: for their own rows and for the network's.
    parts = 2 * len(sums) + 2 * len(replay.units) + len(replay.attention) + 1
    with waits() as ending:
        rows = replay.rows(EVERYTHING)
    assert len(rows) > 300 and ending.total() <= parts
    return running, ending, replay


def test_no_component_is_waited_for_while_a_batch_runs() -> None:
    running, ending, _ = replayed(2)
    deeper, later, _ = replayed(4)
    # Of each batch the inputs, the labels and which of its tokens count are sent. Only the rank of
    # the attention's maps, which is of some inputs, needs its own solver in each block.
    ranks = Counter({key: n for key, n in running.items() if "attention.py" in key[1]})
    assert ranks.total() == 2 and running - ranks == deeper - ranks - ranks
    assert {kind for kind, _ in running - ranks} == {"send"}
    assert (running - ranks).total() <= 3 * 6
    # Afterwards a component's sums are fetched together, and nothing is asked for by itself.
    assert {kind for kind, _ in (*ending, *later)} <= {"synchronize", "fetch"}


@pytest.mark.parametrize("function", ["mean_logit", "loss", "logits"])
def test_a_kernel_is_fetched_once(function: str) -> None:
    """Of all components, however deep the network is."""
    counts = []
    for depth in (2, 4):
        live, batch = vit(depth)
        batch = {name: tensor[:4].to("sim") for name, tensor in batch.items()}
        plan = plan_ntk(live.module, live.forward, batch)
        owners = {name: name for name, _ in live.module.named_parameters()}
        with waits() as counted:
            observe_ntk(
                live.module, live.forward, batch, function=function, plan=plan, components=owners
            )
        counts.append(counted)
    assert counts[0] == counts[1]
    assert sum(n for (kind, _), n in counts[0].items() if kind == "synchronize") == 1
    assert counts[0].total() <= 4


def test_rates_of_change_are_fetched_once_a_module() -> None:
    live, batch = vit(4)
    paths = {i: f"blocks.{i}" for i in range(4)}
    there = {"inputs": batch["inputs"].to("sim")}
    with waits() as counted:
        observe_rate_of_change(live.module, live.forward, there, paths)
    assert [kind for kind, _ in counted] == ["synchronize"] and counted.total() == 4
