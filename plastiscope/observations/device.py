"""What goes to the CPU from another device, and which of the two takes a spectrum.

A GPU works while the CPU goes on, until the CPU asks for a value. So values are asked for together,
and float64 spectra, which some GPUs take 64 times more slowly than float32 ones, are taken where a
measurement says that it is faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .symmetric import workers

Floats = npt.NDArray[np.float64]
SMALL = 128
"""Matrices of a smaller side are no work for a CPU, and go there without a measurement."""
_Out = TypeVar("_Out")
_lock = threading.RLock()
_faster: dict[tuple[str, str, int], str] = {}


def fetched(*tensors: Tensor) -> tuple[Floats, ...]:
    """Float64 arrays of tensors, for which the CPU waits once a device."""
    given = [t.detach().double() for t in tensors]
    devices = {t.device for t in given if t.device.type != "cpu"}
    if devices:
        # Only into pinned memory does CUDA copy while the CPU goes on.
        pinned = any(device.type == "cuda" for device in devices)
        places = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in given]
        given = [p.copy_(t, non_blocking=True) for p, t in zip(places, given, strict=True)]
    for device in devices:
        synchronize(device)
    return tuple(np.asarray(t.numpy()) for t in given)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def faster(
    what: str, device: torch.device, side: int, there: Callable[[], _Out], here: Callable[[], _Out]
) -> _Out:
    """The result of the faster of two ways to take the spectra of matrices on a device: `there`,
    or `here` on the CPU, the copies included.

    The first time for a device and a side, rounded up to a power of two, both are run; later ones
    go where that was faster, with as many threads as work on the CPU. `here` where the device
    fails (no memory, no convergence).
    """
    if device.type == "cpu" or side < SMALL:
        return here()
    key = (str(device), what, 1 << (side - 1).bit_length())
    with _lock:
        if key not in _faster:
            return _measured(key, device, there, here)
    return _tried(there, here) if _faster[key] == device.type else here()


def _measured(
    key: tuple[str, str, int], device: torch.device, there: Callable[[], _Out],
    here: Callable[[], _Out],
) -> _Out:  # fmt: skip
    result, on_cpu = _timed(here, device)
    _faster[key] = "cpu"
    try:
        there()  # The first time a library is loaded there.
        _, on_device = _timed(there, device)
    except RuntimeError:
        return result
    if on_device < on_cpu / workers():
        _faster[key] = device.type
    return result


def _timed(work: Callable[[], _Out], device: torch.device) -> tuple[_Out, float]:
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def _tried(there: Callable[[], _Out], here: Callable[[], _Out]) -> _Out:
    try:
        return there()
    except RuntimeError:
        return here()


def spectra_places() -> dict[str, str]:
    """What was found faster: "cpu" or the device's type, by device, kind and side."""
    return {f"{device} {what} {side}": place for (device, what, side), place in _faster.items()}
