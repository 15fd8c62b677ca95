"""What torch.save wrote before zip archives: bare pickles, and the tar archives of 2016."""

from __future__ import annotations

import io
import tarfile
from typing import Any, BinaryIO

from plastiscope.checkpoints.blobs import Blob, PartBlob, stream
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.rebuilds import (
    TypedStorage,
    storage_dtype,
    storage_id,
    tensor_rebuilds,
)
from plastiscope.checkpoints.stored import Storage
from plastiscope.checkpoints.unpickle import Global, Rebuild, unpickle
from plastiscope.errors import UnreadableError

MAGIC = 0x1950A86A20F9469CFC6C


def read_legacy(blob: Blob) -> Content:
    """torch.save before 1.6: magic, protocol, system, object, keys, then the storages raw."""
    with stream(blob) as file:
        _expect_magic(file, blob.size)
        _read(file, blob.size)
        system = _read(file, blob.size)
        big = isinstance(system, dict) and system.get("little_endian") is False
        storages: dict[str, Storage] = {}
        types: dict[str, Any] = {}

        def persistent(pid: Any) -> Any:
            if isinstance(pid, tuple) and pid and pid[0] == "module":
                return pid[1]
            kind, key, _, count = storage_id(pid)
            dtype = storage_dtype(kind)
            view = pid[5] if len(pid) > 5 else None
            if key not in storages:
                storages[key] = Storage(key, blob, 0, count * dtype.itemsize, None, big)
                types[key] = dtype
            if isinstance(view, tuple) and len(view) == 3:
                return TypedStorage(dtype, _part(storages, key, view, dtype.itemsize))
            return TypedStorage(dtype, storages[key])

        read = unpickle(file, blob.size, tensor_rebuilds(), persistent)
        keys = _read(file, blob.size)
        _place(blob, file, keys, storages, types)
    return Content("torch legacy", read.tree, read.stubs)


def _part(storages: dict[str, Storage], key: str, view: tuple[Any, ...], size: int) -> Storage:
    # Torch before 0.4 saved views of storages: (key of the view, offset, number of elements).
    name, offset, count = f"{key}/{view[0]}", int(view[1]) * size, int(view[2]) * size
    whole = storages[key]
    if offset < 0 or count < 0 or offset + count > whole.nbytes:
        raise UnreadableError("corrupt: a storage's view leaves the storage")
    if name not in storages:
        storages[name] = Storage(name, PartOf(whole), offset, count, None, whole.swap)
    return storages[name]


class PartOf:
    """The bytes of a storage whose place is known only after the pickle was read."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.name, self.size = storage.blob.name, storage.nbytes

    def read(self, offset: int, length: int) -> bytes:
        return self._storage.blob.read(self._storage.offset + offset, length)

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        return self._storage.blob.view(self._storage.offset + offset, length, whole=whole)


def _place(
    blob: Blob, file: BinaryIO, keys: Any, storages: dict[str, Storage], types: dict[str, Any]
) -> None:
    if not isinstance(keys, list) or len(keys) > blob.size:
        raise UnreadableError("corrupt: no list of storages behind the pickle")
    at = file.tell()
    for key in map(str, keys):
        header = blob.read(at, 8)
        if len(header) < 8:
            raise UnreadableError("truncated: the file ends before its storages")
        if key not in types:
            raise UnreadableError(f"corrupt: storage {key} is unknown to the pickle")
        count = int.from_bytes(header, "little", signed=True)
        nbytes = count * types[key].itemsize
        if count < 0 or nbytes != storages[key].nbytes:
            raise UnreadableError(f"corrupt: storage {key} has another size than its pickle says")
        if at + 8 + nbytes > blob.size:
            raise UnreadableError("truncated: the file ends inside its storages")
        storages[key].offset = at + 8
        at += 8 + nbytes
    missing = set(types) - set(map(str, keys))
    if missing:
        raise UnreadableError(f"corrupt: {len(missing)} storages have no data in the file")


def _read(file: BinaryIO, size: int) -> Any:
    return unpickle(file, size, tensor_rebuilds()).tree


def _expect_magic(file: BinaryIO, size: int) -> None:
    if _read(file, size) != MAGIC:
        raise UnreadableError("not a torch file: its magic number is missing")


def read_tar(blob: Blob) -> Content:
    """torch.save of 2016: a tar with the pickle and its storages apart."""
    with tarfile.open(fileobj=stream(blob), mode="r:") as archive:
        members = {m.name: m for m in _limited(archive) if m.isfile()}
    if not {"pickle", "storages"} <= set(members):
        raise UnreadableError("a tar archive that torch didn't write: no pickle, no storages")
    parts = {
        name: PartBlob(f"{blob.name}:{name}", blob, member.offset_data, member.size)
        for name, member in members.items()
    }
    if any(part.start + part.size > blob.size for part in parts.values()):
        raise UnreadableError("truncated: the tar archive ends inside a member")
    storages = _tar_storages(parts["storages"])
    if "tensors" in parts and parts["tensors"].size > 16:
        raise UnreadableError(
            "a tar archive of torch 0.1 with separate tensors: load and save it with torch once"
        )

    def persistent(pid: Any) -> TypedStorage:
        kind, key, _, _ = storage_id(pid)
        if key not in storages:
            raise UnreadableError(f"corrupt: storage {key} isn't in the archive")
        return TypedStorage(storage_dtype(kind), storages[key])

    def resolved(rebuild: Rebuild) -> Rebuild:
        # Some writers put the reference itself where torch has a persistent id.
        def call(args: tuple[Any, ...]) -> Any:
            if args and isinstance(args[0], tuple):
                args = (persistent(args[0]), *args[1:])
            return rebuild(args)

        return call

    rebuilds = {
        name: resolved(rebuild) if "_rebuild_tensor" in name else rebuild
        for name, rebuild in tensor_rebuilds().items()
    }
    member = parts["pickle"]
    read = unpickle(stream(member), member.size, rebuilds, persistent)
    return Content("torch tar", read.tree, read.stubs)


def _limited(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members: list[tarfile.TarInfo] = []
    for member in archive:
        members.append(member)
        if len(members) > 100:
            break
    return members


def _tar_storages(part: PartBlob) -> dict[str, Storage]:
    storages: dict[str, Storage] = {}
    file = stream(part)
    count = _read(file, part.size)
    if not isinstance(count, int) or not 0 <= count <= part.size:
        raise UnreadableError("corrupt: no number of storages in the tar archive")
    for _ in range(count):
        key, _, kind = _triple(_read(file, part.size))
        nbytes = int.from_bytes(file.read(8), "little", signed=True)
        nbytes *= storage_dtype(kind).itemsize
        at = file.tell()
        if nbytes < 0 or at + nbytes > part.size:
            raise UnreadableError("truncated: the tar archive's storages end too early")
        storages[str(key)] = Storage(str(key), part, at, nbytes)
        file.seek(nbytes, io.SEEK_CUR)
    return storages


def _triple(value: Any) -> tuple[Any, Any, Any]:
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[2], Global):
        raise UnreadableError("corrupt: a storage's description in the tar archive")
    return value
