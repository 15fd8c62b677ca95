"""Where the weights are in a stored tree: under which key, which branch, beside what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plastiscope.checkpoints.content import as_tensor, children, has_tensors, tensors
from plastiscope.checkpoints.rebuilds import Array
from plastiscope.checkpoints.stored import Stored
from plastiscope.checkpoints.unpickle import Stub
from plastiscope.errors import UnreadableError, UsageError

# In order of how surely they name the one model of the file.
_WEIGHTS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "network_state_dict",
    "network",
    "net_state_dict",
    "net",
    "weights",
    "params",
    "parameters",
    "policy_state_dict",
    "policy",
    "actor_critic",
    "agent",
    "agent_state_dict",
    "student",
)
_EMA = (
    "ema",
    "model_ema",
    "ema_model",
    "ema_state_dict",
    "model_ema_state_dict",
    "ema_model_state_dict",
    "state_dict_ema",
    "params_ema",
    "ema_params",
    "ema_weights",
    "averaged_model",
    "swa_model",
)
_OPTIMIZER = re.compile(r"optim|(^|_)opt(_|$|\d)|(^|_)adam")
_SIDE = re.compile(
    r"sched|scaler|rng|random_state|callback|loops|^amp$|buffer$|replay|history|metric|loss|"
    r"sampler|data(set|loader)?$|cursor"
)


@dataclass(frozen=True)
class Found:
    """A file's parts: the named weights, the optimizer's tree, and the rest."""

    weights: dict[str, Stored]
    optimizer: Any = None
    rest: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    branch: str = "raw"
    key: str = ""


def find_weights(tree: Any, branch: str = "raw", prefix: str | None = None) -> Found:
    """Split a tree into weights, optimizer and rest.

    Raises:
        UnreadableError: nothing in it looks like weights, or the branch isn't there.
    """
    if branch not in ("raw", "ema"):
        raise UsageError(f"unknown weights {branch!r}: known: ema, raw")
    top = _top(tree)
    if {"state", "param_groups"} <= set(top):
        raise UnreadableError("an optimizer's state, not a checkpoint")
    optimizer = {k: v for k, v in top.items() if is_optimizer(k, v)}
    ema = _ema_part(top)
    chosen, key, notes = _raw_part({k: v for k, v in top.items() if k not in optimizer}, ema[0])
    if prefix:
        chosen, key = _by_prefix(top, chosen, prefix), key
    chosen, flat_ema = split_flat_ema(chosen)
    branches = ema[1] or flat_ema
    if branch == "ema":
        if not branches:
            raise UnreadableError("no EMA weights in it: use --weights raw, or leave it out")
        chosen = _ema_weights(branches, chosen)
    elif branches:
        notes += ("EMA weights are there too: --weights ema",)
    if not chosen:
        raise UnreadableError("no weights in it: nothing there is a table of named tensors")
    used = {key, ema[0]} if key else {k for k, v in top.items() if has_tensors(v)} | {ema[0]}
    used -= {k for k in used if _SIDE.search(k.lower())}
    rest = {k: v for k, v in top.items() if k not in optimizer and k not in used}
    return Found(chosen, _one(optimizer), rest, notes, branch, key)


def _top(tree: Any) -> dict[str, Any]:
    tensor = as_tensor(tree)
    if tensor is not None:
        return {"tensor": tensor}
    if isinstance(tree, list | tuple):
        # kuangliu's and fastai's lists: [state dict, optimizer]; a list of batches is data.
        parts = [part for part in tree if isinstance(part, Mapping | Stub)]
        if parts and len(tree) <= 3 and _looks_like_weights(tree[0]):
            return {"model": parts[0]} | {f"optimizer_{i}": p for i, p in enumerate(parts[1:])}
        raise UnreadableError("a list of data, not a checkpoint")
    if isinstance(tree, Stub) and _is_module(tree):
        return {"model": tree}
    inner = children(tree)
    if inner is None:
        raise UnreadableError(f"no weights in it: it holds one {type(tree).__name__}")
    return dict(inner)


def _is_module(stub: Stub) -> bool:
    """Whether the object is a pickled module or a TorchScript one."""
    return "_modules" in stub.attributes or stub.name.startswith("__torch__")


def _looks_like_weights(node: Any) -> bool:
    return any(re.search(r"weight|bias|kernel", name) for name in tensors(node))


def is_optimizer(key: str, node: Any) -> bool:
    """Whether a top-level entry is an optimizer's state (or several of them)."""
    if isinstance(node, Mapping) and {"state", "param_groups"} <= set(node):
        return True
    if isinstance(node, list | tuple) and node and len(node) < 64:
        return all(is_optimizer(key, part) for part in node)
    return _OPTIMIZER.search(key.lower()) is not None and children(node) is not None


def _one(optimizer: dict[str, Any]) -> Any:
    if not optimizer:
        return None
    if len(optimizer) > 1:
        return optimizer
    only = next(iter(optimizer.values()))
    return only[0] if isinstance(only, list | tuple) and len(only) == 1 else only


def _ema_part(top: dict[str, Any]) -> tuple[str, dict[str, Stored]]:
    for key in _EMA:
        if key in top and has_tensors(top[key]):
            return key, _shadow(top[key])
    callbacks = top.get("callbacks")
    if isinstance(callbacks, Mapping):
        for name, state in callbacks.items():
            if "ema" in str(name).lower() and has_tensors(state):
                return "callbacks", _shadow(state)
    return "", {}


def _shadow(node: Any) -> dict[str, Stored]:
    """The averaged tensors inside an EMA object: its module, its shadow, or itself."""
    inner = dict(children(node) or [])
    for key in ("shadow_params", "shadow", "module", "ema_model", "model", "state_dict", "params"):
        if key in inner and has_tensors(inner[key]):
            return _shadow(inner[key]) if key != "shadow_params" else tensors(inner[key])
    holders = [value for value in inner.values() if has_tensors(value)]
    if len(holders) == 1 and as_tensor(holders[0]) is None:
        return _shadow(holders[0])
    return tensors(node)


def _ema_weights(ema: dict[str, Stored], raw: dict[str, Stored]) -> dict[str, Stored]:
    if all(name.isdigit() for name in ema):
        # A bare list of averages follows the order of the parameters, without the buffers.
        params = [n for n, t in raw.items() if t.dtype.is_floating_point and "running_" not in n]
        values = list(ema.values())
        if [raw[n].shape for n in params] != [t.shape for t in values]:
            raise UnreadableError("EMA weights without names that don't fit the model's order")
        return {**raw, **dict(zip(params, values, strict=True))}
    return ema


def split_flat_ema(weights: dict[str, Stored]) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Part the averages that hooks keep as flattened buffers of the model itself.

    `ema_backbone_conv_weight` belongs to `backbone.conv.weight`, `model_ema.diffusion...` alike.
    """
    plain = {re.sub(r"[._]", "", name): name for name in weights}
    pairs: dict[str, str] = {}
    for name in weights:
        match = re.match(r"(?:module\.)?(?:ema_|model_ema\.|ema\.)(.+)", name)
        if match is None:
            continue
        flat = re.sub(r"[._]", "", match[1])
        owner = plain.get(flat) or plain.get(f"model{flat}") or plain.get(f"module{flat}")
        if owner is not None and weights[owner].shape == weights[name].shape:
            pairs[name] = owner
    extra = {"model_ema.decay", "model_ema.num_updates", "ema.decay"} if pairs else set()
    raw = {n: t for n, t in weights.items() if n not in pairs and n not in extra}
    return raw, {owner: weights[name] for name, owner in pairs.items()}


def _raw_part(top: dict[str, Any], ema_key: str) -> tuple[dict[str, Stored], str, tuple[str, ...]]:
    direct = {k: t for k, v in top.items() if (t := as_tensor(v)) is not None}
    named = {k: t for k, t in direct.items() if "." in k or k in ("weight", "bias", "tensor")}
    if len(named) < 2 and not (named and len(direct) == len(named)):
        for key in _WEIGHTS:
            if key in top and key != ema_key and has_tensors(top[key]):
                return _under(top, key, ema_key)
    if named or (direct and not _nested(top, ema_key)):
        return _flat(top, direct, ema_key)
    nested = _nested(top, ema_key)
    if len(nested) == 1:
        return _under(top, nested[0], ema_key)
    merged: dict[str, Stored] = {}
    for key in nested:
        name = re.sub(r"_?(state_dict|state)$", "", key) or key
        merged.update(tensors(top[key], name))
    return merged, "", ()


def _flat(
    top: dict[str, Any], direct: dict[str, Stored], ema_key: str
) -> tuple[dict[str, Stored], str, tuple[str, ...]]:
    """A state dict at the top level, its entries perhaps nested one level deeper."""
    found: dict[str, Stored] = {}
    for key, value in top.items():
        if key in direct:
            found[key] = direct[key]
        elif key != ema_key and not _SIDE.search(key.lower()) and not isinstance(value, Array):
            found.update(tensors(value, key))
    return found, "", ()


def _nested(top: dict[str, Any], ema_key: str) -> list[str]:
    return [
        key
        for key, value in top.items()
        if key != ema_key
        and not _SIDE.search(key.lower())
        and as_tensor(value) is None
        and has_tensors(value)
    ]


def _under(
    top: dict[str, Any], key: str, ema_key: str
) -> tuple[dict[str, Stored], str, tuple[str, ...]]:
    node = top[key]
    inner = dict(children(node) or [])
    # {"model": {"state_dict": {...}}} and the like.
    for deeper in ("state_dict", "model_state_dict", "model", "module"):
        nested = deeper in inner and as_tensor(inner[deeper]) is None and len(inner) < 4
        if nested and not _has_direct(inner) and not isinstance(node, Stub):
            if not has_tensors(inner[deeper]):
                continue
            node = inner[deeper]
            break
    others = [k for k in _nested(top, ema_key) if k != key and _looks_like_weights(top[k])]
    notes = tuple(f"also holds weights under {k!r}: --prefix {k}" for k in others)
    return tensors(node), key, notes


def _has_direct(inner: dict[str, Any]) -> bool:
    return any(as_tensor(value) is not None for value in inner.values())


def _by_prefix(top: dict[str, Any], chosen: dict[str, Stored], prefix: str) -> dict[str, Stored]:
    """The tensors under a prefix: of the names inside the model first, else of the whole file."""
    lead = prefix.rstrip(".") + "."
    everything = tensors(top)
    for table in (chosen, everything):
        found = {n[len(lead) :]: t for n, t in table.items() if n.startswith(lead)}
        if found:
            return found
    known = sorted({name.split(".")[0] for name in (*chosen, *everything)})
    raise UnreadableError(f"no tensor under the prefix {prefix!r}: known: {', '.join(known[:12])}")
