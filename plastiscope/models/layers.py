"""The layers of a plain feed-forward network, read from the names and shapes of its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from torch import nn

from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.models.live import ModelError

WEIGHTED = ("linear", "conv")
# Parts that a plain chain doesn't have: their tensors may fit one after another all the same.
FOREIGN = re.compile(
    r"(attn|attention|lstm|gru|rnn|weight_ih|weight_hh|embed|shortcut|downsample|residual|"
    r"skip|qkv|memory|moe|expert|gate|deconv|upconv|(^|[._])res\d*([._]|$)|"
    r"(^|\.)(q|k|v|wq|wk|wv|wo)\d*(\.|$))",
    re.IGNORECASE,
)
# Names of heads: two of them are two branches.
HEADS = re.compile(
    r"(actor|critic|policy|value|advantage|(^|_)(adv|pi|vf|mu|mean|var|logvar|sigma|std|query|key|"
    r"target)(_|$|\d)|log_?std|left|right|branch|aux|domain|teacher|student|(^|_)(q|v)(_|$|\d))",
    re.IGNORECASE,
)
ORDERS_TRIED = 5000


@dataclass(frozen=True)
class Layer:
    """One layer with parameters. `taken` and `given` are its input and output channels (for a norm
    both are its size); `kernel` is a convolution's, over `axes` axes (along one axis it is 1 high);
    `bias` tells whether there is one."""

    path: str
    kind: str
    taken: int
    given: int
    kernel: tuple[int, int] = (1, 1)
    bias: bool = True
    axes: int = 2

    @property
    def container(self) -> str:
        """The path of what holds the layer."""
        return self.path.rpartition(".")[0]

    @property
    def index(self) -> int | None:
        """Its place in a Sequential, when its name is a number."""
        last = self.path.rpartition(".")[2]
        return int(last) if last.isdigit() else None


def read_layers(tensors: Mapping[str, TensorInfo]) -> tuple[Layer, ...]:
    """The layers of a network that is one chain, in the order of its computation.

    Raises ModelError when a tensor is of no plain layer, or when the layers may not be one chain:
    several heads, parallel branches, skip connections, or an order that the file doesn't show.
    """
    layers = read_layer_set(tensors)
    _refuse_branches(layers)
    return _ordered(layers)


def read_layer_set(tensors: Mapping[str, TensorInfo]) -> list[Layer]:
    """The layers in stored order; ModelError when a tensor is of no plain layer."""
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        path, _, part = name.rpartition(".")
        groups.setdefault(path, {})[part] = info
    return [_layer(path, parts) for path, parts in groups.items()]


def _layer(path: str, parts: Mapping[str, TensorInfo]) -> Layer:
    foreign = FOREIGN.search(path)
    if foreign:
        raise not_a_chain(f"{path} isn't a layer of a plain MLP or CNN")
    weight, bias = parts.get("weight"), parts.get("bias")
    running = parts.get("running_mean")
    extra = set(parts) - {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    if extra:
        raise not_a_chain(f"{path or 'the root'} has a tensor {min(extra)!r} of no plain layer")
    if running is not None:
        size = running.shape[0]
        return Layer(path, "batch_norm" if weight else "batch_norm_plain", size, size)
    if weight is None or (bias is not None and len(bias.shape) != 1):
        raise not_a_chain(f"{path} has no weight of a plain layer")
    return _by_shape(path, weight.shape, bias is not None)


def _by_shape(path: str, shape: tuple[int, ...], bias: bool) -> Layer:
    if len(shape) == 2:
        return Layer(path, "linear", shape[1], shape[0], bias=bias)
    if len(shape) == 4:
        return Layer(path, "conv", shape[1], shape[0], (shape[2], shape[3]), bias)
    if len(shape) == 3:
        return Layer(path, "conv", shape[1], shape[0], (1, shape[2]), bias, axes=1)
    if len(shape) == 1 and bias:
        return Layer(path, "layer_norm", shape[0], shape[0])
    if shape == (1,):
        return Layer(path, "prelu", 1, 1, bias=False)
    raise not_a_chain(f"{path}.weight {list(shape)} is of no layer that its shape alone tells")


def not_a_chain(why: str) -> ModelError:
    """The error for a checkpoint that isn't recognisably one chain of layers."""
    return ModelError(
        f"can't rebuild this network from its tensors alone: {why}. Give it with --model "
        "path.py:function (or timm:NAME, torchvision:NAME, transformers:CLASS)"
    )


def _refuse_branches(layers: Iterable[Layer]) -> None:
    weighted = [layer for layer in layers if layer.kind in WEIGHTED]
    if not weighted:
        raise not_a_chain("it holds no linear or convolution weights")
    named = [
        {part for part in layer.path.split(".") if not part.isdigit() and HEADS.search(part)}
        for layer in weighted
    ]
    for one, other in combinations([heads for heads in named if heads], 2):
        if not one & other:
            raise not_a_chain(f"{min(one)} and {min(other)} may be separate branches")
    _refuse_blocks(weighted)


def _refuse_blocks(weighted: Sequence[Layer]) -> None:
    """Numbered blocks of several layers usually have skip connections, which no tensor shows."""
    blocks: dict[str, set[str]] = {}
    for layer in weighted:
        for found in re.finditer(r"\d+\.", layer.path):
            blocks.setdefault(layer.path[: found.end() - 1], set()).add(layer.path[found.end() :])
    families: dict[str, int] = {}
    for block, inside in blocks.items():
        if len(inside) > 1:
            family = re.sub(r"\d+$", "", block)
            families[family] = families.get(family, 0) + 1
    for name, count in families.items():
        if count > 1:
            raise not_a_chain(
                f"{name}N has several layers in each block, which may have skip connections"
            )


def _ordered(layers: list[Layer]) -> tuple[Layer, ...]:
    """The layers in computing order: numbers decide, then the file's own order, then widths."""
    natural = tuple(sorted(layers, key=lambda layer: natural_key(layer.path)))
    numbered = len({re.sub(r"\d+", "#", layer.path) for layer in layers}) == 1
    stored = tuple(layers)
    alphabetical = [layer.path for layer in layers] == sorted(layer.path for layer in layers)
    if fits(natural) and (numbered or len({layer.container for layer in layers}) == 1):
        indexed = all(layer.index is not None for layer in layers)
        if indexed or numbered:
            return natural
    if fits(stored) and (not alphabetical or len(layers) == 1):
        return stored
    orders = list(islice(_chains(layers), 2))
    if len(orders) == 1:
        return orders[0]
    if not orders:
        raise not_a_chain("its layers' widths don't follow one another, so they aren't one chain")
    raise not_a_chain("its layers fit in more than one order, and the file doesn't keep theirs")


def natural_key(path: str) -> list[tuple[int, int | str]]:
    """Sorts numbers by value: layers.2 before layers.10."""
    pieces = (piece for piece in re.split(r"(\d+)|\.", path) if piece)
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in pieces]


def fits(layers: Sequence[Layer]) -> bool:
    """Whether each layer takes what the one before gives."""
    flow: Flow | None = Flow()
    for layer in layers:
        flow = flow.through(layer) if flow else None
    return flow is not None


@dataclass(frozen=True)
class Flow:
    """What runs between two layers: its channels, and whether it is still an image (None: open)."""

    channels: int | None = None
    image: bool | None = None

    def through(self, layer: Layer) -> Flow | None:
        """What comes out of the layer, or None when it can't take this."""
        if layer.kind == "prelu":
            return self
        before = layer.taken if self.channels is None else self.channels
        if layer.kind == "conv":
            # A grouped or depthwise convolution stores the channels of one group only.
            groups, rest = divmod(before, layer.taken)
            takes = self.image is not False and rest == 0 and layer.given % groups == 0
            return Flow(layer.given, True) if takes else None
        if layer.kind == "linear":
            takes = layer.taken % before == 0 if self.image else layer.taken == before
            return Flow(layer.given, False) if takes else None
        return Flow(layer.given, self.image) if layer.given == before else None


def _chains(layers: list[Layer]) -> Iterable[tuple[Layer, ...]]:
    """Every order in which the layers follow one another and keep the order of their numbers."""
    tried = 0

    def extend(
        done: tuple[Layer, ...], left: tuple[Layer, ...], flow: Flow
    ) -> Iterable[tuple[Layer, ...]]:
        nonlocal tried
        tried += 1
        if tried > ORDERS_TRIED:
            raise not_a_chain("its layers fit in too many orders, and the file doesn't keep theirs")
        if not left:
            yield done
        for layer in left:
            others = tuple(other for other in left if other is not layer)
            after = flow.through(layer)
            if after and all(_may_precede(layer, other) for other in others):
                yield from extend((*done, layer), others, after)

    return extend((), tuple(layers), Flow())


def _may_precede(layer: Layer, other: Layer) -> bool:
    same = re.sub(r"\d+", "#", layer.path) == re.sub(r"\d+", "#", other.path)
    return not same or natural_key(layer.path) < natural_key(other.path)


def make(layer: Layer, before: int, stride: int = 1, padding: int = 0) -> nn.Module:
    """The module of a layer that is given `before` channels."""
    convolution: Any = nn.Conv1d if layer.axes == 1 else nn.Conv2d
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(layer.taken, layer.given, bias=layer.bias),
        "conv": lambda: convolution(
            before,
            layer.given,
            layer.kernel[-layer.axes :],
            stride,
            padding,
            groups=before // layer.taken,
            bias=layer.bias,
        ),
        "layer_norm": lambda: nn.LayerNorm(layer.given),
        "prelu": nn.PReLU,
    }
    return makers[layer.kind]()


def weights_of(state: State) -> dict[str, TensorInfo]:
    """The stored tensors of the network's layers: no aliases, no masks."""
    running = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name: info
        for name, info in state.tensors.items()
        if info.alias_of is None and (info.kind == "weight" or name.rpartition(".")[2] in running)
    }
