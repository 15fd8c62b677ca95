"""A network's parts from its stored names: tables of known families, else every tensor alone.

A family is a TOML file: `name`; `detect`, keys that all have to be there under one prefix, and
`absent`, keys that may not; `shapes`, sizes that have to hold; `when`, values that the model's
config has to have; `[config]`, where the config says how many heads there are (names to look for,
or a number); and one `[[tensor]]` for each stored key: its `part`, or `into` for the parts of a
fused tensor, its `key` with {block} (and {stage}, {expert}) for numbers, and its `layout` (see
layout.py). `embeds` are keys of position tables, CLS and register tokens. A family of
`kind = "stack"` has lists of key endings for its layers and norms instead.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plastiscope.anatomy.effective import Effective, effective_tensors
from plastiscope.anatomy.layout import Heads, Layout, cut, parse
from plastiscope.anatomy.parts import (
    CANONICAL,
    Anatomy,
    Component,
    Matrix,
    expert_part,
    own_name,
    plain_name,
)
from plastiscope.checkpoints.run import State
from plastiscope.errors import UsageError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FOLDER = Path(__file__).parent / "families"
FIELDS = {
    "name",
    "kind",
    "detect",
    "absent",
    "shapes",
    "when",
    "config",
    "embeds",
    "tensor",
    "layers",
    "norms",
}


@dataclass(frozen=True)
class Family:
    """One table, as read from its file."""

    path: Path
    table: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.table["name"])

    def prefix(
        self, names: Sequence[str], tensors: Effective, config: Mapping[str, Any]
    ) -> str | None:
        """What stands before the family's keys in these tensors; None: it's another family."""
        for key, values in self.table.get("when", {}).items():
            if setting(config, [key]) not in (values if isinstance(values, list) else [values]):
                return None
        known = set(names)
        first, *others = self.table["detect"]
        for name in names:
            if name == first or name.endswith("." + first):
                prefix = name[: len(name) - len(first)]
                there = all(prefix + key in known for key in others)
                other = any(prefix + key in known for key in self.table.get("absent", ()))
                if there and not other and self._fits(prefix, tensors):
                    return prefix
        return None

    def _fits(self, prefix: str, tensors: Effective) -> bool:
        """Whether the sizes are as `shapes` says: "3d" is three times what "d" is elsewhere."""
        sizes: dict[str, int] = {}
        for key, wanted in self.table.get("shapes", {}).items():
            for term, size in zip(wanted, tensors.shape(prefix + key), strict=True):
                times, letter = int(term[:-1] or 1), term[-1]
                if size % times or sizes.setdefault(letter, size // times) != size // times:
                    return False
        return True


def read_family(path: Path) -> Family:
    """One family file; UsageError says what is wrong with it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: can't be read as a family: {error}") from error
    missing = {"name", "detect"} - set(table)
    extra = set(table) - FIELDS
    if missing or extra:
        wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"unknown {sorted(extra)}"
        raise UsageError(f"{path}: {wrong}; a family has {', '.join(sorted(FIELDS))}")
    for entry in table.get("tensor", ()):
        if "key" not in entry or "layout" not in entry or not ("part" in entry or "into" in entry):
            raise UsageError(f"{path}: a [[tensor]] needs key, layout, and part or into")
        for part in entry.get("into", [entry.get("part")]):
            if part not in CANONICAL:
                raise unknown("part", part, CANONICAL)
        parse(entry["layout"])
    return Family(path, table)


def known_families(more: Sequence[Path] = ()) -> list[Family]:
    """The user's families first, then the shipped ones, those that ask for most before others."""
    shipped = [read_family(path) for path in sorted(FOLDER.glob("*.toml"))]
    shipped.sort(key=lambda f: (not f.table.get("when"), -len(f.table["detect"]), f.name))
    return [read_family(path) for path in more] + shipped


def from_names(
    state: State, config: Mapping[str, Any] | None = None, families: Sequence[Path] = ()
) -> Anatomy:
    """Every part of a network of which only the tensors are known.

    `config` is the model's own (else what the checkpoint holds); `families` are further tables.
    Tensors that no table explains become components under their own path, without heads, and are
    listed in `unexplained`.
    """
    tensors = effective_tensors(state)
    names = [n for n in tensors.names() if _is_weight(state, tensors, n)]
    settings = {**state.extras, **(config or {})}
    for family in known_families(families):
        prefix = family.prefix(names, tensors, settings)
        if prefix is not None:
            return _from_family(family, prefix, names, tensors, settings)
    found, left = alone(names, set(), set())
    return Anatomy(tuple(found), source="names", unexplained=tuple(left))


def _is_weight(state: State, tensors: Effective, name: str) -> bool:
    return all(state.tensors[f].kind == "weight" for f in tensors.factors(name))


def setting(config: Mapping[str, Any], names: Sequence[str], depth: int = 2) -> Any:
    """The first of these names in a config, or in a mapping inside it; None when there is none."""
    for name in names:
        if config.get(name) is not None and not isinstance(config[name], Mapping):
            return config[name]
    for value in config.values() if depth else ():
        if isinstance(value, Mapping):
            found = setting(value, names, depth - 1)
            if found is not None:
                return found
    return None


def _from_family(
    family: Family, prefix: str, names: list[str], tensors: Effective, config: Mapping[str, Any]
) -> Anatomy:
    notes: list[str] = []
    if family.table.get("kind") == "stack":
        parts = stack(family, prefix, names, tensors)
    else:
        parts = _Table(family, prefix, names, tensors, config, notes).components()
    claimed = {m.tensor for c in parts for m in (*c.weights, *c.heads)}
    others, left = alone(names, claimed, {c.path for c in parts if c.weights})
    embeds = {prefix + key for key in family.table.get("embeds", ())}
    others = [replace(c, embeds=c.weights[0].tensor in embeds) for c in others]
    left = [name for name in left if name not in embeds]
    source = f"family {family.name}"
    return Anatomy((*parts, *others), {}, None, 0, source, tuple(left), tuple(notes))


def alone(
    names: Sequence[str], claimed: set[str], owners: set[str]
) -> tuple[list[Component], list[str]]:
    """A component for every tensor that nothing has claimed, by its own path; and their names."""
    parts, left, known = [], [], set(names)
    for name in names:
        owner, _, last = name.rpartition(".")
        is_bias = "bias" in last and (owner in owners or f"{owner}.weight" in known)
        if name in claimed or is_bias:
            continue
        parts.append(Component(own_name(name), None, owner, (Matrix(name),)))
        left.append(name)
    return parts, left


@dataclass(frozen=True)
class _Table:
    """A family's entries met with the tensors of one state."""

    family: Family
    prefix: str
    names: list[str]
    tensors: Effective
    config: Mapping[str, Any]
    notes: list[str]

    def components(self) -> list[Component]:
        """Every part that an entry names, blocks in order."""
        merged: dict[tuple[int, str], Component] = {}
        numbers = self._blocks()
        for entry in self.family.table["tensor"]:
            for name, number, expert in self._matches(entry["key"]):
                block = numbers.index(number) if number else None
                for part in self._parts(entry, name, number):
                    named = part.name if expert is None else expert_part(expert, part.name)
                    part = replace(part, name=named, block=block)
                    key = (-1 if block is None else block, part.name)
                    merged[key] = _joined(merged[key], part) if key in merged else part
        return sorted(merged.values(), key=_place)

    def _blocks(self) -> list[tuple[int, ...]]:
        entries = self.family.table["tensor"]
        return sorted({n for e in entries for _, n, _ in self._matches(e["key"]) if n})

    def _matches(self, key: str) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
        """The tensors of a key, with their block's number (its stage's first) and the expert's."""
        pattern = re.escape(key).replace(r"\{expert\}", r"(?P<expert>\d+)")
        for name in ("stage", "block"):
            pattern = pattern.replace(rf"\{{{name}\}}", rf"(?P<{name}>\d+)")
        parent = self.prefix[:-1].rpartition(".")
        outer = [parent[0] + parent[1], ""] if "{" not in key else []
        for prefix in dict.fromkeys([self.prefix, *outer]):
            whole = re.compile(re.escape(prefix) + pattern + "$")
            found = [(n, m.groupdict()) for n in self.names if (m := whole.match(n))]
            for name, numbers in found:
                block = tuple(int(numbers[k]) for k in ("stage", "block") if numbers.get(k))
                yield name, block, int(numbers["expert"]) if numbers.get("expert") else None
            if found:
                return

    def _parts(
        self, entry: Mapping[str, Any], name: str, number: tuple[int, ...]
    ) -> Iterator[Component]:
        layout, shape = parse(entry["layout"]), self.tensors.shape(name)
        into = entry.get("into", [entry.get("part")])
        heads = self._heads(number)
        owner = name.rpartition(".")[0]
        for part in into:
            if layout.axes[0] == ("expert",):
                yield from _experts(name, layout, shape, part, into)
                continue
            found = cut(name, layout, shape, part, into, heads)
            if found is None:
                self._note(f"{name} can't be split: its number of heads isn't known")
                return
            whole, slices = found
            attention = part in ("q", "k", "v", "attention_output")
            if attention and not slices:
                self._note("no heads: the checkpoint holds no config that says how many there are")
            offset = bool(entry.get("offset_gain", False))
            yield Component(part, 0, owner, (whole,), slices, offset_gain=offset)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _heads(self, number: tuple[int, ...]) -> Heads:
        table = self.family.table.get("config", {})
        queries = self._setting(table.get("heads", ()), number)
        if queries is None and "heads_from" in table:
            queries = self._from_shape(table["heads_from"], number)
        shared = self._setting(table.get("kv_heads", ()), number)
        return Heads(queries, queries if shared is None else shared)

    def _setting(self, where: Any, number: tuple[int, ...]) -> int | None:
        if isinstance(where, int):
            return where
        value = setting(self.config, where)
        if isinstance(value, (list, tuple)):
            stages = sorted({n[0] for n in self._blocks()})
            place = stages.index(number[0]) if number else 0
            value = value[place] if place < len(value) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _from_shape(self, place: Mapping[str, Any], number: tuple[int, ...]) -> int | None:
        for name, found, _ in self._matches(place["key"]):
            if found == number:
                return int(self.tensors.shape(name)[place["axis"]])
        return None


def _experts(
    name: str, layout: Layout, shape: Sequence[int], part: str, into: Sequence[str]
) -> Iterator[Component]:
    """A part of every expert in a tensor [experts, ...]: each laid out as if it were alone."""
    found = cut(name, Layout(layout.axes[1:]), shape[1:], part, into, Heads(None, None))
    assert found is not None
    alone, axes = found[0], (0, *(a + 1 for a in found[0].out_axes))
    height = math.prod(shape[a] for a in axes[1:])
    own = range(height) if alone.rows is None else alone.rows
    for number in range(shape[0]):
        rows = tuple(number * height + r for r in own)
        owner = name.rpartition(".")[0]
        yield Component(expert_part(number, part), 0, owner, (Matrix(name, axes, rows),))


def _joined(first: Component, second: Component) -> Component:
    weights = (*first.weights, *second.weights)
    return Component(first.name, first.block, first.path, weights, first.heads)


def _place(part: Component) -> tuple[float, int, int]:
    rank = CANONICAL.index(plain_name(part.name))
    expert = int(part.name.split(" ")[1]) if part.name != plain_name(part.name) else -1
    if part.block is not None:
        return part.block, expert, rank
    return (-1.0 if part.name == "embedding" else float("inf")), expert, rank


def stack(family: Family, prefix: str, names: Sequence[str], tensors: Effective) -> list[Component]:
    """A plain stack in stored order: each layer is a block, the last one the head."""
    layers = re.compile("|".join(f"(?:{p})" for p in family.table["layers"]))
    normed = re.compile("|".join(f"(?:{p})" for p in family.table["norms"]))
    parts: list[Component] = []
    has_norm = True
    block = -1
    for name in names:
        owner = name.rpartition(".")[0]
        if not name.startswith(prefix):
            continue
        if layers.search(name):
            block, has_norm = block + 1, False
            kind = "conv" if len(tensors.shape(name)) > 2 else "fc"
            parts.append(Component(kind, block, owner, (Matrix(name),)))
        elif normed.search(name) and not has_norm:
            has_norm = True
            parts.append(Component("norm", block, owner, (Matrix(name),)))
    last = max(k for k, part in enumerate(parts) if part.name != "norm")
    parts[last] = Component("head", None, parts[last].path, parts[last].weights)
    return parts
