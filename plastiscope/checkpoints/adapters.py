"""LoRA and other low-rank adapters: the update of each target, never A or B as a layer.

A [r, in], B [out, r]; update = scale * B A, of shape [out, in] and rank at most r
MLX stores lora_a [in, r] and lora_b [r, out]
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plastiscope.checkpoints.stored import Stored, contiguous
from plastiscope.errors import UnreadableError

_PAIR = re.compile(
    r"(?P<target>.+?)\.(?:(?P<peft>lora_(?:embedding_)?[AB])(?:\.(?!weight$)(?P<which>\w+))?(?:\.weight)?"
    r"|(?P<mlx>lora_[ab])|(?P<kohya>lora_(?:down|up))\.weight)$"
)
_ROWS = 256
_LEFTOVER = re.compile(r"\.(original_module|base_layer)\.")


@dataclass(frozen=True)
class Adapted:
    """The updates by target and the layers that were trained whole, with what was assumed."""

    tensors: dict[str, Stored]
    ranks: dict[str, int]
    notes: tuple[str, ...]


def is_adapter(names: Mapping[str, Stored]) -> bool:
    """Whether the table holds low-rank pairs."""
    return any(_PAIR.match(name) for name in names)


def adapted(weights: Mapping[str, Stored], config: Mapping[str, Any]) -> Adapted:
    """Replace each pair of factors by its update, read when it is asked for.

    Raises:
        UnreadableError: a factor without its partner, or shapes that don't multiply.
    """
    pairs: dict[str, dict[str, Stored]] = {}
    rest: dict[str, Stored] = {}
    for name, tensor in weights.items():
        match = _PAIR.match(name)
        if match:
            kind = match["peft"] or match["mlx"] or match["kohya"]
            pairs.setdefault(_target(match["target"], match["which"]), {})[kind] = tensor
        else:
            rest[name] = tensor
    updates: dict[str, Stored] = {}
    ranks: dict[str, int] = {}
    assumed = False
    for target, parts in pairs.items():
        first, second = _ordered(target, parts)
        scale = _scale(target, first.shape[0], config, rest)
        assumed |= scale is None
        transposed = bool(config.get("fan_in_fan_out"))
        updates[f"{target}.weight"] = _update(first, second, 1.0 if scale is None else scale)
        if transposed:
            updates[f"{target}.weight"] = _transposed(updates[f"{target}.weight"])
        ranks[f"{target}.weight"] = first.shape[0]
    notes = [
        f"adapter: {len(updates)} updates B A of rank at most {max(ranks.values(), default=0)}"
    ]
    if assumed:
        notes.append("adapter: no alpha found, its scale is taken as 1")
    if any("lora_magnitude_vector" in name for name in rest):
        notes.append("adapter: DoRA magnitudes are kept apart, the updates are B A alone")
    return Adapted({**updates, **_whole_layers(rest)}, ranks, tuple(notes))


def _target(name: str, which: str | None) -> str:
    target = re.sub(r"^(?:base_model\.model\.|base_model\.)", "", name)
    return target if which in (None, "default") else f"{target}[{which}]"


def _ordered(target: str, parts: Mapping[str, Stored]) -> tuple[Stored, Stored]:
    """A as [r, in] and B as [out, r]."""
    for first, second, flip in (
        ("lora_A", "lora_B", False),
        ("lora_a", "lora_b", True),
        ("lora_down", "lora_up", False),
        ("lora_embedding_A", "lora_embedding_B", False),
    ):
        if first in parts and second in parts:
            a, b = parts[first], parts[second]
            a, b = (_transposed(a), _transposed(b)) if flip else (a, b)
            if a.shape[:1] != b.shape[1:2]:
                raise UnreadableError(f"adapter: {target}: A {a.shape} and B {b.shape} don't fit")
            return a, b
    raise UnreadableError(f"adapter: {target} has {', '.join(parts)} without its partner")


def _transposed(tensor: Stored) -> Stored:
    shape = tensor.shape[::-1]

    def read() -> torch.Tensor:
        return tensor.read().T

    return Stored(shape, tensor.dtype, contiguous(shape), compute=read, note=tensor.note)


def _update(a: Stored, b: Stored, scale: float) -> Stored:
    # Convolutions: A [r, in, k, k], B [out, r, 1, 1].
    shape = (b.shape[0], *a.shape[1:])

    def read() -> torch.Tensor:
        left, right = b.read().double().flatten(1), a.read().double().flatten(1)
        product = torch.empty(left.shape[0], right.shape[1])
        # In float64, a few rows at a time: the whole product is many times its factors.
        for at in range(0, left.shape[0], _ROWS):
            product[at : at + _ROWS] = scale * (left[at : at + _ROWS] @ right)
        return product.reshape(shape)

    if not (a.has_data and b.has_data):
        return Stored(shape, torch.float32)
    return Stored(shape, torch.float32, contiguous(shape), compute=read)


def _scale(
    target: str, rank: int, config: Mapping[str, Any], rest: Mapping[str, Stored]
) -> float | None:
    own = rest.get(f"{target}.alpha")
    if own is not None and own.numel == 1:
        return float(own.read().item()) / rank
    mlx = config.get("lora_parameters")
    if isinstance(mlx, Mapping) and isinstance(mlx.get("scale"), int | float):
        return float(mlx["scale"])
    alpha = _pattern(config.get("alpha_pattern"), target) or config.get("lora_alpha")
    if not isinstance(alpha, int | float):
        return None
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return float(alpha) / divisor


def _pattern(patterns: Any, target: str) -> Any:
    if not isinstance(patterns, Mapping):
        return None
    return next((v for key, v in patterns.items() if target.endswith(str(key))), None)


def _whole_layers(rest: Mapping[str, Stored]) -> dict[str, Stored]:
    """Layers that were trained whole, under the base model's names; frozen copies left out."""
    layers: dict[str, Stored] = {}
    trained = {n for n in rest if ".modules_to_save." in n}
    for name, tensor in rest.items():
        plain = re.sub(r"^(?:base_model\.model\.|base_model\.)", "", name)
        if _LEFTOVER.search(name) or name.endswith(".alpha") or "lora_magnitude" in name:
            continue
        plain = re.sub(r"\.modules_to_save(?:\.default)?\.", ".", plain)
        if name in trained or plain not in layers:
            layers[plain] = tensor
    return layers


def merged(update: Mapping[str, Stored], base: Mapping[str, Stored]) -> dict[str, Stored]:
    """The base model with every update added; whole layers replaced.

    Raises:
        UnreadableError: a target that the base lacks, or another shape: never a partial merge.
    """
    result = dict(base)
    for name, tensor in update.items():
        owner = _owner(name, base)
        if owner is None:
            raise UnreadableError(f"adapter: the base has no tensor for {name}")
        if base[owner].shape != tensor.shape:
            raise UnreadableError(
                f"adapter: {name} is {tensor.shape}, the base's {owner} {base[owner].shape}"
            )
        result[owner] = tensor
    return result


def _owner(name: str, base: Mapping[str, Stored]) -> str | None:
    if name in base:
        return name
    ends = [other for other in base if other.endswith(f".{name}") or name.endswith(f".{other}")]
    return ends[0] if len(ends) == 1 else None


def added(base: Stored, update: Stored) -> Stored:
    """base + update, in the base's type."""

    def read() -> torch.Tensor:
        return (base.read().float() + update.read().float()).to(base.dtype)

    return Stored(base.shape, base.dtype, contiguous(base.shape), compute=read)
