"""safetensors: a header of names, types and ranges, then the tensors' bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from plastiscope.checkpoints.blobs import Blob
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.names import natural
from plastiscope.checkpoints.stored import Storage, Stored, contiguous
from plastiscope.errors import UnreadableError

# The format's own limit is 100 MB; the header of a model with a million tensors reaches it.
_MAX_HEADER = 100_000_000
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def read_safetensors(blob: Blob) -> Content:
    """The tensors of one file; only the header is read now.

    Raises:
        UnreadableError: truncated, an absurd or corrupt header.
    """
    header = read_header(blob)
    metadata = header.pop("__metadata__", None) or {}
    start = 8 + int.from_bytes(blob.read(0, 8), "little")
    stored: dict[str, Stored] = {}
    notes: list[str] = []
    # The file's own order is by type and alphabet, which puts layer 10 before layer 2.
    for name, entry in sorted(header.items(), key=lambda item: natural(item[0])):
        stored[name] = _tensor(blob, start, name, entry)
        if stored[name].note:
            notes.append(f"{name}: {stored[name].note}")
    aliases = _aliases(metadata, stored)
    if not isinstance(metadata, dict):
        metadata = {}
    return Content("safetensors", stored, notes=tuple(notes), aliases=aliases, metadata=metadata)


def read_header(blob: Blob) -> dict[str, Any]:
    """The header, checked for size and form."""
    length = int.from_bytes(blob.read(0, 8), "little")
    if blob.size < 8:
        raise UnreadableError(f"truncated: {blob.size} bytes are no safetensors file")
    if length > _MAX_HEADER:
        raise UnreadableError(
            f"absurd header of {length} bytes (the limit is {_MAX_HEADER}): "
            "not a safetensors file, or one with too many tensors; split it into shards"
        )
    if 8 + length > blob.size:
        raise UnreadableError(f"truncated: the header alone needs {8 + length} bytes")
    try:
        header = json.loads(blob.read(8, length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"corrupt safetensors header ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise UnreadableError("corrupt safetensors header: not a table of tensors")
    return header


def _offset(entry: Any) -> tuple[int, int]:
    try:
        first, last = entry["data_offsets"]
        return int(first), int(last)
    except (TypeError, KeyError, ValueError):
        raise UnreadableError("corrupt safetensors header: a tensor without its range") from None


def _tensor(blob: Blob, start: int, name: str, entry: dict[str, Any]) -> Stored:
    first, last = _offset(entry)
    shape = entry.get("shape")
    if not isinstance(shape, list) or any(not isinstance(n, int) or n < 0 for n in shape):
        raise UnreadableError(f"corrupt safetensors header: {name} has no proper shape")
    if not 0 <= first <= last:
        raise UnreadableError(f"corrupt safetensors header: the range of {name}")
    if start + last > blob.size:
        raise UnreadableError(
            f"truncated: {name} ends at byte {start + last}, the file at {blob.size}"
        )
    dtype = getattr(torch, _DTYPES.get(str(entry.get("dtype")), "?"), None)
    if dtype is None:
        note = f"element type {entry.get('dtype')} isn't supported: not measured"
        return Stored(tuple(shape), torch.uint8, contiguous(tuple(shape)), note=note)
    if math.prod(shape) * dtype.itemsize != last - first:
        raise UnreadableError(f"corrupt safetensors header: {name}'s range doesn't fit its shape")
    storage = Storage(name, blob, start + first, last - first)
    return Stored(tuple(shape), dtype, contiguous(tuple(shape)), 0, storage)


def _aliases(metadata: Any, stored: dict[str, Stored]) -> dict[str, str]:
    """Names that safetensors' save_model left out because another name shares their memory."""
    if not isinstance(metadata, dict):
        return {}
    return {
        name: kept
        for name, kept in metadata.items()
        if name not in stored and isinstance(kept, str) and kept in stored
    }
