"""DeepSpeed ZeRO folders: fp32 weights rebuilt from the optimizer's shards.

Stages 1 and 2 keep, for each parameter group, one flat vector cut into equal parts, one a process.
Stage 3 cuts each parameter by itself: every process holds ceil(numel / processes) of it, padded.
Layout as in DeepSpeed's own converter, zero_to_fp32.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from plastiscope.checkpoints.content import Content, as_tensor, tensors
from plastiscope.checkpoints.places import Place, joined
from plastiscope.checkpoints.stored import Stored, contiguous
from plastiscope.checkpoints.torch_files import read_torch
from plastiscope.errors import UnreadableError

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\w+)?_model_states\.pt$")
_CONVERTER = "run DeepSpeed's zero_to_fp32.py in that folder and analyse its output"
_NOT_MODEL = ("module", "optimizer", "lr_scheduler", "random_rng_state", "np_rng_state")


def is_zero_folder(names: list[str]) -> bool:
    """Whether these are the files of one DeepSpeed step."""
    return any(OPTIMIZER_FILE.match(n) or _MODEL_FILE.match(n) for n in names)


def read_zero(place: Place, folder: str) -> Content:
    """The model of one global_step folder.

    Raises:
        UnreadableError: model-parallel or incomplete folders; names the converter where it helps.
    """
    names = [entry.name for entry in place.entries(folder)]
    models = sorted(name for name in names if _MODEL_FILE.match(name))
    shards = sorted(
        (name for name in names if OPTIMIZER_FILE.match(name)),
        key=lambda name: int(OPTIMIZER_FILE.match(name)[1]),  # type: ignore[index]
    )
    if not models:
        raise UnreadableError("incomplete ZeRO folder: no model_states file")
    if any(int(_MODEL_FILE.match(name)[2]) > 0 for name in models):  # type: ignore[index]
        raise UnreadableError(f"ZeRO with model parallelism: {_CONVERTER}")
    model = _read(place, folder, models[0])
    rest = {k: v for k, v in model.items() if k not in _NOT_MODEL}
    module = tensors(model.get("module"), "") if model.get("module") is not None else {}
    if not shards:
        return Content("deepspeed", {**rest, "module": module})
    parts = [_read(place, folder, name).get("optimizer_state_dict") for name in shards]
    weights, stage = _rebuilt(model, parts)
    weights = {**_buffers(model, module), **_frozen(model, module), **weights}
    for name, owner in _shared(model):
        if owner in weights:
            weights[name] = weights[owner]
    ordered = {n: weights[n] for n in module if n in weights}
    ordered.update(weights)
    notes = (f"fp32 weights rebuilt from {len(parts)} shards of ZeRO stage {stage}",)
    return Content("deepspeed zero", {**_plain(rest), "module": ordered}, notes=notes)


def _plain(rest: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rest.items() if not tensors(v)}


def _read(place: Place, folder: str, name: str) -> dict[str, Any]:
    try:
        tree = read_torch(place.blob(joined(folder, name))).tree
    except UnreadableError as error:
        raise UnreadableError(f"{name}: {error}") from None
    if not isinstance(tree, dict):
        raise UnreadableError(f"{name}: not a DeepSpeed file")
    return tree


def _rebuilt(model: Mapping[str, Any], parts: list[Any]) -> tuple[dict[str, Stored], int]:
    shapes = model.get("param_shapes")
    groups = shapes if isinstance(shapes, list) else [shapes]
    if not all(isinstance(part, Mapping) for part in parts) or not all(
        isinstance(group, Mapping) for group in groups
    ):
        raise UnreadableError(f"a ZeRO layout that isn't known: {_CONVERTER}")
    stage = parts[0].get("zero_stage")
    count = parts[0].get("partition_count")
    processes = max(count) if isinstance(count, list | tuple) and count else count
    if isinstance(processes, int) and processes != len(parts):
        raise UnreadableError(f"incomplete ZeRO folder: {len(parts)} of {processes} shards")
    if stage in (1, 2):
        return _from_groups(groups, [_flat(p, "single_partition_of_fp32_groups") for p in parts]), (
            stage
        )
    if stage == 3:
        return _from_parameters(groups, [_flat(p, "fp32_flat_groups") for p in parts]), stage
    raise UnreadableError(f"ZeRO stage {stage!r} isn't known: {_CONVERTER}")


def _flat(part: Mapping[str, Any], key: str) -> list[Stored]:
    vectors = [as_tensor(value) for value in part.get(key) or []]
    found = [vector for vector in vectors if vector is not None]
    if not found or len(found) != len(vectors) or any(len(v.shape) != 1 for v in found):
        raise UnreadableError(f"a ZeRO shard without {key}: {_CONVERTER}")
    return found


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or any(not isinstance(n, int) for n in shape):
        raise UnreadableError(f"corrupt: the shape of {name}")
    return tuple(shape)


def _from_groups(groups: list[Any], parts: list[list[Stored]]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for at, group in enumerate(groups):
        if any(at >= len(part) for part in parts):
            raise UnreadableError("incomplete ZeRO shards: a parameter group is missing")
        pieces = [part[at] for part in parts]
        offset, total = 0, sum(piece.shape[0] for piece in pieces)
        for name, shape in group.items():
            size = _shape(str(name), shape)
            count = math.prod(size)
            if offset + count > total:
                raise UnreadableError(f"incomplete ZeRO shards: {name} lies behind their end")
            found[str(name)] = _gathered(size, _cuts(pieces, offset, count))
            offset += count
        # Each group is padded to a multiple of twice the number of processes.
        align = 2 * len(parts)
        if -(-offset // align) != -(-total // align):
            raise UnreadableError(
                f"ZeRO shards hold {total} numbers, the shapes ask for {offset}: {_CONVERTER}"
            )
    return found


def _cuts(pieces: list[Stored], offset: int, count: int) -> list[tuple[Stored, int, int]]:
    """The ranges (vector, start, length) of a span over vectors laid end to end."""
    cuts, begin = [], 0
    for piece in pieces:
        length = piece.shape[0]
        low, high = max(offset, begin), min(offset + count, begin + length)
        if low < high:
            cuts.append((piece, low - begin, high - low))
        begin += length
    return cuts


def _from_parameters(groups: list[Any], parts: list[list[Stored]]) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    processes, offset = len(parts), 0
    totals = [sum(piece.shape[0] for piece in part) for part in parts]
    for group in groups:
        for name, shape in group.items():
            size = _shape(str(name), shape)
            count = math.prod(size)
            share = -(-count // processes)
            if any(offset + share > total for total in totals):
                raise UnreadableError(f"incomplete ZeRO shards: {name} lies behind their end")
            cuts = [cut for part in parts for cut in _cuts(part, offset, share)]
            found[str(name)] = _gathered(size, cuts)
            offset += share
    return found


def _gathered(shape: tuple[int, ...], cuts: list[tuple[Stored, int, int]]) -> Stored:
    count = math.prod(shape)

    def read() -> torch.Tensor:
        flat = torch.cat([_part(piece, start, length) for piece, start, length in cuts])
        return flat[:count].reshape(shape).clone()

    return Stored(shape, torch.float32, contiguous(shape), compute=read)


def _part(piece: Stored, start: int, length: int) -> torch.Tensor:
    part = Stored((length,), piece.dtype, piece.stride, piece.start + start, piece.storage)
    return part.read().float()


def _buffers(model: Mapping[str, Any], module: Mapping[str, Stored]) -> dict[str, Stored]:
    names = model.get("buffer_names") or []
    return {str(name): module[str(name)] for name in names if str(name) in module}


def _frozen(model: Mapping[str, Any], module: Mapping[str, Stored]) -> dict[str, Stored]:
    shapes = model.get("frozen_param_shapes")
    if not isinstance(shapes, Mapping):
        return {}
    fragments = model.get("frozen_param_fragments") or {}
    found: dict[str, Stored] = {}
    for name, shape in shapes.items():
        size = _shape(str(name), shape)
        fragment = as_tensor(fragments.get(name)) if isinstance(fragments, Mapping) else None
        kept = fragment or module.get(str(name))
        if kept is None or kept.numel != math.prod(size):
            raise UnreadableError(f"frozen parameter {name} is sharded: {_CONVERTER}")
        found[str(name)] = Stored(size, kept.dtype, contiguous(size), kept.start, kept.storage)
    return found


def _shared(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    shared = model.get("shared_params")
    pairs = shared.items() if isinstance(shared, Mapping) else shared or []
    return [(str(p[0]), str(p[1])) for p in pairs if len(p) == 2]
