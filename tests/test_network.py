"""One architecture of a run: a wrong map is refused, a replay leaves nothing behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from plastiscope import network
from plastiscope.anatomy import Anatomy, trace
from plastiscope.checkpoints import discover
from plastiscope.config import Settings
from plastiscope.network import open_network
from plastiscope.replay import Replay, Sampling

SAMPLES = Path(__file__).parents[1] / "sample_checkpoints"


def swapped_heads(*arguments: object) -> Anatomy:
    """The right anatomy, but for the first two heads of q in block 1, which change places."""
    right = trace(*arguments)  # type: ignore[arg-type]
    components = tuple(
        dataclasses.replace(c, heads=(c.heads[1], c.heads[0], *c.heads[2:]))
        if (c.name, c.block) == ("q", 1)
        else c
        for c in right.components
    )
    return dataclasses.replace(right, components=components)


def test_a_wrong_map_gets_no_rows_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = discover(SAMPLES / "gpt")
    state = run.checkpoints[-1].open()
    right = open_network(state, run.path, Settings())
    assert all(proof.ok for proof in right.proofs) and len(right.proofs) == 4
    monkeypatch.setattr(network, "trace", swapped_heads)
    wrong = open_network(state, run.path, Settings())
    assert [proof.block for proof in wrong.proofs if not proof.ok] == [1]
    heads = {c.block: len(c.heads) for c in wrong.anatomy.components if c.name == "q"}
    assert heads == {0: 4, 1: 0, 2: 4, 3: 4}
    assert any("block 1: no rows per head" in line for line in wrong.announcements)


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_fifty_replays_leave_no_hooks_and_no_memory() -> None:
    """R16."""
    (run,) = discover(SAMPLES / "mlp")
    net = open_network(run.checkpoints[-1].open(), run.path, Settings())
    assert net.live is not None
    sizes = []
    for _ in range(50):
        replay = Replay(net.anatomy, 64, Sampling(4, 256, 32, 0))
        batch = {name: tensor[:64] for name, tensor in net.probes[0].batch.items()}
        replay.run(net.live, batch, torch.device("cpu"))
        replay.rows(("effective_rank", "dormant_fraction"))
        sizes.append(resident())
    assert sizes[-1] <= 1.1 * sizes[1]
    for module in net.live.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_an_exception_in_the_replay_leaves_no_hooks() -> None:
    """R16."""
    (run,) = discover(SAMPLES / "mlp")
    net = open_network(run.checkpoints[-1].open(), run.path, Settings())
    assert net.live is not None
    before = {name: tensor.clone() for name, tensor in net.live.module.state_dict().items()}
    wrong = {"inputs": torch.zeros(4, 7)}
    with pytest.raises(RuntimeError):
        Replay(net.anatomy, 4, Sampling(2, 256, 32, 0)).run(net.live, wrong, torch.device("cpu"))
    for module in net.live.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    after = net.live.module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
