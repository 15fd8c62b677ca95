"""One model in several files, with or without an index that says which tensor lies where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plastiscope.checkpoints.branches import find_weights
from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.places import Place, joined, read_json
from plastiscope.checkpoints.sniff import read_content
from plastiscope.checkpoints.stored import Stored
from plastiscope.errors import UnreadableError

SHARD = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<count>\d{5})\.(?P<kind>\w+)$")


def read_indexed(place: Place, folder: str, index: str) -> Content:
    """The shards that an index names, all of them or none.

    Raises:
        UnreadableError: a shard is missing or broken, or lacks a tensor the index puts there.
    """
    table = read_json(place, joined(folder, index)).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UnreadableError(f"{index}: no weight_map in it")
    wanted = sorted({str(file) for file in table.values()})
    present = {entry.name for entry in place.entries(folder)}
    missing = [file for file in wanted if file not in present]
    if missing:
        raise UnreadableError(
            f"{index} names {len(missing)} of {len(wanted)} shards that are missing: "
            f"{', '.join(missing[:4])}"
        )
    parts = {file: _tensors(place, folder, file) for file in wanted}
    tree: dict[str, Stored] = {}
    for name, file in table.items():
        if name not in parts[file][0]:
            raise UnreadableError(f"{index} is stale: {file} holds no tensor {name}")
        tree[str(name)] = parts[file][0][name]
    notes = _unlisted(present, wanted)
    unnamed = [n for held, _ in parts.values() for n in held if n not in table]
    if unnamed:
        notes.append(f"{len(unnamed)} tensors of the shards aren't in the index: {unnamed[0]}")
    kind = next(content.format for _, content in parts.values())
    return Content(f"sharded {kind}", tree, notes=tuple(notes), metadata=_metadata(parts))


def _unlisted(present: set[str], wanted: list[str]) -> list[str]:
    stems = {match["stem"] for file in wanted if (match := SHARD.match(file))}
    old = sorted(
        name
        for name in present
        if name not in wanted and (m := SHARD.match(name)) and m["stem"] in stems
    )
    return [f"not in the index, ignored: {', '.join(old)}"] if old else []


def read_numbered(place: Place, folder: str, files: list[str]) -> Content:
    """Shards without an index: complete by their own numbering, or refused."""
    matches = [match for file in files if (match := SHARD.match(file))]
    count = max(int(match["count"]) for match in matches)
    here = {int(match["at"]) for match in matches if int(match["count"]) == count}
    start = 0 if 0 in here else 1
    missing = sorted(set(range(start, start + count)) - here)
    if missing:
        raise UnreadableError(f"{len(missing)} of {count} shards are missing: {missing[:8]}")
    tree: dict[str, Stored] = {}
    kind = ""
    for match in sorted(matches, key=lambda m: int(m["at"])):
        if int(match["count"]) != count:
            continue
        held, content = _tensors(place, folder, match[0])
        twice = set(held) & set(tree)
        if twice:
            raise UnreadableError(f"{sorted(twice)[0]} is in two shards: parts of one tensor?")
        tree.update(held)
        kind = content.format
    return Content(f"sharded {kind}", tree)


def _tensors(place: Place, folder: str, file: str) -> tuple[dict[str, Stored], Content]:
    try:
        content = read_content(place.blob(joined(folder, file)))
        return find_weights(content.tree).weights, content
    except UnreadableError as error:
        raise UnreadableError(f"{file}: {error}") from None


def _metadata(parts: Mapping[str, tuple[Any, Content]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for _, content in parts.values():
        merged.update(content.metadata)
    return merged
