"""Tensors that are one tensor under several names: counted once, measured once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from plastiscope.checkpoints.stored import Stored

_HEADS = re.compile(r"(^|\.)(lm_head|output|head|embed_out|output_layer|proj_out|decoder)\.weight$")
_EMBEDDINGS = re.compile(
    r"(^|[._])(embed\w*|wte|tok_embeddings|tok_emb|token_embedding\w*|word_embeddings|shared|emb)"
    r"(\.weight)?$"
)
_POSITIONS = re.compile(r"pos|type_emb|patch|norm", re.IGNORECASE)


def find_ties(weights: Mapping[str, Stored], config: Any = None) -> dict[str, str]:
    """Alias -> the name it is counted under. An output head is counted under its embedding.

    Ties are the same bytes of one storage, or a head and an embedding of equal values, or a head
    that isn't stored because the model's config ties it.
    """
    ties: dict[str, str] = {}
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in weights.items():
        if tensor.place is not None and tensor.has_data:
            groups.setdefault(tensor.place, []).append(name)
    for names in groups.values():
        owner = next((n for n in names if _is_embedding(n)), names[0])
        ties.update({name: owner for name in names if name != owner})
    ties.update(_equal_head(weights, ties))
    ties.update(_absent_head(weights, config))
    return ties


def _is_embedding(name: str) -> bool:
    return _EMBEDDINGS.search(name) is not None and not _POSITIONS.search(name)


def _equal_head(weights: Mapping[str, Stored], known: Mapping[str, str]) -> dict[str, str]:
    heads = [n for n in weights if _HEADS.search(n) and n not in known]
    tables = [n for n in weights if _is_embedding(n) and n not in known]
    for head in heads:
        for table in tables:
            if head != table and same_values(weights[head], weights[table]):
                return {head: table}
    return {}


def same_values(one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same numbers; a few rows decide before all are read."""
    if one.shape != other.shape or one.dtype != other.dtype or len(one.shape) != 2:
        return False
    if not (one.has_data and other.has_data) or one.compute or other.compute:
        return False
    stores = one.storage, other.storage
    if all(s is not None and s.crc is not None for s in stores):
        a, b = stores
        whole = all(s.nbytes == t.numel * t.dtype.itemsize for s, t in ((a, one), (b, other)) if s)
        if a and b and whole and one.stride == other.stride:
            return a.crc == b.crc and a.nbytes == b.nbytes
    if not torch.equal(_first_rows(one), _first_rows(other)):
        return False
    return torch.equal(one.peek(), other.peek())


def _first_rows(tensor: Stored) -> torch.Tensor:
    """Two rows, read by themselves: over a network the rest would be a long download."""
    rows = min(tensor.shape[0], 2)
    shape = (rows, *tensor.shape[1:])
    return Stored(shape, tensor.dtype, tensor.stride, tensor.start, tensor.storage).peek()


def _absent_head(weights: Mapping[str, Stored], config: Any) -> dict[str, str]:
    if not isinstance(config, Mapping) or any(_HEADS.search(name) for name in weights):
        return {}
    kinds = config.get("architectures") or []
    causal = any("CausalLM" in str(k) or "LMHead" in str(k) for k in kinds)
    # transformers writes the key only where it differs from its default, which was True.
    if not causal or not config.get("tie_word_embeddings", True):
        return {}
    tables = [n for n in weights if _is_embedding(n) and len(weights[n].shape) == 2]
    return {"lm_head.weight": tables[0]} if len(tables) == 1 else {}
