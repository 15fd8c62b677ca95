"""Where weights meet activations: the linear maps of a pass, and which rows make which output.

Letters: o an output row of the weight matrix, i an input column, c a channel of the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from plastiscope.anatomy.flow import CASTS, RESHAPES, places
from plastiscope.anatomy.parts import Matrix
from plastiscope.anatomy.record import Call, Record

CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "convolution", "_convolution"}
GROUPED = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}
TRANSPOSED = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
MATMULS = {"matmul", "__matmul__", "mm", "bmm"}
REVERSED = {"__rmatmul__"}
OPERAND_NAMES = (
    ("input", "other", "mat2", "weight"),
    ("mat1", "mat2", "batch1", "batch2"),
)
ADDED = {"addmm", "baddbmm", "addbmm"}
Roles = tuple[tuple[int | None, int | None], ...]
PRODUCTS = CONVOLUTIONS | TRANSPOSED | MATMULS | REVERSED | ADDED | GROUPED | {"linear", "einsum"}


@dataclass(frozen=True)
class Product:
    """A linear map: `source` through the weights of the tensor `matrix.tensor` to `output`.

    `rows` has the shape of the output's channel axes `channels` and gives the row of the matrix
    that makes each channel. `columns` has the shape of the source's axes `summed`, and one more
    (a kernel's places), and gives the columns that each of them meets.
    """

    call: Call
    source: int
    output: int
    matrix: Matrix
    channels: tuple[int, ...]
    rows: Tensor
    summed: tuple[int, ...]
    columns: Tensor
    shape: tuple[int, ...]

    @property
    def tensor(self) -> str:
        return self.matrix.tensor

    @property
    def height(self) -> int:
        """How many rows the whole matrix has."""
        return math.prod(self.shape[a] for a in self.matrix.out_axes)

    @property
    def is_depthwise(self) -> bool:
        """Whether it is a convolution that keeps every channel to itself."""
        return self.call.op in CONVOLUTIONS and self.shape[1] == 1 and self.height > 1

    @property
    def path(self) -> str:
        """The module that owns the weight."""
        return self.matrix.tensor.rpartition(".")[0]


def products(record: Record) -> list[Product]:
    """Every linear map of the pass whose weights can be named, in order."""
    found = (product(record, call) for call in record.calls if call.op in PRODUCTS)
    return [p for p in found if p is not None]


def product(record: Record, call: Call) -> Product | None:
    """One call read as a linear map, or None when no parameter takes part."""
    operands = _operands(record, call)
    if operands is None:
        return None
    base = weight_base(record, operands[1])
    return None if base is None else _located(record, call, operands, *base)


def _operands(record: Record, call: Call) -> tuple[int, int, Roles] | None:
    """(live operand, weight operand, what each axis of the weight becomes)."""
    pair = operands_of(record, call)
    if pair is None:
        return None
    left, right = pair
    live = record.values[left].live, record.values[right].live
    learned = record.values[left].learned, record.values[right].learned
    if live[0] and not live[1] and learned[1]:
        return left, right, _axes(record, call, pair, 1)
    if live[1] and not live[0] and learned[0]:
        return right, left, _axes(record, call, pair, 0)
    return None


def operands_of(record: Record, call: Call) -> tuple[int, int] | None:
    """The two values that a product multiplies, in order."""
    args = list(call.args)
    if call.op == "einsum":
        args = [
            a for item in args[1:] for a in (item if isinstance(item, (list, tuple)) else [item])
        ]
        numbers = [record.value(a) for a in args]
    else:
        given = (args[1:] if call.op in ADDED else args) + [
            call.kwargs[n] for n in OPERAND_NAMES[call.op in ADDED] if n in call.kwargs
        ]
        numbers = [record.value(a) for a in given[:2]][:: -1 if call.op in REVERSED else 1]
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0], numbers[1]


def _axes(record: Record, call: Call, operands: tuple[int, int], side: int) -> Roles:
    """For each axis of the weight operand: the output axis it becomes, or the source axis summed.

    `side` says which operand is the weight. (None, None): summed over a kernel.
    """
    ndim, other = (record.values[operands[k]].tensor.ndim for k in (side, 1 - side))
    out = record.values[call.outputs[0]].tensor.ndim
    if call.op == "einsum":
        return _einsum_axes(record, call, operands, side)
    if call.op == "linear":
        return ((out - 1, None), (None, other - 1)) if ndim == 2 else ((None, other - 1),)
    if call.op in CONVOLUTIONS:
        kernel = ((None, None),) * (ndim - 2)
        return ((out - ndim + 1, None), (None, other - ndim + 1), *kernel)
    if call.op in TRANSPOSED:
        kernel = ((None, None),) * (ndim - 2)
        return ((None, other - ndim + 1), (out - ndim + 1, None), *kernel)
    if call.op in GROUPED:
        return ((0, None), (None, other - 1), (out - 1, None))
    if ndim == 1:
        return ((None, other - 1 if side == 1 else other - 2),)
    leading = tuple((out - ndim + a, None) for a in range(ndim - 2))
    if side == 1:
        return (*leading, (None, other - 1), (out - 1, None))
    return (*leading, (out - 2, None), (None, other - 2))


def _einsum_axes(record: Record, call: Call, operands: tuple[int, int], side: int) -> Roles:
    ranks = tuple(record.values[n].tensor.ndim for n in operands)
    parts, right = letters(call.args[0], ranks)
    weight, source = parts[side], parts[1 - side]
    return tuple(
        (right.index(c), None) if c in right else (None, source.index(c) if c in source else None)
        for c in weight
    )


def letters(equation: str, ranks: tuple[int, ...]) -> tuple[list[str], str]:
    """An einsum equation's operands and output, with every ellipsis spelt out."""
    left, _, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    unused = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in equation]
    spans = [n - len(p.replace("...", "")) for p, n in zip(parts, ranks, strict=True)]
    names = "".join(
        unused[: max([s for p, s in zip(parts, spans, strict=True) if "..." in p] or [0])]
    )
    parts = [p.replace("...", names[len(names) - s :]) for p, s in zip(parts, spans, strict=True)]
    if "->" not in equation:
        joined = "".join(parts)
        right = "".join(sorted(c for c in set(joined) if joined.count(c) == 1 and c not in names))
        right = names + right
    return parts, right.replace("...", names)


def weight_base(record: Record, weight: int) -> tuple[str, Tensor | None] | None:
    """The named tensor behind a weight operand, and the flat index in it of each element.

    The index is None when the operand is the named tensor itself.
    """
    if (name := record.name(weight)) is not None:
        return name, None
    number = weight
    while record.name(number) is None:
        call = record.call_of(number)
        if call is None or call.op not in RESHAPES | CASTS:
            return None
        # A router's choice of an expert depends on weights too, but is a number.
        learned = [n for n in call.inputs if record.values[n].learned]
        learned = [n for n in learned if record.values[n].tensor.is_floating_point()]
        if len(learned) != 1:
            return None
        number = learned[0]
    place = places(record, number, weight)
    name = record.name(number)
    return (name, place) if name is not None and place is not None else None


def _located(
    record: Record, call: Call, operands: tuple[int, int, Roles], name: str, place: Tensor | None
) -> Product | None:
    """The product with its rows and columns numbered in the named tensor's own matrix."""
    source, weight, roles = operands
    shape, sizes = record.shape(name), record.values[weight].tensor.shape
    if len(roles) != len(sizes):
        return None
    out = [a for a, (axis, _) in enumerate(roles) if axis is not None and sizes[a] > 1]
    out = out or [a for a, (axis, _) in enumerate(roles) if axis is not None]
    if not out:
        return None
    summed = [a for a in range(len(sizes)) if a not in out and roles[a][1] is not None]
    rest = [a for a in range(len(sizes)) if a not in out and a not in summed]
    if place is None:
        fixed, rows, columns = _own_numbers(shape, out, summed, rest)
    else:
        table = place.permute(*out, *summed, *rest)
        fixed, rows, columns = _numbers(table, shape, len(out), len(summed))
    channels = tuple(axis for a in out if (axis := roles[a][0]) is not None)
    inner = tuple(axis for a in summed if (axis := roles[a][1]) is not None)
    matrix = Matrix(name, fixed)
    return Product(call, source, call.outputs[0], matrix, channels, rows, inner, columns, shape)


def _own_numbers(
    shape: tuple[int, ...], out: list[int], summed: list[int], rest: list[int]
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """(out axes, rows, columns) when the operand is the whole tensor as it is stored."""
    heights = [shape[a] for a in out]
    rows = torch.arange(math.prod(heights)).reshape(heights)
    moving = sorted([*summed, *rest])
    widths = [shape[a] for a in moving]
    columns = torch.arange(math.prod(widths)).reshape(widths)
    columns = columns.permute([moving.index(a) for a in [*summed, *rest]])
    return tuple(out), rows, columns.reshape([shape[a] for a in summed] + [-1])


def _numbers(
    table: Tensor, shape: tuple[int, ...], out: int, summed: int
) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """(out axes, rows, columns) from the place of every element: [out..., summed..., rest...]."""
    table = table.flatten(out + summed) if table.ndim > out + summed else table[..., None]
    first = table.flatten(0, out - 1)[0]
    fixed = _fixed_axes(first.flatten(), shape) or (0,)
    moving = tuple(a for a in range(len(shape)) if a not in fixed)
    heads = table.flatten(out)[..., 0]
    return fixed, _ravel(heads, shape, fixed), _ravel(first, shape, moving)


def _ravel(places: Tensor, shape: tuple[int, ...], axes: tuple[int, ...]) -> Tensor:
    """The number of each place when only these axes of the tensor are counted."""
    coordinates = torch.unravel_index(places, shape)
    number = torch.zeros_like(places)
    for axis in axes:
        number = number * shape[axis] + coordinates[axis]
    return number


def _fixed_axes(row: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of the weight along which one row of the matrix doesn't move."""
    coordinates = torch.unravel_index(row, shape)
    return tuple(
        a
        for a in range(len(shape))
        if shape[a] > 1 and bool((coordinates[a] == coordinates[a][0]).all())
    )
