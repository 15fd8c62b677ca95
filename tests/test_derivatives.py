"""What is measured on request, through the whole loop, against torch's own dense derivatives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap

import plastiscope
from plastiscope.config import Settings
from plastiscope.optimizer import match_optimizer

INPUTS = 12


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of Adam on a tanh network, saved as such runs are."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    x, y = torch.randn(INPUTS, 5), torch.randint(0, 3, (INPUTS,))
    for step in range(3):
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save({**state, "config": {"activation": "tanh"}}, folder / f"step_{step}.pt")
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    np.savez(folder / "probe.npz", inputs=x.numpy(), labels=y.numpy())
    return folder


@pytest.fixture(scope="module")
def table(run: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    extra = ("ntk", "jacobian", "sensitivity", "optimizer")
    settings = Settings(out=tmp_path_factory.mktemp("out"), extra=extra, jacobian_inputs=INPUTS)
    return plastiscope.analyze(run, settings).table()


def stored(run: Path, step: int) -> tuple[nn.Sequential, torch.Tensor]:
    net = network().double()
    state = torch.load(run / f"step_{step}.pt", weights_only=True)["model"]
    net.load_state_dict({k: v.double() for k, v in state.items()})
    return net.requires_grad_(False), torch.from_numpy(
        np.load(run / "probe.npz")["inputs"]
    ).double()


def dense_kernel(run: Path, step: int) -> np.ndarray:
    net, x = stored(run, step)
    parameters = dict(net.named_parameters())

    def mean_logit(p: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return functional_call(net, p, (one[None],)).mean()

    grads = vmap(torch.func.grad(mean_logit), (None, 0))(parameters, x)
    rows = torch.cat([g.flatten(1) for g in grads.values()], 1)
    return (rows @ rows.T).numpy()


def at(
    table: pd.DataFrame, metric: str, step: int, component: str, **where: object
) -> pd.DataFrame:
    chosen = table[(table["metric"] == metric) & (table["step"] == step)]
    chosen = chosen[chosen["component"] == component]
    for column, value in where.items():
        chosen = chosen[chosen[column] == value]
    return chosen


def test_the_kernel_is_the_dense_one(run: Path, table: pd.DataFrame) -> None:
    for step in (0, 2):
        kernel = dense_kernel(run, step)
        rows = at(table, "ntk_trace", step, "network")
        found = rows[rows["parameters"].str.contains("mean_logit")]["value"]
        assert found.tolist() == [pytest.approx(float(np.trace(kernel)), rel=1e-5)]


def test_the_kernel_of_each_logit_is_the_dense_one(run: Path, tmp_path: Path) -> None:
    """And without labels a metric that needs them is a row with the reason."""
    inputs = np.load(run / "probe.npz")["inputs"]
    np.savez(tmp_path / "bare.npz", inputs=inputs)
    settings = Settings(
        out=tmp_path / "out", probe=str(tmp_path / "bare.npz"), steps="2", kernel=("logits",),
        only=("ntk_trace", "ntk_spectrum", "ntk_alignment", "gradient_norm"),
    )  # fmt: skip
    table = plastiscope.analyze(run, settings).table()
    net, x = stored(run, 2)
    parameters = dict(net.named_parameters())
    rows = torch.func.jacrev(lambda p: functional_call(net, p, (x,)))(parameters)
    jacobian = torch.cat([r.flatten(2) for r in rows.values()], 2).flatten(0, 1)
    found = at(table, "ntk_trace", 2, "network")
    assert found["value"].tolist() == [pytest.approx(float(jacobian.square().sum()), rel=1e-5)]
    assert found["parameters"].str.startswith("f=logits").all()
    largest = at(table, "ntk_spectrum", 2, "network", index=0)["value"].tolist()
    sigma = torch.linalg.svdvals(jacobian.double())
    assert largest == [pytest.approx(float(sigma[0] ** 2), rel=1e-5)]
    for metric in ("ntk_alignment", "gradient_norm"):
        assert at(table, metric, 2, "network")["status"].tolist() == ["no_labels"]


def test_drift_against_the_first_and_the_previous_checkpoint(
    run: Path, table: pd.DataFrame
) -> None:
    def centred(kernel: np.ndarray) -> np.ndarray:
        h = np.eye(len(kernel)) - 1 / len(kernel)
        return h @ kernel @ h

    def drift(a: np.ndarray, b: np.ndarray) -> float:
        a, b = centred(a), centred(b)
        return 1 - float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))

    kernels = [dense_kernel(run, step) for step in range(3)]
    assert at(table, "ntk_drift", 0, "network")["value"].isna().all()
    rows = at(table, "ntk_drift", 2, "network")
    rows = rows[rows["parameters"].str.contains("mean_logit")]
    values = {("first" if "first" in p else "previous"): v for p, v in
              zip(rows["parameters"], rows["value"], strict=True)}  # fmt: skip
    assert values["first"] == pytest.approx(drift(kernels[2], kernels[0]), abs=1e-5)
    assert values["previous"] == pytest.approx(drift(kernels[2], kernels[1]), abs=1e-5)


def test_jacobians_are_the_dense_ones(run: Path, table: pd.DataFrame) -> None:
    net, x = stored(run, 2)
    sigma = torch.linalg.svdvals(torch.stack([jacrev(net)(one) for one in x]))
    rows = at(table, "jacobian_sigma_max", 2, "network")
    found = rows.set_index("parameters")["value"]
    mean = next(v for p, v in found.items() if "mean" in str(p))
    assert mean == pytest.approx(float(sigma[:, 0].mean()), rel=1e-4)
    weight = torch.linalg.svdvals(net[2].weight)
    rows = at(table, "jacobian_sigma_max", 2, "fc", block=1)
    assert rows["value"].iloc[0] == pytest.approx(float(weight[0]), rel=1e-5)


def test_a_layer_never_changes_faster_than_its_bound(table: pd.DataFrame) -> None:
    for block in (0, 1):
        rate = at(table, "rate_of_change", 2, "fc", block=block)["value"].iloc[0]
        bound = at(table, "rate_of_change_bound", 2, "fc", block=block)["value"].iloc[0]
        assert 0 < rate <= bound * (1 + 1e-6)


def test_the_optimizer_says_how_far_the_next_step_goes(run: Path, table: pd.DataFrame) -> None:
    saved = torch.load(run / "step_2.pt", weights_only=True)
    entry = saved["optimizer"]["state"][0]
    mean = entry["exp_avg"] / (1 - 0.9**2)
    root = (entry["exp_avg_sq"] / (1 - 0.999**2)).sqrt()
    update = 0.05 * mean / (root + 1e-8)
    ratio = update.double().square().mean().sqrt()
    ratio /= saved["model"]["0.weight"].double().square().mean().sqrt()
    rows = at(table, "update_to_weight_ratio", 2, "fc", block=0)
    assert rows["value"].tolist() == [pytest.approx(float(ratio), rel=1e-5)]


def test_optimizer_entries_in_two_groups_are_told_apart_by_shape() -> None:
    net = network()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizer = torch.optim.Adam([{"params": decayed}, {"params": others, "weight_decay": 0}])
    net(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    matched = match_optimizer(net, optimizer.state_dict())
    for name, parameter in net.named_parameters():
        assert matched[name][0]["exp_avg"].data_ptr() == (
            optimizer.state[parameter]["exp_avg"].data_ptr()
        )


def test_an_optimizer_of_another_network_is_not_matched() -> None:
    other = nn.Linear(5, 4)
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    assert match_optimizer(network(), optimizer.state_dict()) == {}


def test_gradients_into_units_are_autograds(run: Path, tmp_path: Path) -> None:
    settings = Settings(out=tmp_path, only=("gradients",), steps="2", gradient_inputs=INPUTS)
    rows = plastiscope.analyze(run, settings).table()
    net, x = stored(run, 2)
    labels = torch.from_numpy(np.load(run / "probe.npz")["labels"])
    hidden = net[1](net[0](x)).requires_grad_()
    loss = nn.functional.cross_entropy(net[2:](hidden), labels, reduction="sum")
    gradient = torch.autograd.grad(loss, hidden)[0].abs().mean(0)
    score = gradient / gradient.mean()
    found = rows[(rows["component"] == "activation") & (rows["block"] == 0)]
    assert len(found) >= 1
    for parameters, value in zip(found["parameters"], found["value"], strict=True):
        tau = float(str(parameters).split("tau=")[1])
        assert value == pytest.approx(float((score <= tau).double().mean()))
