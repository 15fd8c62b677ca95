"""torch.distributed.checkpoint folders, read in one process and without the library's planner.

`.metadata` is a pickle that gives each tensor's size and its chunks, and for each chunk the file,
offset and length of a torch.save'd tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from plastiscope.checkpoints.blobs import PartBlob, stream
from plastiscope.checkpoints.content import Content, as_tensor
from plastiscope.checkpoints.places import Place, joined
from plastiscope.checkpoints.rebuilds import DTYPES, tensor_rebuilds
from plastiscope.checkpoints.stored import Stored, contiguous
from plastiscope.checkpoints.torch_files import read_torch
from plastiscope.checkpoints.unpickle import Global, Stub, unpickle
from plastiscope.errors import UnreadableError

_OPTIMIZERS = ("optim", "optimizer", "optimizers", "opt")


def read_dcp(place: Place, folder: str) -> Content:
    """The model part of a distributed checkpoint; the optimizer's tensors aren't read.

    Raises:
        UnreadableError: no `.metadata` (the save never finished), missing or short files.
    """
    path = joined(folder, ".metadata")
    if place.entry(path) is None:
        raise UnreadableError(
            "incomplete distributed checkpoint: no .metadata, the save never finished"
        )
    blob = place.blob(path)
    described = _attributes(unpickle(stream(blob), blob.size, tensor_rebuilds()).tree)
    places = _places(described.get("storage_data"))
    table = described.get("state_dict_metadata")
    if not isinstance(table, Mapping) or not places:
        raise UnreadableError("corrupt .metadata: no table of tensors in it")
    tree: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    left_out = 0
    sizes: dict[str, int] = {}
    for name, entry in table.items():
        head = str(name).split(".", 1)[0]
        chunks = _attributes(entry).get("chunks")
        if head in _OPTIMIZERS:
            left_out += 1
        elif isinstance(chunks, list):
            tree[str(name)] = _tensor(place, folder, str(name), entry, places, sizes)
        elif (str(name), ()) in places and "." not in str(name):
            plain[str(name)] = _object(place, folder, places[(str(name), ())])
    notes = [f"the optimizer's {left_out} entries aren't read"] if left_out else []
    return Content("distributed checkpoint", {**plain, **_nested(tree)}, notes=tuple(notes))


def _nested(tree: dict[str, Any]) -> dict[str, Any]:
    """{"model": {...}} where every tensor lies under one of the usual keys."""
    for head in ("model", "state_dict", "app.model", "module"):
        if tree and all(name.startswith(f"{head}.") for name in tree):
            return {"model": {name[len(head) + 1 :]: t for name, t in tree.items()}}
    model = {name[6:]: t for name, t in tree.items() if name.startswith("model.")}
    return {"model": model} if model else tree


def _attributes(node: Any) -> dict[str, Any]:
    return node.attributes if isinstance(node, Stub) else {}


def _numbers(node: Any) -> tuple[int, ...]:
    """A torch.Size or a tuple of integers, however it was pickled."""
    if isinstance(node, Stub):
        node = node.args[0] if node.args else node.items
    if isinstance(node, list | tuple) and all(isinstance(n, int) and n >= 0 for n in node):
        return tuple(node)
    raise UnreadableError("corrupt .metadata: a size that isn't one")


def _places(data: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
    """(name, offsets of the chunk) -> (file, offset, length)."""
    found: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    if not isinstance(data, Mapping):
        return found
    for key, value in data.items():
        index, place = _attributes(key), _attributes(value)
        offset = index.get("offset")
        where = () if offset is None else _numbers(offset)
        file, at, length = (place.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or "/" in file.replace("\\", "/") or ".." in file:
            raise UnreadableError("corrupt .metadata: a chunk outside of the folder")
        if not isinstance(at, int) or not isinstance(length, int) or at < 0 or length < 0:
            raise UnreadableError("corrupt .metadata: a chunk without its place")
        found[(str(index.get("fqn")), where)] = (file, at, length)
    return found


def _tensor(
    place: Place,
    folder: str,
    name: str,
    entry: Any,
    places: Mapping[tuple[str, tuple[int, ...]], tuple[str, int, int]],
    sizes: dict[str, int],
) -> Stored:
    attributes = _attributes(entry)
    shape = _numbers(attributes.get("size"))
    dtype = _dtype(attributes.get("properties"))
    parts = []
    for chunk in attributes["chunks"]:
        offsets, extent = (_numbers(_attributes(chunk).get(k)) for k in ("offsets", "sizes"))
        found = places.get((name, offsets)) or places.get((name, ()))
        if found is None:
            raise UnreadableError(f"incomplete: a chunk of {name} has no file")
        _check_file(place, folder, found, sizes)
        parts.append((offsets, extent, found))
    covered = sum(_volume(extent) for _, extent, _ in parts)
    if covered != _volume(shape):
        raise UnreadableError(f"incomplete: the chunks of {name} don't cover its shape {shape}")

    def read() -> torch.Tensor:
        pieces = [(o, e, _chunk(place, folder, f)) for o, e, f in parts]
        if len(pieces) == 1:
            return pieces[0][2].reshape(shape)
        whole = torch.empty(shape, dtype=dtype)
        for offsets, extent, piece in pieces:
            where = tuple(slice(o, o + n) for o, n in zip(offsets, extent, strict=True))
            whole[where] = piece.reshape(extent)
        return whole

    return Stored(shape, dtype, contiguous(shape), compute=read)


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _check_file(
    place: Place, folder: str, found: tuple[str, int, int], sizes: dict[str, int]
) -> None:
    file, at, length = found
    if file not in sizes:
        entry = place.entry(joined(folder, file))
        if entry is None:
            raise UnreadableError(f"incomplete: {file} is missing")
        sizes[file] = entry.size
    if at + length > sizes[file]:
        raise UnreadableError(f"truncated: {file} ends before its last chunk")


def _chunk(place: Place, folder: str, found: tuple[str, int, int]) -> torch.Tensor:
    file, at, length = found
    part = PartBlob(file, place.blob(joined(folder, file)), at, length)
    tensor = as_tensor(read_torch(part).tree)
    if tensor is None:
        raise UnreadableError(f"corrupt: a chunk of {file} isn't a tensor")
    return tensor.read()


def _object(place: Place, folder: str, found: tuple[str, int, int]) -> Any:
    """A small plain entry (a step counter); None when it can't be read."""
    file, at, length = found
    if length > 1 << 16:
        return None
    try:
        return read_torch(PartBlob(file, place.blob(joined(folder, file)), at, length)).tree
    except UnreadableError:
        return None


def _dtype(properties: Any) -> torch.dtype:
    # TensorProperties pickles as a tuple whose first entry is the element type.
    state = properties.state if isinstance(properties, Stub) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if first is None:
        first = _attributes(properties).get("dtype")
    if isinstance(first, Global) and first.name in DTYPES:
        return DTYPES[first.name]
    return torch.float32
