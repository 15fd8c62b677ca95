"""Files written by torch.save: zip archives, the older bare pickles, and the oldest tar archives.

Also TorchScript archives (only their tensors) and plain pickles of numpy arrays.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from typing import Any, BinaryIO

from plastiscope.checkpoints.blobs import Blob, BytesBlob, PartBlob, stream
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.rebuilds import TypedStorage, storage_dtype, tensor_rebuilds
from plastiscope.checkpoints.stored import Storage
from plastiscope.checkpoints.unpickle import Global, Rebuild, unpickle
from plastiscope.errors import UnreadableError

MAGIC = 0x1950A86A20F9469CFC6C
_MAX_PICKLE = 1 << 30
_MAX_RATIO = 200


def read_zip(blob: Blob) -> Content:
    """A torch zip archive (data.pkl with one stored member a storage) or TorchScript archive."""
    archive = Archive(blob)
    root = archive.root
    script = any(name.startswith(f"{root}code/") for name in archive.members)
    swap = archive.text(f"{root}byteorder") == "big"
    storages: dict[str, Storage] = {}

    def persistent(pid: Any) -> TypedStorage:
        kind, key, _, count = _storage_id(pid)
        dtype = storage_dtype(kind)
        if key not in storages:
            storages[key] = archive.storage(f"{root}data/{key}", swap=swap)
        storage = storages[key]
        if storage.nbytes < count * dtype.itemsize:
            raise UnreadableError(f"corrupt: storage {key} is shorter than its pickle says")
        return TypedStorage(dtype, storage)

    member = archive.blob(f"{root}data.pkl", limit=_MAX_PICKLE, check=True)
    read = unpickle(stream(member), member.size, tensor_rebuilds(), persistent)
    return Content("torchscript" if script else "torch zip", read.tree, read.stubs)


def read_torch(blob: Blob) -> Content:
    """A file of torch.save in whichever of its formats."""
    if blob.read(0, 4) == b"PK\x03\x04":
        return read_zip(blob)
    return read_legacy(blob)


class Archive:
    """The members of a zip file, each as a blob; no member is read further than declared."""

    def __init__(self, blob: Blob) -> None:
        self.whole = blob
        try:
            with zipfile.ZipFile(stream(blob)) as opened:
                self.members = {info.filename: info for info in opened.infolist()}
        except UnreadableError:
            raise
        except Exception as error:
            # A cut file lacks the directory at its end; a damaged directory raises many things.
            cut = "not a zip file" in str(error) or isinstance(error, EOFError)
            cause = "truncated: the zip archive's end is missing" if cut else "corrupt zip archive"
            raise UnreadableError(cause) from None

    @property
    def checked(self) -> bool:
        """Whether checksums were written: torch can be told to leave them all 0."""
        return any(info.CRC for info in self.members.values() if info.file_size)

    @property
    def root(self) -> str:
        """The folder that holds data.pkl, with its slash."""
        found = [name for name in self.members if name == "data.pkl" or name.endswith("/data.pkl")]
        if not found:
            raise UnreadableError("a zip archive that torch didn't write: it has no data.pkl")
        return min(found, key=len)[: -len("data.pkl")]

    def blob(self, name: str, *, limit: int, check: bool = False) -> Blob:
        """A member's bytes; a compressed one is decompressed up to `limit`, no bomb beyond."""
        info = self.members.get(name)
        if info is None:
            raise UnreadableError(f"corrupt: member {name} is missing from the archive")
        if info.file_size > limit:
            raise UnreadableError(f"absurd: member {name} declares {info.file_size} bytes")
        if info.flag_bits & 1:
            raise UnreadableError(f"encrypted: member {name}")
        if info.compress_type == zipfile.ZIP_STORED:
            return self._stored(info, check=check)
        if info.file_size > _MAX_RATIO * max(info.compress_size, 1 << 12):
            raise UnreadableError(
                f"decompression bomb: member {name} would grow from {info.compress_size} "
                f"to {info.file_size} bytes"
            )
        return self._decompressed(info)

    def _stored(self, info: zipfile.ZipInfo, *, check: bool) -> Blob:
        header = self.whole.read(info.header_offset, 30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise UnreadableError(f"corrupt: member {info.filename} isn't where the archive says")
        start = info.header_offset + 30
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        if start + info.file_size > self.whole.size:
            raise UnreadableError(f"truncated: member {info.filename} ends behind the file")
        part = PartBlob(f"{self.whole.name}:{info.filename}", self.whole, start, info.file_size)
        if check and self.checked and zlib.crc32(part.read(0, part.size)) != info.CRC:
            raise UnreadableError(f"damaged: member {info.filename} fails its checksum")
        return part

    def _decompressed(self, info: zipfile.ZipInfo) -> Blob:
        try:
            with zipfile.ZipFile(stream(self.whole)) as opened, opened.open(info) as file:
                data = file.read(info.file_size + 1)
        except UnreadableError:
            raise
        except Exception as error:
            message = f"{type(error).__name__} {error}".rstrip()
            raise UnreadableError(f"damaged: member {info.filename} ({message})") from None
        if len(data) != info.file_size:
            raise UnreadableError(f"damaged: member {info.filename} has another size than declared")
        return BytesBlob(f"{self.whole.name}:{info.filename}", data)

    def storage(self, name: str, *, swap: bool) -> Storage:
        """A member as a storage whose place is looked up, and checksum verified, when it's read."""
        info = self.members.get(name)
        key = name.rsplit("/", 1)[-1]
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            part = self.blob(name, limit=1 << 62)
            return Storage(key, part, 0, part.size, None, swap)
        crc = info.CRC if self.checked else None
        return Storage(key, Member(self, info), 0, info.file_size, crc, swap)

    def text(self, name: str) -> str:
        """A short text member, empty when absent."""
        if name not in self.members:
            return ""
        return self.blob(name, limit=1 << 20).read(0, 1 << 20).decode("latin1").strip()


class Member:
    """An uncompressed member; where its bytes start is asked of its header on first use."""

    def __init__(self, archive: Archive, info: zipfile.ZipInfo) -> None:
        self._archive, self._info = archive, info
        self._part: Blob | None = None
        self.name, self.size = f"{archive.whole.name}:{info.filename}", info.file_size

    @property
    def part(self) -> Blob:
        if self._part is None:
            self._part = self._archive.blob(self._info.filename, limit=1 << 62)
        return self._part

    def read(self, offset: int, length: int) -> bytes:
        return self.part.read(offset, length)

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        return self.part.view(offset, length, whole=whole)


def _storage_id(pid: Any) -> tuple[Any, str, Any, int]:
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        raise UnreadableError("corrupt: an unknown kind of reference in the pickle")
    _, kind, key, location, count = pid[:5]
    if not isinstance(count, int) or count < 0:
        raise UnreadableError("corrupt: a storage of impossible size")
    return kind, str(key), location, count


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
            kind, key, _, count = _storage_id(pid)
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


def read_pickle(blob: Blob) -> Content:
    """A plain pickle; its numpy arrays are the tensors."""
    with stream(blob) as file:
        read = unpickle(file, blob.size, tensor_rebuilds())
    return Content("pickle", read.tree, read.stubs)


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
        kind, key, _, _ = _storage_id(pid)
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
