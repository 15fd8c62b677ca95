"""Metrics of the empirical neural tangent kernel. Axes: 1 + K replicates of n inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric
from .spectral import count_rank, entropy_rank, relative

if TYPE_CHECKING:
    from ..observations import Kernel

_LAWS = ("scale: unchanged", "permutation of inputs: unchanged")
_ROUNDING = 16
"""Times the entries' precision: what a sum over a few inputs may leave of zero."""


def _parameters(kernel: Kernel) -> str:
    return f"f={kernel.function}, n={kernel.inputs}, mode=eval"


def _each(kernel: Kernel, function: Callable[[Floats], float]) -> Values:
    """A function of the kernel, of all inputs and of all but a fold's."""
    if kernel.status == "non_finite":
        return Values(float("nan"), parameters=_parameters(kernel))
    values = [function(kernel.part(kernel.gram, kept)) for kept in kernel.kept()]
    return Values(np.asarray(values), parameters=_parameters(kernel))


def eigenvalues(gram: Floats) -> Floats:
    """Descending; what rounding made negative is 0."""
    return np.asarray(np.linalg.eigvalsh(gram)[::-1].clip(min=0.0))


@metric(
    unit="squared gradient",
    range="0 to infinity",
    source="textbook",
    laws=("permutation of inputs: unchanged",),
    default=False,
    subject="ntk",
)
def ntk_trace(kernel: Kernel) -> Values:
    """Sum of the squared lengths of the per-input gradients.

    Formula: sum_i K_ii.
    Read: how fast the outputs move under a small learning rate.
    Misleads: proportional to the number of inputs; grows with the network.
    """
    whole = kernel.inputs
    return _each(kernel, lambda k: float(np.trace(k)) * whole * kernel.outputs / len(k))


@metric(
    unit="ratio",
    range="1 to infinity",
    source="dynamical-isometry study (anisotropy of the kernel) [secondary notes]",
    laws=_LAWS,
    default=False,
    subject="ntk",
)
def ntk_condition_number(kernel: Kernel) -> Values:
    """Largest over smallest eigenvalue of the kernel.

    Formula: lambda_1 / lambda_n; no value (status unresolved) when lambda_n < n eps lambda_1.
    Read: a rise means that some directions in the space of outputs are learned ever more slowly.
    Misleads: inputs that are nearly equal make it large for any network.
    """

    def ratio(gram: Floats) -> float:
        lam = np.linalg.eigvalsh(gram)[::-1]
        tolerance = len(lam) * kernel.eps * lam[0]
        return float(lam[0] / lam[-1]) if lam[-1] > tolerance else float("nan")

    found = _each(kernel, ratio)
    lost = kernel.status == "ok" and np.isnan(np.ravel(found.values)[0])
    status = "unresolved" if lost else kernel.status
    return Values(found.values, parameters=found.parameters, status=status)


@metric(
    unit="directions",
    range="1 to the number of gradients; 0 for a zero kernel",
    source="effective_rank of the kernel's eigenvalues",
    laws=_LAWS,
    rank=True,
    default=False,
    subject="ntk",
)
def ntk_effective_rank(kernel: Kernel) -> Values:
    """Effective rank of the kernel.

    Formula: exp(-sum p ln p), p = lambda / sum lambda.
    Read: how many independent directions the outputs can be moved in at a like speed.
    Misleads: can't exceed the number of inputs.
    """
    return _rank(kernel, lambda lam: float(entropy_rank(lam)))


@metric(
    unit="eigenvalues",
    range="1 to the number of gradients; 0 for a zero kernel",
    source="srank of the kernel's eigenvalues",
    laws=_LAWS,
    rank=True,
    default=False,
    subject="ntk",
)
def ntk_srank(kernel: Kernel) -> Values:
    """How many of the kernel's eigenvalues make up 99 % of their sum.

    Formula: min k with sum_{i<=k} lambda_i / sum lambda >= 0.99.
    Read: as ntk_effective_rank.
    Misleads: can't exceed the number of inputs.
    """
    return _rank(kernel, lambda lam: float(count_rank(lam)))


@metric(
    unit="eigenvalues",
    range="1 to the number of gradients; 0 for a zero kernel",
    source="approximate_rank of the kernel's eigenvalues",
    laws=_LAWS,
    rank=True,
    default=False,
    subject="ntk",
)
def ntk_approximate_rank(kernel: Kernel) -> Values:
    """How many of the kernel's eigenvalues make up 99 % of their sum of squares.

    Formula: min k with sum_{i<=k} lambda_i^2 / sum lambda^2 >= 0.99.
    Read: as ntk_effective_rank.
    Misleads: gradients with a large mean over inputs give 1.
    """
    return _rank(kernel, lambda lam: float(count_rank(relative(lam) ** 2)))


def _rank(kernel: Kernel, function: Callable[[Floats], float]) -> Values:
    found = _each(kernel, lambda gram: function(eigenvalues(gram)))
    most = float(len(kernel.gram))
    return Values(found.values, parameters=found.parameters, maximum=most)


@metric(
    unit="squared gradient",
    range="0 to infinity",
    source="textbook",
    laws=("permutation of inputs: unchanged",),
    default=False,
    subject="ntk",
)
def ntk_spectrum(kernel: Kernel) -> list[Values]:
    """The kernel's eigenvalues, largest first, one row each.

    Formula: lambda_i at index i, from 0.
    Read: the speeds at which independent combinations of outputs are learned.
    Misleads: the smallest are rounding when they are below n eps lambda_1.
    """
    lam = eigenvalues(kernel.gram)
    return [
        Values(float(one), parameters=_parameters(kernel), index=i) for i, one in enumerate(lam)
    ]


@metric(
    unit="ratio",
    range="0 to n - 1",
    source="this project",
    laws=_LAWS,
    default=False,
    subject="ntk",
)
def ntk_offdiagonal(kernel: Kernel) -> Values:
    """How much the inputs' gradients overlap.

    Formula: sum_{i != j} |K_ij| / trace K.
    Read: 0 for orthogonal gradients, n - 1 for equal ones.
    Misleads: proportional to the number of inputs.
    """

    def ratio(gram: Floats) -> float:
        trace = float(np.trace(gram))
        off = float(np.abs(gram).sum() - np.abs(np.diagonal(gram)).sum())
        return off / trace * (len(kernel.gram) - 1) / max(len(gram) - 1, 1)

    return _each(kernel, ratio)


def centered_alignment(a: Floats, b: Floats, eps: float) -> float:
    """Cosine of two kernels [n, n] after their means over rows and columns are taken off; NaN where
    that leaves no more of one than the rounding of its entries, relative precision eps."""
    rests = [k - k.mean(0) - k.mean(1)[:, None] + k.mean() for k in (a, b)]
    norms = [float(np.linalg.norm(rest)) for rest in rests]
    floors = [_ROUNDING * eps * float(np.linalg.norm(k)) for k in (a, b)]
    if any(norm <= floor for norm, floor in zip(norms, floors, strict=True)):
        return float("nan")
    return float((rests[0] * rests[1]).sum() / (norms[0] * norms[1]))


@metric(
    unit="cosine",
    range="-1 to 1",
    version=2,
    source="Cortes et al. 2012 (centred kernel alignment)",
    laws=_LAWS,
    default=False,
    subject="ntk",
)
def ntk_alignment(kernel: Kernel) -> Values | None:
    """How far the kernel's similarities are those of the labels.

    Formula: centred alignment of K (traced over outputs) with Y, Y_ij = [label_i = label_j].
    Read: it rises while a network learns the features of its task.
    Misleads: aligned with this task's labels, whatever comes next. No value without one label
    an input.
    """
    if kernel.labels is None:
        return None
    same = (kernel.labels[:, None] == kernel.labels[None]).astype(np.float64)
    traced = kernel.traced(kernel.gram)
    values = [
        centered_alignment(traced[np.ix_(k, k)], same[np.ix_(k, k)], kernel.eps)
        for k in kernel.kept()
    ]
    return Values(np.asarray(values), parameters=_parameters(kernel))


@metric(
    unit="1 - cosine",
    range="0 to 2",
    version=2,
    source="Fort et al. 2020 (kernel distance), centred",
    laws=_LAWS,
    default=False,
    subject="ntk",
)
def ntk_drift(kernel: Kernel) -> list[Values]:
    """How far the kernel turned since the first and since the previous checkpoint.

    Formula: 1 - centred alignment of K with the earlier K on the same inputs.
    Read: 0 in the lazy regime; a network that keeps drifting keeps learning features.
    Misleads: blind to the kernel's scale (see ntk_trace).
    """
    found = []
    for name, earlier in (("first", kernel.first), ("previous", kernel.previous)):
        if earlier is None:
            continue
        parameters = f"{_parameters(kernel)}, against={name}"
        if earlier.shape != kernel.gram.shape:
            found.append(Values(np.nan, parameters=parameters, status="shape_changed"))
            continue
        values = [
            1.0
            - centered_alignment(kernel.part(kernel.gram, k), kernel.part(earlier, k), kernel.eps)
            for k in kernel.kept()
        ]
        found.append(Values(np.asarray(values), parameters=parameters))
    return found


@metric(
    unit="gradient",
    range="0 to infinity",
    version=2,
    source="textbook",
    laws=("permutation of inputs: unchanged",),
    default=False,
    subject="gradient",
)
def gradient_norm(kernel: Kernel) -> Values | None:
    """Length of the gradient of the probe's loss, as `loss` has it: the mean over its labels.

    Formula: ‖grad L‖_2, L = sum_i m_i loss_i / sum_i m_i over n inputs, loss_i the mean over the
    m_i labels of input i (-100 doesn't count): sqrt(m^T K m) / sum m, K the kernel of loss_i.
    Read: beside weight_l2: a gradient that fades while the loss stays high is lost plasticity.
    Misleads: near 0 for a network that fits its probe. Of the probe's first n inputs, where `loss`
    is of all. Only for f = loss.
    """
    if kernel.function != "loss":
        return None
    parameters = f"n={kernel.inputs}"
    labels = np.ones(kernel.inputs) if kernel.counts is None else np.asarray(kernel.counts, float)
    if kernel.status == "non_finite" or not labels.any():
        reason = "no_labels" if not labels.any() else "non_finite"
        return Values(float("nan"), parameters=parameters, status=reason)
    values = []
    for kept in kernel.kept():
        m = labels[kept]
        square = max(float(m @ kernel.part(kernel.gram, kept) @ m), 0.0)
        values.append(np.sqrt(square) / m.sum() if m.any() else np.nan)
    return Values(np.asarray(values), parameters=parameters)


@metric(
    unit="directions",
    range="1 to the number of inputs; 0 for zero gradients",
    source="Lewandowski et al. 2023 (2312.00246) [secondary notes]",
    laws=_LAWS,
    rank=True,
    default=False,
    subject="gradient",
)
def fisher_effective_rank(kernel: Kernel) -> Values | None:
    """Effective rank of the empirical Fisher matrix, from its Gram over inputs.

    Formula: exp(-sum p ln p), p = lambda / sum lambda of the Gram of per-input loss gradients.
    Read: how many independent directions the loss is curved in; a fall precedes lost plasticity
    in the source's experiments.
    Misleads: can't exceed the number of inputs. Only for f = loss.
    """
    if kernel.function != "loss":
        return None
    found = _each(kernel, lambda gram: float(entropy_rank(eigenvalues(gram))))
    return Values(found.values, parameters=f"n={kernel.inputs}", maximum=float(len(kernel.gram)))
