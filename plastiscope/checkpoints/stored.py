"""A tensor known by where it lies, and how to read it: one at a time, mapped, checked.

Shapes and strides count elements; a storage counts bytes.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from plastiscope.checkpoints.blobs import Blob
from plastiscope.errors import UnreadableError

# An expanded view (stride 0) may stand for far more elements than are stored.
_MAX_EXPANSION = 1 << 24


@dataclass(eq=False)
class Storage:
    """A run of bytes that tensors share. `crc` is checked once, when the bytes are first used."""

    key: Hashable
    blob: Blob
    offset: int
    nbytes: int
    crc: int | None = None
    swap: bool = False
    checked: bool = field(default=False)

    def view(self, start: int, length: int, *, check: bool = True) -> memoryview:
        if check and self.crc is not None and not self.checked:
            # The whole storage is mapped for the check, so the part asked for is read once.
            whole = self.blob.view(self.offset, self.nbytes)
            if zlib.crc32(whole) != self.crc:
                raise UnreadableError(
                    f"damaged: {self.blob.name} fails its checksum in storage {self.key}"
                )
            self.checked = True
            return whole[start : start + length]
        return self.blob.view(self.offset + start, length, whole=check)


@dataclass(frozen=True, eq=False)
class Stored:
    """A dense strided tensor in a storage, or one without data (`storage` None: meta)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    start: int = 0
    storage: Storage | None = None
    # A tensor computed on reading (dequantised, merged, rebuilt from shards) instead of mapped.
    compute: Callable[[], torch.Tensor] | None = None
    note: str = ""
    buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def has_data(self) -> bool:
        return self.numel > 0 and (self.storage is not None or self.compute is not None)

    @property
    def place(self) -> Hashable | None:
        """Equal for two tensors that are the same bytes under the same shape."""
        if self.storage is None:
            return None
        return (id(self.storage), self.start, self.shape, self.stride, self.dtype)

    def read(self) -> torch.Tensor:
        """The tensor on the CPU; mapped when it lies in a local file, its checksum verified."""
        return self._read(check=True)

    def peek(self) -> torch.Tensor:
        """The tensor without its checksum, for looking at a few values of a large one."""
        return self._read(check=False)

    def _read(self, *, check: bool) -> torch.Tensor:
        if self.compute is not None:
            return self.compute()
        if self.numel == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.storage is None:
            raise UnreadableError(self.note or "a meta tensor holds no data")
        size = self.dtype.itemsize
        first, count = span(self.shape, self.stride, self.start)
        view = self.storage.view(first * size, count * size, check=check)
        flat = tensor_of(view, self.dtype, count, swap=self.storage.swap)
        return flat.as_strided(self.shape, self.stride)


def span(shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> tuple[int, int]:
    """First element and number of elements from the first to the last that a view touches."""
    return start, 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def tensor_of(
    view: memoryview, dtype: torch.dtype, count: int, *, swap: bool = False
) -> torch.Tensor:
    """A one-dimensional tensor over the buffer, which it keeps alive; copied if unaligned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raw = torch.frombuffer(view, dtype=torch.uint8, count=count * dtype.itemsize)
    if swap:
        half = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        raw = raw.view(-1, half).flip(1).reshape(-1)
    elif raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def check_bounds(tensor: Stored, name: str = "a tensor") -> Stored:
    """The tensor itself; UnreadableError when its view leaves its storage or declares a bomb."""
    shape, stride = tensor.shape, tensor.stride
    numbers = (*shape, *stride, tensor.start)
    if any(not isinstance(n, int) or n < 0 for n in numbers) or len(shape) != len(stride):
        raise UnreadableError(f"corrupt: {name} has impossible shape {shape} or stride {stride}")
    if tensor.storage is None or tensor.numel == 0:
        return tensor
    first, count = span(shape, stride, tensor.start)
    held = tensor.storage.nbytes // tensor.dtype.itemsize
    if first + count > held:
        raise UnreadableError(
            f"corrupt: {name} of shape {shape} needs {first + count} elements, "
            f"its storage holds {held}"
        )
    if tensor.numel > max(_MAX_EXPANSION, 4 * held):
        raise UnreadableError(
            f"corrupt: {name} declares {tensor.numel} elements over a storage of {held}"
        )
    return tensor
