"""Zip archives of torch.save and TorchScript (only their tensors), and plain pickles."""

from __future__ import annotations

import io
from typing import Any

from plastiscope.checkpoints.archives import Archive
from plastiscope.checkpoints.blobs import Blob, stream
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.rebuilds import (
    TypedStorage,
    storage_dtype,
    storage_id,
    tensor_rebuilds,
)
from plastiscope.checkpoints.stored import Storage
from plastiscope.checkpoints.torch_legacy import read_legacy
from plastiscope.checkpoints.unpickle import unpickle
from plastiscope.errors import UnreadableError

_MAX_PICKLE = 1 << 30


def read_zip(blob: Blob, archive: Archive | None = None) -> Content:
    """A torch zip archive (data.pkl with one stored member a storage) or TorchScript archive."""
    archive = archive or Archive(blob)
    root = archive.root
    script = any(name.startswith(f"{root}code/") for name in archive.members)
    swap = archive.text(f"{root}byteorder") == "big"
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> TypedStorage:
        kind, key, _, count = storage_id(pid)
        dtype = storage_dtype(kind)
        if key not in storages:
            storages[key] = archive.storage(f"{root}data/{key}", swap=swap)
        storage = storages[key]
        if storage.nbytes < count * dtype.itemsize:
            raise UnreadableError(f"corrupt: storage {key} is shorter than its pickle says")
        return TypedStorage(dtype, storage)

    member = archive.blob(f"{root}data.pkl", limit=_MAX_PICKLE, check=True)
    data = io.BytesIO(member.read(0, member.size))
    read = unpickle(data, member.size, tensor_rebuilds(), persistent)
    return Content("torchscript" if script else "torch zip", read.tree, read.stubs)


def read_torch(blob: Blob) -> Content:
    """A file of torch.save in whichever of its formats."""
    if blob.read(0, 4) == b"PK\x03\x04":
        return read_zip(blob)
    return read_legacy(blob)


def read_pickle(blob: Blob) -> Content:
    """A plain pickle; its numpy arrays are the tensors."""
    with stream(blob) as file:
        read = unpickle(file, blob.size, tensor_rebuilds())
    return Content("pickle", read.tree, read.stubs)
