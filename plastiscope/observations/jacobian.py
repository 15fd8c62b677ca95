"""Singular values of J_x = d component(x) / d x at a component's own inputs, per probe input.

Axes: B inputs, T positions, m sampled positions, o and i the sizes of one input's output and input.

Never pooled over the batch: a batched Jacobian has zeros between samples. A position-wise
component (linear layers, norms, a whole FFN) has a block for each position, taken exactly on all
of them or on some. Where positions mix, the Jacobian is exact while its smaller side is small, and
otherwise matrix-free: Lanczos quadrature with J v and J^T w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import UsageError
from .captures import Batch, Called, Capture, capture, frozen
from .lanczos import Quadrature, quadrature
from .positions import ANY_ERROR, in_line, is_position_wise, of_rows
from .spectra import Floats, spectra_of

DENSE_SIDE = 1024
"""Largest smaller side of a Jacobian with mixed positions that is taken exactly."""
POSITIONS = 4
"""How many positions are taken, where all of them would be too many rows."""
ROWS = 4096
"""Rows of a position-wise Jacobian of one input up to which all positions are taken."""
STEPS, PROBES, LEADING = 40, 8, 160
FLOAT64_EPS = float(np.finfo(np.float64).eps)
AT_ONCE = 1 << 18
"""Entries of the vectors that a Jacobian is multiplied with at a time: small networks take many
vectors in the time of one."""


@dataclass(frozen=True)
class Jacobian:
    """Singular values of each input's Jacobian: nodes [B, s] and their weights [B, s] (sum 1).

    Exact methods ("weight", "positions", "dense") have every singular value with equal weights;
    (the first of many positions stands for itself, the others for the rest); "lanczos" has
    quadrature nodes, among which the largest value is resolved but not the smallest.
    `rows` and `columns` are one input's output and input sizes (of one position where it's
    position-wise); `side` is the smaller one. `positions` of `all_positions` were taken, one after
    the other in `nodes`. `eps` is the precision that J was computed in; `quadrature` what the nodes
    of "lanczos" come from.
    """

    nodes: Floats
    weights: Floats
    rows: int
    columns: int
    side: int
    method: str
    positions: int = 1
    all_positions: int = 1
    eps: float = FLOAT64_EPS
    quadrature: Quadrature | None = None
    reason: str | None = None
    replicated: ClassVar[bool] = False

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Jacobian": self}

    @property
    def size(self) -> tuple[int, int]:
        """Output and input size."""
        return self.rows, self.columns

    @property
    def status(self) -> str:
        """ "ok", "non_finite", or why there are no values."""
        if self.reason is not None:
            return self.reason
        return "ok" if np.isfinite(self.nodes).all() else "non_finite"


def observe_jacobians(
    module: nn.Module,
    forward: Callable[[Batch], Tensor],
    batch: Batch,
    paths: Mapping[Hashable, str | Called],
    *,
    positions: int = POSITIONS,
    dense_side: int = DENSE_SIDE,
    steps: int = STEPS,
    probes: int = PROBES,
    seed: int = 0,
) -> dict[Hashable, Jacobian]:
    """The Jacobian of each module named by its path ("" is the network), at its real input.

    Where positions don't mix, `positions` of each input are sampled if there are too many: the
    first (a CLS token, or the one that attention sinks to) and some of the others. A module that
    isn't called with a floating tensor (an embedding of ids) is left out. The network must be in
    eval mode. One whose derivative can't be taken has no values, and the reason as its status.
    """
    if any(part.training for part in module.modules()):
        raise UsageError("a Jacobian in train mode isn't the network's: call .eval() first")
    found, inputs = {}, len(next(iter(batch.values())))
    with frozen(module):
        for key, call in capture(module, forward, batch, paths).items():
            generator = torch.Generator().manual_seed(seed)
            try:
                found[key] = _jacobian(
                    call, inputs, positions, dense_side, steps, probes, generator
                )
            except _NoDerivative as lost:
                found[key] = _without_values(inputs, str(lost))
            except ANY_ERROR as error:
                if isinstance(error, torch.cuda.OutOfMemoryError) or "allocate mem" in str(error):
                    raise  # which says nothing about the part
                found[key] = _without_values(inputs, "not_differentiated")
    return found


class _NoDerivative(Exception):  # noqa: N818  (a reason, no error)
    """Why a component has no Jacobian, as a status."""


def _without_values(inputs: int, reason: str | None = None) -> Jacobian:
    nodes = np.full((inputs, 1), np.nan)
    return Jacobian(nodes, np.ones_like(nodes), 0, 0, 0, "none", reason=reason)


def _jacobian(
    call: Capture,
    inputs: int,
    positions: int,
    dense_side: int,
    steps: int,
    probes: int,
    generator: torch.Generator,
) -> Jacobian:
    if not bool(torch.isfinite(call.output).all()):
        return _without_values(inputs)
    if isinstance(call.module, nn.Linear) and not _has_hooks(call.module):
        weight = call.module.weight
        assert isinstance(weight, Tensor)
        return jacobian_of_weight(weight, inputs)
    if len(call.x) != inputs or len(call.output) != inputs:
        raise _NoDerivative("inputs_not_told_apart")
    if is_position_wise(call):
        return _by_positions(call, positions, generator)
    rows, columns = call.output[0].numel(), call.x[0].numel()
    if min(rows, columns) <= dense_side:
        nodes = _values(dense(call.again, call.x))
        eps = torch.finfo(call.x.dtype).eps
        return Jacobian(nodes, _equal(nodes), rows, columns, min(rows, columns), "dense", eps=eps)
    found = _matrix_free(call, steps, probes, generator)
    return _estimated(found, rows, columns, torch.finfo(call.x.dtype).eps)


def _estimated(found: Quadrature, rows: int, columns: int, eps: float) -> Jacobian:
    inputs, probes, rules, _ = found.nodes.shape
    nodes = found.nodes.reshape(inputs, -1)
    weights = found.weights.reshape(inputs, -1) / (probes * rules)
    side = min(rows, columns)
    return Jacobian(nodes, weights, rows, columns, side, "lanczos", eps=eps, quadrature=found)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def jacobian_of_weight(weight: Tensor, inputs: int) -> Jacobian:
    """A linear map's Jacobian is its matrix [o, i] at every input."""
    values = spectra_of(weight).values
    nodes = np.broadcast_to(values, (inputs, len(values)))
    rows, columns = weight.shape
    return Jacobian(nodes, _equal(nodes), rows, columns, min(rows, columns), "weight")


def _equal(nodes: Floats) -> Floats:
    return np.full(nodes.shape, 1.0 / max(nodes.shape[1], 1))


def _values(jacobians: Tensor) -> Floats:
    return spectra_of(jacobians).values


def _by_positions(call: Capture, positions: int, generator: torch.Generator) -> Jacobian:
    """Exact blocks [o, i] of m positions of every input."""
    call, eps = _in_double(call)
    x = in_line(call, call.x)
    chosen, weights = _chosen(x.shape[1], x.shape[2], positions, call.x.ndim == 3, generator)
    some = x[:, chosen.to(x.device)]
    blocks = dense(lambda rows: of_rows(call, rows), some.flatten(0, 1))
    nodes = _values(blocks).reshape(len(x), -1)
    o, i = blocks.shape[1:]
    each = np.broadcast_to(np.repeat(weights / min(o, i), min(o, i)), nodes.shape)
    return Jacobian(nodes, each, o, i, min(o, i), "positions", len(chosen), x.shape[1], eps=eps)


def _in_double(call: Capture) -> tuple[Capture, float]:
    """The call with a copy of its module in float64, where that computes the same, and the
    precision of what it gives then: a module may turn to float32 inside."""
    own = (call, torch.finfo(call.x.dtype).eps)
    if call.x.dtype == torch.float64:
        return own
    try:
        module = copy.deepcopy(call.module).double().requires_grad_(False)
        x = call.x.double()
        wide = replace(call, module=module, x=x)
        with torch.no_grad():
            output, beside = wide.again(x), wide.again(x + 1e-13 * x.roll(1, -1))
    except ANY_ERROR:
        return own
    scale = float(call.output.abs().max())
    same = output.shape == call.output.shape and output.dtype == torch.float64
    if not same or float((output - call.output).abs().max()) > 1e3 * own[1] * scale:
        return own
    # Float32 inside swallows so small a change.
    fine = float((beside != output).double().mean()) > 0.01
    return wide, FLOAT64_EPS if fine else own[1]


def _chosen(
    count: int, width: int, positions: int, in_line: bool, generator: torch.Generator
) -> tuple[Tensor, Floats]:
    """Positions of all `count`, and the share that each stands for."""
    if count <= positions or count * width <= ROWS:
        return torch.arange(count), np.full(count, 1 / count)
    if not in_line or positions < 2:
        some = torch.randperm(count, generator=generator)[:positions]
        return some, np.full(positions, 1 / positions)
    others = torch.randperm(count - 1, generator=generator)[: positions - 1] + 1
    share = (1 - 1 / count) / (positions - 1)
    weights = np.array([1 / count, *[share] * (positions - 1)])
    return torch.cat([torch.zeros(1, dtype=torch.long), others]), weights


def dense(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """J [B, o, i] of every input: by rows, or by columns where there are fewer of them."""
    products = Products(function, x)
    o, i = products.output[0].numel(), x[0].numel()
    along, side = (products.vjp, o) if o <= i else (products.jvp, i)
    shape = products.output.shape if o <= i else x.shape
    seeds = torch.eye(side, dtype=x.dtype, device=x.device)
    parts = [along(seed.expand(len(x), -1).reshape(shape)).flatten(1) for seed in seeds]
    return torch.stack(parts, 1 if o <= i else 2)


class Products:
    """J v and J^T w of a function at x [B, ...], for all inputs at once, from one forward pass."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        with torch.enable_grad():
            self.x = x.detach().clone().requires_grad_()
            # A leaf itself must not be changed by an in-place function.
            self.output = function(self.x.view_as(self.x) * 1)
            if not self.output.requires_grad:
                raise _NoDerivative("no_gradient")
            self.dual = torch.zeros_like(self.output, requires_grad=True)
            (self.pulled,) = torch.autograd.grad(self.output, self.x, self.dual, create_graph=True)

    def vjp(self, w: Tensor) -> Tensor:
        """J^T w [B, ...] in the shape of x."""
        return torch.autograd.grad(self.output, self.x, w, retain_graph=True)[0]

    def jvp(self, v: Tensor) -> Tensor:
        """J v [B, ...] in the shape of the output: J^T w is linear in w, so this is its adjoint."""
        if self.pulled.grad_fn is None:
            return torch.zeros_like(self.output)
        found = torch.autograd.grad(
            self.pulled, self.dual, v, retain_graph=True, allow_unused=True
        )[0]
        return torch.zeros_like(self.output) if found is None else found


def _matrix_free(call: Capture, steps: int, probes: int, generator: torch.Generator) -> Quadrature:
    products = Products(call.again, call.x)
    rows, columns = products.output[0].numel(), call.x[0].numel()
    copies = max(1, min(LEADING, AT_ONCE // call.x.numel()))
    if copies > 1 and not _may_be_repeated(call):
        copies = 1
    made = {1: products}

    def gram(v: Tensor) -> Tensor:
        """J^T J v, or J J^T v on the smaller side, [B, m, side]."""
        parts = []
        for part in torch.split(v, copies, dim=1):
            m = part.shape[1]
            if m not in made:
                many = _repeated(call, m)
                made.clear()  # Each holds a graph.
                made[m] = Products(many.again, many.x)
            parts.append(_gram_product(made[m], part, columns > rows))
        return torch.cat(parts, 1)

    size, device = min(rows, columns), call.x.device
    return quadrature(gram, len(call.x), size, steps, probes, LEADING, copies, generator, device)


def _gram_product(products: Products, v: Tensor, wide: bool) -> Tensor:
    like = products.output if wide else products.x
    u = v.to(like.dtype).reshape(like.shape)
    w = products.jvp(products.vjp(u)) if wide else products.vjp(products.jvp(u))
    return w.flatten(1).double().reshape(v.shape)


def _repeated(call: Capture, copies: int) -> Capture:
    """The call with as many copies of each input, and of what else has an entry for each."""
    seen: dict[int, Tensor] = {}

    def repeat(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(repeat(part) for part in value)
        if not isinstance(value, Tensor) or not value.ndim or len(value) != len(call.x):
            return value
        # What was one tensor stays one.
        return seen.setdefault(id(value), value.repeat_interleave(copies, 0))

    arguments = tuple(repeat(a) for a in call.arguments)
    options = {name: repeat(a) for name, a in call.options.items()}
    x, output = (part.repeat_interleave(copies, 0) for part in (call.x, call.output))
    return Capture(call.module, x, arguments, options, output)


def _may_be_repeated(call: Capture) -> bool:
    """Whether copies of the inputs give copies of the outputs: a table may be as long as there are
    inputs."""
    twice = _repeated(call, 2)
    try:
        with torch.no_grad():
            found = twice.again(twice.x)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    scale = float(twice.output.abs().max())
    return found.shape == twice.output.shape and torch.allclose(
        found, twice.output, rtol=1e-4, atol=1e-5 * scale
    )
