"""What one stored file holds, before anyone asks what is a weight: a tree with lazy tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plastiscope.checkpoints.rebuilds import Array, stored_array
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.unpickle import Global, Stub
from plastiscope.errors import UnreadableError

_MAX_NODES = 2_000_000
_MAX_DEPTH = 64
_MAX_VISITS = 64
_PLAIN = str | int | float | bool | bytes | complex


@dataclass(frozen=True)
class Content:
    """A file's tree: dicts, lists and plain values, with `Stored` tensors at the leaves.

    `aliases` maps a name that isn't stored to the stored one it shares (safetensors' metadata).
    `metadata` is what a format keeps beside its tensors.
    """

    format: str
    tree: Any
    stubs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """A container's named members, None for a leaf.

    The object tree of a pickled module gives its parameters, buffers and submodules under the
    names that its state dict would use.
    """
    if isinstance(node, Stub):
        return _members(node)
    if isinstance(node, Mapping):
        return [(str(key), value) for key, value in node.items()]
    if isinstance(node, list | tuple):
        return [(str(at), value) for at, value in enumerate(node)]
    return None


def _members(stub: Stub) -> list[tuple[str, Any]]:
    attributes = stub.attributes
    parts = [attributes.get(part) for part in ("_parameters", "_buffers", "_modules")]
    if any(isinstance(part, Mapping) for part in parts):
        skipped = attributes.get("_non_persistent_buffers_set")
        if not isinstance(skipped, set | frozenset):
            skipped = frozenset()
        return [
            (str(key), value)
            for part in parts
            if isinstance(part, Mapping)
            for key, value in part.items()
            if key not in skipped
        ]
    members = [*attributes.items(), *((str(k), v) for k, v in stub.entries.items())]
    return members + [(str(at), value) for at, value in enumerate(stub.items)]


def as_tensor(node: Any) -> Stored | None:
    """The tensor at a leaf: stored, a numpy array, or a stub that carries one."""
    if isinstance(node, Stored):
        return node
    if isinstance(node, Array):
        return stored_array(node)
    return None


def tensors(node: Any, prefix: str = "") -> dict[str, Stored]:
    """Every tensor under `node` by its dotted path, in stored order.

    Raises:
        UnreadableError: the tree is absurdly large (a file may refer to itself).
    """
    found: dict[str, Stored] = {}
    for path, tensor in _walk(node):
        name = ".".join((prefix, *path) if prefix else path)
        found[name or "tensor"] = tensor
    return found


def _walk(node: Any) -> Iterator[tuple[tuple[str, ...], Stored]]:
    pending: list[tuple[tuple[str, ...], Any, _Above]] = [((), node, None)]
    visits: dict[int, int] = {}
    for _ in range(_MAX_NODES):
        if not pending:
            return
        path, current, above = pending.pop()
        tensor = as_tensor(current)
        if tensor is not None:
            yield path, tensor
            continue
        inner = children(current)
        if not inner or len(path) >= _MAX_DEPTH:
            continue
        # A shared module is named under each owner; a container that holds itself only once.
        seen = visits.get(id(current), 0)
        if seen and (seen >= _MAX_VISITS or _is_above(id(current), above)):
            continue
        visits[id(current)] = seen + 1
        below = (id(current), above)
        pending.extend(((*path, key), value, below) for key, value in reversed(inner))
    raise UnreadableError("absurd structure: millions of nested entries")


_Above = tuple[int, Any] | None


def _is_above(node: int, above: _Above) -> bool:
    while above is not None:
        if above[0] == node:
            return True
        above = above[1]
    return False


def has_tensors(node: Any) -> bool:
    """Whether any tensor lies under `node`."""
    return next(_walk(node), None) is not None


def plain(node: Any, *, budget: int = 100_000) -> Any:
    """A tree as plain Python values: a stub is a dict of its attributes and its `__class__`.

    Tensors of one element are numbers; larger ones are described in words. What is deeper or
    larger than a configuration ever is becomes "...".
    """
    left = [budget]
    return _plain(node, left, 0)


def _plain(node: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if node is None or isinstance(node, _PLAIN):
        return node
    if left[0] < 0 or depth > 24:
        return "..."
    tensor = as_tensor(node)
    if tensor is not None:
        return _number(tensor)
    if isinstance(node, Array):
        return str(node.value)
    if isinstance(node, Global):
        return node.name
    if isinstance(node, Stub):
        return _plain_stub(node, left, depth)
    if isinstance(node, Mapping):
        return {
            key if isinstance(key, str | int) else str(key): _plain(value, left, depth + 1)
            for key, value in node.items()
        }
    return [_plain(value, left, depth + 1) for value in node] if _iterable(node) else str(node)


def _iterable(node: Any) -> bool:
    return hasattr(node, "__iter__")


def _number(tensor: Stored) -> Any:
    if tensor.numel == 1 and tensor.has_data:
        return tensor.read().item()
    return f"tensor {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _plain_stub(stub: Stub, left: list[int], depth: int) -> Any:
    attributes = stub.attributes
    # OmegaConf keeps a value in _val and a container in _content.
    for key in ("_val", "_content"):
        if key in attributes and stub.name.startswith("omegaconf."):
            return _plain(attributes[key], left, depth + 1)
    values: dict[str, Any] = {"__class__": stub.name}
    for key, value in attributes.items():
        values[key] = _plain(value, left, depth + 1)
    if not attributes and stub.args:
        values["args"] = _plain(list(stub.args), left, depth + 1)
    return values
