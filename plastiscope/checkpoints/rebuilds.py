"""Tensors and numpy values as a pickle describes them, rebuilt without torch or numpy calls of
the pickle's choosing."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from plastiscope.checkpoints.blobs import BytesBlob
from plastiscope.checkpoints.containers import collection_rebuilds
from plastiscope.checkpoints.stored import Storage, Stored, check_bounds, contiguous
from plastiscope.checkpoints.unpickle import Global, Rebuild, Stub
from plastiscope.errors import UnreadableError

DTYPES: dict[str, torch.dtype] = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_STORAGES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.int8,
    "QUInt8": torch.uint8,
    "QInt32": torch.int32,
    "Untyped": torch.uint8,
}
_STORAGE_NAME = re.compile(r"torch(?:\.cuda|\.storage)?\.(\w+?)Storage")
_ARRAY_TYPE = re.compile(r"[<>|=]?[biufcSUV]\d{0,3}")
# More elements than this aren't made dense or dequantised in one go.
_MAX_DENSE = 1 << 28


class TypedStorage:
    """A storage with the element type that its pickle names."""

    def __init__(self, dtype: torch.dtype, storage: Storage) -> None:
        self.dtype, self.storage = dtype, storage


def storage_dtype(kind: Any) -> torch.dtype:
    """The element type of a storage class; raises UnreadableError for an unknown one."""
    match = _STORAGE_NAME.fullmatch(kind.name) if isinstance(kind, Global) else None
    if match is None or match[1] not in _STORAGES:
        name = kind.name if isinstance(kind, Global) else type(kind).__name__
        raise UnreadableError(f"corrupt: unknown storage type {name}")
    return _STORAGES[match[1]]


def storage_id(pid: Any) -> tuple[Any, str, Any, int]:
    """A reference to a storage: its class, key, location and number of elements."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
        raise UnreadableError("corrupt: an unknown kind of reference in the pickle")
    _, kind, key, location, count = pid[:5]
    if not isinstance(count, int) or count < 0:
        raise UnreadableError("corrupt: a storage of impossible size")
    return kind, str(key), location, count


def dtype_of(value: Any) -> torch.dtype:
    """A torch dtype by its global's name."""
    if isinstance(value, Global) and value.name in DTYPES:
        return DTYPES[value.name]
    raise UnreadableError(f"corrupt: unknown tensor type {value!r}")


def _view(storage: Any, dtype: torch.dtype | None, start: Any, shape: Any, stride: Any) -> Stored:
    if not isinstance(storage, TypedStorage):
        raise UnreadableError("corrupt: a tensor without a storage")
    if not isinstance(shape, tuple | list) or not isinstance(stride, tuple | list):
        raise UnreadableError("corrupt: a tensor without a shape")
    return check_bounds(
        Stored(tuple(shape), dtype or storage.dtype, tuple(stride), start, storage.storage)
    )


def _tensor(args: tuple[Any, ...]) -> Stored:
    storage, start, shape, stride = args[:4]
    return _view(storage, None, start, shape, stride)


def _tensor_v3(args: tuple[Any, ...]) -> Stored:
    storage, start, shape, stride = args[:4]
    return _view(storage, dtype_of(args[6]), start, shape, stride)


def _parameter(args: tuple[Any, ...]) -> Any:
    return args[0]


def _meta(args: tuple[Any, ...]) -> Stored:
    dtype, shape = dtype_of(args[0]), tuple(args[1])
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise UnreadableError("corrupt: a meta tensor of impossible shape")
    return Stored(shape, dtype, contiguous(shape))


def _wrapper_subclass(args: tuple[Any, ...]) -> Stored:
    dtype, shape = dtype_of(args[1]), tuple(args[2])
    return Stored(shape, dtype, contiguous(shape), note="a tensor subclass without its data")


def _quantised(args: tuple[Any, ...]) -> Stored:
    packed = _view(args[0], None, *args[1:4])
    params = args[4]
    kind = params[0].name if isinstance(params[0], Global) else str(params[0])
    if packed.numel > _MAX_DENSE:
        raise UnreadableError(f"a quantised tensor of {packed.numel} elements is too large")

    def dequantise() -> torch.Tensor:
        values = packed.read().to(torch.float32)
        if kind == "torch.per_tensor_affine":
            return (values - float(params[2])) * float(params[1])
        scales, zeros = _dense(params[1]).float(), _dense(params[2]).float()
        shape = [1] * values.ndim
        shape[int(params[3])] = -1
        return (values - zeros.reshape(shape)) * scales.reshape(shape)

    if kind not in ("torch.per_tensor_affine", "torch.per_channel_affine"):
        return Stored(packed.shape, torch.float32, note=f"quantised as {kind}: not read")
    return Stored(
        packed.shape,
        torch.float32,
        contiguous(packed.shape),
        compute=dequantise,
        note=f"dequantised from {packed.dtype} ({kind.removeprefix('torch.')})",
    )


def _dense(value: Any) -> torch.Tensor:
    if isinstance(value, Stored):
        return value.read()
    return torch.as_tensor(value)


def _sparse(args: tuple[Any, ...]) -> Any:
    data = args[1]
    indices, values, shape = data[0], data[1], tuple(data[2])
    if not isinstance(indices, Stored) or not isinstance(values, Stored):
        return Stub("torch._utils._rebuild_sparse_tensor", args)
    if math.prod(shape) > _MAX_DENSE:
        raise UnreadableError(f"corrupt: a sparse tensor of shape {shape}")

    def dense() -> torch.Tensor:
        made = torch.sparse_coo_tensor(indices.read(), values.read(), shape, check_invariants=True)
        return made.to_dense()

    return Stored(shape, values.dtype, contiguous(shape), compute=dense, note="stored sparse")


def _from_type(args: tuple[Any, ...]) -> Any:
    rebuild = _TENSORS.get(args[0].name) if isinstance(args[0], Global) else None
    if rebuild is None:
        return Stub(args[0].name if isinstance(args[0], Global) else "unknown", args)
    made = rebuild(tuple(args[2]))
    state = args[3] if len(args) > 3 else None
    parts = state if isinstance(state, tuple) else (state,)
    local = next((p["_local_tensor"] for p in parts if _holds_local(p)), None)
    if isinstance(local, Stored) and isinstance(made, Stored):
        if local.shape == made.shape:
            return local
        return Stored(made.shape, made.dtype, note="one process's shard of a distributed tensor")
    return made


def _holds_local(part: Any) -> bool:
    return isinstance(part, dict) and "_local_tensor" in part


def _from_numpy(args: tuple[Any, ...]) -> Any:
    return stored_array(args[0]) if isinstance(args[0], Array) else Stub("tensor", args)


_TENSORS: dict[str, Rebuild] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
}


class Array:
    """A numpy array, dtype or scalar in the making; `value` is set once its state is known."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def build_from(self, state: Any) -> None:
        if isinstance(self.value, np.dtype) and isinstance(state, tuple) and len(state) > 1:
            if state[1] in ("<", ">", "|", "="):
                self.value = self.value.newbyteorder(state[1])
        elif self.value is None and isinstance(state, tuple) and len(state) >= 5:
            self.value = _array(state[4], state[2], state[1], fortran=bool(state[3]))


def _array(data: Any, kind: Any, shape: Any, *, fortran: bool) -> np.ndarray[Any, Any] | None:
    dtype = kind.value if isinstance(kind, Array) else None
    if isinstance(data, str):
        data = data.encode("latin1")
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes | bytearray):
        return None
    shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise UnreadableError("corrupt: a numpy array of impossible shape")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableError("corrupt: a numpy array's bytes don't fit its shape")
    if dtype.itemsize == 0:
        return None
    flat: np.ndarray[Any, Any] = np.frombuffer(data, dtype)
    array: np.ndarray[Any, Any] = flat.reshape(shape, order="F" if fortran else "C")
    return array


def _array_type(args: tuple[Any, ...]) -> Array:
    name = args[0] if args else None
    if isinstance(name, bytes):
        name = name.decode("latin1")
    if isinstance(name, Global):
        name = name.name.removeprefix("numpy.").replace("bool_", "bool")
        return Array(np.dtype(name)) if name in _SCALARS else Array()
    if isinstance(name, str) and _ARRAY_TYPE.fullmatch(name):
        return Array(np.dtype(name))
    # Object arrays hold pickles of their own; structured ones aren't tensors.
    return Array()


_SCALARS = {
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("bool", "float16", "float32", "float64", "complex64", "complex128"),
}


def _scalar(args: tuple[Any, ...]) -> Any:
    dtype = args[0].value if args and isinstance(args[0], Array) else None
    data = args[1] if len(args) > 1 else b""
    if isinstance(data, str):
        data = data.encode("latin1")
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes):
        return Stub("numpy.scalar", args)
    if dtype.itemsize == 0 or len(data) != dtype.itemsize:
        raise UnreadableError("corrupt: a numpy scalar's bytes don't fit its type")
    return np.frombuffer(data, dtype)[0].item()


def _from_buffer(args: tuple[Any, ...]) -> Array:
    data, kind, shape, order = args[:4]
    return Array(_array(data, kind, shape, fortran=order == "F"))


def _numpy_rebuilds() -> dict[str, Rebuild]:
    rebuilds: dict[str, Rebuild] = {"numpy.dtype": _array_type}
    # numpy 1 and numpy 2 pickle under two module paths; files of both kinds are everywhere.
    for core in ("numpy.core", "numpy._core"):
        rebuilds[f"{core}.multiarray._reconstruct"] = lambda args: Array()
        rebuilds[f"{core}.multiarray.scalar"] = _scalar
        rebuilds[f"{core}.numeric._frombuffer"] = _from_buffer
    for name in _SCALARS:
        rebuilds[f"numpy.dtypes.{name.capitalize()}DType"] = (
            lambda args, name=name: Array(np.dtype(name))  # type: ignore[misc]
        )
    return rebuilds


def stored_array(array: Array) -> Stored | None:
    """A numeric numpy array as a tensor; None for other arrays."""
    value = array.value
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return None
    value = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
    if value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
        return None
    dtype = torch.from_numpy(np.empty(0, value.dtype)).dtype
    shape = tuple(int(n) for n in value.shape)
    blob = BytesBlob("array", value.tobytes())
    return Stored(shape, dtype, contiguous(shape), 0, Storage(id(array), blob, 0, blob.size))


def tensor_rebuilds() -> dict[str, Rebuild]:
    """Everything a pickle may rebuild, by the global's full name."""
    return {**collection_rebuilds(), **_numpy_rebuilds(), **_TENSORS}
