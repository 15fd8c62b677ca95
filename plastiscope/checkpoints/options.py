"""What a user may say about a run that its files don't."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from plastiscope.errors import UsageError, unknown

ORDERS = ("auto", "name", "content", "time")


@dataclass(frozen=True)
class Options:
    """How to find and read a run.

    Attributes:
        weights: "raw" or "ema"; one branch for the whole run, never mixed.
        prefix: the sub-model whose tensors are wanted; removed from their names.
        steps: only these steps (a set, a range).
        every: only every n-th checkpoint, the first and the last always.
        include, exclude: glob patterns of checkpoint names within the run.
        rename: pairs of old and new beginnings of tensor names, for layers renamed mid-run.
        order: "auto" (content, then name), "name", "content" or "time".
        base: the model that adapters are merged into; without it their updates are given.
        trust_pickle: run what the pickles contain. Only for files you wrote yourself.
        strict: the first unreadable checkpoint is an error.
    """

    weights: str = "raw"
    prefix: str | None = None
    steps: Container[int] | None = None
    every: int = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    order: str = "auto"
    base: str | None = None
    trust_pickle: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)
        if self.weights not in ("raw", "ema"):
            raise unknown("weights", self.weights, ("raw", "ema"))
        if self.every < 1:
            raise UsageError(f"every {self.every}: must be at least 1")
