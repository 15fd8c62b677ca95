"""Which earlier checkpoints a checkpoint is compared with, and the breaks between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .checkpoints import Break, Checkpoint, Run
from .network import Network
from .weigh import Earlier, Read


@dataclass(frozen=True)
class Past:
    """What lies before each checkpoint of a run."""

    run: Run

    @cached_property
    def broken(self) -> dict[str, Break]:
        """The breaks, by the name of the checkpoint that they come before."""
        return {b.checkpoint: b for b in self.run.breaks}

    def before(self, position: int) -> list[Break]:
        """The breaks up to a checkpoint."""
        names = [c.name for c in self.run.checkpoints[: position + 1]]
        return [self.broken[name] for name in names if name in self.broken]

    def earlier(self, position: int) -> tuple[Checkpoint | None, Checkpoint | None]:
        """The previous and the first checkpoint that this one may be compared with: none across
        a break of the whole network."""
        previous, first = (
            None if at is None else self.run.checkpoints[at] for at in self.positions(position)
        )
        return previous, first

    def positions(self, position: int) -> tuple[int | None, int | None]:
        """Where they are in the run."""
        first = position
        while first > 0 and not self._whole_break(self.run.checkpoints[first].name):
            first -= 1
        return (None, None) if first == position else (position - 1, first)

    def _whole_break(self, name: str) -> bool:
        return name in self.broken and not self.broken[name].tensors

    def segments(self, position: int, network: Network) -> dict[tuple[str | None, int | None], int]:
        """How many breaks lie before each component's values; (None, None) for all others."""
        before = self.before(position)
        whole = sum(not b.tensors for b in before)
        segments: dict[tuple[str | None, int | None], int] = {(None, None): whole}
        for component in network.anatomy.components:
            tensors = {network.stored_name(m.tensor) for m in component.weights}
            own = sum(bool(tensors & set(b.tensors)) for b in before)
            segments[component.name, component.block] = whole + own
        return segments

    def readers(self, position: int, network: Network) -> Earlier:
        """Reads the previous and the first checkpoint's tensors, and says whether a break lies
        between."""
        readers: list[Read | None] = [
            None if checkpoint is None else network.reader(checkpoint.open())
            for checkpoint in self.earlier(position)
        ]
        breaks = [self.broken.get(c.name) for c in self.run.checkpoints[: position + 1]]

        def since(at: int) -> Callable[[str], bool]:
            between = [b for b in breaks[at + 1 :] if b is not None]
            return lambda name: any(not b.tensors or name in b.tensors for b in between)

        previous, first = self.positions(position)
        return Earlier(
            readers[0],
            readers[1],
            since(position - 1 if previous is None else previous),
            since(position - 1 if first is None else first),
        )
