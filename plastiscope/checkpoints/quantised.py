"""Weights packed into integers: bitsandbytes 8 and 4 bit, GPTQ. Dequantised when read.

A layout that isn't known is left out with its name; the integers are never measured as weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from plastiscope.checkpoints.stored import Stored, contiguous


def dequantised(weights: dict[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """The table with packed weights replaced by ones that dequantise on reading, and notes."""
    result: dict[str, Stored] = {}
    notes: list[str] = []
    consumed: set[str] = set()
    for name in weights:
        for rule in (_int8, _gptq, _block_scaled):
            made = rule(name, weights)
            if made is not None:
                new, tensor, parts = made
                result[new] = tensor
                consumed |= parts
                notes.append(f"{new}: {tensor.note}")
                break
    for name, tensor in weights.items():
        if name in consumed:
            continue
        if _refused(name, tensor):
            note = f"packed integers of {list(tensor.shape)}, layout unknown: no weight"
            result[name] = replace(tensor, note=note)
        else:
            result[name] = tensor
    ordered = [n for n in weights if n in result] + [n for n in result if n not in weights]
    return {name: result[name] for name in ordered}, notes


def _refused(name: str, tensor: Stored) -> bool:
    packing = tensor.dtype in (torch.int8, torch.uint8, torch.int32)
    return packing and len(tensor.shape) >= 2 and name.endswith(("weight", "weight_packed"))


Made = tuple[str, Stored, set[str]]


def _int8(name: str, weights: Mapping[str, Stored]) -> Made | None:
    """bitsandbytes LLM.int8: rows of int8 with one scale (the row's maximum) each."""
    scale = weights.get(f"{name.removesuffix('weight')}SCB")
    tensor = weights[name]
    if scale is None or not name.endswith("weight") or tensor.dtype != torch.int8:
        return None

    def read() -> torch.Tensor:
        return tensor.read().float() * scale.read().float().reshape(-1, 1) / 127.0

    base = name.removesuffix("weight")
    parts = {name, f"{base}SCB", f"{base}weight_format"}
    return name, _computed(tensor.shape, read, "dequantised from bitsandbytes int8"), parts


def _gptq(name: str, weights: Mapping[str, Stored]) -> Made | None:
    """GPTQ: qweight [in/k, out] int32, k = 32/bits values each; zeros one less than stored."""
    if not name.endswith(".qweight") or weights[name].dtype != torch.int32:
        return None
    base = name.removesuffix("qweight")
    parts = {f"{base}{part}": weights.get(f"{base}{part}") for part in ("scales", "qzeros")}
    scales, zeros = parts[f"{base}scales"], parts[f"{base}qzeros"]
    index = weights.get(f"{base}g_idx")
    if scales is None or zeros is None or index is None:
        return None
    packed = weights[name]
    rows = index.shape[0]
    if packed.shape[0] == 0 or rows % packed.shape[0]:
        return None
    per = rows // packed.shape[0]
    bits = 32 // per
    if bits not in (2, 4, 8):
        return None

    def read() -> torch.Tensor:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        mask = (1 << bits) - 1
        values = (packed.read()[:, None, :] >> shifts[None, :, None]) & mask
        offsets = (zeros.read()[:, :, None] >> shifts[None, None, :]) & mask
        groups = index.read().long()
        offset = offsets.reshape(zeros.shape[0], -1)[groups] + 1
        scale = scales.read().float()[groups]
        return ((values.reshape(rows, -1) - offset).float() * scale).T.contiguous()

    shape = (packed.shape[1], rows)
    note = f"dequantised from GPTQ {bits} bit"
    consumed = {name, f"{base}scales", f"{base}qzeros", f"{base}g_idx"}
    return f"{base}weight", _computed(shape, read, note), consumed


def _block_scaled(name: str, weights: Mapping[str, Stored]) -> Made | None:
    """fp8 weights [out, in] with one inverse scale for each block."""
    tensor, scale = weights[name], weights.get(f"{name}_scale_inv")
    if scale is None or not re.match(r"torch\.float8", str(tensor.dtype)):
        return None
    if len(tensor.shape) != 2 or len(scale.shape) != 2 or 0 in scale.shape:
        return None
    sides = [_block(n, m) for n, m in zip(tensor.shape, scale.shape, strict=True)]
    if None in sides:
        return None
    rows, columns = (side or 1 for side in sides)

    def read() -> torch.Tensor:
        grown = scale.read().float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return tensor.read().float() * grown[: tensor.shape[0], : tensor.shape[1]]

    note = "dequantised from fp8 with block scales"
    return name, _computed(tensor.shape, read, note), {name, f"{name}_scale_inv"}


def _block(size: int, blocks: int) -> int | None:
    """Elements a block: 128 wherever that gives this many blocks, else an exact part."""
    if -(-size // 128) == blocks:
        return 128
    return size // blocks if size % blocks == 0 else None


def _computed(shape: tuple[int, ...], read: Callable[[], torch.Tensor], note: str) -> Stored:
    return Stored(shape, torch.float32, contiguous(shape), compute=read, note=note)
