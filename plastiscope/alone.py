"""Which parts of a network can be called alone: components that are modules, blocks, attentions.

Blocks may share a module: the n-th block is then its n-th call, if no other call is made of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .anatomy.parts import Component, is_expert
from .network import Network, is_part
from .observations import Called

Where = tuple[str, int | None]
"""A component's name and its block."""
IN_ATTENTION = ("q", "k", "v")
STREAM = ("residual1", "residual2")
FUNCTIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU,
}  # fmt: skip
"""Activations that their name tells whole: a gelu may be the exact one or an approximation."""


@dataclass(frozen=True)
class Alone:
    """The call of each part that is a module by itself, and for the others the reason why not."""

    calls: Mapping[Where, Called]
    obstacles: Mapping[Where, str]

    def __or__(self, other: Alone) -> Alone:
        return Alone({**self.calls, **other.calls}, {**self.obstacles, **other.obstacles})

    def named(self, names: Collection[str]) -> Alone:
        """Those parts alone that have one of these names."""
        calls = {key: call for key, call in self.calls.items() if key[0] in names}
        return Alone(calls, {k: v for k, v in self.obstacles.items() if k[0] in names})


def components_alone(network: Network) -> Alone:
    """Of every component that computes something: not the residual stream, a bias or a table. Of a
    mixture the experts as one: an expert alone isn't given inputs, but some of their tokens."""
    known = _modules(network)
    parts = [
        replace(c, path=_own_path(c, network, known))
        for c in network.anatomy.components
        if is_part(c) and not c.embeds and not is_expert(c.name)
    ]
    obstacles = {(c.name, c.block): _obstacle(c, parts, known) for c in parts}
    own = {(c.name, c.block): c for c in parts if obstacles[c.name, c.block] is None}
    calls = {
        where: replace(call, channel_axis=own[where].channel_axis)
        for where, call in _numbered({where: c.path for where, c in own.items()}).items()
    }
    functions = _functions([c for c in parts if (c.name, c.block) not in calls], parts, calls)
    left = {
        key: reason
        for key, reason in obstacles.items()
        if reason and key not in functions and key[0] not in STREAM
    }
    experts = [c for c in network.anatomy.components if is_expert(c.name)]
    left |= {(c.name, c.block): "part_of_experts" for c in experts}
    return Alone({**calls, **functions}, left)


def _own_path(c: Component, network: Network, known: Mapping[str, nn.Module]) -> str:
    """A tied weight has the path of its first owner: of the component it's where the output is."""
    assert network.live is not None
    site = c.features
    if not c.weights or site is None or site.op or site.port != "output":
        return c.path
    weight = dict(network.live.module.named_parameters()).get(c.weights[0].tensor)
    mine = weight is not None and getattr(known.get(site.module), "weight", None) is weight
    return site.module if mine else c.path


def _functions(
    some: Sequence[Component], parts: Sequence[Component], calls: Mapping[Where, Called]
) -> dict[Where, Called]:
    """Activations that are called as functions of a component's whole output."""
    found: dict[Where, Called] = {}
    for c in some:
        before, function = c.pre_activation, FUNCTIONS.get(c.function or "")
        if before is None or before.op or before.port != "output" or function is None:
            continue
        for o in parts:
            called = calls.get((o.name, o.block))
            if called and o.block == c.block and before == o.features and c.before_channels is None:
                then = replace(called, then=function(), channel_axis=c.channel_axis)
                found[c.name, c.block] = then
    return found


def _obstacle(
    c: Component, parts: Sequence[Component], known: Mapping[str, nn.Module]
) -> str | None:
    """Why a component's module isn't the component and nothing else."""
    if c.name in STREAM:
        return "no_module_of_its_own"
    if c.name in IN_ATTENTION:
        return "part_of_attention"
    if c.features is None:
        return "output_not_seen"
    if c.input_axis != 0:
        return "inputs_not_told_apart"
    if c.path not in known or _holds_more(c, parts, known[c.path]):
        return "no_module_of_its_own"
    return "takes_ids" if isinstance(known[c.path], nn.Embedding) else None


def _holds_more(c: Component, parts: Sequence[Component], module: nn.Module) -> bool:
    """Whether another component lies in the module, or the component is a function called in it.

    A function that isn't a module has the path of the layer before it.
    """
    others = [o for o in parts if o is not c and o.path == c.path]
    if not c.weights:
        before = c.pre_activation is not None and c.pre_activation.module == c.path
        return before or any(module.children()) or any(o.block == c.block for o in others)
    beside = any(o.block == c.block and o.name != "activation" for o in others)
    inside = c.path + "." if c.path else ""
    return beside or any(o.path != c.path and o.path.startswith(inside) for o in parts)


def _numbered(paths: Mapping[Where, str]) -> dict[Where, Called]:
    """Each path with its number among the parts, in forward order, that have the same."""
    every = list(paths.values())
    return {
        key: Called(path, every[:position].count(path), every.count(path))
        for position, (key, path) in enumerate(paths.items())
    }


def matrices(network: Network) -> Iterator[tuple[Where, Tensor]]:
    """The matrix of each component that is one: of q the rows of a fused projection, for example,
    before whatever norm or rotation the model applies to what they make."""
    assert network.live is not None
    known = _modules(network)
    for c in network.anatomy.components:
        if c.linear and len(c.weights) == 1:
            owner, _, name = c.weights[0].tensor.rpartition(".")
            weight = getattr(known[owner], name)  # resolved, where it's parametrised
            yield (c.name, c.block), c.weights[0].of(weight.detach())


def blocks_alone(network: Network) -> Alone:
    """Of every transformer block: the longest prefix of its components' paths."""
    return _shared_modules(network, "block", None, frozenset({""}))


def attentions_alone(network: Network) -> Alone:
    """Of every attention, with its output projection."""
    taken = {call.path for call in blocks_alone(network).calls.values()}
    names = (*IN_ATTENTION, "attention_output")
    return _shared_modules(network, "attention", names, frozenset({*taken, ""}))


def _shared_modules(
    network: Network, label: str, names: Sequence[str] | None, taken: frozenset[str]
) -> Alone:
    """Of each block the module that all its components (of these names) lie in, if not `taken`."""
    known = _modules(network)
    paths: dict[Where, str] = {}
    obstacles: dict[Where, str] = {}
    for block in network.anatomy.attention:
        parts = [c for c in network.anatomy.components if c.block == block]
        path = _prefix([c.path for c in parts if names is None or c.name in names])
        if not _inputs_first(parts, known.get(path), label):
            obstacles[label, block] = "inputs_not_told_apart"
        elif path not in known or path in taken:
            obstacles[label, block] = "no_module_of_its_own"
        else:
            paths[label, block] = path
    calls = {where: replace(call, mixes=True) for where, call in _numbered(paths).items()}
    return Alone(calls, obstacles)


def _inputs_first(parts: Sequence[Component], module: nn.Module | None, label: str) -> bool:
    """Whether what the module is given has the inputs along its first axis.

    torch's attention puts them elsewhere for its output projection only: not the block's matter.
    """
    inner = label == "block" or (isinstance(module, nn.MultiheadAttention) and module.batch_first)
    axes = {
        c.input_axis
        for c in parts
        if c.features is not None and not (inner and c.name == "attention_output")
    }
    return axes == {0}


def _prefix(paths: Sequence[str]) -> str:
    shared = []
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


def _modules(network: Network) -> dict[str, nn.Module]:
    assert network.live is not None
    return dict(network.live.module.named_modules())
