"""From a path to runs: find candidates, open each once, order them, say what was left out."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from plastiscope.checkpoints.blobs import without_secrets
from plastiscope.checkpoints.branches import find_weights
from plastiscope.checkpoints.fingerprints import fingerprint
from plastiscope.checkpoints.groups import Group, group_opened
from plastiscope.checkpoints.members import Members, Source, step_of_each
from plastiscope.checkpoints.options import Options
from plastiscope.checkpoints.places import Entry, open_place
from plastiscope.checkpoints.reading import Opened, examine
from plastiscope.checkpoints.run import Break, Checkpoint, Run, Skipped
from plastiscope.checkpoints.seen import Seen
from plastiscope.checkpoints.sequence import find_breaks
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.units import Unit, file_unit, find_units, is_weights_name
from plastiscope.errors import UnreadableError, UsageError

_DEFAULT = Options()
_NO_CHECKPOINT = ("a batch of data", "a list of data", "no weights in it", "an optimizer's state")


def discover(path: str | Path, options: Options = _DEFAULT, seen: Seen | None = None) -> list[Run]:
    """The runs at a path: a folder, a single file, or any fsspec URL.

    Files are recognised by content. Nothing in them is executed, and only headers and pickles
    are read. Several runs are told apart and never merged. Files that are in `seen`, unchanged,
    aren't opened.

    Returns:
        Runs in the order of their names, each with its checkpoints in the order of their steps.

    Raises:
        UsageError: nothing lies at the path, or an option doesn't fit.
        UnreadableError: nothing there can be read; the reasons, file by file. With
            `options.strict`, the first file that can't.
    """
    place, inner = open_place(path)
    shown = without_secrets(str(path))
    entry = place.entry(inner)
    if entry is None:
        raise UsageError(f"no such file or directory: {shown}")
    if options.trust_pickle and place.remote:
        raise UsageError(f"--trust-pickle: {shown} isn't a local file: download it first")
    search = _Search(Source(place, options, *_base(options)), seen or Seen())
    if not entry.folder:
        return [search.single(entry)]
    return search.folder(inner, shown)


def _base(options: Options) -> tuple[Mapping[str, Stored] | None, str]:
    """The tensors of the model that adapters are merged into, and their fingerprint."""
    if options.base is None:
        return None, ""
    place, inner = open_place(options.base)
    entry = place.entry(inner)
    if entry is None:
        raise UsageError(f"--base: no such file or directory: {without_secrets(options.base)}")
    units = find_units(place, inner).units if entry.folder else (file_unit(place, entry, ""),)
    if len(units) != 1:
        raise UsageError(f"--base: {len(units)} checkpoints in {options.base}: name one of them")
    weights = find_weights(units[0].load().tree, prefix=None).weights
    return weights, fingerprint(place, units[0].files)


@dataclass(frozen=True)
class _Search:
    source: Source
    seen: Seen

    def single(self, entry: Entry) -> Run:
        """A file named by the user: its name may say anything."""
        folder = str(PurePosixPath(entry.path).parent)
        unit = file_unit(self.source.place, entry, folder)
        try:
            opened = self._examined(unit)
        except UnreadableError as error:
            raise UnreadableError(f"{entry.name}: {error}") from None
        return self._run(Group(entry.name, folder, (opened,), ()), entry.name, entry.path)

    def _examined(self, unit: Unit) -> Opened:
        source = self.source
        where, stamp = source.place.shown(unit.path), source.stamp(unit)
        found = self.seen.recall(unit, where, stamp)
        if found is None:
            found = examine(source.place, unit, source.options, source.base, source.identity)
            self.seen.keep(where, stamp, found)
        return found

    def folder(self, inner: str, shown: str) -> list[Run]:
        listing = find_units(self.source.place, inner)
        opened: list[Opened] = []
        skipped = list(listing.skipped)
        for unit in self._chosen(listing.units):
            try:
                opened.append(self._examined(unit))
            except UnreadableError as error:
                reason = _refusal(unit, str(error))
                if reason is not None:
                    skipped.append((unit.group, reason))
                    if self.source.options.strict and reason.unreadable:
                        raise UnreadableError(f"{unit.name}: {error}") from None
        if not opened:
            raise UnreadableError(_nothing(shown, [s for _, s in skipped]))
        groups = group_opened(opened, skipped, self.source.options.order)
        runs: list[Run] = []
        failed: UsageError | None = None
        for group in groups:
            try:
                runs.append(self._run(group, _label(group, inner, groups), group.folder))
            except UsageError as error:
                # Another run may hold the wanted steps.
                failed = error
        if not runs and failed is not None:
            raise failed
        return runs

    def _chosen(self, units: Sequence[Unit]) -> list[Unit]:
        include, exclude = self.source.options.include, self.source.options.exclude
        return [
            unit
            for unit in units
            if (not include or _matches(unit.name, include)) and not _matches(unit.name, exclude)
        ]

    def _run(self, group: Group, name: str, path: str) -> Run:
        if not group.members:
            return Run(name, self.source.place.shown(path), (), group.skipped, (), ())
        members, steps = group.members, step_of_each(group.members, self.source.options.order)
        known = Members(self.source, members, steps)
        skipped = list(group.skipped)
        notes = [*steps.notes, *group.notes]
        checkpoints, moments = known.ordered(skipped)
        checkpoints, moments = known.with_unnumbered(
            group.unnumbered, checkpoints, moments, skipped
        )
        if not checkpoints:
            raise UnreadableError(_nothing(name, skipped))
        breaks, odd = find_breaks(moments)
        kept = _selected(checkpoints, self.source.options)
        notes += odd + _shared_notes(members)
        return Run(
            name=name,
            path=self.source.place.shown(path),
            checkpoints=tuple(kept),
            skipped=tuple(skipped),
            breaks=tuple(_moved(breaks, checkpoints, kept)),
            notes=tuple(dict.fromkeys(notes)),
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = PurePosixPath(name).name
    return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(last, p) for p in patterns)


def _refusal(unit: Unit, reason: str) -> Skipped | None:
    """How an unreadable candidate is listed; None where nobody would expect weights in it."""
    if reason.startswith(_NO_CHECKPOINT):
        return Skipped(unit.name, reason)
    if unit.whole_folder or is_weights_name(unit.name) or len(unit.files) > 1:
        return Skipped(unit.name, reason, unreadable=True)
    expected = reason.startswith(("truncated", "damaged", "corrupt", "Git LFS", "empty"))
    return Skipped(unit.name, reason, unreadable=True) if expected else None


def _nothing(shown: str, skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return f"{shown}: no checkpoint in it"
    listed = "; ".join(f"{s.name}: {s.reason}" for s in skipped[:10])
    more = f"; and {len(skipped) - 10} more" if len(skipped) > 10 else ""
    return f"{shown}: no readable checkpoint in it ({listed}{more})"


def _label(group: Group, root: str, groups: Sequence[Group]) -> str:
    base = PurePosixPath(root)
    folder = PurePosixPath(group.folder)
    inner = folder.relative_to(base).as_posix() if folder.is_relative_to(base) else folder.name
    where = (base.name or Path(root).resolve().name or root) if inner == "." else inner
    siblings = [g for g in groups if g.folder == group.folder]
    if len(siblings) == 1:
        return where
    plain = [_without_step(g.label) for g in siblings]
    short = _without_step(group.label)
    return f"{where}/{short if short and plain.count(short) == 1 else group.label}"


def _without_step(label: str) -> str:
    """`actor_step_#_pt` is the run `actor_step`; a name without a step stays whole."""
    if "#" not in label:
        return label
    return re.sub(r"_[a-z0-9]+$", "", label).replace("#", "").replace("__", "_").strip("_")


def _selected(checkpoints: Sequence[Checkpoint], options: Options) -> list[Checkpoint]:
    wanted = options.steps
    kept = [c for c in checkpoints if wanted is None or c.step in wanted]
    if not kept:
        steps = ", ".join(str(c.step) for c in checkpoints[:12])
        raise UsageError(f"none of the wanted steps is there: the steps are {steps}")
    if options.every > 1:
        last = len(kept) - 1
        kept = [c for at, c in enumerate(kept) if at % options.every == 0 or at == last]
    return kept


def _moved(
    breaks: Sequence[Break], every: Sequence[Checkpoint], kept: Sequence[Checkpoint]
) -> list[Break]:
    """A break at a checkpoint that wasn't selected still parts its selected neighbours."""
    order = {c.name: at for at, c in enumerate(every)}
    moved: list[Break] = []
    for found in breaks:
        at = order[found.checkpoint]
        target = next((c for c in kept if order[c.name] >= at), None)
        if target is not None and order[target.name] > 0 and target.name != kept[0].name:
            moved.append(Break(target.name, found.reason, found.tensors))
    return list(dict.fromkeys(moved))


def _shared_notes(members: Sequence[Opened]) -> list[str]:
    """Notes that every checkpoint has, once; others with the checkpoint's name."""
    owners: dict[str, list[str]] = {}
    for member in members:
        for note in member.notes:
            owners.setdefault(note, []).append(member.unit.name)
    return [_owned(note, names, len(members)) for note, names in owners.items()]


def _owned(note: str, names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return note
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}: {note}"
