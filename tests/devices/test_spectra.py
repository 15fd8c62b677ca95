"""Where a device's float64 spectra are taken: where it was faster, to the same digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import plastiscope
from plastiscope import store
from plastiscope.config import Settings
from plastiscope.observations import (
    Features,
    FeatureSums,
    Weight,
    device,
    in_threads,
    spectra_of,
    spectra_places,
)
from tests.devices.present import DEVICES

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_faster", {})
    monkeypatch.setattr(device, "synchronize", lambda device: None)


class Ways:
    """Two ways to one result, with planted times: a clock that only they advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, there: list[float], here: float) -> None:
        self.now, self.times, self.cpu, self.called = 0.0, there, here, list[str]()
        monkeypatch.setattr(device.time, "perf_counter", lambda: self.now)

    def there(self) -> str:
        self.called.append("there")
        self.now += self.times.pop(0) if len(self.times) > 1 else self.times[0]
        return "there"

    def here(self) -> str:
        self.called.append("here")
        self.now += self.cpu
        return "here"

    def run(self, side: int, where: torch.device = GPU) -> str:
        self.called.clear()
        return device.faster("test", where, side, self.there, self.here)


def test_a_fast_device_keeps_its_spectra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call there loads libraries, and doesn't count."""
    ways = Ways(monkeypatch, there=[50.0, 1.0], here=2.0)
    assert ways.run(300) == "here" and ways.called == ["here", "there", "there"]
    assert [ways.run(side) for side in (257, 512)] == ["there"] * 2
    assert ways.called == ["there"]
    assert spectra_places() == {"cuda test 512": "cuda"}


def test_a_slow_device_s_spectra_go_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways(monkeypatch, there=[3.0], here=2.0)
    ways.run(300)
    assert ways.run(400) == "here" and ways.called == ["here"]
    ways.times = [0.5]
    ways.run(600)  # Another size is measured anew.
    assert spectra_places() == {"cuda test 512": "cpu", "cuda test 1024": "cuda"}


def test_small_matrices_and_the_cpu_s_own_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = Ways(monkeypatch, there=[0.5], here=2.0)
    assert ways.run(device.SMALL - 1) == "here"
    assert ways.run(4096, torch.device("cpu")) == "here" and ways.called == ["here"]
    assert spectra_places() == {}


def test_the_cpu_s_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on as many matrices at once; a device on one after the other."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    ways = Ways(monkeypatch, there=[1.0], here=2.0)
    in_threads(ways.run, [300])
    assert spectra_places() == {"cuda test 512": "cpu"}
    ways.run(600)
    assert spectra_places()["cuda test 1024"] == "cuda"


def test_what_a_device_fails_at_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise torch.OutOfMemoryError("no memory")

    ways = Ways(monkeypatch, there=[0.5], here=2.0)
    assert device.faster("test", GPU, 300, fail, ways.here) == "here"
    assert spectra_places() == {"cuda test 512": "cpu"}
    ways.run(600)
    assert device.faster("test", GPU, 600, fail, ways.here) == "here"


@pytest.fixture(params=["cpu", "there"])
def everything(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All spectra, the smallest too, on one side."""
    monkeypatch.undo()
    monkeypatch.setattr(device, "SMALL", 0)

    def chosen(key: tuple[str, str, int], where: torch.device, there, here):  # type: ignore[no-untyped-def]
        return there() if request.param == "there" else here()

    monkeypatch.setattr(device, "_measured", chosen)
    return request.param


def features(x: Tensor, where: str) -> Features:
    sums, fold = FeatureSums(4), torch.arange(len(x)) % 4
    fold[fold == 2] = 1  # A fold without rows.
    for rows in torch.arange(len(x)).split(48):
        sums.add(x[rows].to(where), fold[rows])
    return sums.finish()


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("shape", [(200, 24), (20, 48), (200, 3, 10), (9, 3, 12)])
def test_features_are_the_same_on_both_sides(
    everything: str, where: str, shape: tuple[int, ...]
) -> None:
    """From moments and from rows, of heads and whole; the mean is 1e6 times the smallest value."""
    torch.manual_seed(0)
    x = torch.randn(*shape) * torch.logspace(-4, 0, shape[-1]) + 100.0
    here, there = features(x, "cpu"), features(x, where)
    for name in ("spectrum", "centered"):
        a, b = getattr(here, name), getattr(there, name)
        assert_close(b.values, a.values, rtol=1e-5, atol=0.0, equal_nan=True)
        assert_close(b.square, a.square, rtol=1e-9, atol=0.0, equal_nan=True)
        assert (a.status == b.status).all() and (a.attainable == b.attainable).all()
    direct = np.linalg.svd((x.double().flatten(1) if x.ndim == 2 else x[:, 0].double()).numpy(),
                           compute_uv=False)  # fmt: skip
    first = there.spectrum.values[0] if x.ndim == 2 else there.spectrum.values[0, 0]
    assert_close(first, direct, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_the_same_on_both_sides(
    everything: str, where: str, dtype: torch.dtype
) -> None:
    """The last one has a rank of 20, which takes an SVD."""
    torch.manual_seed(0)
    x = torch.randn(3, 40, 60, dtype=dtype)
    x[2, 20:] = 0.0
    there = spectra_of(x.to(where))
    assert_close(there.values[:2], np.linalg.svd(x[:2].double().numpy(), compute_uv=False))
    assert (there.values[2] > 0).sum() == 20
    here = spectra_of(x)
    assert_close(there.values, here.values, rtol=1e-9, atol=1e-12)
    # Of a weight that lies on the CPU.
    sent = Weight.of(x, device=torch.device(where)).spectrum
    assert_close(sent.values, here.values, rtol=1e-9, atol=1e-12)
    assert (sent.status == here.status).all()


@pytest.mark.parametrize("where", DEVICES)
def test_the_choice_is_recorded(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(device, "_faster", {})
    monkeypatch.setattr(device, "SMALL", 8)
    chosen = Settings(out=tmp_path, device=where, only=("effective_rank",), steps="0")
    (run,) = plastiscope.analyze(SAMPLES / "mlp", chosen).runs
    places = store.read_facts(run.files[0])["environment"]["spectra"]
    assert places and {*places.values()} <= {"cpu", where}
    assert all(torch.device(name.split()[0]).type == where for name in places)
