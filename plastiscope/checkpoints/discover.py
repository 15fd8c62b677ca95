"""From a path to runs: find candidates, open each once, order them, say what was left out."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from plastiscope.checkpoints.blobs import without_secrets
from plastiscope.checkpoints.branches import find_weights
from plastiscope.checkpoints.fingerprints import fingerprint
from plastiscope.checkpoints.groups import Group, group_opened
from plastiscope.checkpoints.names import step_numbers, task_number, unnumbered_role
from plastiscope.checkpoints.options import Options
from plastiscope.checkpoints.places import Entry, Place, joined, open_place
from plastiscope.checkpoints.reading import Opened, examine, opener
from plastiscope.checkpoints.run import Break, Checkpoint, Run, Skipped
from plastiscope.checkpoints.sequence import Moment, equal_weights, find_breaks
from plastiscope.checkpoints.steps import Steps, find_steps
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.units import Unit, file_unit, find_units, is_weights_name
from plastiscope.errors import UnreadableError, UsageError

_DEFAULT = Options()
_NO_CHECKPOINT = ("a batch of data", "a list of data", "no weights in it", "an optimizer's state")


def discover(path: str | Path, options: Options = _DEFAULT) -> list[Run]:
    """The runs at a path: a folder, a single file, or any fsspec URL.

    Files are recognised by content. Nothing in them is executed, and only headers and pickles
    are read. Several runs are told apart and never merged.

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
    search = _Search(place, options, *_base(options))
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
    place: Place
    options: Options
    base: Mapping[str, Stored] | None
    base_print: str = ""

    def single(self, entry: Entry) -> Run:
        """A file named by the user: its name may say anything."""
        folder = str(PurePosixPath(entry.path).parent)
        unit = file_unit(self.place, entry, folder)
        try:
            opened = examine(self.place, unit, self.options, self.base)
        except UnreadableError as error:
            raise UnreadableError(f"{entry.name}: {error}") from None
        return self._run(Group(entry.name, folder, (opened,), ()), entry.name, entry.path)

    def identity(self, unit: Unit) -> str:
        """The hash of what is read: the files, and what changes their reading."""
        options, files = self.options, list(unit.files)
        settings = joined(unit.folder, "adapter_config.json")
        if self.place.entry(settings) is not None:
            files.append(settings)
        plain = fingerprint(self.place, files)
        how = (options.weights, options.prefix, options.rename, self.base_print)
        if how == (_DEFAULT.weights, None, (), ""):
            return plain
        return hashlib.blake2b(f"{plain} {how}".encode(), digest_size=20).hexdigest()

    def folder(self, inner: str, shown: str) -> list[Run]:
        listing = find_units(self.place, inner)
        opened: list[Opened] = []
        skipped = list(listing.skipped)
        for unit in self._chosen(listing.units):
            try:
                opened.append(examine(self.place, unit, self.options, self.base))
            except UnreadableError as error:
                reason = _refusal(unit, str(error))
                if reason is not None:
                    skipped.append((unit.group, reason))
                    if self.options.strict and reason.unreadable:
                        raise UnreadableError(f"{unit.name}: {error}") from None
        if not opened:
            raise UnreadableError(_nothing(shown, [s for _, s in skipped]))
        groups = group_opened(opened, skipped, self.options.order)
        return [self._run(g, _label(g, inner, groups), g.folder) for g in groups]

    def _chosen(self, units: Sequence[Unit]) -> list[Unit]:
        include, exclude = self.options.include, self.options.exclude
        return [
            unit
            for unit in units
            if (not include or _matches(unit.name, include)) and not _matches(unit.name, exclude)
        ]

    def _run(self, group: Group, name: str, path: str) -> Run:
        members, steps = group.members, _steps(group.members, self.options.order)
        known = _Known(self, members, steps)
        skipped = list(group.skipped)
        notes = [*steps.notes, *group.notes]
        checkpoints, moments = known.ordered(skipped)
        checkpoints, moments = known.with_unnumbered(
            group.unnumbered, checkpoints, moments, skipped
        )
        if not checkpoints:
            raise UnreadableError(_nothing(name, skipped))
        breaks, odd = find_breaks(moments)
        kept = _selected(checkpoints, self.options)
        notes += odd + _shared_notes(members)
        return Run(
            name=name,
            path=self.place.shown(path),
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
    return where if len(siblings) == 1 else f"{where}/{group.label}"


def _steps(members: Sequence[Opened], order: str) -> Steps:
    names = [member.unit.name for member in members]
    if order == "time":
        ranked = sorted(range(len(members)), key=lambda at: members[at].unit.modified)
        rank = {at: position for position, at in enumerate(ranked)}
        named = find_steps(names, [m.numbers for m in members])
        if None not in named.values and _rising([named.values[at] or 0 for at in ranked]):
            return named
        return Steps(tuple(rank[at] for at in range(len(members))), "modification time")
    found = find_steps(names, [m.numbers for m in members], order)
    if order == "name" and None in found.values:
        return Steps(tuple(range(len(members))), "order of names")
    return found


def _rising(values: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(values))


@dataclass(frozen=True)
class _Known:
    """The members of one run with their steps."""

    search: _Search
    members: Sequence[Opened]
    steps: Steps

    def ordered(self, skipped: list[Skipped]) -> tuple[list[Checkpoint], list[Moment]]:
        pairs = list(zip(self.members, self.steps.values, strict=True))
        if len(pairs) == 1 and pairs[0][1] is None:
            pairs = [(pairs[0][0], 0)]
        checkpoints: list[Checkpoint] = []
        moments: list[Moment] = []
        # Of two files of one step the shorter name counts: "-v1" marks a second save.
        pairs.sort(key=lambda p: (p[1] is None, p[1] or 0, len(p[0].unit.name)))
        for member, step in pairs:
            if step is None:
                skipped.append(Skipped(member.unit.name, "no step in its content or its name"))
                continue
            made = self.checkpoint(member, step, self.steps.source)
            twin = next((c for c in checkpoints if c.step == step), None)
            if twin is not None:
                same = twin.fingerprint == made.fingerprint
                reason = (
                    f"bit-identical to {twin.name}"
                    if same
                    else f"step {step} twice: {twin.name} is used"
                )
                skipped.append(Skipped(made.name, reason))
                continue
            checkpoints.append(made)
            moments.append(self.moment(member, made))
        return checkpoints, moments

    def checkpoint(self, member: Opened, step: int, source: str) -> Checkpoint:
        unit = member.unit
        search = self.search
        task = member.task if member.task is not None else task_number(unit.name)
        return Checkpoint(
            name=unit.name,
            path=search.place.shown(unit.path),
            format=member.format,
            step=step,
            step_source=source if len(self.members) > 1 or step else _lone(source, unit),
            size=unit.size,
            fingerprint=search.identity(unit),
            open=opener(search.place, unit, search.options, search.base),
            task=task,
        )

    def moment(self, member: Opened, made: Checkpoint) -> Moment:
        return Moment(
            made.name,
            made.step,
            member.tensors,
            member.optimizer_step,
            made.open,
            local=not self.search.place.remote,
        )

    def with_unnumbered(
        self,
        unnumbered: Sequence[Opened],
        checkpoints: list[Checkpoint],
        moments: list[Moment],
        skipped: list[Skipped],
    ) -> tuple[list[Checkpoint], list[Moment]]:
        """Place best, last, final and their like: a copy, a step of its own, or listed apart."""
        for member in unnumbered:
            step = member.numbers.get(self.steps.key) if self.steps.key else None
            role = unnumbered_role(member.unit.name) or (
                "final" if member.unit.whole_folder else None
            )
            made = self.checkpoint(member, step or 0, self.steps.source)
            reason = self._copy(made, member, step, checkpoints, moments)
            if reason is None and role in ("init", "initial") and checkpoints[0].step > 0:
                step = step or 0
            elif reason is None and (step is None or role not in ("last", "latest", "final")):
                reason = _apart(self.steps, step, role)
            if reason is not None:
                skipped.append(Skipped(member.unit.name, reason))
                continue
            made = self.checkpoint(member, step or 0, self.steps.source)
            at = sum(c.step < made.step for c in checkpoints)
            checkpoints.insert(at, made)
            moments.insert(at, self.moment(member, made))
        return checkpoints, moments

    def _copy(
        self,
        made: Checkpoint,
        member: Opened,
        step: int | None,
        checkpoints: Sequence[Checkpoint],
        moments: Sequence[Moment],
    ) -> str | None:
        for checkpoint in checkpoints:
            if checkpoint.fingerprint == made.fingerprint:
                return f"bit-identical to {checkpoint.name}: counted once"
        for checkpoint, moment in zip(checkpoints, moments, strict=True):
            if checkpoint.step == step or (step is None and moment.local):
                if equal_weights(moment, self.moment(member, made)):
                    return f"the weights of {checkpoint.name}: counted once"
                if checkpoint.step == step:
                    return (
                        f"step {step} by its {self.steps.source}, not {checkpoint.name}'s weights"
                    )
        return None


def _lone(source: str, unit: Unit) -> str:
    return source if step_numbers(unit.name) or source != "name" else "none: a single checkpoint"


def _apart(steps: Steps, step: int | None, role: str | None) -> str:
    if step is not None:
        word = (steps.key or "step").replace("global_", "")
        kind = f"the {role} state" if role else "unnumbered"
        return f"{kind}: a copy of the state at {word} {step} by its stored {steps.key}, not a step"
    return "unnumbered: neither its content nor its name gives a step"


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
