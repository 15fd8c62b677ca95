"""One run's analysis: checkpoint -> observations -> rows, one file a checkpoint, resumed."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from . import keys, metrics, probe, store
from .checkpoints import Checkpoint, Run, State
from .config import Settings
from .costs import costs
from .derivatives import wants
from .errors import NotEnoughEvidenceError, UnreadableError
from .network import Network, counted_entries, label, open_network, signature
from .observations import Coverage, spectra_places
from .past import Past
from .replay import Replay, Sampling
from .reporter import Reporter
from .requested import SUBJECTS, Part, Requested, Which, is_of
from .weigh import Earlier, Scales

ON_REQUEST = ("ntk", "jacobian", "sensitivity")
"""Families of metrics whose cost is told where they aren't measured."""
REPLAYED = {
    "Features": "feature", "Units": "unit", "Attention": "attention", "Outputs": "output",
    **SUBJECTS,
}  # fmt: skip
"""What only a live network shows, and the subject of its rows."""


class Session:
    """The state of one run's analysis: networks by architecture, what was written, what failed."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        chosen: frozenset[str],
        reporter: Reporter,
        retry: bool = True,
    ) -> None:
        self.run, self.settings, self.chosen, self.reporter = run, settings, chosen, reporter
        self.retry = retry
        self.networks: dict[str, Network] = {}
        self.costs: dict[int, dict[str, float]] = {}
        self.files: list[Path] = []
        self.failed: dict[str, str] = {}
        self.empty: dict[str, str] = {}
        self.measured = 0
        self.told: set[str] = set()
        self.past = Past(run)
        self.requested = Requested(run, settings, chosen, self.past, reporter.say)
        self.sources = keys.sources(run.path, settings)
        self.versions = keys.versions(chosen)

    def measure(self, position: int, checkpoint: Checkpoint) -> None:
        """Measure a checkpoint unless its rows are there, and of those what failed; note a failure
        and go on."""
        file = store.checkpoint_file(self.settings.out, self.run.name, checkpoint.name)
        try:
            written = self._update(position, checkpoint, file)
        except NotEnoughEvidenceError as error:
            self.empty[checkpoint.name] = str(error)
            self.reporter.say(str(error))
            return
        except FileNotFoundError:
            self._fail(checkpoint, UnreadableError("deleted while the run was analyzed"))
            return
        except UnreadableError as error:
            self._fail(checkpoint, error)
            return
        self.measured += written
        self.files.append(file)
        self.reporter.advance(checkpoint.name, checkpoint.step, not written)

    def _update(self, position: int, checkpoint: Checkpoint, file: Path) -> bool:
        """Write what the file lacks; whether anything was written. What it holds stays until the
        new rows are whole."""
        key = keys.content(self.past, position, self.settings, self.chosen, self.sources)
        if store.is_finished(file, key, self.versions):
            failed = [tuple(which) for which in store.read_facts(file).get("failed", [])]
            return bool(failed and self.retry) and self._retry(position, checkpoint, file, failed)
        if changed := store.outdated(file, self.versions):
            self._tell_once(f"measured by an earlier version ({changed}); measuring again")
        self._write(position, checkpoint, file, key)
        return True

    def _tell_once(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            self.reporter.say(f"{self.run.name}: {line}")

    def _fail(self, checkpoint: Checkpoint, error: UnreadableError) -> None:
        if self.settings.strict:
            raise error
        self.failed[checkpoint.name] = str(error)
        self.reporter.say(f"{self.run.name}/{checkpoint.name}: {error}")

    def _write(self, position: int, checkpoint: Checkpoint, file: Path, key: str) -> None:
        started = time.perf_counter()
        state = checkpoint.open()
        network = self._network(state)
        rows, parts = self._rows(position, state, network), list[Part]()
        if network.live is not None:
            parts += self.requested.parts(position, network, state)
            rows += [row for part in parts for row in part.rows]
        if all(row.status == "no_model" for row in rows):
            raise NotEnoughEvidenceError(
                f"{self.run.name}/{checkpoint.name}: nothing to measure: {len(state.tensors)} "
                f"tensors, none that the chosen metrics apply to"
            )
        facts = {
            **network.facts(),
            "source": str(self.run.path),
            "sequence": [
                *self.run.notes,
                *(f"break at {b.checkpoint}: {b.reason}" for b in self.run.breaks),
                *(f"skipped {s.name}: {s.reason}" for s in self.run.skipped),
            ],
            "step_source": checkpoint.step_source,
            "format": checkpoint.format,
            "notes": list(state.notes),
            "first": self._first(position, file),
            "settings": {k: str(v) for k, v in asdict(self.settings).items()},
            "environment": _environment(),
            "costs": self._costs(network),
            "seconds": round(time.perf_counter() - started, 3),
            "failed": [part.which for part in parts if part.failed],
        }
        rows = self._placed(position, network, rows)
        store.write(file, rows, self._common(checkpoint, state), key, facts, self.versions)

    def _retry(
        self, position: int, checkpoint: Checkpoint, file: Path, failed: Sequence[Which]
    ) -> bool:
        """Measure again the families that failed; whether any came out. All else is kept."""
        state = checkpoint.open()
        network = self._network(state)
        if network.live is None:
            return False
        network.fill(state)
        parts = self.requested.parts(position, network, state, failed)
        mended = [part for part in parts if not part.failed]
        if not mended:
            return False
        done = {part.which for part in mended}
        kept = [r for r in store.read_rows(file) if not any(is_of(r, which) for which in done)]
        new = self._placed(position, network, [row for part in mended for row in part.rows])
        facts = store.read_facts(file) | {"failed": [w for w in failed if w not in done]}
        key = store.read_key(file)
        common = self._common(checkpoint, state)
        store.write(file, [*kept, *new], common, key, facts, self.versions)
        return True

    def _placed(
        self, position: int, network: Network, rows: Sequence[store.Row]
    ) -> list[store.Row]:
        """The rows with the segment of the sequence that each belongs to."""
        segments = self.past.segments(position, network)
        return [
            replace(row, segment=segments.get((row.component, row.block), segments[None, None]))
            for row in rows
        ]

    def _common(self, checkpoint: Checkpoint, state: State) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "checkpoint": checkpoint.name,
            "step": checkpoint.step,
            "task": checkpoint.task,
            "branch": state.branch,
            "checkpoint_fingerprint": checkpoint.fingerprint,
        }

    def _first(self, position: int, file: Path) -> str | None:
        """The checkpoint that drift is taken from; says so when it was another one before."""
        _, first = self.past.earlier(position)
        before = store.read_facts(file).get("first") if file.exists() else None
        now = None if first is None else first.name
        if None not in (before, now) and now != before:
            self._tell_once(f"drift is from {now} now, and was from {before}")
        return now

    def _costs(self, network: Network) -> dict[str, float]:
        """About how long, in seconds, what wasn't asked for would take; empty where it all was."""
        missing = [name for name in ON_REQUEST if not wants(name, self.chosen)]
        if self.settings.only or not missing:
            return {}
        if id(network) not in self.costs:
            self.costs[id(network)] = costs(network, self.settings)
        return {n: s for n, s in self.costs[id(network)].items() if n in missing}

    def _network(self, state: State) -> Network:
        """The network for a state, opened once for each architecture in the run."""
        name = signature(state)
        if name not in self.networks:
            first = not self.networks
            network = open_network(state, self.run.path, self.settings, required=first)
            self.networks[name] = network
            for line in network.announcements:
                self.reporter.say(f"{self.run.name}: {line}")
        return self.networks[name]

    def _rows(self, position: int, state: State, network: Network) -> list[store.Row]:
        """Of the weights and, with a live network, of a replay of each probe."""
        scales = Scales(
            network.reader(state),
            lambda name: network.counted_name(state, name),
            self.chosen,
            self.past.readers(position, network) if self.chosen & keys.DIFFERENCES else Earlier(),
            network.device,
        )
        rows = scales.weigh(network.anatomy)
        seen, outputs = network.observed()
        found = Coverage(scales.entries(), counted_entries(state), seen, outputs)
        rows += metrics.measure(found, metrics.Place("network", None, "network"), self.chosen)
        if network.live is None:
            return [*rows, *_unreplayed(self.chosen)]
        network.fill(state)
        for each in network.probes:
            rows += self._replayed(network, each)
        return rows

    def _replayed(self, network: Network, each: probe.Probe) -> list[store.Row]:
        assert network.live is not None
        s = self.settings
        maps = s.gradient_inputs if "attention_rank" in self.chosen else 0
        sampling = Sampling(s.folds, s.probe_rows, s.batch_size, s.seed, maps)
        replay = Replay(network.anatomy, len(each.batch["inputs"]), sampling)
        replay.run(network.live, each.batch, network.device)
        rows = replay.rows(self.chosen)
        if "labels" not in each.batch:
            place = metrics.Place("head", None, "output")
            rows += metrics.absent("Outputs", place, "no_labels", self.chosen)
        return [replace(row, probe=label(each)) for row in rows]


def _unreplayed(chosen: frozenset[str]) -> Iterator[store.Row]:
    """A null row for each metric that needs the live network, where there is none."""
    for kind, subject in REPLAYED.items():
        yield from metrics.absent(kind, metrics.Place("network", None, subject), "no_model", chosen)


def _environment() -> dict[str, Any]:
    """What the last digits may depend on."""
    return {
        "plastiscope": importlib.metadata.version("plastiscope"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "spectra": spectra_places(),
    }
