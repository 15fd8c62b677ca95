"""An accelerator made of the CPU: a device of its own, on which tests find what only a GPU shows.

Its tensors are plain tensors of PyTorch's device "privateuseone", renamed, whose memory is the
CPU's. Every operation is computed there by the CPU's kernel, and refuses what CUDA refuses: tensors
of two devices (but for scalars and indices) and a generator of another device. What would make the
host wait for a GPU is counted, with the line of plastiscope that asked for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import dlpack
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "sim"
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
KEY = "PrivateUse1"
DL_CPU, DL_OTHER = 1, 12
"""DLPack's numbers for the CPU's memory and for a device outside its list."""
WAITING = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
           "bincount", "linalg_eigvals", "_linalg_eigh", "_linalg_svd", "linalg_qr"}  # fmt: skip
"""Operations whose result's size or success the host must know."""
INDEXED = {"index", "index_put", "_index_put_impl", "_unsafe_index"}
"""Operations that take indices from the CPU."""
_aten = torch.ops.aten
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_waits: Counter[tuple[str, str]] = Counter()


class _Module(_DummyBackendModule):
    """What stands at torch.sim. There are no random numbers, and one device."""

    device = contextlib.nullcontext

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None: ...

    def synchronize(self, device: torch.device | None = None) -> None:
        _note("synchronize")


@contextlib.contextmanager
def waits() -> Iterator[Counter[tuple[str, str]]]:
    """How often the host waited, by what and where: "item", "fetch" (to the CPU), "send" (from
    it), "synchronize" or the operation's name."""
    before = _waits.copy()
    counted: Counter[tuple[str, str]] = Counter()
    try:
        yield counted
    finally:
        counted.update(_waits - before)


@functools.cache
def start() -> str:
    """Make the device, once in a process; its name."""
    _setup_privateuseone_for_python_backend(NAME, _Module())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, KEY)
    own = torch.library.Library("aten", "IMPL")
    own.impl("_copy_from", _copy, KEY)
    own.impl("_local_scalar_dense", _item, KEY)
    own.impl(
        "convolution_overrideable", functools.partial(_compute, _aten.convolution.default), KEY
    )
    own.impl("convolution_backward_overrideable", _convolution_backward, KEY)
    for view in (
        _aten.as_strided.default, _aten.view.default, _aten._reshape_alias.default,
        _aten.unfold.default, _aten.set_.source_Storage_storage_offset,
        _aten.set_.source_Tensor, _aten.set_.source_Storage,
    ):  # fmt: skip
        # These only write shapes and strides, and the storage stays the same one.
        own.impl(view, functools.partial(view.redispatch, CPU), KEY)
    _kept.extend((everything, own))
    nn.Module._apply = _keeping_ties(nn.Module._apply)  # type: ignore[method-assign]
    return NAME


_kept: list[torch.library.Library] = []


def _seen_as(tensor: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = dlpack.to_dlpack(tensor.detach().resolve_conj())
    place = _pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(place).value = kind
    ctypes.c_int32.from_address(place + 4).value = 0
    return dlpack.from_dlpack(capsule)


def _is_here(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _host(value: Any) -> Any:
    """A value as the CPU's kernel takes it."""
    if isinstance(value, (list, tuple)):
        return [_host(v) for v in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not _is_here(value):
        return value
    # Nothing has no memory, and an empty output is still to be resized.
    return _seen_as(value, DL_CPU) if value.numel() else torch.empty_like(value, device="cpu")


def _device(value: Any) -> Any:
    """A result of the CPU's kernel as one of this device."""
    if isinstance(value, (list, tuple)):
        return type(value)(_device(v) for v in value)
    return _seen_as(value, DL_OTHER) if isinstance(value, Tensor) else value


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation, on the same memory by the CPU's kernel."""
    schema = op._schema
    name = schema.name.removeprefix("aten::").removesuffix("_")
    _refuse_what_cuda_refuses(op, name, [*args, *kwargs.values()])
    if name in WAITING:
        _note(name)
    given = [
        _scalar(a) if isinstance(a, (int, float)) and str(p.type) == "Tensor" else _host(a)
        for a, p in zip(args, schema.arguments, strict=False)
    ]
    if name == "histc" and not given[0].is_floating_point():
        given[0] = given[0].double()  # Which the CPU's kernel needs and CUDA's doesn't.
    made = op(*given, **{key: _host(value) for key, value in kwargs.items()})
    targets = [
        kwargs[a.name] if a.name in kwargs else args[i]
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if not targets:
        return _device(made)
    for target, result in zip(targets, made if len(targets) > 1 else [made], strict=True):
        if target.shape != result.shape:
            _aten.set_.source_Tensor.redispatch(CPU, target, _device(result))
    return tuple(targets) if len(targets) > 1 else targets[0]


def _scalar(number: float) -> Tensor:
    """What a number in a tensor's place is, at its full precision."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _refuse_what_cuda_refuses(op: Any, name: str, values: list[Any]) -> None:
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    for value in flat:
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"{op}: a generator of {value.device.type} on device {NAME}")
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.ndim:
            if name not in INDEXED:
                raise RuntimeError(f"{op}: tensors on two devices, cpu and {NAME}")
            _note("send")


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not non_blocking and not (_is_here(source) and _is_here(target)):
        _note("send" if _is_here(target) else "fetch")
    if target.numel():
        _host(target).copy_(_host(source))
    return target


def _item(tensor: Tensor) -> Any:
    _note("item")
    return _host(tensor).item()


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Any:
    bias = [gradient.shape[1]]
    return _compute(_aten.convolution_backward.default, gradient, x, weight, bias, *options)


def _note(what: str) -> None:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        _, inside, file = frame.f_code.co_filename.rpartition("/plastiscope/")
        if inside:
            _waits[what, f"{file}:{frame.f_lineno}"] += 1
            return
    _waits[what, "elsewhere"] += 1


def _keeping_ties(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """To a device outside PyTorch's own list, modules move by new parameters, where to CUDA the
    old ones are filled: of two names of one parameter both must stay one."""

    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        places = [(part, key) for part in self.modules() for key in part._parameters]
        owners: dict[int, tuple[nn.Module, str]] = {}
        first = [owners.setdefault(id(part._parameters[key]), (part, key)) for part, key in places]
        result = apply(self, *args, **kwargs)
        for (part, key), (owner, name) in zip(places, first, strict=True):
            part._parameters[key] = owner._parameters[name]
        return result

    return moved
