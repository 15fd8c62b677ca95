"""Zip archives: members as blobs, none read further than declared, checksums verified."""

from __future__ import annotations

import zipfile
import zlib

from plastiscope.checkpoints.blobs import Blob, BytesBlob, PartBlob, stream
from plastiscope.checkpoints.stored import Storage
from plastiscope.errors import UnreadableError

_MAX_RATIO = 200


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
