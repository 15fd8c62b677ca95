"""Activation functions: where one lies between two linear maps, and which one it is.

The name is found by comparing values, so that a function written out in arithmetic is known too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from plastiscope.anatomy.flow import CASTS, NORMS, RESHAPES
from plastiscope.anatomy.products import PRODUCTS
from plastiscope.anatomy.record import PICKS, Call, Record
from plastiscope.anatomy.sites import SUMS

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
    "leaky_relu_0.2": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "relu_squared": lambda x: F.relu(x) ** 2,
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
}
NAMES = {"gelu_tanh": "gelu", "quick_gelu": "gelu", "leaky_relu_0.2": "leaky_relu"}
PRODUCTS_OF_TWO = {"mul", "mul_", "multiply"}
SAMPLES = 997
KEPT = CASTS | RESHAPES | {"dropout", "dropout_", "feature_dropout"}
POOLS = {
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "mean",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d",
}  # fmt: skip


@dataclass(frozen=True)
class Activation:
    """A function of single elements: its input value, its output value and its name."""

    source: int
    output: int
    function: str


def function_between(record: Record, source: int, output: int) -> str | None:
    """The name of the elementwise function that makes one value of the other; None: identity.

    The calls in between are run again on values from -6 to 6. "unknown" when they are none of
    the known functions.
    """
    like = record.values[source].tensor
    if record.values[output].tensor.numel() != like.numel() or not like.is_floating_point():
        return "unknown"
    count = min(SAMPLES, like.numel())
    x = torch.linspace(-6, 6, count).repeat(-(-like.numel() // count))[: like.numel()]
    x = x.reshape(like.shape).to(like)
    with torch.no_grad():
        y = record.run_again({source: x}, output)
    x, y = x.flatten()[:count].double(), y.flatten()[:count].double()
    if torch.allclose(x, y, rtol=1e-4, atol=1e-6):
        return None
    for name, function in FUNCTIONS.items():
        if torch.allclose(function(x), y, rtol=1e-3, atol=1e-4):
            return NAMES.get(name, name)
    return "unknown"


def activation_between(record: Record, start: int, end: int) -> Activation | None:
    """The activation on the way from a linear map's output to a later value, or None."""
    calls = record.between(start, end)
    source = _entered(record, calls, start, end)
    output = _left(record, calls, source, end)
    if source == output:
        return None
    name = function_between(record, source, output)
    return None if name is None else Activation(source, output, name)


def _entered(record: Record, calls: list[Call], start: int, end: int) -> int:
    """The last value before the function: past biases, norms and changes of shape."""
    current = start
    while current != end:
        takers = [c for c in calls if current in c.inputs]
        if len(takers) != 1 or not _linear_step(record, takers[0]):
            break
        on_way = [o for o in takers[0].outputs if o == end or record.precedes(o, end)]
        if len(on_way) != 1:
            break
        current = on_way[0]
    return current


def _linear_step(record: Record, call: Call) -> bool:
    if call.op in KEPT | NORMS:
        return True
    live = [n for n in call.inputs if record.values[n].live and not _is_bias(record, n)]
    return call.op in SUMS | {"sub", "sub_"} and len(live) == 1


def _is_bias(record: Record, number: int) -> bool:
    """Whether a value is picked from a table of weights, as the biases of chosen experts are."""
    call = record.call_of(number)
    if call is None or call.op not in PICKS or not call.inputs:
        return False
    table = record.values[call.inputs[0]]
    return table.learned and not table.live


def _left(record: Record, calls: list[Call], source: int, end: int) -> int:
    """The first value after the function: before norms, pools, products, changes of shape."""
    current = end
    makers = {o: c for c in calls for o in c.outputs}
    while current != source and current in makers:
        call = makers[current]
        before = [n for n in call.inputs if n == source or record.precedes(source, n)]
        if call.op not in KEPT | NORMS | POOLS or len(before) != 1:
            break
        current = before[0]
    return current


def first_activation(record: Record, start: int) -> Activation | None:
    """The first activation that a linear map's output meets, before any other linear map."""
    waiting, seen = [start], set()
    while waiting:
        current = waiting.pop(0)
        if current in seen:
            continue
        seen.add(current)
        for call in record.consumers(current):
            if call.op in PRODUCTS or not call.outputs:
                continue
            if len(call.inputs) == 1 and call.op not in KEPT | NORMS | POOLS:
                found = _named(record, call, start)
                if found:
                    return found
            waiting.extend(call.outputs)
    return None


def _named(record: Record, call: Call, start: int) -> Activation | None:
    """The function that begins with this call: itself, or a product like x * sigmoid(x)."""
    source, output = call.inputs[0], call.outputs[0]
    if record.values[source].tensor.shape != record.values[output].tensor.shape:
        return None
    if (
        "clamp" in call.op
        and record.values[source].tensor.numel() < record.values[start].tensor.numel()
    ):
        return None  # of a norm, that it isn't divided by 0
    for taker in record.consumers(output):
        others = [n for n in taker.inputs if n != output and record.values[n].live]
        if taker.op in PRODUCTS_OF_TWO and len(others) == 1 and _from(record, start, others[0]):
            name = function_between(record, others[0], taker.outputs[0])
            return Activation(others[0], taker.outputs[0], name or "unknown")
    name = function_between(record, source, output)
    return None if name in (None, "unknown") else Activation(source, output, str(name))


def _from(record: Record, start: int, number: int) -> bool:
    return number == start or record.precedes(start, number)
