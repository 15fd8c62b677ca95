"""Low-rank adapters: the update of each target, merged into a base or alone."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UnreadableError

TARGET = "base_model.model.layer.0.query"


def peft(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def factors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(4, 32, generator=generator)
    b = torch.randn(16, 4, generator=generator)
    return a, b, {f"{TARGET}.lora_A.weight": a, f"{TARGET}.lora_B.weight": b}


def test_update_of_rank_four_and_scale_two(tmp_path):  # L25
    a, b, tensors = factors()
    peft(tmp_path / "checkpoint-5", tensors)
    state = discover(tmp_path)[0].checkpoints[0].open()
    assert list(state.tensors) == ["layer.0.query.weight"]
    update = state.read("layer.0.query.weight")
    assert update.shape == (16, 32)
    torch.testing.assert_close(update, 2.0 * (b @ a))
    assert int(torch.linalg.matrix_rank(update)) == 4
    assert state.extras["adapter"]["ranks"] == {"layer.0.query.weight": 4}
    assert "adapter: 1 updates B A of rank at most 4" in state.notes


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"layer.0.query": 4}}, 1.0),
        ({"lora_alpha": None}, 1.0),
    ],
)
def test_scales(tmp_path, config, scale):
    a, b, tensors = factors()
    peft(tmp_path / "checkpoint-5", tensors, **config)
    (run,) = discover(tmp_path)
    update = run.checkpoints[0].open().read("layer.0.query.weight")
    torch.testing.assert_close(update, scale * (b @ a))
    assert ("adapter: no alpha found, its scale is taken as 1" in run.notes) is (
        config == {"lora_alpha": None}
    )


def test_layouts_of_other_libraries(tmp_path):
    a, b, _ = factors()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 10.0}}))
    mlx = {"l.q.lora_a": a.T.contiguous(), "l.q.lora_b": b.T.contiguous()}
    save_file(mlx, tmp_path / "0000100_adapters.safetensors")
    state = discover(tmp_path)[0].checkpoints[0].open()
    torch.testing.assert_close(state.read("l.q.weight"), 10.0 * (b @ a))
    kohya = {"u.lora_down.weight": a, "u.lora_up.weight": b, "u.alpha": torch.tensor(2.0)}
    save_file(kohya, tmp_path / "k.safetensors")
    state = discover(tmp_path / "k.safetensors")[0].checkpoints[0].open()
    torch.testing.assert_close(state.read("u.weight"), 0.5 * (b @ a))


def test_layers_trained_whole_are_kept_without_their_frozen_copies(tmp_path):
    _, _, tensors = factors()
    extra = {
        "base_model.model.classifier.original_module.weight": torch.zeros(2, 8),
        "base_model.model.classifier.modules_to_save.weight": torch.ones(2, 8),
    }
    peft(tmp_path / "checkpoint-5", {**tensors, **extra})
    state = discover(tmp_path)[0].checkpoints[0].open()
    assert set(state.tensors) == {"layer.0.query.weight", "classifier.weight"}
    assert torch.equal(state.read("classifier.weight"), torch.ones(2, 8))


def test_merged_with_its_base(tmp_path):  # L25
    a, b, tensors = factors()
    peft(tmp_path / "checkpoint-5", tensors)
    base = {"layer.0.query.weight": torch.randn(16, 32), "layer.0.key.weight": torch.randn(16, 32)}
    save_file(base, tmp_path.parent / "base.safetensors")
    options = Options(base=str(tmp_path.parent / "base.safetensors"))
    state = discover(tmp_path, options)[0].checkpoints[0].open()
    assert set(state.tensors) == set(base)
    expected = base["layer.0.query.weight"] + 2.0 * (b @ a)
    torch.testing.assert_close(state.read("layer.0.query.weight"), expected)
    assert torch.equal(state.read("layer.0.key.weight"), base["layer.0.key.weight"])
    save_file({"other.weight": torch.ones(2, 2)}, tmp_path.parent / "base.safetensors")
    with pytest.raises(UnreadableError, match=r"the base has no tensor for layer.0.query.weight"):
        discover(tmp_path, options)


def test_factor_without_its_partner_is_refused(tmp_path):
    _, _, tensors = factors()
    del tensors[f"{TARGET}.lora_B.weight"]
    peft(tmp_path / "checkpoint-5", tensors)
    with pytest.raises(UnreadableError, match="without its partner"):
        discover(tmp_path)
