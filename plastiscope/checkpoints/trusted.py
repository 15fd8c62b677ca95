"""The one way around the inert reader: run a file's pickle, because its owner asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.stored import Stored, contiguous
from plastiscope.errors import UnreadableError

_TORCH = ("torch zip", "torch legacy")


def trusted(content: Content, files: tuple[str, ...]) -> Content:
    """The content with its stubbed classes imported and their code run.

    Files without stubs stay with the inert reader. Raises UnreadableError with what the code
    raised, most often a module that isn't installed.
    """
    if not content.stubs or content.format not in _TORCH or len(files) != 1:
        return content
    try:
        tree = torch.load(files[0], map_location="cpu", weights_only=False)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UnreadableError(f"--trust-pickle: {line}") from None
    note = f"pickle run (--trust-pickle): {', '.join(content.stubs)}"
    return replace(content, tree=_tree(tree, 0), stubs=(), notes=(*content.notes, note))


def _tree(node: Any, depth: int) -> Any:
    if isinstance(node, torch.Tensor):
        kept = node.detach()
        shape = tuple(kept.shape)
        return Stored(shape, kept.dtype, contiguous(shape), compute=lambda: kept)
    if isinstance(node, torch.nn.Module):
        return _tree(node.state_dict(), depth + 1)
    if isinstance(node, Mapping) and depth < 32:
        return {key: _tree(value, depth + 1) for key, value in node.items()}
    if isinstance(node, list | tuple) and depth < 32:
        return [_tree(value, depth + 1) for value in node]
    if hasattr(node, "__dict__") and not isinstance(node, type) and depth < 32:
        return {key: _tree(value, depth + 1) for key, value in vars(node).items()}
    return node
