"""From what a file holds to a State: names cleaned, kinds told, ties found, side parts listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from plastiscope.checkpoints import adapters, quantised
from plastiscope.checkpoints.blobs import UNREADABLE
from plastiscope.checkpoints.branches import Found, find_weights
from plastiscope.checkpoints.content import Content, plain
from plastiscope.checkpoints.kinds import is_flat_shard, kind_of
from plastiscope.checkpoints.names import printable, unwrap
from plastiscope.checkpoints.run import State, TensorInfo
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.ties import find_ties
from plastiscope.errors import UnreadableError, UsageError

_AUXILIARY = re.compile(r"(.*_)?(loss|losses|loss_fn|criterion|criteria|metrics?)(_.*)?$")
# Words that Lightning modules give to their metrics; elsewhere `f1` may be a layer.
_METRICS = re.compile(r"(train|val|valid|test)_.*|(.*_)?(accuracy|acc|auroc|f1|recall|precision)$")
_INNER = ("net", "model", "_model", "network", "module", "nn", "backbone_net", "generator")
_LIGHTNING = ("pytorch-lightning_version", "lightning_version")
_LARGE_VIEW = 1 << 20


@dataclass(frozen=True)
class Beside:
    """What lies beside the weights: plain extras, adapter settings, a base to merge into."""

    extras: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Stored] | None = None
    optimizer: Callable[[], Mapping[str, Any] | None] | None = None
    notes: tuple[str, ...] = ()


def make_state(
    content: Content,
    *,
    branch: str = "raw",
    prefix: str | None = None,
    rename: tuple[tuple[str, str], ...] = (),
    beside: Beside | None = None,
) -> State:
    """The State of one checkpoint.

    Raises:
        UnreadableError: no weights, placeholder weights, flat shards; the line says which.
    """
    beside = beside or Beside()
    found = find_weights(content.tree, branch, prefix)
    notes = [*found.notes, *content.notes, *beside.notes]
    weights, stripped = _cleaned(found, prefix, notes)
    weights = _renamed(weights, rename)
    refuse_shards(weights)
    weights, extras = _special(weights, beside, notes)
    notes += _view_notes(weights)
    if content.stubs:
        notes.append(f"not imported: {', '.join(content.stubs)}")
    aliases = {k: v for k, v in content.aliases.items() if v in weights and k not in weights}
    infos = describe(weights, aliases, beside.extras.get("config"))
    names = {**{n: n for n in weights}, **{n: i.alias_of or n for n, i in infos.items()}}

    def read(name: str) -> torch.Tensor:
        stored = weights[names[name]]
        try:
            return stored.read()
        except UNREADABLE as error:
            raise UnreadableError(printable(f"{name}: {error}")) from None

    def peek(name: str) -> torch.Tensor:
        return weights[names[name]].peek()

    return State(
        tensors=infos,
        read=read,
        extras={**_metadata(content), **_plain_rest(found), **beside.extras, **extras},
        optimizer=beside.optimizer or (lambda: optimizer_state(found.optimizer)),
        notes=tuple(dict.fromkeys(printable(note) for note in notes)),
        branch=found.branch,
        stripped=stripped,
        stubs=content.stubs,
        peek=peek,
    )


def _metadata(content: Content) -> dict[str, Any]:
    return {"metadata": dict(content.metadata)} if content.metadata else {}


def _plain_rest(found: Found) -> dict[str, Any]:
    rest = plain(found.rest)
    return rest if isinstance(rest, dict) else {}


def _cleaned(found: Found, prefix: str | None, notes: list[str]) -> tuple[dict[str, Stored], str]:
    names = unwrap(found.weights)
    weights = {names[name]: tensor for name, tensor in found.weights.items()}
    if prefix:
        return weights, f"{prefix.rstrip('.')}."
    weights = _without_targets(weights, notes)
    lightning = any(key in found.rest for key in _LIGHTNING)
    return _inner_model(weights, lightning, notes)


def _renamed(weights: dict[str, Stored], pairs: tuple[tuple[str, str], ...]) -> dict[str, Stored]:
    """The table under new names; the first pair whose old beginning fits a name counts."""
    named: dict[str, Stored] = {}
    for name, tensor in weights.items():
        old, new = next((p for p in pairs if name.startswith(p[0])), ("", ""))
        changed = new + name[len(old) :]
        if changed in named:
            raise UsageError(f"renaming {old!r} to {new!r} gives two tensors the name {changed!r}")
        named[changed] = tensor
    return named


def _without_targets(weights: dict[str, Stored], notes: list[str]) -> dict[str, Stored]:
    """Leave out a reinforcement learner's delayed copies: they aren't trained and count twice."""
    copies: dict[str, list[str]] = {}
    for name in weights:
        head, _, tail = name.partition(".")
        owner = re.sub(r"(_target|target_)", "", head)
        twin = f"{owner}.{tail}"
        if owner != head and twin in weights and weights[twin].shape == weights[name].shape:
            copies.setdefault(head, []).append(name)
    for head, names in copies.items():
        notes.append(f"target copy left out: {head} ({len(names)} tensors): --prefix {head}")
    gone = {name for names in copies.values() for name in names}
    return {name: tensor for name, tensor in weights.items() if name not in gone}


def _inner_model(
    weights: dict[str, Stored], lightning: bool, notes: list[str]
) -> tuple[dict[str, Stored], str]:
    """Keep the model itself where a framework's module also holds losses and metrics."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(name.partition(".")[0], []).append(name)
    side = {g for g in groups if _AUXILIARY.match(g) or (lightning and _METRICS.match(g))}
    side = {g for g in side if g not in groups[g]}
    main = [g for g in groups if g not in side]
    if not main or not (side or lightning):
        return weights, ""
    if side:
        listed = ", ".join(f"{g} ({len(groups[g])} tensors)" for g in sorted(side))
        notes.append(f"not layers of the model, left out: {listed}")
    kept = {n: t for n, t in weights.items() if n.partition(".")[0] in main}
    if len(main) == 1 and main[0] in _INNER and all("." in name for name in kept):
        lead = f"{main[0]}."
        notes.append(f"names are given without the framework's prefix {lead!r}")
        return {name[len(lead) :]: tensor for name, tensor in kept.items()}, lead
    return kept, ""


def refuse_shards(weights: Mapping[str, Stored]) -> None:
    """Refuse one process's flat shard, and the placeholders that ZeRO-3 leaves."""
    for name, tensor in weights.items():
        if is_flat_shard(name, tensor):
            raise UnreadableError(
                f"sharded local state: {name} is FSDP's flat parameter of one process; "
                "save a full or a distributed checkpoint"
            )
    floating = [t for t in weights.values() if t.dtype.is_floating_point]
    if len(weights) == 1 and next(iter(weights.values())).numel == 0:
        raise UnreadableError("no data in it: its only tensor has 0 elements")
    if floating and all(t.numel == 0 for t in floating):
        raise UnreadableError(
            "placeholder weights (ZeRO-3): every tensor has 0 elements; the weights are in "
            "the global_step folder"
        )


def _special(
    weights: dict[str, Stored], beside: Beside, notes: list[str]
) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Adapters become updates, packed integers become the weights they stand for."""
    if adapters.is_adapter(weights):
        made = adapters.adapted(weights, beside.adapter)
        notes += made.notes
        if beside.base is None:
            return made.tensors, {"adapter": {"ranks": made.ranks, **dict(beside.adapter)}}
        total = {}
        for name, tensor in made.tensors.items():
            owner = adapters._owner(name, beside.base)
            both = name in made.ranks and owner is not None
            total[name] = adapters.added(beside.base[owner], tensor) if both and owner else tensor
        return adapters.merged(total, beside.base), {"adapter": {"merged": True}}
    weights, lines = quantised.dequantised(weights)
    notes += lines
    return weights, {}


def _view_notes(weights: Mapping[str, Stored]) -> list[str]:
    lines = []
    used: dict[int, int] = {}
    for tensor in weights.values():
        if tensor.storage is not None:
            key = id(tensor.storage)
            used[key] = used.get(key, 0) + tensor.numel * tensor.dtype.itemsize
    for name, tensor in weights.items():
        if tensor.note:
            lines.append(f"{name}: {tensor.note}")
        storage = tensor.storage
        if storage is not None and storage.nbytes > max(4 * used[id(storage)], _LARGE_VIEW):
            lines.append(
                f"{name}: a view of {tensor.numel * tensor.dtype.itemsize} bytes that drags a "
                f"storage of {storage.nbytes} along"
            )
    return lines


def describe(
    weights: Mapping[str, Stored], aliases: Mapping[str, str], config: Any
) -> dict[str, TensorInfo]:
    """The table of tensors: kinds, and one name for each piece of memory."""
    names = set(weights)
    infos = {
        name: TensorInfo(name, tensor.shape, tensor.dtype, kind_of(name, tensor, names))
        for name, tensor in weights.items()
    }
    for name, owner in find_ties(weights, config).items():
        base = infos.get(name, infos[owner])
        infos[name] = replace(base, name=name, alias_of=owner)
    for name, owner in aliases.items():
        # safetensors keeps either of the two names; the embedding is the one that counts.
        infos[name] = replace(infos[owner], name=name, alias_of=owner)
    return infos


def optimizer_state(tree: Any) -> Mapping[str, Any] | None:
    """An optimizer's tree with its tensors read, or None where none was stored."""
    if tree is None:
        return None
    read = _read_all(tree, 0)
    return read if isinstance(read, Mapping) else {"optimizers": read}


def _read_all(node: Any, depth: int) -> Any:
    if isinstance(node, Stored):
        return node.read() if node.has_data or node.numel == 0 else None
    if isinstance(node, Mapping) and depth < 12:
        return {key: _read_all(value, depth + 1) for key, value in node.items()}
    if isinstance(node, list | tuple) and depth < 12:
        return [_read_all(value, depth + 1) for value in node]
    return plain(node)
