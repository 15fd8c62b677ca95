"""Which elements of one value end up where in another, through calls that only move elements."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plastiscope.anatomy.record import Call, Record

RESHAPES = {
    "view", "reshape", "view_as", "reshape_as", "permute", "transpose", "swapaxes", "swapdims",
    "movedim", "moveaxis", "t", "T", "mT", "flatten", "unflatten", "contiguous", "clone", "detach",
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "__getitem__", "select",
    "narrow", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to", "repeat",
    "repeat_interleave", "tile", "cat", "concat", "concatenate", "stack", "hstack", "roll", "flip",
    "index_select", "alias", "unsafe_chunk", "pad", "ravel", "take_along_dim", "gather", "data",
    "unsafe_split", "_unsafe_view", "copy_", "__setitem__", "as_strided_scatter",
    "constant_pad_nd", "slice",
}  # fmt: skip
CASTS = {"to", "float", "double", "half", "bfloat16", "type", "type_as", "_to_copy", "cpu"}
POINTWISE = CASTS | {
    "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "dropout", "dropout_",
    "feature_dropout", "true_divide", "__truediv__", "clamp", "nan_to_num", "rsub", "__rsub__",
    "__rtruediv__", "masked_fill", "masked_fill_", "where", "multiply", "divide", "subtract",
}  # fmt: skip
NORMS = {
    "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", "native_layer_norm",
    "_fused_rms_norm", "normalize",
}  # fmt: skip

_NAMES = {
    "relu", "relu6", "gelu", "silu", "hardswish", "tanh", "sigmoid", "elu", "selu", "celu", "mish",
    "leaky_relu", "softplus",
}  # fmt: skip
ACTIVATIONS = {*_NAMES, *(f"{name}_" for name in _NAMES)}


def places(
    record: Record,
    start: int,
    end: int,
    through: frozenset[str] = frozenset(),
    shortcuts: Mapping[int, int] | None = None,
    labels: Tensor | None = None,
) -> Tensor | None:
    """For each element of `end` the flat index of the element of `start` it was made from.

    With `labels` (integers, one for each element of `start`) those in place of the index. -1
    where it was made from nothing of `start` (padding, another operand of a concatenation).
    None when a call on the way mixes elements. Pointwise calls, and those named in `through`,
    keep each element's place; so does everything between a value and its shortcut.
    """
    if labels is None:
        shape = record.values[start].tensor.shape
        labels = torch.arange(shape.numel()).reshape(shape)
    new = {start: labels + 1}
    mixed: set[int] = set()
    for call in record.affected(set(new), end):
        source = shortcuts.get(call.outputs[0]) if shortcuts and call.outputs else None
        if source in new:
            new[call.outputs[0]] = new[source]
            continue
        outputs = None if mixed.intersection(call.inputs) else _moved(record, call, new, through)
        if outputs is None:
            mixed.update(call.outputs)
        else:
            new.update(zip(call.outputs, outputs, strict=True))
    return new[end] - 1 if end in new and end not in mixed else None


def _moved(
    record: Record, call: Call, new: dict[int, Tensor], through: frozenset[str]
) -> list[Tensor] | None:
    if call.op in RESHAPES:
        return record.outputs_with(call, new, _nothing)
    if call.op in POINTWISE or call.op in through:
        known = [new[n] for n in dict.fromkeys(call.inputs) if n in new]
        shape = record.values[call.outputs[0]].tensor.shape
        if len(known) == 1 and len(call.outputs) == 1:
            return [known[0].expand(shape)] if known[0].numel() <= shape.numel() else None
    return None


def _nothing(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.zeros(tensor.shape, dtype=torch.int64)
    return tensor.cpu()
