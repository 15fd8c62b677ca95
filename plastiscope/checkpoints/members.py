"""The checkpoints of one run: their order, their copies, and the files beside the numbered ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from plastiscope.checkpoints.fingerprints import fingerprint
from plastiscope.checkpoints.names import step_numbers, task_number, unnumbered_role
from plastiscope.checkpoints.options import Options
from plastiscope.checkpoints.places import Place, joined
from plastiscope.checkpoints.reading import SETTINGS, Opened, opener, side_files
from plastiscope.checkpoints.run import Checkpoint, Skipped
from plastiscope.checkpoints.seen import stamp_of
from plastiscope.checkpoints.sequence import Moment, equal_weights
from plastiscope.checkpoints.steps import Steps, find_steps
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.units import Unit

_DEFAULT = Options()


@dataclass(frozen=True)
class Source:
    """Where a run is read from and how; `base` is what adapters are merged into."""

    place: Place
    options: Options
    base: Mapping[str, Stored] | None
    base_print: str = ""

    def stamp(self, unit: Unit) -> str | None:
        """What is the same while the unit reads the same; None where that can't be told."""
        options = self.options
        how = (options.weights, options.prefix, options.rename, options.trust_pickle)
        return stamp_of(self.place, unit, (*how, self.base_print))

    def identity(self, unit: Unit) -> str:
        """The hash of what is read: the files, those beside them, and what changes how."""
        options, files = self.options, list(unit.files)
        beside = [joined(unit.folder, name) for name in (*SETTINGS, *side_files(unit))]
        files += [path for path in beside if self.place.entry(path) is not None]
        plain = fingerprint(self.place, files)
        how = (options.weights, options.prefix, options.rename, self.base_print)
        if how == (_DEFAULT.weights, None, (), ""):
            return plain
        return hashlib.blake2b(f"{plain} {how}".encode(), digest_size=20).hexdigest()


def step_of_each(members: Sequence[Opened], order: str) -> Steps:
    """The steps by content, name or time, as the user wants them ordered."""
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
class Members:
    """The members of one run with their steps."""

    source: Source
    members: Sequence[Opened]
    steps: Steps

    def ordered(self, skipped: list[Skipped]) -> tuple[list[Checkpoint], list[Moment]]:
        """Checkpoints and moments in the order of their steps, one a step."""
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
                reason = f"step {step} twice: {twin.name} is used"
                if twin.fingerprint == made.fingerprint:
                    reason = f"bit-identical to {twin.name}: counted once"
                skipped.append(Skipped(made.name, reason))
                continue
            checkpoints.append(made)
            moments.append(self.moment(member, made))
        return checkpoints, moments

    def checkpoint(self, member: Opened, step: int, found: str) -> Checkpoint:
        """The member as a checkpoint at a step, with where that was found."""
        unit = member.unit
        task = member.task if member.task is not None else task_number(unit.name)
        return Checkpoint(
            name=unit.name,
            path=self.source.place.shown(unit.path),
            format=member.format,
            step=step,
            step_source=found if len(self.members) > 1 or step else _lone(found, unit),
            size=unit.size,
            fingerprint=member.fingerprint,
            open=opener(self.source.place, unit, self.source.options, self.source.base),
            task=task,
        )

    def moment(self, member: Opened, made: Checkpoint) -> Moment:
        """The member as the sequence's checks see it."""
        return Moment(
            made.name,
            made.step,
            member.tensors,
            member.optimizer_step,
            made.open,
            member.sample,
            local=not self.source.place.remote,
        )

    def with_unnumbered(
        self,
        unnumbered: Sequence[Opened],
        checkpoints: list[Checkpoint],
        moments: list[Moment],
        skipped: list[Skipped],
    ) -> tuple[list[Checkpoint], list[Moment]]:
        """Place best, last, final and their like: a copy, a step of its own, or listed apart."""
        for member in unnumbered if checkpoints else ():
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
