"""What a network takes, found from its layers, its checkpoint's settings, or the user's words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from plastiscope.checkpoints.run import State
from plastiscope.models import hints
from plastiscope.models.live import Inputs, ModelError

LENGTH_KEYS = (
    "block_size",
    "context_length",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_seq_length",
    "max_position_embeddings",
    "seq_len",
    "sequence_length",
    "max_len",
    "max_length",
)
IMAGE_KEYS = ("input_shape", "image_shape", "image_size", "img_size", "resolution", "input_size")
SYNTHETIC_LENGTH = 64


def infer(module: nn.Module, state: State, assume: Mapping[str, str]) -> Inputs:
    """The kind and shape of one input, by the first layer with weights.

    An embedding takes token ids, a convolution images, a linear layer vectors. `assume` may say
    input, kind and vocabulary. Raises ModelError when the size can't be told.
    """
    given = hints.input_shape(state.extras, assume, IMAGE_KEYS)
    first = _first(module)
    kind = assume.get("kind") or _kind(first, given, "input" in assume)
    if kind == "tokens":
        return _tokens(module, first, state, assume)
    if kind == "image":
        return _image(module, first, given)
    width = getattr(first, "in_features", None) or (given[0] if given else None)
    if not width:
        raise _unknown("how many features it takes", "input=64")
    return Inputs("vector", (int(width),))


def _first(module: nn.Module) -> nn.Module | None:
    kinds = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.RNNBase)
    return next((part for part in module.modules() if isinstance(part, kinds)), None)


def _kind(first: nn.Module | None, given: tuple[int, ...] | None, said: bool) -> str:
    if isinstance(first, nn.Embedding):
        return "tokens"
    if isinstance(first, nn.Linear) and not said and math.prod(given or ()) == first.in_features:
        return "vector"
    if given is not None and len(given) in (2, 3):
        return "image"
    if isinstance(first, nn.Conv2d):
        return "image"
    if isinstance(first, (nn.Linear, type(None))):
        return "vector"
    raise _unknown(f"inputs of a {type(first).__name__}", "input=64 --assume kind=vector")


def _unknown(what: str, example: str) -> ModelError:
    return ModelError(f"the model doesn't show {what}: say --assume {example}, or give a --probe")


def _tokens(
    module: nn.Module,
    first: nn.Module | None,
    state: State,
    assume: Mapping[str, str],
) -> Inputs:
    words = assume.get("vocabulary") or hints.find(state.extras, "vocab_size", "vocabulary_size")
    rows = getattr(first, "num_embeddings", None)
    vocabulary = int(rows or words or 0)
    if not vocabulary:
        raise _unknown("how many token ids it knows", "vocabulary=256")
    tables = [
        part.num_embeddings
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and ("pos" in name.lower() or name.endswith("wpe"))
    ]
    length = hints.find(state.extras, *LENGTH_KEYS)
    known = [*tables, *([length] if type(length) is int else [])]
    longest = min(known) if known else None
    said = hints.size(assume.get("input"))
    shape = said or (min(SYNTHETIC_LENGTH, longest or SYNTHETIC_LENGTH),)
    return Inputs("tokens", shape, vocabulary, longest=longest)


def _image(module: nn.Module, first: nn.Module | None, shape: tuple[int, ...] | None) -> Inputs:
    conv = first if isinstance(first, nn.Conv2d) else None
    if shape is None and conv is not None:
        shape = _from_positions(module, conv)
    if shape is None:
        raise _unknown("the size of its images", "input=3x32x32")
    channels = conv.in_channels if conv is not None else (shape[0] if len(shape) == 3 else 3)
    return Inputs("image", (channels, *hints.sides(shape)))


def _from_positions(module: nn.Module, conv: nn.Conv2d) -> tuple[int, int] | None:
    """The image size for which a table of positions has one row a patch, CLS tokens apart."""
    for name, table in module.named_parameters():
        if "pos" not in name.lower() or table.ndim not in (2, 3):
            continue
        grid = square(table.shape[-2])
        if grid:
            return grid * conv.stride[0], grid * conv.stride[1]
    return None


def square(rows: int) -> int | None:
    """The side of the square grid of a table with 0 to 5 rows more (CLS, registers)."""
    for extra in range(6):
        side = math.isqrt(max(rows - extra, 0))
        if side > 1 and side * side == rows - extra:
            return side
    return None
