"""weight_norm and spectral_norm in every key style: the weight in use, not its stored factors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from plastiscope.anatomy import effective_tensors
from plastiscope.checkpoints.run import State, TensorInfo


def state_of(tensors: dict[str, torch.Tensor]) -> State:
    infos = {n: TensorInfo(n, tuple(t.shape), t.dtype) for n, t in tensors.items()}
    return State(infos, lambda name: tensors[name])


def trained(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layer.train()
    x = torch.randn(4, 6) if isinstance(layer, nn.Linear) else torch.randn(4, 6, 5, 5)
    for _ in range(30):
        layer(x)
    return layer.eval()


STYLES = {
    "weight_g": lambda layer: nn.utils.weight_norm(layer),
    "original0": lambda layer: parametrizations.weight_norm(layer),
    "weight_orig": lambda layer: nn.utils.spectral_norm(layer),
    "original": lambda layer: parametrizations.spectral_norm(layer),
}
LAYERS = {
    "linear": lambda: nn.Linear(6, 8),
    "conv": lambda: nn.Conv2d(6, 8, 3),
    "transposed": lambda: nn.ConvTranspose2d(6, 8, 3),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("style", STYLES)
def test_effective_weight_is_the_one_the_layer_uses(style: str, layer: str) -> None:
    module = trained(STYLES[style](LAYERS[layer]()))
    x = torch.randn(1, 6) if layer == "linear" else torch.randn(1, 6, 5, 5)
    with torch.no_grad():
        module(x)
    tensors = effective_tensors(state_of(dict(module.state_dict())))
    assert sorted(tensors.names()) == ["bias", "weight"]
    torch.testing.assert_close(tensors.read("weight"), module.weight.detach())
    assert tensors.shape("weight") == tuple(module.weight.shape)


def test_scale_of_the_stored_direction_changes_nothing() -> None:
    tensors = dict(parametrizations.weight_norm(nn.Linear(6, 8)).state_dict())
    before = effective_tensors(state_of(tensors)).read("weight")
    tensors["parametrizations.weight.original1"] = 7 * tensors["parametrizations.weight.original1"]
    torch.testing.assert_close(effective_tensors(state_of(tensors)).read("weight"), before)


def test_spectral_norm_is_one_and_of_the_stored_weight_is_not() -> None:
    module = trained(parametrizations.spectral_norm(nn.Linear(6, 8), n_power_iterations=20))
    stored = dict(module.state_dict())
    weight = effective_tensors(state_of(stored)).read("weight")
    assert torch.linalg.svdvals(weight)[0].item() == pytest.approx(1.0, abs=1e-4)
    original = stored["parametrizations.weight.original"]
    assert abs(torch.linalg.svdvals(original)[0].item() - 1.0) > 0.01


def test_row_of_zeros_stays_zeros() -> None:
    tensors = dict(parametrizations.weight_norm(nn.Linear(6, 8)).state_dict())
    tensors["parametrizations.weight.original1"][2] = 0.0
    weight = effective_tensors(state_of(tensors)).read("weight")
    assert torch.isfinite(weight).all()
    assert weight[2].abs().max().item() == 0.0


def test_vector_called_weight_v_alone_is_a_plain_tensor() -> None:
    tensors = effective_tensors(state_of({"weight_v": torch.ones(3)}))
    assert tensors.names() == ("weight_v",)
