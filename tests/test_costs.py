"""What the measures on request would take: the arithmetic, the counted products, the line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import costs, store
from plastiscope.config import Settings
from plastiscope.costs import Call, Work, estimate, timed_calls
from plastiscope.observations.jacobian import LEADING, PROBES, STEPS
from plastiscope.terminal import duration, on_request


def work(**changed: object) -> Work:
    given: dict[str, object] = {
        "forward": 0.5, "functions": 2, "tensors": 100, "groups": 9, "tokens": 0, "calls": (),
    }  # fmt: skip
    return Work(**{**given, **changed})  # type: ignore[arg-type]


def test_kernels_grow_with_passes_functions_and_components() -> None:
    one = 0.5 * costs.KERNEL_PASSES + 100 * costs.PER_TENSOR + 10 * costs.PER_KERNEL
    assert estimate(work())["ntk"] == pytest.approx(2 * one)
    assert estimate(work(functions=1))["ntk"] == pytest.approx(one)
    longer = estimate(work(functions=1, tokens=2000))["ntk"]
    assert longer == pytest.approx(one + 4e6 * costs.PER_PAIR)


def test_jacobians_are_products_and_decompositions() -> None:
    calls = (Call(0.01, 384, 0, 0), Call(0.002, 0, 1, 100))
    found = estimate(work(calls=calls))
    products = 384 * (costs.PER_PRODUCT + 0.01 * costs.PRODUCT_PASSES)
    assert found["jacobian"] == pytest.approx(products + 1e6 * costs.PER_CUBE)
    passes = 0.5 * costs.SENSITIVITY_PASSES
    assert found["sensitivity"] == pytest.approx(passes + 2 * costs.PER_PLACE)


def test_products_are_counted_as_the_jacobians_take_them() -> None:
    """A linear layer takes none, a norm one a channel, a small map one an output, a large map
    a Lanczos estimate's."""
    net = nn.Sequential(
        nn.Linear(8, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(30, 1200),
        nn.Unflatten(1, (3, 400)), nn.Conv1d(3, 4, 3),
    )  # fmt: skip
    paths = {i: str(i) for i in range(6)} | {6: ""}
    found = timed_calls(
        net, lambda batch: net(batch["inputs"]), {"inputs": torch.ones(2, 6, 8)}, paths
    )
    counted = [(c.products, c.matrices, c.side) for c in found]
    lanczos = (2 * (2 * LEADING + STEPS * PROBES) // costs.SHARED, 0, 0)
    norm = (5, 2 * 6, 5)  # All six positions of both inputs.
    assert counted == [(0, 1, 5), norm, (30, 2, 30), (0, 1, 30), lanczos, lanczos, (48, 2, 48)]
    assert all(c.seconds > 0 for c in found)
    assert found[6].seconds > max(c.seconds for c in found[:6])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


class Deep(nn.Module):
    """Gives its tensor deep inside."""

    def forward(self, x: torch.Tensor) -> object:
        return None, {"deep": [x @ torch.ones(8, 3)]}


def test_a_module_without_a_tensor_is_left_out_and_a_deep_one_found() -> None:
    nothing, deep = nn.Identity(), Deep()
    nothing.register_forward_hook(lambda *_: "a word")
    net = nn.ModuleList([nothing, deep])

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        net[0](batch["inputs"])
        net[1](batch["inputs"])
        return batch["inputs"]

    found = timed_calls(net, forward, {"inputs": torch.ones(2, 8)}, {0: "0", 1: "1"})
    assert [(c.products, c.matrices, c.side) for c in found] == [(3, 2, 3)]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "1 s"), (14.4, "14 s"), (89, "89 s"), (100, "2 min"), (5000, "83 min"), (20_000, "6 h")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_line_names_what_was_not_measured() -> None:
    line = on_request({"ntk": 14.0, "jacobian": 350.0, "sensitivity": 0.1})
    assert line == "--with ntk,jacobian,sensitivity would add about 14 s, 6 min and 1 s"
    assert on_request({"ntk": 14.0}) == "--with ntk would add about 14 s"
    assert on_request({}) is None


def test_costs_are_told_for_the_whole_run(tmp_path: Path) -> None:
    """Three checkpoints cost three times one; a second, finished analysis still says so; what was
    asked for isn't told; a choice of metrics tells nothing."""
    run = tmp_path / "run"
    run.mkdir()
    for step in range(3):
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        torch.save({"model": net.state_dict(), "step": step}, run / f"step_{step}.pt")
    np.savez(run / "probe.npz", inputs=np.ones((8, 6), np.float32), labels=np.zeros(8, int))
    settings = Settings(out=tmp_path / "out")
    (analyzed,) = plastiscope.analyze(run, settings).runs
    one = store.read_facts(analyzed.files[0])["costs"]
    assert set(one) == {"ntk", "jacobian", "sensitivity"} and all(v > 0 for v in one.values())
    assert analyzed.costs == pytest.approx({name: 3 * v for name, v in one.items()})
    (again,) = plastiscope.analyze(run, settings).runs
    assert again.measured == 0 and again.costs == analyzed.costs
    asked = Settings(out=tmp_path / "b", extra=("ntk", "sensitivity"))
    assert set(plastiscope.analyze(run, asked).runs[0].costs) == {"jacobian"}
    chosen = Settings(out=tmp_path / "c", only=("srank",))
    assert plastiscope.analyze(run, chosen).runs[0].costs == {}
