"""The rows of a replay: of every component what was summed, and of what wasn't the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .anatomy.parts import Component, is_expert, own_name, plain_name
from .metrics import Place, absent, duplicate_totals, measure, unit_totals
from .observations import in_threads
from .store import Row

if TYPE_CHECKING:
    from .replay import Replay

NETWORK = ("network", None)


def rows_of(replay: Replay, only: frozenset[str]) -> list[Row]:
    """Rows of every component, in the network's order, then of the network. Uses up the sums."""
    numbered = enumerate(replay.anatomy.components)
    parts = in_threads(lambda item: _component_rows(replay, *item, only), numbered)
    rows = [row for part in parts for row in part]
    for block in replay.attention:
        if (block, "q") not in replay.places:
            rows += _attention_rows(replay, block, only)
    if replay.outputs is not None:
        rows += measure(replay.outputs.finish(), Place("head", None, "task"), only)
    known = [sums.finish() for k, sums in replay.units.items() if k not in replay.unplaced]
    return [*rows, *unit_totals(known, only), *duplicate_totals(rows), *_lacking(replay, only)]


def _lacking(replay: Replay, only: frozenset[str]) -> list[Row]:
    """Null rows of what the network hasn't got: a CLS token, attention, units; and of the attention
    of modules that may have one."""
    anatomy, rows = replay.anatomy, list[Row]()
    if anatomy.cls is None:
        rows += absent("Features", Place(*NETWORK, "feature", "cls"), "no_cls_token", only)
    if not anatomy.attention and not anatomy.unread:
        rows += absent("Attention", Place(*NETWORK, "attention"), "no_attention", only)
    if not replay.units:
        rows += absent("Units", Place(*NETWORK, "unit", "all"), "no_activation", only)
    for path, status in anatomy.unread.items():
        place = Place(own_name(path) or NETWORK[0], None, "attention")
        rows += absent("Attention", place, status, only)
    return rows


def _component_rows(
    replay: Replay, index: int, component: Component, only: frozenset[str]
) -> list[Row]:
    rows = _feature_rows(replay, index, component, only)
    place = Place(component.name, component.block, "unit", "all")
    if index in replay.units and index not in replay.unplaced:
        rows += measure(replay.units[index].finish(), place, only)
    elif _has_units(component):
        reason = _reason(replay, index, component) or "output_not_seen"
        rows += absent("Units", place, reason, only)
    if component.name == "q" and component.block in replay.attention:
        rows += _attention_rows(replay, component.block, only)
    return rows


def _has_units(component: Component) -> bool:
    """Whether it's an activation, or an expert whose parts aren't known."""
    part = plain_name(component.name)
    return part == "activation" or (is_expert(component.name) and part == component.name)


def _attention_rows(replay: Replay, block: int, only: frozenset[str]) -> list[Row]:
    heads = replay.anatomy.attention[block].heads
    place = Place("attention", block, "attention", heads=heads)
    return measure(replay.attention[block].finish(), place, only)


def _feature_rows(
    replay: Replay, index: int, component: Component, only: frozenset[str]
) -> list[Row]:
    """Of all tokens, of the CLS token and of each head."""
    rows: list[Row] = []
    reasons = {"all": _reason(replay, index, component)}
    if replay.anatomy.cls is not None:
        reasons["cls"] = "no_cls_token" if component.before_cls else reasons["all"]
    for tokens in ("all", "cls"):
        place = Place(component.name, component.block, "feature", tokens)
        # Taken out: what one component held is free for the next one's matrices.
        sums = replay.features.pop((index, tokens), None)
        if sums is not None and sums.counts.any():
            rows += measure(sums.finish(), place, only)
        elif reason := reasons.get(tokens):
            rows += absent("Features", place, reason, only)
    if index in replay.per_head and component.heads:
        site = replay.anatomy.attention[component.block or 0]
        heads = site.heads if component.name == "q" else site.kv_heads
        place = Place(component.name, component.block, "feature", "all", heads=heads)
        rows += measure(replay.per_head.pop(index).finish(), place, only)
    return rows


def _reason(replay: Replay, index: int, component: Component) -> str | None:
    """Why a component that should have features has none; None for one that should have none."""
    anatomy = replay.anatomy
    if index in replay.unplaced:
        return "inputs_not_told_apart"
    if is_expert(component.name):
        site = anatomy.experts.get(component.block or 0)
        if site is None:
            return "expert_not_read"
        whole = {*site.whole, "activation"}
        return "not_routed" if plain_name(component.name) in whole else "bias_added_apart"
    if component.is_unseen:
        unused = {m.tensor for m in component.weights} & {*anatomy.unexplained}
        return "not_used" if unused else "output_not_seen"
    return None
