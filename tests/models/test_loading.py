"""Loading is exact: every tensor in its place, every difference named, a full match or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from plastiscope.models import Live, ModelError, load
from plastiscope.models.live import Inputs, Merge
from plastiscope.models.names import match
from plastiscope.models.outputs import positional


def live_for(module: nn.Module, state) -> Live:
    stored = match(module, state.tensors)
    return Live(module, Inputs("vector", (3,)), stored, positional(module), "test")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def trained() -> nn.Sequential:
    torch.manual_seed(0)
    model = network()
    for _ in range(3):
        model(torch.randn(16, 3) * 2 + 1)
    return model.eval()


@pytest.mark.parametrize("prefix", ["", "net.", "model.net.", "module."])
def test_fills_parameters_and_running_statistics(state_of, prefix):
    model = trained()
    state = state_of({prefix + name: value for name, value in model.state_dict().items()})
    live = live_for(network(), state)
    report = load(live, state)
    assert report.full and len(report.matched) == 9
    for name, value in model.state_dict().items():
        assert torch.equal(live.module.state_dict()[name], value)
    inputs = torch.randn(5, 3)
    assert torch.equal(live.forward({"inputs": inputs}), model(inputs))
    assert not live.module.training


def test_a_missing_statistic_is_missing_and_a_missing_counter_is_not(state_of):
    tensors = dict(trained().state_dict())
    tensors.pop("1.num_batches_tracked")
    state = state_of(tensors)
    report = load(live_for(network(), state), state)
    assert report.full and report.ignored == ("1.num_batches_tracked",)
    tensors.pop("1.running_var")
    state = state_of(tensors)
    with pytest.raises(ModelError, match=r"1 parameters .*1\.running_var"):
        load(live_for(network(), state), state)


def test_reports_missing_unexpected_and_reshaped(state_of):
    tensors = dict(trained().state_dict())
    tensors.pop("0.bias")
    tensors["extra.weight"] = torch.zeros(2, 2)
    tensors["3.weight"] = torch.zeros(5, 4)
    state = state_of(tensors)
    live = live_for(network(), state)
    with pytest.raises(ModelError) as error:
        load(live, state)
    for part in ("0.bias", "extra.weight", "3.weight", "--model"):
        assert part in str(error.value)
    assert "\n" not in str(error.value) and error.value.status == 2
    report = load(live, state, allow_partial=True)
    assert (report.missing, report.unexpected, report.reshaped) == (
        ("0.bias",),
        ("extra.weight",),
        ("3.weight",),
    )
    assert not report.full
    # What the file doesn't hold is no number: whatever depends on it can't look like a measurement.
    assert live.module.get_parameter("0.bias").isnan().all()
    assert live.module.get_parameter("3.weight").isnan().all()
    assert torch.equal(live.module.get_parameter("0.weight"), tensors["0.weight"])
    assert live.forward({"inputs": torch.randn(2, 3)}).isnan().all()


def test_a_stored_mask_is_ignored_and_nothing_matched_is_an_error(state_of):
    state = state_of({**trained().state_dict(), "mask": torch.zeros(2)})
    masked = replace(
        state,
        tensors={**state.tensors, "mask": replace(state.tensors["mask"], kind="buffer")},
    )
    assert load(live_for(network(), masked), masked).ignored == ("mask",)
    other = state_of({"a.weight": torch.zeros(7, 7)})
    with pytest.raises(ModelError):
        load(live_for(network(), other), other)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precision(state_of, stored):
    model = trained().to(stored)
    state = state_of(model.state_dict())
    live = live_for(network(), state)
    load(live, state)
    expected = torch.float64 if stored == torch.float64 else torch.float32
    weight = live.module.get_parameter("0.weight")
    assert weight.dtype == expected
    assert torch.equal(weight, model[0].weight.to(expected))
    assert live.forward({"inputs": torch.randn(2, 3)}).dtype == expected
    load(live, state, dtype=torch.float64)
    assert live.module.get_parameter("0.weight").dtype == torch.float64


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.table.weight


@pytest.mark.parametrize("keep", [("table.weight",), ("head.weight",), None])
def test_tied_weights_from_either_name_or_both(state_of, keep):
    model = Tied()
    tensors = {n: t for n, t in model.state_dict().items() if keep is None or n in keep}
    state = state_of(tensors)
    live = live_for(Tied(), state)
    assert load(live, state).full
    assert torch.equal(live.module.get_parameter("table.weight"), model.table.weight)


def test_weights_tied_in_the_model_but_not_in_the_file_are_refused(state_of):
    state = state_of(Tied(tie=False).state_dict())
    with pytest.raises(ModelError, match=r"head\.weight and table\.weight"):
        load(live_for(Tied(), state), state)


def test_equal_copies_of_tied_weights_are_accepted(state_of):
    weight = torch.randn(5, 3)
    state = state_of({"table.weight": weight, "head.weight": weight.clone()})
    assert load(live_for(Tied(), state), state).full


def test_a_tensor_without_data_is_refused(state_of):
    state = state_of(network().state_dict())
    empty = replace(
        state,
        tensors={**state.tensors, "0.bias": replace(state.tensors["0.bias"], kind="no_data")},
    )
    with pytest.raises(ModelError, match=r"0\.bias is stored without data"):
        load(live_for(network(), empty), empty)


@pytest.mark.parametrize("new_in_model", [True, False])
def test_weight_norm_under_either_spelling(state_of, new_in_model):
    def new() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))

    def old() -> nn.Module:
        with pytest.warns(FutureWarning):
            return nn.utils.weight_norm(nn.Linear(3, 4))

    model, twin = (old(), new()) if new_in_model else (new(), old())
    state = state_of(model.state_dict())
    live = live_for(twin, state)
    assert load(live, state).full
    inputs = torch.randn(2, 3)
    torch.testing.assert_close(live.forward({"inputs": inputs}), model(inputs))


def test_a_merge_fills_one_tensor_from_several(state_of):
    module = nn.Linear(3, 4, bias=False)
    rows = torch.randn(4, 3)
    state = state_of({"a": rows[:2], "b": rows[2:]})
    join = Merge(("weight",), ("a", "b"), lambda t: {"weight": torch.cat([t["a"], t["b"]])})
    live = Live(module, Inputs("vector", (3,)), {}, positional(module), "test", merges=(join,))
    assert load(live, state).full
    assert torch.equal(module.weight, rows)


def test_lazy_layers_take_the_stored_shape(state_of):
    model = nn.Linear(3, 4)
    state = state_of(model.state_dict())
    live = live_for(nn.LazyLinear(4), state)
    assert load(live, state).full
    inputs = torch.randn(2, 3)
    assert torch.equal(live.forward({"inputs": inputs}), model(inputs))
