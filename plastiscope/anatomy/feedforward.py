"""The feed-forward part of a block: up, gate, activation and down, as modules or as functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from plastiscope.anatomy.activations import Activation, activation_between
from plastiscope.anatomy.parts import Matrix
from plastiscope.anatomy.products import Product
from plastiscope.anatomy.record import Call, Record
from plastiscope.anatomy.rows import feeding, reached

MULTIPLICATIONS = {"mul", "mul_", "__mul__", "multiply"}


@dataclass(frozen=True)
class FeedForward:
    """fc1 and fc2, the gate where there is one; `joined` is the gate's product with fc1.

    `half` are the channels of the activation's input that it takes: those of the gate, when one
    function (F.glu) takes both.
    """

    fc1: Product
    fc1_matrix: Matrix
    fc2: Product
    gate: Product | None = None
    gate_matrix: Matrix | None = None
    activation: Activation | None = None
    joined: int | None = None
    half: tuple[int, ...] | None = None


def feed_forward(record: Record, linear: tuple[Product, ...]) -> FeedForward | None:
    """The parts of a feed-forward network of two or three linear maps; None when it isn't one."""
    last = [p for p in linear if not any(record.precedes(p.output, q.output) for q in linear)]
    if len(last) != 1:
        return None
    fc2 = last[0]
    others = {p.call.index: p for p in linear if p is not fc2}
    behind = feeding(record, fc2.source, others)
    near = {b.call.index for b in behind}
    far = [p for p in others.values() if p.call.index not in near]
    if len(behind) == 1 and len(far) == 1 and behind[0].is_depthwise:
        # A depthwise convolution between fc1 and the activation, as in PVT and SegFormer.
        activation = activation_between(record, behind[0].output, fc2.source)
        return FeedForward(far[0], _matrix(record, far[0], None), fc2, activation=activation)
    if not behind or far or len(behind) > 2:
        return None
    gated = _gate(record, fc2.source, behind, others)
    if gated is not None:
        return _gated(record, fc2, gated, others)
    if len(behind) != 1:
        return None
    fc1 = behind[0]
    for call in record.between(fc1.output, fc2.source):
        if call.op == "glu" and (halved := _halved(record, call, fc1, fc2)) is not None:
            return halved
    activation = activation_between(record, fc1.output, fc2.source)
    return FeedForward(fc1, _matrix(record, fc1, None), fc2, activation=activation)


def _gate(
    record: Record, end: int, behind: tuple[Product, ...], others: dict[int, Product]
) -> Call | None:
    """The multiplication of two values that different rows of weights make, nearest the end."""
    starts = [p.output for p in behind]
    calls = {c.index: c for start in starts for c in record.between(start, end)}
    for index in sorted(calls, reverse=True):
        call = calls[index]
        live = [n for n in call.inputs if record.values[n].live]
        if call.op not in MULTIPLICATIONS or len(set(live)) != 2:
            continue
        sides = [feeding(record, n, others) for n in live]
        if any(len(side) != 1 for side in sides):
            continue
        if sides[0][0] is not sides[1][0] or not _share_rows(record, sides[0][0], live):
            return call
    return None


def _halved(record: Record, call: Call, fc1: Product, fc2: Product) -> FeedForward | None:
    """The parts around F.glu: the first half of its input times the sigmoid of the second."""
    source, output = call.inputs[0], call.outputs[0]
    sizes = (record.values[n].tensor.shape for n in (source, output))
    axes = [a for a, (old, new) in enumerate(zip(*sizes, strict=True)) if old != new]
    rows = reached(record, fc1, source)
    if rows is None or len(axes) != 1:
        return None
    up, gate = (set(half.flatten().tolist()) for half in rows.chunk(2, axes[0]))
    if up & gate or -1 in up | gate:
        return None
    size = rows.shape[axes[0]]
    matrices = [Matrix(fc1.tensor, fc1.matrix.out_axes, tuple(sorted(half))) for half in (up, gate)]
    return FeedForward(
        fc1, matrices[0], fc2, fc1, matrices[1], Activation(source, output, "sigmoid"), output,
        tuple(range(size // 2, size)),
    )  # fmt: skip


def _share_rows(record: Record, product: Product, sides: list[int]) -> bool:
    """Whether two values depend on common outputs of a linear map."""
    leaf = record.values[product.output].tensor.detach().clone().requires_grad_(True)
    used = []
    for number in sides:
        with torch.enable_grad():
            value = (
                leaf
                if number == product.output
                else record.run_again({product.output: leaf}, number)
            )
        drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(1)).to(value)
        (gradient,) = torch.autograd.grad(value, leaf, drawn)
        used.append(gradient != 0)
    return bool((used[0] & used[1]).any())


def _gated(
    record: Record, fc2: Product, call: Call, others: dict[int, Product]
) -> FeedForward | None:
    first, second = dict.fromkeys(n for n in call.inputs if record.values[n].live)
    products = [feeding(record, n, others)[0] for n in (first, second)]
    found = [
        activation_between(record, p.output, n)
        for p, n in zip(products, (first, second), strict=True)
    ]
    # The gate is the side with a function; of two, the one whose function is known.
    doubts = [2 if f is None else f.function == "unknown" for f in found]
    side = 1 if doubts[1] < doubts[0] else 0
    gate, up = products[side], products[1 - side]
    activation, up_value = found[side], (first, second)[1 - side]
    gate_value = activation.source if activation else (first, second)[side]
    return FeedForward(
        up, _matrix(record, up, up_value), fc2, gate, _matrix(record, gate, gate_value),
        activation, call.outputs[0],
    )  # fmt: skip


def _matrix(record: Record, product: Product, number: int | None) -> Matrix:
    """The rows that make a value; the whole matrix when all do."""
    if number is None:
        return product.matrix
    rows = reached(record, product, number)
    used = tuple(sorted(set(rows.flatten().tolist()) - {-1})) if rows is not None else ()
    if not used or len(used) == product.rows.numel():
        return product.matrix
    return Matrix(product.tensor, product.matrix.out_axes, used)
