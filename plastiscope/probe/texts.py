"""Texts as token ids: by the checkpoint's tokenizer, nanoGPT's character table, or bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plastiscope.checkpoints.blobs import local
from plastiscope.checkpoints.content import plain
from plastiscope.checkpoints.sniff import read_content
from plastiscope.errors import UnreadableError, UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe.draw import spread

Encode = Callable[[str], list[int]]
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model")


def read_texts(
    texts: Sequence[str], inputs: Inputs, places: Sequence[Path], size: int
) -> tuple[dict[str, Tensor], list[str]]:
    """At most `size` windows of the texts, spread evenly, as long as the model's usual input.

    A model that predicts the next token gets it as label. Windows don't cross texts; texts shorter
    than a window are padded, with a mask, when there are several.
    """
    if inputs.kind != "tokens":
        raise UsageError(f"the probe holds text, but the model takes {inputs.kind} inputs")
    encode, how = tokenizer(inputs, places)
    windows = _windows([encode(text) for text in texts], inputs.shape[0], int(inputs.causal))
    if not windows:
        raise UsageError("the probe's text is too short: it gives no window of two tokens")
    chosen = spread(windows, size)
    notes = [f"{len(chosen)} of {len(windows)} windows of {inputs.shape[0]} tokens, {how}"]
    return _stack(chosen, inputs.causal), notes


def _windows(texts: Sequence[list[int]], length: int, ahead: int) -> list[list[int]]:
    """Consecutive pieces of `length` tokens and the one `ahead`; a text's short end only alone."""
    pieces = []
    for ids in texts:
        whole = range(0, max(len(ids) - ahead, 0) - length + 1, length)
        found = [ids[start : start + length + ahead] for start in whole]
        if not found and len(ids) >= 2:
            found = [ids]
        pieces += found
    return pieces


def _stack(windows: Sequence[list[int]], causal: bool) -> dict[str, Tensor]:
    ahead = int(causal)
    longest = max(map(len, windows)) - ahead
    inputs = torch.zeros(len(windows), longest, dtype=torch.long)
    labels = torch.full_like(inputs, -100)
    mask = torch.zeros_like(inputs)
    for row, ids in enumerate(windows):
        count = len(ids) - ahead
        inputs[row, :count] = torch.tensor(ids[:count])
        mask[row, :count] = 1
        if causal:
            labels[row, :count] = torch.tensor(ids[1:])
    batch = {"inputs": inputs}
    if causal:
        batch["labels"] = labels
    if not bool(mask.all()):
        batch["mask"] = mask
    return batch


def tokenizer(inputs: Inputs, places: Sequence[Path]) -> tuple[Encode, str]:
    """How text becomes ids, and how to say it: the first of the places that holds a tokenizer.

    Raises UsageError when there's none and the vocabulary isn't that of bytes.
    """
    for place in places:
        if any((place / name).is_file() for name in TOKENIZERS):
            return _pretrained(place), f"by the tokenizer in {place.name}"
        if (place / "meta.pkl").is_file():
            return _characters(place / "meta.pkl"), "by the characters of meta.pkl"
    if inputs.vocabulary == 256:
        return lambda text: list(text.encode("utf-8")), "by bytes"
    raise UsageError(
        f"no tokenizer lies beside the run, and the model's {inputs.vocabulary} ids aren't bytes: "
        "copy its tokenizer files there, or give token ids (--probe ids.npz)"
    )


def _pretrained(place: Path) -> Encode:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "the tokenizer needs transformers: python -m pip install 'plastiscope[hf]'"
        ) from error
    try:
        found = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"the tokenizer in {place} can't be read: {line}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = found(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode


def _characters(path: Path) -> Encode:
    """nanoGPT's prepared data keep {"stoi": {character: id}} in a pickle; none of it is run."""
    try:
        tree: Any = plain(read_content(local(path)).tree)
    except UnreadableError as error:
        raise UsageError(f"{path} can't be read: {error}") from error
    table = tree.get("stoi") if isinstance(tree, Mapping) else None
    if not isinstance(table, Mapping):
        raise UsageError(f"{path} holds no table of characters (stoi)")

    def encode(text: str) -> list[int]:
        unknown = sorted(set(text) - set(table))
        if unknown:
            raise UsageError(f"the probe's character {unknown[0]!r} isn't among those of {path}")
        return [int(table[character]) for character in text]

    return encode
