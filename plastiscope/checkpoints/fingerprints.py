"""What identifies a checkpoint's content: equal for the same bytes under another name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from plastiscope.checkpoints.archives import Archive
from plastiscope.checkpoints.blobs import Blob
from plastiscope.checkpoints.places import Place
from plastiscope.errors import UnreadableError

_PIECE = 1 << 24
_WRITER_FILES = ("version", "byteorder", ".format_version", ".storage_alignment")


def fingerprint(place: Place, paths: Iterable[str]) -> str:
    """A hex hash of the content of these files together.

    A zip archive with checksums is identified by its members' checksums and sizes (torch writes
    the file's own name into the archive, so the bytes of two equal saves differ); everything else
    by its whole content. An object store's own content hash stands for reading it all.
    """
    total = hashlib.blake2b(digest_size=20)
    for path in paths:
        known = place.identity(path)
        total.update((known or _of_blob(place.blob(path))).encode())
    return total.hexdigest()


def _of_blob(blob: Blob) -> str:
    if blob.read(0, 4) == b"PK\x03\x04":
        try:
            archive = Archive(blob)
            if archive.checked:
                return _of_archive(archive)
        except UnreadableError:
            pass
    return _of_bytes(blob)


def _of_archive(archive: Archive) -> str:
    names = archive.members
    root = ""
    if any(name.endswith("data.pkl") for name in names):
        root = archive.root
    digest = hashlib.blake2b(digest_size=20)
    for name, info in sorted(names.items()):
        inner = name.removeprefix(root)
        if inner in _WRITER_FILES or inner.startswith(".data/"):
            continue
        digest.update(f"{inner}\0{info.file_size}\0{info.CRC}\n".encode())
        if inner == "data.pkl":
            pickle = archive.blob(name, limit=1 << 30)
            digest.update(pickle.read(0, pickle.size))
    return digest.hexdigest()


def _of_bytes(blob: Blob) -> str:
    """A hash over the hashes of 16 MiB pieces: the pieces are hashed side by side."""

    def piece(at: int) -> bytes:
        return hashlib.sha256(blob.read(at, _PIECE)).digest()

    offsets = range(0, blob.size, _PIECE)
    digest = hashlib.blake2b(str(blob.size).encode(), digest_size=20)
    if len(offsets) < 2:
        digest.update(b"".join(map(piece, offsets)))
        return digest.hexdigest()
    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(piece, offsets):
            digest.update(part)
    return digest.hexdigest()
