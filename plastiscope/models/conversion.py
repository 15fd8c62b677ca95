"""How transformers' file names become its module's: renamed, split, stacked experts.

From its fifth version on the library stores a model under the names of its older versions and
converts while it reads. Its own rules are applied here to the names, and to one group of tensors
at a time, so that no checkpoint is ever held whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from plastiscope.checkpoints.run import TensorInfo
from plastiscope.models.live import Merge
from plastiscope.models.loading import tensors_of
from plastiscope.models.names import match


def plan(
    module: nn.Module, stored: Mapping[str, TensorInfo]
) -> tuple[dict[str, str], tuple[Merge, ...]]:
    """The stored name of each tensor of the module, and the groups that are stored otherwise."""
    rules = _rules(module)
    direct = match(module, stored)
    if not rules:
        return direct, ()
    return _apply(module, stored, rules, direct)


def _rules(module: nn.Module) -> list[Any]:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(module))


def _apply(
    module: Any, stored: Mapping[str, TensorInfo], rules: list[Any], direct: dict[str, str]
) -> tuple[dict[str, str], tuple[Merge, ...]]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    targets = tensors_of(module)
    names: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    for source in sorted(stored, key=_natural):
        name, pattern = rename_source_key(
            source, renamings, converters, module.base_model_prefix, targets
        )
        if name in targets and pattern is not None:
            groups.setdefault(name, []).append((source, pattern))
        elif name in targets:
            names[name] = source
    patterns = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    planned = [
        _merge(module, stored, patterns[group[0][1]], name, group) for name, group in groups.items()
    ]
    merges = tuple(merge for merge in planned if merge is not None)
    made = {target for merge in merges for target in merge.targets}
    own = {name: source for name, source in direct.items() if name not in made}
    return {**own, **names}, merges


def _merge(
    module: Any,
    stored: Mapping[str, TensorInfo],
    rule: Any,
    name: str,
    group: list[tuple[str, str]],
) -> Merge | None:
    """The group as one step, or None when tensors of it are absent or of other shapes."""

    def convert(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        fresh = copy.deepcopy(rule)
        for source, pattern in group:
            fresh.add_tensor(name, source, pattern, tensors[source])
        made = fresh.convert(name, model=module, config=module.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    sources = tuple(source for source, _ in group)
    shapes = {source: torch.empty(stored[source].shape, device="meta") for source in sources}
    try:
        targets = tuple(convert(shapes))
    except (RuntimeError, ValueError, IndexError, KeyError):
        return None
    return Merge(targets=targets, sources=sources, convert=convert)


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]
