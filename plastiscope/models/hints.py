"""What a checkpoint says about its own network: values found by name in its stored settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from plastiscope.models.live import ModelError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "celu": nn.CELU,
    "leakyrelu": nn.LeakyReLU,
    "lrelu": nn.LeakyReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "mish": nn.Mish,
    "hardtanh": nn.Hardtanh,
    "identity": nn.Identity,
    "linear": nn.Identity,
    "none": nn.Identity,
}
ACTIVATION_KEYS = (
    "activation",
    "activation_fn",
    "activation_function",
    "act",
    "act_fn",
    "act_layer",
    "nonlinearity",
    "non_linearity",
    "hidden_act",
    "hidden_activation",
)
SKIP_KEYS = re.compile(r"(^|_)(residual|skip|resnet)(_connections?|_connection)?$|^use_(res|skip)")


def settings(extras: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every stored setting by its lower-case name, outer ones first."""
    level: list[Mapping[Any, Any]] = [extras]
    while level:
        inner: list[Mapping[Any, Any]] = []
        for values in level:
            for key, value in values.items():
                yield str(key).lower(), value
                if isinstance(value, Mapping):
                    inner.append(value)
        level = inner


def find(extras: Mapping[str, Any], *names: str) -> Any:
    """The first stored setting under any of the names, earlier names first; else None."""
    known = list(settings(extras))
    for name in names:
        for key, value in known:
            if key == name and value is not None:
                return value
    return None


def activation(extras: Mapping[str, Any], assume: Mapping[str, str]) -> tuple[str | None, bool]:
    """The activation's name, and whether the user gave it; None when nothing says.

    Raises ModelError for a name that isn't known.
    """
    given = assume.get("activation")
    if given is not None:
        name = spell(given)
        if name is None:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelError(f"unknown activation {given!r} in assume: known: {known}")
        return name, True
    stored = find(extras, *ACTIVATION_KEYS)
    return (spell(str(stored)) if stored is not None else None), False


def spell(text: str) -> str | None:
    """The known activation in "ReLU", "nn.Tanh()", "<class 'torch...LeakyReLU'>"; else None."""
    words = re.findall(r"[A-Za-z_0-9]+", text)
    for word in reversed(words):
        plain = str(word).lower().replace("_", "")
        if plain in ACTIVATIONS:
            return plain
    return None


def says_skip(extras: Mapping[str, Any]) -> str | None:
    """The setting by which a stored config says that there are skip connections, if any."""
    for key, value in settings(extras):
        if SKIP_KEYS.search(key) and value is True:
            return key
    return None


def size(value: Any) -> tuple[int, ...] | None:
    """A shape written as 28, [1, 28, 28] or "1x28x28"; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return (value,)
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\s*[x,]\s*\d+)*\s*", value):
        return tuple(int(part) for part in re.findall(r"\d+", value))
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        return tuple(value)
    return None


def sides(shape: Any) -> tuple[int, int]:
    """Height and width of an image given as 224, (224,), (h, w) or (channels, h, w)."""
    values = (shape,) if isinstance(shape, int) else tuple(shape)
    return (int(values[-2]), int(values[-1])) if len(values) > 1 else (int(values[0]),) * 2


def input_shape(
    extras: Mapping[str, Any], assume: Mapping[str, str], names: tuple[str, ...]
) -> tuple[int, ...] | None:
    """The shape of one input: the user's word, else the first of the settings, else the probe's.

    Raises ModelError when the user's word isn't a shape.
    """
    given = assume.get("input")
    if given is not None:
        said = size(given)
        if said is None or len(said) > 3:
            raise ModelError(f"input={given!r} in assume isn't a shape such as 3x32x32")
        return said
    for name in names:
        said = size(find(extras, name))
        if said is not None:
            return said
    return size(assume.get("probe"))
