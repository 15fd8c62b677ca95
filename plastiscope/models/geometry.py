"""How the convolutions of a plain CNN are strided, padded and pooled, so that the sizes agree.

Tensors don't hold strides, paddings and poolings; the first linear layer holds their product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from plastiscope.models import hints
from plastiscope.models.layers import Layer, not_a_chain
from plastiscope.models.live import ModelError

# Image sides that are tried when nothing says: the usual ones, and by channels the very usual one.
USUAL = (28, 32, 64, 84, 96, 224)
UNUSUAL = (8, 12, 14, 16, 20, 24, 36, 40, 42, 48, 56, 80, 100, 112, 128)
BY_CHANNELS = {1: 28, 3: 32, 4: 84}
# Lengths that are tried for convolutions along one axis.
LENGTHS = range(4, 4097)
INPUT_KEYS = (
    "input_shape",
    "in_shape",
    "image_shape",
    "obs_shape",
    "input_size",
    "image_size",
    "img_size",
    "resolution",
    "input_dim",
)


@dataclass(frozen=True)
class Geometry:
    """A reading of a CNN: `strides` and `paddings` a convolution, `pooled` the convolutions that a
    pooling follows, its kind ("max" or "avg") and size; `collapse` averages each channel at the
    end; `image` is the input [C, h, w], h = 1 where convolutions go along one of the `axes` alone,
    and `rows` x `columns` what is flattened."""

    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    pooled: frozenset[int]
    pool: str
    pool_size: int
    collapse: bool
    image: tuple[int, int, int]
    flat: tuple[int, int] = (1, 1)
    axes: int = 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The input [C, h, w], or [C, length]."""
        return self.image if self.axes == 2 else (self.image[0], self.image[2])


@dataclass(frozen=True)
class Clues:
    """What is known: values to choose from, each the user's or the checkpoint's or the usual ones.

    `slots` are the convolutions after which the Sequential's numbers leave room for a pooling,
    None when numbers don't tell. `size` is the input (h, w) when known.
    """

    strides: tuple[tuple[int, ...], ...]
    paddings: tuple[tuple[int, ...], ...]
    poolings: tuple[tuple[frozenset[int], bool], ...]
    pool: str
    pool_size: int
    sizes: tuple[tuple[int, int], ...]
    channels: int


def solve(convs: Sequence[Layer], flat: int, clues: Clues) -> tuple[Geometry, int]:
    """The most usual geometry whose flattened size is `flat`, and how many others fit as well.

    Raises ModelError when none fits.
    """
    found = [
        (cost, geometry)
        for cost, candidate in _candidates(clues)
        if (geometry := _run(convs, flat, candidate))
    ]
    if not found:
        raise not_a_chain(
            f"no usual stride, padding and pooling gives the {flat} inputs of its first linear "
            "layer; if you know them, say e.g. --assume input=3x32x32 --assume stride=2 "
            "--assume padding=1 --assume pool=max2"
        )
    return min(found, key=lambda pair: pair[0])[1], len(found) - 1


def _candidates(clues: Clues) -> Iterator[tuple[float, Geometry]]:
    """Every reading with its cost: how far each choice is from the most usual one."""
    for size, pooling, strides, paddings in product(
        clues.sizes, enumerate(clues.poolings), enumerate(clues.strides), enumerate(clues.paddings)
    ):
        place, (pooled, collapse) = pooling
        # Striding and pooling together is rare; either alone is not.
        cost = _unusual(size, clues) + place + (6 if pooled else 2) * strides[0] + paddings[0]
        yield (
            cost,
            Geometry(
                strides[1],
                paddings[1],
                pooled,
                clues.pool,
                clues.pool_size,
                collapse,
                (clues.channels, *size),
            ),
        )


def _unusual(size: tuple[int, int], clues: Clues) -> float:
    if len(clues.sizes) == 1 or size[0] == BY_CHANNELS.get(clues.channels):
        return 0.0
    if clues.sizes[0][0] == 1:
        length = size[1]
        return 0.5 if length % 100 == 0 or length & (length - 1) == 0 else 4.0
    return 0.5 if size[0] in USUAL else 4.0


def _run(convs: Sequence[Layer], flat: int, candidate: Geometry) -> Geometry | None:
    high, wide = candidate.image[1:]
    for number, conv in enumerate(convs):
        stride, padding = candidate.strides[number], candidate.paddings[number]
        if conv.axes == 2:
            high = (high + 2 * padding - conv.kernel[0]) // stride + 1
        wide = (wide + 2 * padding - conv.kernel[1]) // stride + 1
        if number in candidate.pooled:
            high = high // candidate.pool_size if conv.axes == 2 else high
            wide = wide // candidate.pool_size
        if high < 1 or wide < 1:
            return None
    if candidate.collapse:
        high = wide = 1
    if convs[-1].given * high * wide != flat:
        return None
    return replace(candidate, flat=(high, wide), axes=convs[0].axes)


def gather(
    convs: Sequence[Layer],
    flat: int,
    slots: frozenset[int] | None,
    extras: Mapping[str, Any],
    assume: Mapping[str, str],
) -> Clues:
    """The values to try: what the user says, else what the checkpoint says, else the usual."""
    pool, pool_size, poolings = _poolings(convs, flat, slots, extras, assume)
    read = _sizes if convs[0].axes == 2 else _lengths
    channels, sizes = read(convs[0].taken, extras, assume)
    if len(sizes) == len(LENGTHS) and flat == convs[-1].given:
        raise not_a_chain(
            "how long its inputs are isn't stored, and it may average over them: say it with "
            f"--assume input={channels}x128"
        )
    return Clues(
        strides=_per_conv(convs, "stride", extras, assume) or _usual_strides(convs),
        paddings=_per_conv(convs, "padding", extras, assume) or _usual_paddings(convs),
        poolings=poolings,
        pool=pool,
        pool_size=pool_size,
        sizes=sizes,
        channels=channels,
    )


def _usual_strides(convs: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    count = len(convs)
    nature = tuple({8: 4, 4: 2, 3: 1}.get(conv.kernel[1], 1) for conv in convs)
    ones, twos = (1,) * count, (2,) * count
    # Kernels of 8, 4 and 3 are the network of the Nature paper on Atari, whose strides are known.
    if [conv.kernel[1] for conv in convs] == [8, 4, 3]:
        return (nature, ones, twos)
    patches = tuple(conv.kernel[1] for conv in convs)
    return tuple(dict.fromkeys((ones, twos, (2,) + (1,) * (count - 1), patches)))


def _usual_paddings(convs: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    same = tuple(conv.kernel[1] // 2 for conv in convs)
    none = (0,) * len(convs)
    if any(conv.kernel[1] % 2 == 0 for conv in convs):
        return tuple(dict.fromkeys((none, same)))
    return tuple(dict.fromkeys((same, none)))


def _per_conv(
    convs: Sequence[Layer], name: str, extras: Mapping[str, Any], assume: Mapping[str, str]
) -> tuple[tuple[int, ...], ...]:
    value = assume.get(name)
    values = hints.size(value if value is not None else hints.find(extras, name, name + "s"))
    if values is None:
        if value is not None:
            raise ModelError(f"{name}={value!r} in assume isn't a number or a list such as 4,2,1")
        return ()
    if len(values) == 1:
        return (values * len(convs),)
    if len(values) == len(convs):
        return (values,)
    if value is not None:
        raise ModelError(f"{name}={value} in assume: there are {len(convs)} convolutions")
    return ()


def _poolings(
    convs: Sequence[Layer],
    flat: int,
    slots: frozenset[int] | None,
    extras: Mapping[str, Any],
    assume: Mapping[str, str],
) -> tuple[str, int, tuple[tuple[frozenset[int], bool], ...]]:
    given = assume.get("pool")
    kind, size = _pool_kind(given, extras)
    every = frozenset(range(len(convs)))
    none: frozenset[int] = frozenset()
    last = frozenset({len(convs) - 1})
    if given == "none":
        return kind, size, ((none, False),)
    if given == "global":
        return kind, size, ((none, True), (every - last, True))
    chosen = (slots, every, last, every - last) if slots is not None else (none, every, last)
    places = list(dict.fromkeys((*chosen, every - last, none)))
    if given is not None:
        places = [place for place in places if place]
    collapse = (False, True) if flat == convs[-1].given else (False,)
    return kind, size, tuple((place, end) for end in collapse for place in places)


def _pool_kind(given: str | None, extras: Mapping[str, Any]) -> tuple[str, int]:
    said = given or str(hints.find(extras, "pool", "pooling", "pool_type") or "")
    kind = "avg" if "avg" in said or "average" in said or "mean" in said else "max"
    digits = [int(char) for char in said if char.isdigit()]
    stored = hints.size(hints.find(extras, "pool_size", "pool_kernel", "pool_kernel_size"))
    return kind, digits[0] if digits else (stored[0] if stored else 2)


def _sizes(
    channels: int, extras: Mapping[str, Any], assume: Mapping[str, str]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    shape = hints.input_shape(extras, assume, INPUT_KEYS)
    if shape is None:
        return channels, tuple((side, side) for side in USUAL + UNUSUAL)
    if len(shape) == 3 and shape[0] != channels and shape[2] == channels:
        shape = (shape[2], shape[0], shape[1])
    if len(shape) == 3 and shape[0] != channels:
        raise ModelError(
            f"the input is said to be {'x'.join(map(str, shape))}, but the first convolution "
            f"takes {channels} channels: correct it with --assume input={channels}x32x32"
        )
    if len(shape) > 1:
        return channels, ((shape[-2], shape[-1]),)
    side = math.isqrt(shape[0] // channels)
    squares = [(side, side)] if side * side * channels == shape[0] else []
    return channels, (*squares, (shape[0], shape[0]))


def _lengths(
    channels: int, extras: Mapping[str, Any], assume: Mapping[str, str]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Channels and sizes (1, length) for convolutions along one axis."""
    shape = hints.input_shape(extras, assume, INPUT_KEYS)
    if shape is None:
        return channels, tuple((1, length) for length in LENGTHS)
    if len(shape) == 2 and shape[0] != channels and shape[1] == channels:
        shape = shape[::-1]
    if len(shape) > 2 or (len(shape) == 2 and shape[0] != channels):
        raise ModelError(
            f"the input is said to be {'x'.join(map(str, shape))}, but the first convolution "
            f"takes {channels} channels along one axis: correct it with --assume "
            f"input={channels}x128"
        )
    lengths = {shape[-1]} if len(shape) == 2 else {shape[0], max(1, shape[0] // channels)}
    return channels, tuple((1, length) for length in sorted(lengths))
