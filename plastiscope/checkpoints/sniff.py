"""Tell a file's format by its first bytes, and name what it is when it isn't a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from plastiscope.checkpoints.archives import Archive
from plastiscope.checkpoints.blobs import DAMAGE, Blob
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.numpy_files import read_npz, read_sb2, read_sb3
from plastiscope.checkpoints.safetensors_files import read_safetensors
from plastiscope.checkpoints.torch_files import read_pickle, read_zip
from plastiscope.checkpoints.torch_legacy import read_legacy, read_tar
from plastiscope.errors import UnreadableError

_LFS = b"version https://git-lfs"
_LEGACY = (b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", b"L119547037146038801333356L")
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e\x80-\xff]+")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}


def read_content(blob: Blob) -> Content:
    """What a file holds, whatever its extension says.

    Raises:
        UnreadableError: one line that names the cause (truncated, empty, Git LFS pointer, HTML,
            symlink text, another kind of file ...).
    """
    if blob.size == 0:
        raise UnreadableError("empty file (0 bytes): the save never finished")
    head = blob.read(0, 4096)
    reader = _reader(blob, head)
    try:
        return reader(blob)
    except UnreadableError as error:
        raise UnreadableError(_explained(blob, error)) from None
    except DAMAGE as error:
        # Damaged files reach every branch of every parser below.
        raise UnreadableError(f"corrupt: {type(error).__name__} {error}".rstrip()) from None


def _explained(blob: Blob, error: UnreadableError) -> str:
    return str(error).replace(f"{blob.name}:", "").strip() or "unreadable, without a reason"


def _reader(blob: Blob, head: bytes) -> Callable[[Blob], Content]:
    refuse_text(blob, head)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip_reader(blob)
    if any(magic in head[:48] for magic in _LEGACY):
        return read_legacy
    if head[257:262] == b"ustar" or _is_old_tar(head):
        return read_tar
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return read_safetensors
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return read_pickle
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise UnreadableError(f"a {name} archive: decompress it first")
    if blob.name.endswith(".safetensors") and len(head) >= 8:
        return read_safetensors
    if not any(head):
        raise UnreadableError("nothing but zero bytes: the save never finished")
    if head[:1] in b"(]}cl" and b"." in blob.read(max(blob.size - 64, 0), 64):
        return read_pickle
    raise UnreadableError(f"not a checkpoint: unknown first bytes {head[:8]!r}")


def refuse_text(blob: Blob, head: bytes) -> None:
    """Name the text files that stand where weights should be."""
    if head.startswith(_LFS):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        expected = f"{size[1].decode()} bytes" if size else "an unknown number of bytes"
        raise UnreadableError(
            f"Git LFS pointer, {expected} expected: git lfs pull (or download the file itself)"
        )
    start = head.lstrip()[:256].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<body")):
        raise UnreadableError("an HTML or XML page, not weights: the download needs a login or URL")
    if blob.size < 4096 and _TEXT.fullmatch(head) and head[:1] != b"\x80":
        text = head.decode("utf-8", "replace").strip()
        if re.fullmatch(r"[\w./\\-]+\.\w+", text) or text.startswith(("../", "./")):
            raise UnreadableError(f"text of a symbolic link to {text}, not the file itself")
        if _LEGACY[1] not in head and not _protocol_zero(head):
            raise UnreadableError(f"text, not weights: {text[:40]!r}")


def _protocol_zero(head: bytes) -> bool:
    return head[:1] in b"(cl" and b"\n" in head and head.rstrip().endswith(b".")


def _is_old_tar(head: bytes) -> bool:
    # The format before ustar has no magic: a known member's name and its octal size.
    name = head[:100].rstrip(b"\x00")
    return name in (b"sys_info", b"pickle", b"storages", b"tensors") and len(head) > 512


def _zip_reader(blob: Blob) -> Callable[[Blob], Content]:
    archive = Archive(blob)
    members = set(archive.members)
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in members):
        return partial(read_zip, archive=archive)
    if "policy.pth" in members:
        return read_sb3
    if "parameters" in members and "data" in members:
        return read_sb2
    if members and all(name.endswith(".npy") for name in members):
        return read_npz
    if any(name.endswith(".keras") or name == "model.weights.h5" for name in members):
        raise UnreadableError("a Keras archive: save the weights as .npz or safetensors")
    shown = ", ".join(sorted(members)[:3]) or "nothing"
    raise UnreadableError(f"a zip archive without a known checkpoint in it (holds {shown})")
