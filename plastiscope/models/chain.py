"""Plain MLPs and CNNs, rebuilt from the names and shapes of their tensors alone.

What tensors don't hold (activations, strides, poolings) comes from the user, else from the settings
stored beside them, else from the numbers that a Sequential leaves free, else from custom; all that
was assumed is said in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from plastiscope.checkpoints.run import State
from plastiscope.models import geometry, hints
from plastiscope.models.geometry import Geometry
from plastiscope.models.layers import WEIGHTED, Layer, make, not_a_chain, read_layers, weights_of
from plastiscope.models.live import Inputs, Live
from plastiscope.models.names import match
from plastiscope.models.outputs import positional

IMAGE_POOLS = (nn.MaxPool2d, nn.AvgPool2d)


class Chain(nn.Module):
    """Modules at the paths of the checkpoint's own names, run one after another."""

    def __init__(self, steps: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.order = tuple(path for path, _ in steps)
        for path, module in steps:
            attach(self, path, module)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [B, ...] to outputs [B, classes]."""
        for path in self.order:
            inputs = self.get_submodule(path)(inputs)
        return inputs


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path, making the containers on the way."""
    *containers, last = path.split(".")
    for name in containers:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)


@dataclass(frozen=True)
class Between:
    """What comes after a layer: free numbers of its Sequential (None: unknown), an activation."""

    activation: bool
    free: tuple[int, ...] | None = None


def build(state: State, assume: Mapping[str, str]) -> Live:
    """A chain of linear, convolution and norm layers; ModelError when it isn't one."""
    layers = read_layers(weights_of(state))
    skip = hints.says_skip(state.extras)
    if skip:
        raise not_a_chain(f"its settings say {skip}, and tensors don't show where it skips")
    between = read_gaps(layers)
    known, _ = hints.activation(state.extras, assume)
    name = known or "relu"
    plan, alternatives = read_geometry(layers, between, state.extras, assume)
    if not all(layer.path for layer in layers):
        raise not_a_chain("its root is itself one layer, without a name")
    module = Chain(assemble(layers, between, name, plan)).eval()
    inputs = inputs_of(layers, plan)
    said = describe(layers, between, name, plan, alternatives) + _difference(layers, state.extras)
    kind = "convolution" if plan else "fully connected"
    return Live(
        module=module,
        inputs=inputs,
        stored=match(module, state.tensors),
        forward=positional(module),
        source=f"a {kind} chain, from the tensors' names and shapes",
        assumptions=(said,),
    )


def read_gaps(layers: Sequence[Layer]) -> tuple[Between, ...]:
    """What lies after each layer but the last.

    Numbers missing from a Sequential are layers without parameters: the first of them is the
    activation (or the flattening, when a linear layer follows a convolution after one number); from
    one weight to the next there is one activation. Where the numbers leave no gap anywhere, an
    activation follows each layer and its norms.
    """
    found: list[Between] = []
    activated = False
    for number, (layer, following) in enumerate(pairwise(layers)):
        activated = layer.kind == "prelu" or (activated and layer.kind not in WEIGHTED)
        free = _free(layer, following)
        ends = following.kind in WEIGHTED and layer.kind != "prelu"
        if free is None or not _has_gaps(layers, layer.container):
            found.append(Between(ends and following.kind != "prelu"))
            continue
        flattens = following.kind == "linear" and _is_image(layers[: number + 1])
        activates = len(free) > int(flattens) and not activated
        activated = activated or activates
        found.append(Between(activates, free))
    return tuple(found)


def _free(layer: Layer, following: Layer) -> tuple[int, ...] | None:
    if layer.index is None or following.index is None or layer.container != following.container:
        return None
    return tuple(range(layer.index + 1, following.index))


def _has_gaps(layers: Sequence[Layer], container: str) -> bool:
    numbers = [
        layer.index for layer in layers if layer.container == container and layer.index is not None
    ]
    return max(numbers) - min(numbers) + 1 > len(numbers)


def _is_image(layers: Sequence[Layer]) -> bool:
    kinds = [layer.kind for layer in layers if layer.kind in WEIGHTED]
    return bool(kinds) and kinds[-1] == "conv"


def read_geometry(
    layers: Sequence[Layer],
    between: Sequence[Between],
    extras: Mapping[str, Any],
    assume: Mapping[str, str],
) -> tuple[Geometry | None, int]:
    """Strides, paddings and poolings, and how many other readings fit; None without convolutions.

    Raises ModelError when nothing usual fits the sizes.
    """
    convs = [layer for layer in layers if layer.kind == "conv"]
    if not convs:
        return None, 0
    if len({conv.axes for conv in convs}) > 1:
        raise not_a_chain("it has convolutions along one axis and along two")
    linear = next((layer for layer in layers if layer.kind == "linear"), None)
    if linear is None:
        raise not_a_chain("it has convolutions and no linear layer to give its outputs")
    slots = _slots(layers, between)
    clues = geometry.gather(convs, linear.taken, slots, extras, assume)
    return geometry.solve(convs, linear.taken, clues)


def _slots(layers: Sequence[Layer], between: Sequence[Between]) -> frozenset[int] | None:
    """The convolutions after which a Sequential's numbers leave room for a pooling."""
    room: set[int] = set()
    told = False
    conv = -1
    for layer, gap, following in zip(layers, between, layers[1:], strict=False):
        conv += layer.kind == "conv"
        if not _is_image(layers[: layers.index(layer) + 1]) or gap.free is None:
            continue
        told = True
        taken = int(gap.activation) + int(following.kind == "linear")
        if following.kind in WEIGHTED and len(gap.free) > taken:
            room.add(conv)
    return frozenset(room) if told else None


def assemble(
    layers: Sequence[Layer],
    between: Sequence[Between],
    activation: str,
    plan: Geometry | None,
    cnn: str | None = None,
) -> list[tuple[str, nn.Module]]:
    """The modules of the chain with their paths, in computing order.

    `cnn` names the activation of a convolutional extractor, up to its linear layer, when it
    differs from that of the rest.
    """
    steps: list[tuple[str, nn.Module]] = []
    conv = -1
    channels = plan.image[0] if plan else layers[0].taken
    for number, layer in enumerate(layers):
        conv += layer.kind == "conv"
        steps.append((layer.path, _module(layer, layers[:number], channels, conv, plan)))
        if layer.kind in WEIGHTED:
            channels = layer.given
        if number < len(between):
            here = cnn if cnn and plan and number <= _extractor_end(layers) else activation
            steps += _fill(layers, number, between[number], here, conv, plan)
    return steps


def _extractor_end(layers: Sequence[Layer]) -> int:
    return next(number for number, layer in enumerate(layers) if layer.kind == "linear")


def _module(
    layer: Layer, before: Sequence[Layer], channels: int, conv: int, plan: Geometry | None
) -> nn.Module:
    if layer.kind.startswith("batch_norm"):
        affine = layer.kind == "batch_norm"
        image = _is_image(before) or (not before and plan is not None)
        image = image and plan is not None and plan.axes == 2
        kind = nn.BatchNorm2d if image else nn.BatchNorm1d
        return kind(layer.given, affine=affine)
    if layer.kind == "layer_norm" and _is_image(before):
        raise not_a_chain(f"{layer.path} normalises channels, in groups that tensors don't show")
    if plan is None or layer.kind != "conv":
        return make(layer, channels)
    return make(layer, channels, plan.strides[conv], plan.paddings[conv])


def _fill(
    layers: Sequence[Layer],
    number: int,
    gap: Between,
    activation: str,
    conv: int,
    plan: Geometry | None,
) -> list[tuple[str, nn.Module]]:
    """Activation, pooling and flattening after a layer, at the free numbers or beside its name."""
    following = layers[number + 1]
    parts: list[tuple[str, nn.Module]] = []
    if gap.activation:
        parts.append(("activation", hints.ACTIVATIONS[activation]()))
    if plan and following.kind in WEIGHTED and _is_image(layers[: number + 1]):
        if conv in plan.pooled:
            kinds = (nn.MaxPool1d, nn.AvgPool1d) if plan.axes == 1 else IMAGE_POOLS
            parts.append(("pool", kinds[plan.pool != "max"](plan.pool_size)))
        if following.kind == "linear":
            if plan.collapse:
                average = nn.AdaptiveAvgPool1d if plan.axes == 1 else nn.AdaptiveAvgPool2d
                parts.append(("collapse", average(1)))
            parts.append(("flatten", nn.Flatten()))
    path = layers[number].path
    container = layers[number].container
    free = gap.free
    if free is None and layers[number].index is not None and container != following.container:
        first = (layers[number].index or 0) + 1
        free = tuple(range(first, first + len(parts)))
    if free is not None and len(parts) <= len(free):
        prefix = f"{container}." if container else ""
        return [(f"{prefix}{place}", part) for place, (_, part) in zip(free, parts, strict=False)]
    return [(f"{path}_{name}", part) for name, part in parts]


def inputs_of(layers: Sequence[Layer], plan: Geometry | None) -> Inputs:
    """What the first layer takes."""
    classes = next(layer.given for layer in reversed(layers) if layer.kind in WEIGHTED)
    if plan and plan.axes == 1:
        return Inputs("vector", plan.shape, classes=classes)
    if plan:
        return Inputs("image", plan.image, resizable=plan.collapse, classes=classes)
    return Inputs("vector", (layers[0].taken,), classes=classes)


def describe(
    layers: Sequence[Layer],
    between: Sequence[Between],
    activation: str,
    plan: Geometry | None,
    alternatives: int,
) -> str:
    """One line with everything that the tensors don't say."""
    count = sum(gap.activation for gap in between)
    parts = [f"{activation} after {count} hidden layers"] if count else ["no activation"]
    if plan:
        parts.append(f"stride {_short(plan.strides)}, padding {_short(plan.paddings)}")
        where = ", ".join(str(number + 1) for number in sorted(plan.pooled))
        parts.append(
            f"{plan.pool} pooling of {plan.pool_size} after convolution {where}"
            if plan.pooled
            else "no pooling"
        )
        if plan.collapse:
            parts.append("each channel averaged at the end")
        parts.append(f"input {'x'.join(map(str, plan.shape))}")
    line = f"assumed: {', '.join(parts)}, layers run one after another without skip connections"
    if alternatives:
        line += f"; {alternatives} other readings fit the sizes as well"
    options = "activation" + ("=…, stride=…, padding=…, pool=…, input" if plan else "")
    return f"{line} (change with --assume {options}=…)"


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))


def _difference(layers: Sequence[Layer], extras: Mapping[str, Any]) -> str:
    """What to add when the settings speak of another input than the first stored layer's."""
    said = hints.find(extras, "input_dim", "input_size", "in_features", "obs_dim", "n_inputs")
    first = layers[0]
    if first.kind != "linear" or not isinstance(said, int) or said in (first.taken, False):
        return ""
    return (
        f"; the settings say {said} inputs and the first stored layer takes {first.taken}: the "
        "replay starts at that layer"
    )
