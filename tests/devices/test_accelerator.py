"""The device that stands in for a GPU refuses, counts and computes what a GPU would."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.devices.present import DEVICES

if "sim" not in DEVICES:
    pytest.skip("this PyTorch makes no device in Python", allow_module_level=True)

from tests.devices.accelerator import waits

X = torch.arange(6.0).reshape(2, 3)


def test_tensors_of_two_devices_are_refused() -> None:
    there = X.to("sim")
    for mixed in (
        lambda: there + X,
        lambda: there @ X.T,
        lambda: torch.cat([there, X]),
        lambda: torch.where(X > 1, there, 0.0),
        lambda: torch.zeros(2).index_add_(0, torch.zeros(2, dtype=torch.long).to("sim"), X[:, 0]),
        lambda: nn.functional.linear(X, there),
        lambda: torch.rand(3, device="sim", generator=torch.Generator()),
    ):
        with pytest.raises(RuntimeError, match=r"two devices|same device|generator"):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    # What CUDA takes from the CPU: a scalar, an index.
    assert_close((there * torch.tensor(2.0)).cpu(), X * 2)
    assert_close(there[torch.tensor([1])].cpu(), X[1:])


def test_waiting_is_counted() -> None:
    there, index = X.to("sim"), torch.tensor([1])
    for work, what in (
        (lambda: there.sum().item(), "item"),
        (lambda: bool((there > 1).any()), "item"),
        (lambda: there.cpu(), "fetch"),
        (lambda: index.to("sim"), "send"),
        (lambda: there[index], "send"),
        (lambda: there[there > 2], "nonzero"),
        (lambda: torch.sim.synchronize(), "synchronize"),
    ):
        with waits() as counted:
            work()
        assert [kind for kind, _ in counted] == [what], what
    with waits() as counted:
        index.to("sim", non_blocking=True)
        there.exp().sum(0).softmax(-1)[1:]
    assert not counted


def test_views_and_gradients_are_the_cpus() -> None:
    there = X.to("sim")
    there[1:, :2] += 1.0
    assert_close(there.cpu(), torch.tensor([[0.0, 1, 2], [4, 5, 5]]))
    torch.manual_seed(0)
    found = []
    for device in ("cpu", "sim"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten())
        net = net.to(device)
        y = net(torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4).to(device))
        y[:, 1:].mul_(2.0)
        y.square().sum().backward()
        found.append([p.grad.cpu() for p in net.parameters()])
    assert_close(found[1], found[0])


def test_tied_parameters_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net.to("sim")
    assert net[1].weight is net[0].weight and net[0].weight.device.type == "sim"
    assert net[1].bias is not net[0].bias
