"""The measures on request of one run's checkpoints, family by family.

A family that fails leaves null rows with the reason; what else is measured of the checkpoint is
kept, and the family may be tried again by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from . import metrics, probe
from .checkpoints import Run, State
from .config import Settings
from .derivatives import (
    FAMILIES,
    family,
    first_inputs,
    gradient_rows,
    jacobian_rows,
    kernel_rows,
    kernels,
    place_of,
    unlabelled_rows,
    wants,
)
from .errors import PlastiscopeError, UnreadableError
from .metrics import Place, absent
from .models.live import Batch
from .network import Network, label
from .observations.kernel import Kernel
from .optimizer import optimizer_rows
from .padding import unpadded
from .past import Past
from .sensitivity import pairing, sensitivity_rows
from .store import Row

LOST = (UnreadableError, FileNotFoundError)
"""Where the checkpoint itself, or an earlier one, can't be read."""
FAILED, REFUSED = "failed", "refused"
"""Statuses of a family: what may pass (no memory, a disk's error), and what the network or the
settings don't allow, which would be refused again."""
DRIFT = frozenset({"ntk_drift"})
PAIRED = frozenset({"rate_of_change", "rate_of_change_embedding"})
"""Metrics of pairs of inputs."""
SUBJECTS = {
    "Kernel": "ntk", "Jacobian": "jacobian", "RateOfChange": "sensitivity",
    "ChangeBound": "sensitivity", "UnitGradients": "gradient", "OptimizerState": "optimizer",
}  # fmt: skip
"""The subject of the rows of each kind of observation."""
Which = tuple[str, "str | None"]
"""A family's name and its probe's label; None for what needs no probe."""
Kernels = dict[tuple[str, Hashable], Kernel]
"""By function and parameter group, as `derivatives.kernels` gives them."""


@dataclass(frozen=True)
class Part:
    """The rows of one family on one probe."""

    family: str
    probe: str | None
    rows: tuple[Row, ...]

    @property
    def which(self) -> Which:
        return self.family, self.probe

    @property
    def failed(self) -> bool:
        """Whether any of it failed in a way that may pass."""
        return any(row.status == FAILED for row in self.rows)


@dataclass
class Requested:
    """Measures the chosen families of a run's checkpoints; keeps their kernels for the drift."""

    run: Run
    settings: Settings
    chosen: frozenset[str]
    past: Past
    say: Callable[[str], None]
    kernels: dict[tuple[str, str], Kernels] = field(default_factory=dict)

    def parts(
        self, position: int, network: Network, state: State, only: Collection[Which] | None = None
    ) -> Iterator[Part]:
        """Every chosen family (of `only` those) on every probe, of the state in the network."""
        for each in network.probes:
            for name, rows in self._families(position, network, each).items():
                yield from self._part(position, network, (name, label(each)), rows, only)
        optimizer = optimizer_rows(network, state, self.chosen)
        yield from self._part(position, network, ("optimizer", None), optimizer, only)

    def _families(
        self, position: int, network: Network, each: probe.Probe
    ) -> dict[str, Iterator[Row]]:
        """What needs gradients, on the first inputs of a probe; nothing runs yet."""
        s, chosen = self.settings, self.chosen
        batch = network.on_device(first_inputs(each.batch, s.gradient_inputs))
        return {
            "ntk": self._kernel_rows(position, network, each, batch),
            "jacobian": self._jacobian_rows(network, each),
            "gradients": gradient_rows(network, batch, chosen, s.folds),
            "sensitivity": self._sensitivity_rows(network, each),
        }

    def _jacobian_rows(self, network: Network, each: probe.Probe) -> Iterator[Row]:
        s, whole = self.settings, unpadded(each.batch)
        if whole is None:
            yield from self._all_padded("jacobian", "Jacobian")
            return
        batch = network.on_device(first_inputs(whole[0], s.jacobian_inputs))
        yield from jacobian_rows(network, batch, self.chosen, s.seed)

    def _sensitivity_rows(self, network: Network, each: probe.Probe) -> Iterator[Row]:
        """With a second probe, of the pairs across the two."""
        s, second = self.settings, network.second
        whole = unpadded(each.batch) if second is None else unpadded(each.batch, second.batch)
        if whole is None:
            yield from self._all_padded("sensitivity", "RateOfChange", "ChangeBound")
            return
        batch = network.on_device(first_inputs(whole[0], s.gradient_inputs))
        across = None
        if second is not None:
            across = pairing(whole[0], whole[1], s.sensitivity_pairs, s.batch_size)
        yield from sensitivity_rows(network, batch, self.chosen, across)

    def _all_padded(self, subject: str, *kinds: str) -> Iterator[Row]:
        for kind in kinds:
            yield from absent(kind, Place("network", None, subject), "padded_inputs", self.chosen)

    def _part(
        self,
        position: int,
        network: Network,
        which: Which,
        rows: Iterable[Row],
        only: Collection[Which] | None,
    ) -> Iterator[Part]:
        name, probed = which
        if wants(name, self.chosen) and (only is None or which in only):
            found = self._tried(name, rows, self.run.checkpoints[position].name)
            yield Part(name, probed, tuple(_told(row, probed, network.second) for row in found))

    def _tried(self, name: str, rows: Iterable[Row], at: str) -> Iterator[Row]:
        """A family's rows; where it fails, null rows after what it gave, and a line that says
        why."""
        try:
            yield from rows
        except LOST:
            raise
        except Exception as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.say(f"{self.run.name}/{at}: {name} not measured: {said}")
            for kind in sorted(FAMILIES[name]):
                place = metrics.Place("network", None, SUBJECTS[kind])
                yield from metrics.absent(kind, place, _status(error), self.chosen)

    def _kernel_rows(
        self, position: int, network: Network, each: probe.Probe, batch: Batch
    ) -> Iterator[Row]:
        """Of this checkpoint's kernels, with those of the previous and the first beside them."""
        own = self._kernels_at(position, network, each)
        earlier = [self._earlier(at, network, each) for at in self.past.positions(position)]
        network.fill(self.run.checkpoints[position].open())
        previous, first = (found if isinstance(found, dict) else {} for found in earlier)
        compared = {
            key: replace(
                kernel,
                first=first[key].gram if key in first else None,
                previous=previous[key].gram if key in previous else None,
                folds=self.settings.folds,
            )
            for key, kernel in own.items()
        }
        yield from kernel_rows(compared, self.chosen)
        yield from unlabelled_rows(batch, self.chosen)
        statuses = {found for found in earlier if isinstance(found, str)}
        if position > 0 and self.past.positions(position) == (None, None):
            statuses.add("across_break")
        for place in sorted({place_of(key) for _, key in own}, key=str):
            for status in sorted(statuses):
                yield from metrics.absent("Kernel", place, status, DRIFT & self.chosen)

    def _earlier(self, position: int | None, network: Network, each: probe.Probe) -> Kernels | str:
        """The kernels of an earlier checkpoint, for the drift; where they can't be measured the
        status that says so: its own measurement has said why."""
        try:
            return {} if position is None else self._kernels_at(position, network, each)
        except LOST:
            raise
        except Exception as error:
            return _status(error)

    def _kernels_at(self, position: int, network: Network, each: probe.Probe) -> Kernels:
        key = (self.run.checkpoints[position].fingerprint, each.fingerprint)
        if key not in self.kernels:
            network.fill(self.run.checkpoints[position].open())
            batch = network.on_device(first_inputs(each.batch, self.settings.gradient_inputs))
            s = self.settings
            self.kernels[key] = kernels(network, batch, self.chosen, s.kernel, s.seed)
        return self.kernels[key]


def _told(row: Row, probed: str | None, second: probe.Probe | None) -> Row:
    """The row with what it was measured on: its probe and, of a pair across two, the other one."""
    if second is not None and row.metric in PAIRED:
        row = replace(row, parameters=f"second={label(second)}")
    return replace(row, probe=probed)


def is_of(row: Row, which: Which) -> bool:
    """Whether a row, as it stands on disk, is of this family on this probe."""
    return row.metric in family(which[0]) and row.probe == which[1]


def _status(error: Exception) -> str:
    return REFUSED if isinstance(error, PlastiscopeError) else FAILED
