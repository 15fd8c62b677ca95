"""numpy .npz archives and Stable-Baselines zips."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import numpy as np
import torch

from plastiscope.checkpoints.archives import Archive
from plastiscope.checkpoints.blobs import Blob
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.stored import Storage, Stored, contiguous
from plastiscope.checkpoints.torch_files import read_torch
from plastiscope.errors import UnreadableError

_MAX_MEMBER = 1 << 40
_KIND = re.compile(r"[<>|=]?[biufc]\d{1,2}")


def read_npz(blob: Blob) -> Content:
    """The arrays of an .npz; an uncompressed one is mapped. Object arrays are left out."""
    archive = Archive(blob)
    notes: list[str] = []
    tree: dict[str, Any] = {}
    for member in archive.members:
        if not member.endswith(".npy"):
            continue
        array = _array(archive, member)
        if array is None:
            notes.append(f"{member}: an array of Python objects, not read")
        else:
            tree[member.removesuffix(".npy")] = array
    return Content("npz", tree, notes=tuple(notes))


def _array(archive: Archive, member: str) -> Stored | None:
    part = archive.blob(member, limit=_MAX_MEMBER)
    head = part.read(0, 1 << 16)
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise UnreadableError(f"corrupt: {member} isn't a numpy array")
    width = 2 if head[6] == 1 else 4
    start = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    try:
        described = ast.literal_eval(head[8 + width : start].decode("latin1").strip())
        kind, shape = described["descr"], tuple(map(int, described["shape"]))
        fortran = bool(described["fortran_order"])
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError):
        raise UnreadableError(f"corrupt: the header of {member}") from None
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        return None
    try:
        dtype = torch.from_numpy(np.empty(0, np.dtype(kind).newbyteorder("="))).dtype
    except TypeError:
        return None
    stride = contiguous(shape[::-1])[::-1] if fortran else contiguous(shape)
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if any(n < 0 for n in shape) or start + nbytes > part.size:
        raise UnreadableError(f"truncated: {member} is shorter than its shape {shape}")
    swap = kind.startswith(">")
    storage = archive.storage(member, swap=swap)
    return (
        Stored(shape, dtype, stride, start // dtype.itemsize, storage)
        if (start % dtype.itemsize == 0)
        else Stored(
            shape,
            dtype,
            stride,
            0,
            Storage(member, part, start, nbytes, None, swap),
        )
    )


def read_sb3(blob: Blob) -> Content:
    """A Stable-Baselines3 zip: the policy's tensors and the plain numbers of its JSON.

    The pickles inside `data` are never decoded; the optimizers stay apart.
    """
    archive = Archive(blob)
    policy = read_torch(archive.blob("policy.pth", limit=_MAX_MEMBER))
    if not isinstance(policy.tree, dict):
        raise UnreadableError("policy.pth holds no table of tensors")
    tree: dict[str, Any] = {"policy": policy.tree, **_plain_data(archive)}
    for member in archive.members:
        if member.endswith(("optimizer.pth", "optimizers.pth")):
            name = member.removesuffix(".pth").replace(".", "_")
            tree[name] = read_torch(archive.blob(member, limit=_MAX_MEMBER)).tree
    return Content("stable-baselines3 zip", tree, policy.stubs)


def _plain_data(archive: Archive) -> dict[str, Any]:
    if "data" not in archive.members:
        return {}
    try:
        data = json.loads(archive.blob("data", limit=1 << 26).read(0, 1 << 26))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {k: v for k, v in data.items() if isinstance(v, int | float | bool) or v is None}


def read_sb2(blob: Blob) -> Content:
    """A Stable-Baselines 2 zip: its `parameters` member is an .npz."""
    archive = Archive(blob)
    inner = read_npz(archive.blob("parameters", limit=_MAX_MEMBER))
    # TensorFlow's names end in ":0" and separate by slashes.
    named = {name.removesuffix(":0").replace("/", "."): t for name, t in inner.tree.items()}
    tree = {"policy": named, **_plain_data(archive)}
    return Content("stable-baselines 2 zip", tree, notes=inner.notes)
