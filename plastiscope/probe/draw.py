"""Choose a few of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")


def spread(items: Sequence[_T], size: int) -> list[_T]:
    """At most `size` of the items, at even distances, the first one included."""
    if len(items) <= size:
        return list(items)
    return [items[number * len(items) // size] for number in range(size)]
