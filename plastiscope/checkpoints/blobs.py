"""Bytes that lie somewhere: a file, a part of a file, memory, or an object behind a URL.

Readers ask a blob for ranges; only a local file is memory-mapped, range by range, so that what
stays resident is the tensor in use and not the file.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import re
import struct
import tarfile
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from plastiscope.errors import UnreadableError

_T = TypeVar("_T")
# What damaged bytes raise in the parsers of the standard library, numpy and torch.
DAMAGE: tuple[type[Exception], ...] = (
    *(TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, AssertionError),
    *(MemoryError, RuntimeError, OSError, EOFError, ArithmeticError, SyntaxError),
    *(struct.error, zlib.error, zipfile.BadZipFile, tarfile.TarError),
)
UNREADABLE: tuple[type[Exception], ...] = (UnreadableError, *DAMAGE)
_RETRIES = 5
_BLOCK, _KEPT_BLOCKS = 1 << 18, 8


class Blob(Protocol):
    """A named, sized run of bytes."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer only at the end."""

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        """Exactly `length` writable bytes that aren't written back; raises UnreadableError.

        With `whole` they will all be used, else only a few of them.
        """


@dataclass(frozen=True)
class FileBlob:
    """A local file, opened for each range and never held open."""

    path: Path
    size: int

    @property
    def name(self) -> str:
        return str(self.path)

    def read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(min(length, max(self.size - offset, 0)))

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        if length == 0:
            return memoryview(bytearray())
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            # A map past the end kills the process on first touch: ask the file, not the listing.
            if os.fstat(file.fileno()).st_size < offset + length:
                raise UnreadableError(f"truncated: {self.path.name} ends before its data")
            if whole and hasattr(os, "posix_fadvise"):
                # The disk reads ahead while the first pages are already in use.
                os.posix_fadvise(
                    file.fileno(), start, offset + length - start, os.POSIX_FADV_WILLNEED
                )
            mapped = mmap.mmap(
                file.fileno(), offset + length - start, access=mmap.ACCESS_COPY, offset=start
            )
        return memoryview(mapped)[offset - start :]


@dataclass(frozen=True)
class BytesBlob:
    """Bytes in memory, such as a decompressed member."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        if offset + length > len(self.data):
            raise UnreadableError(f"truncated: {self.name} ends before its data")
        return memoryview(bytearray(self.data[offset : offset + length]))


@dataclass(frozen=True)
class PartBlob:
    """A range of another blob, such as an uncompressed zip member."""

    name: str
    whole: Blob
    start: int
    size: int

    def read(self, offset: int, length: int) -> bytes:
        return self.whole.read(self.start + offset, min(length, max(self.size - offset, 0)))

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        if offset + length > self.size:
            raise UnreadableError(f"truncated: {self.name} ends before its data")
        return self.whole.view(self.start + offset, length, whole=whole)


@dataclass(frozen=True)
class RemoteBlob:
    """An object on an fsspec file system, read by ranges, with retries.

    Small reads fetch the block around them, since an archive's directory and headers are asked
    for in many pieces and each request costs more than a block.
    """

    system: Any
    path: str
    size: int
    blocks: OrderedDict[int, bytes] = field(default_factory=OrderedDict, compare=False)

    @property
    def name(self) -> str:
        return without_secrets(self.path)

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        if end <= offset:
            return b""
        if end - offset > _BLOCK:
            return self._fetched(offset, end)
        first, last = offset // _BLOCK, (end - 1) // _BLOCK
        joined = b"".join(self._block(at) for at in range(first, last + 1))
        return joined[offset - first * _BLOCK : end - first * _BLOCK]

    def _block(self, at: int) -> bytes:
        if at not in self.blocks:
            start = at * _BLOCK
            self.blocks[at] = self._fetched(start, min(start + _BLOCK, self.size))
        self.blocks.move_to_end(at)
        while len(self.blocks) > _KEPT_BLOCKS:
            self.blocks.popitem(last=False)
        return self.blocks[at]

    def _fetched(self, offset: int, end: int) -> bytes:
        def fetch() -> bytes:
            data = bytes(self.system.cat_file(self.path, start=offset, end=end))
            if len(data) == self.size > end - offset:
                # A server that ignores ranges sends everything.
                data = data[offset:end]
            if len(data) != end - offset:
                raise OSError(f"{len(data)} of {end - offset} bytes came")
            return data

        return retried(fetch, self.path)

    def view(self, offset: int, length: int, *, whole: bool = True) -> memoryview:
        if offset + length > self.size:
            raise UnreadableError(f"truncated: {self.name} ends before its data")
        return memoryview(bytearray(self.read(offset, length)))


def without_secrets(url: str) -> str:
    """The URL without a user, password, or query: what may be printed."""
    return re.sub(r"//[^/@]*@", "//", url).split("?", 1)[0]


def retried(fetch: Callable[[], _T], what: str) -> _T:
    """`fetch()`, tried again after short waits when the connection or the server fails.

    A missing object or a refused permission isn't tried again. The error names the object and
    the kind of failure only: messages of the libraries below may carry signed URLs.
    """
    what, wait = without_secrets(what), 0.1
    for attempt in range(_RETRIES):
        try:
            return fetch()
        except (FileNotFoundError, PermissionError) as error:
            raise UnreadableError(f"{what}: {type(error).__name__}") from None
        except Exception as error:
            if attempt == _RETRIES - 1:
                raise UnreadableError(
                    f"{what}: reading failed {_RETRIES} times ({type(error).__name__})"
                ) from None
            time.sleep(wait)
            wait *= 2
    raise AssertionError("unreachable")


class _Stream(io.RawIOBase):
    """A blob as a seekable file, for zipfile and the unpickler."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._blob.size}[whence]
        if base + offset < 0:
            raise OSError("negative seek")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._blob.read(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def stream(blob: Blob) -> BinaryIO:
    """The blob as a buffered binary file; a local one is the file itself."""
    if isinstance(blob, FileBlob):
        return blob.path.open("rb")
    if isinstance(blob, BytesBlob):
        return io.BytesIO(blob.data)
    remote = isinstance(blob, RemoteBlob)
    return cast(BinaryIO, io.BufferedReader(_Stream(blob), 1 << 20 if remote else 1 << 16))


def local(path: Path) -> FileBlob:
    """The file at `path` as a blob; raises UnreadableError where it can't be opened."""
    try:
        with path.open("rb") as file:
            return FileBlob(path, os.fstat(file.fileno()).st_size)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        with contextlib.suppress(OSError):
            if path.is_symlink():
                reason = f"dangling symbolic link to {path.readlink()}"
        raise UnreadableError(f"{path.name}: {reason}") from None
