"""timm and torchvision by name: head, channels and image size come from the stored shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plastiscope.models import ModelError, build, load

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")


def assert_same(model, spec, images, state_of, assume=None, **extras):
    model.eval()
    state = state_of(model.state_dict(), **extras)
    live = build(state, spec, assume or {})
    assert load(live, state).full
    with torch.no_grad():
        assert torch.equal(live.forward({"inputs": images}), model(images))
    return live


TINY = {"embed_dim": "24", "depth": "2"}


@pytest.mark.parametrize(
    ("name", "arguments", "assume", "shape"),
    [
        (
            "vit_tiny_patch16_224",
            {"num_classes": 7, "img_size": 32, "in_chans": 1},
            TINY,
            (1, 32, 32),
        ),
        ("vit_tiny_patch16_224", {"num_classes": 0, "img_size": 48}, TINY, (3, 48, 48)),
        ("vit_tiny_patch16_224", {"global_pool": "avg", "img_size": 32}, TINY, (3, 32, 32)),
        ("deit_tiny_distilled_patch16_224", {"num_classes": 5, "img_size": 32}, TINY, (3, 32, 32)),
        (
            "eva02_tiny_patch14_224",
            {"num_classes": 5, "img_size": 28},
            {"embed_dim": "24", "depth": "2", "num_heads": "2"},
            (3, 28, 28),
        ),
        (
            "swin_tiny_patch4_window7_224",
            {"num_classes": 5, "img_size": 56},
            {"embed_dim": "24", "depths": "(1,1)", "num_heads": "(2,4)", "input": "3x56x56"},
            (3, 56, 56),
        ),
    ],
)
def test_timm_transformers(state_of, name, arguments, assume, shape):
    sizes = {key: eval(value) for key, value in assume.items() if key != "input"}
    model = timm.create_model(name, pretrained=False, **arguments, **sizes)
    live = assert_same(model, f"timm:{name}", torch.randn(2, *shape), state_of, assume)
    assert live.inputs.shape == shape and not live.inputs.resizable
    assert live.inputs.classes == (arguments.get("num_classes", 1000) or None)
    assert (live.inputs.mean is None) == (shape[0] == 1)


def test_timm_convolutions_and_names_from_the_checkpoint(state_of):
    model = timm.create_model("convnext_atto", num_classes=5)
    images = torch.randn(1, 3, 64, 64)
    live = assert_same(model, "timm:convnext_atto", images, state_of)
    assert live.inputs.resizable and live.inputs.classes == 5
    settings = {"architecture": "convnext_atto", "num_classes": 5}
    assert_same(model, None, images, state_of, config=settings)
    live = assert_same(model, None, images, state_of, args={"model": "convnext_atto"})
    assert live.source == "timm convnext_atto"


@pytest.mark.parametrize("channels", [1, 3])
def test_torchvision_resnet_with_a_head_and_a_stem_of_its_own(state_of, channels):
    model = torchvision.models.resnet18(num_classes=10)
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
    model.train()
    model(torch.randn(4, channels, 32, 32))  # running statistics that aren't 0 and 1
    images = torch.randn(2, channels, 32, 32)
    live = assert_same(model, "torchvision:resnet18", images, state_of)
    assert live.inputs.classes == 10 and live.inputs.shape == (channels, 224, 224)
    assert_same(model, None, images, state_of, arch="resnet18")


def test_torchvision_vit(state_of):
    model = torchvision.models.vit_b_16(num_classes=10, image_size=32)
    live = assert_same(model, "torchvision:vit_b_16", torch.randn(1, 3, 32, 32), state_of)
    assert live.inputs.shape == (3, 32, 32) and not live.inputs.resizable


def test_torchvision_swin(state_of):
    model = torchvision.models.swin_t(num_classes=10)
    assert_same(model, "torchvision:swin_t", torch.randn(1, 3, 64, 64), state_of)


@pytest.mark.parametrize(
    ("extras", "assume", "shape"),
    [
        ({"args": {"img_size": 64}}, {}, (3, 64, 64)),
        ({"args": {"img_size": 64}}, {"probe": "3x32x32"}, (3, 64, 64)),
        ({}, {"probe": "3x32x48"}, (3, 32, 48)),
        ({"args": {"img_size": 64}}, {"input": "96"}, (3, 96, 96)),
    ],
)
def test_whose_word_counts_for_the_size_of_images(state_of, extras, assume, shape):
    timm_state = state_of(timm.create_model("convnext_atto").state_dict(), **extras)
    assert build(timm_state, "timm:convnext_atto", assume).inputs.shape == shape
    tv_state = state_of(torchvision.models.resnet18().state_dict(), **extras)
    assert build(tv_state, "torchvision:resnet18", assume).inputs.shape == shape


def test_the_wrong_name_is_refused(state_of):
    state = state_of(torchvision.models.resnet18().state_dict())
    live = build(state, "torchvision:resnet34")
    with pytest.raises(ModelError, match="80 parameters of the model without a stored tensor"):
        load(live, state)
    for spec in ("torchvision:resnet99", "timm:resnet99"):
        with pytest.raises(ModelError, match="has no model 'resnet99'"):
            build(state, spec)


def test_a_changed_kernel_is_refused_because_its_stride_is_unknown(state_of):
    model = torchvision.models.resnet18()
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    with pytest.raises(ModelError, match=r"conv1\.weight is \[64, 3, 3, 3\]"):
        build(state_of(model.state_dict()), "torchvision:resnet18")


def test_a_size_that_shapes_don_t_tell_is_refused_not_guessed(state_of):
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2)
    state = state_of(model.state_dict())
    live = build(state, "timm:vit_tiny_patch16_224")
    with pytest.raises(ModelError, match="tensors of another shape"):
        load(live, state)
