"""A live network for a checkpoint: rebuilt from what the checkpoint says, or as the user says."""

from __future__ import annotations

from collections.abc import Mapping

from plastiscope.checkpoints.run import State
from plastiscope.models import chain, huggingface, nanogpt
from plastiscope.models.live import Batch, Inputs, Live, Merge, ModelError
from plastiscope.models.loading import LoadReport, load

__all__ = ["Batch", "Inputs", "Live", "LoadReport", "Merge", "ModelError", "build", "load"]


def build(state: State, spec: str | None = None, assume: Mapping[str, str] | None = None) -> Live:
    """Rebuild the network of a checkpoint; its weights are loaded apart, with `load`.

    Without `spec` from the checkpoint itself: a transformers config, nanoGPT's layout, else a plain
    MLP or CNN from names and shapes. `assume` overrides what is guessed (activation, stride,
    padding, pool, input, heads). Raises ModelError, which says why and which option supplies it.
    """
    with_words = dict(assume or {})
    if spec:
        kind, _, name = spec.partition(":")
        if kind == "transformers":
            return huggingface.build(state, name)
        raise ModelError(f"unknown model {spec!r}")
    if huggingface.recognises(state):
        return huggingface.build(state)
    if nanogpt.recognises(state):
        return nanogpt.build(state, with_words)
    return chain.build(state, with_words)
