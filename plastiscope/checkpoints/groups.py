"""Which checkpoints belong to one run: same folder, same kind of name, never merged by chance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from plastiscope.checkpoints.names import (
    natural,
    step_numbers,
    tells_runs_apart,
    template,
    unnumbered_role,
)
from plastiscope.checkpoints.reading import Opened
from plastiscope.checkpoints.run import Skipped

_SAME = 0.5
_LAYERS = re.compile(r"weight|bias|kernel|embed|attn|conv|linear|norm|fc\d|\.w\b|\.b\b")


@dataclass(frozen=True)
class Group:
    """The members of one run, unordered; `unnumbered` are best, last and their like."""

    label: str
    folder: str
    members: tuple[Opened, ...]
    skipped: tuple[Skipped, ...]
    unnumbered: tuple[Opened, ...] = ()
    notes: tuple[str, ...] = ()


def group_opened(
    opened: Sequence[Opened], skipped: Sequence[tuple[str, Skipped]], order: str
) -> list[Group]:
    """Runs by folder and by name. With an order given by the user, a folder is one run.

    A folder of nothing but unreadable files is a run without members."""
    groups: list[Group] = []
    folders = dict.fromkeys(member.unit.group for member in opened)
    for folder in sorted(folders, key=natural):
        here = [member for member in opened if member.unit.group == folder]
        groups += _in_folder(folder, here, order)
    for folder, left in skipped:
        at = _owner(groups, folder, left)
        if at is None:
            groups.append(Group("", folder, (), (left,)))
        else:
            groups[at] = replace(groups[at], skipped=(*groups[at].skipped, left))
    return sorted(groups, key=lambda group: natural(group.folder))


def _owner(groups: Sequence[Group], folder: str, left: Skipped) -> int | None:
    """The group that lists what was left out; None where an unreadable file belongs to no run
    that can be read, and so is a run by itself."""
    here = [at for at, group in enumerate(groups) if group.folder == folder]
    same = [at for at in here if groups[at].label == template(left.name)]
    above = [at for at, group in enumerate(groups) if _is_within(folder, group.folder)]
    found = same or here or above[-1:]
    if not found and not left.unreadable:
        return 0
    return found[0] if found else None


def _is_within(folder: str, other: str) -> bool:
    return PurePosixPath(folder).is_relative_to(PurePosixPath(other))


def _in_folder(folder: str, here: list[Opened], order: str) -> list[Group]:
    here = sorted(here, key=lambda member: natural(member.unit.name))
    if order in ("name", "time") or (order == "content" and _have_numbers(here)):
        return [Group(template(here[0].unit.name), folder, tuple(here), ())]
    numbered: dict[str, list[Opened]] = {}
    loose: list[Opened] = []
    for member in here:
        if step_numbers(member.unit.name):
            numbered.setdefault(template(member.unit.name), []).append(member)
        else:
            loose.append(member)
    groups = [Group(label, folder, tuple(found), ()) for label, found in numbered.items()]
    if len(groups) > 1:
        labels = ", ".join(group.label for group in groups)
        note = f"several runs in one folder, told apart by their names: {labels}"
        groups = [replace(group, notes=(note,)) for group in groups]
    if not groups:
        return _by_content(folder, loose)
    return _attached(groups, loose, folder)


def _have_numbers(members: Sequence[Opened]) -> bool:
    return all(member.numbers for member in members)


def _attached(groups: list[Group], loose: Sequence[Opened], folder: str) -> list[Group]:
    """Unnumbered files go to the run whose network they hold; others are runs of their own."""
    apart: list[Opened] = []
    for member in loose:
        fits = [
            at for at, group in enumerate(groups) if likeness(member, group.members[-1]) >= _SAME
        ]
        if not fits:
            apart.append(member)
            continue
        named = [at for at in fits if _related(member.unit.name, groups[at].label)]
        at = (named or fits)[0]
        groups[at] = replace(groups[at], unnumbered=(*groups[at].unnumbered, member))
    left = [member for member in apart if _LAYERS.search(" ".join(member.tensors)) is None]
    lines = tuple(Skipped(m.unit.name, "no layers in it: taken for data") for m in left)
    groups[0] = replace(groups[0], skipped=(*groups[0].skipped, *lines))
    return groups + _by_content(folder, [m for m in apart if m not in left])


def _related(name: str, label: str) -> bool:
    words = set(template(name).lower().split("_")) - {"pt", "pth", "ckpt", "#"}
    return bool(words & set(label.lower().split("_")))


def likeness(one: Opened, other: Opened) -> float:
    """The share of tensors with the same name and shape."""
    left = {(n, i.shape) for n, i in one.tensors.items()}
    right = {(n, i.shape) for n, i in other.tensors.items()}
    return len(left & right) / max(len(left), len(right), 1)


def _by_content(folder: str, members: Sequence[Opened]) -> list[Group]:
    """Files without a number: one run where their content counts steps, else one each."""
    clusters: list[list[Opened]] = []
    for member in members:
        home = next((c for c in clusters if likeness(c[0], member) >= _SAME), None)
        if home is None:
            clusters.append([member])
        else:
            home.append(member)
    groups: list[Group] = []
    for cluster in clusters:
        apart = any(tells_runs_apart(member.unit.name) for member in cluster)
        if len(cluster) > 1 and not apart and _steps_differ(cluster):
            groups.append(_joined(folder, cluster))
        else:
            groups += [Group(_own_label(m), folder, (m,), ()) for m in cluster]
    return groups


def _steps_differ(cluster: Sequence[Opened]) -> bool:
    keys = set(cluster[0].numbers).intersection(*(set(m.numbers) for m in cluster)) - {"_trainer"}
    return any(len({m.numbers[key] for m in cluster}) > 1 for key in keys)


def _joined(folder: str, cluster: Sequence[Opened]) -> Group:
    roles = [unnumbered_role(member.unit.name) for member in cluster]
    main = [m for m, role in zip(cluster, roles, strict=True) if role != "best"] or list(cluster)
    rest = tuple(m for m in cluster if m not in main)
    return Group(template(main[0].unit.name), folder, tuple(main), (), rest)


def _own_label(member: Opened) -> str:
    return member.unit.name
