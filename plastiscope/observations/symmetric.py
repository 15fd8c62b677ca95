"""Gram matrices and their eigenvalues on the CPU, one BLAS thread a matrix.

Axes: ... any leading axes, r rows, c columns, n the side of a symmetric matrix.

NumPy's and SciPy's BLAS are used rather than torch's: a product of a matrix with its own transpose
takes half the operations there, and SciPy gives the tridiagonal form, from which a spectrum with
the mean and one without it both follow. What is on a GPU comes here where that was found to be
faster (`device`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import blas, lapack
from threadpoolctl import ThreadpoolController
from torch import Tensor

Floats = npt.NDArray[np.float64]
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def at_once(device: torch.device) -> int:
    """Entries that several passes should go over at once: on a CPU few enough to stay in its cache
    (half the time), on a GPU enough to be worth a call."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


def gram_of_columns(rows: Tensor) -> Tensor:
    """rows^T rows [..., c, c] of rows [..., r, c], in their dtype."""
    if rows.device.type != "cpu":
        return rows.mT @ rows
    own = rows.detach().numpy()
    # NaN and infinity go on into the result, whose status names them.
    with one_blas_thread(), np.errstate(invalid="ignore"):
        return torch.from_numpy(np.matmul(np.swapaxes(own, -1, -2), own))


def eigenvalues(symmetric: Floats) -> Floats:
    """Ascending [..., n] of float64 [..., n, n]; NaN where LAPACK failed."""
    try:
        with one_blas_thread():
            return np.asarray(np.linalg.eigvalsh(symmetric))
    except np.linalg.LinAlgError:
        if symmetric.ndim == 2:
            return np.full(len(symmetric), np.nan)
        flat = symmetric.reshape(-1, *symmetric.shape[-2:])
        return np.stack([eigenvalues(one) for one in flat]).reshape(symmetric.shape[:-1])


def tridiagonal(lower: Floats) -> tuple[Floats, Floats]:
    """Diagonal [n] and off-diagonal [n - 1] of Q^T A Q, from the lower triangle of A [n, n] float64
    in Fortran's order, which is overwritten.

    Q leaves the first axis alone: adding c to A[0, 0] adds c to the first entry of the diagonal,
    and leaving out the first row and column of A leaves out the first entries of both.
    """
    n = len(lower)
    if n < 2:
        return lower.diagonal().copy(), np.zeros(0)
    work = int(lapack.dsytrd_lwork(n, lower=1)[0])
    with one_blas_thread():
        _, diagonal, off, _, failed = lapack.dsytrd(lower, lower=1, lwork=work, overwrite_a=1)
    if failed:
        raise ValueError(f"dsytrd refused its argument {-failed}")
    return np.asarray(diagonal), np.asarray(off)


def eigenvalues_of_tridiagonal(diagonal: Floats, off: Floats) -> Floats:
    """Ascending [n]; NaN where LAPACK failed or an entry isn't finite."""
    if len(diagonal) < 2:
        return np.array(diagonal)
    if not (np.isfinite(diagonal).all() and np.isfinite(off).all()):
        return np.full(len(diagonal), np.nan)
    values, failed = lapack.dsterf(diagonal, off)
    return np.full(len(diagonal), np.nan) if failed else np.asarray(values)


def reflection(vector: Floats) -> Floats:
    """The n [d] for which H = I - n n^T takes the vector [d] onto the first axis; 0 for a zero."""
    length = float(np.linalg.norm(vector))
    if length == 0.0:
        return np.zeros_like(vector)
    normal = vector / length
    normal[0] += np.copysign(1.0, vector[0])
    return np.asarray(normal * np.sqrt(2.0 / float(normal @ normal)))


def reflect(vector: Floats, normal: Floats) -> Floats:
    """H v [d]."""
    return vector - float(normal @ vector) * normal


def reflected(symmetric: Floats, normal: Floats) -> Floats:
    """The lower triangle of H A H in Fortran's order, over A [n, n]."""
    product = symmetric @ normal
    product -= 0.5 * float(product @ normal) * normal
    # LAPACK's columns are NumPy's rows; a symmetric matrix doesn't mind.
    lower = blas.dsyr2(-1.0, normal, product, a=symmetric.T, lower=1, overwrite_a=1)
    return np.asarray(lower)


def in_threads(function: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """`function` of each item, in order, one BLAS thread an item and as many items as threads.

    Two matrices at a time with one thread each take two thirds of the time of one after the other
    with two threads each. The number of threads is torch's own, and is put back afterwards.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _at_work.append(threads)
    try:
        with one_blas_thread():
            if threads == 1:
                return [function(item) for item in items]
            one = functools.partial(torch.set_num_threads, 1)
            with ThreadPoolExecutor(threads, initializer=one) as pool:
                return list(pool.map(function, items))
    finally:
        _at_work.pop()
        torch.set_num_threads(threads)


def workers() -> int:
    """How many items `in_threads` works on at once; 1 outside of it."""
    return _at_work[-1] if _at_work else 1


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """While it lasts, NumPy's and SciPy's BLAS take one thread a call: on matrices of these sizes a
    second one mostly waits, and on a busy machine for very long.

    The number is the process's own, so whoever comes first sets it and puts it back.
    """
    if not _unlimited.acquire(blocking=False):
        yield
        return
    try:
        with _libraries().limit(limits=1, user_api="blas"):
            yield
    finally:
        _unlimited.release()


@functools.cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")


_unlimited = threading.Lock()
_at_work: list[int] = []
