"""A live network for a checkpoint: rebuilt from what the checkpoint says, or as the user says."""

from __future__ import annotations

from collections.abc import Mapping

from plastiscope.checkpoints.run import State
from plastiscope.models import (
    chain,
    exported,
    factory,
    huggingface,
    llama2c,
    nanogpt,
    policies,
    zoo,
)
from plastiscope.models.live import Batch, Inputs, Live, Merge, ModelError
from plastiscope.models.loading import LoadReport, load

VERSION = 2
"""Of the networks that are rebuilt. Raise it with every change after which a checkpoint's network
computes something else, or is fed otherwise (a mask, a missing option's value)."""

__all__ = ["Batch", "Inputs", "Live", "LoadReport", "Merge", "ModelError", "build", "load"]


def build(state: State, spec: str | None = None, assume: Mapping[str, str] | None = None) -> Live:
    """Rebuild the network of a checkpoint; its weights are loaded apart, with `load`.

    `spec` is timm:NAME, torchvision:NAME, transformers:CLASS, path.py:NAME, package.module:NAME or
    the path of a torch.export program (.pt2). Without it, from the checkpoint itself: a
    transformers config, a timm or torchvision name, nanoGPT's or llama2.c's layout, a policy of
    Stable-Baselines3 or rsl_rl, else a plain MLP or CNN from names and shapes. `assume` overrides
    what is guessed (activation, stride, padding, pool, input, heads); its "probe", the shape of
    the probe's inputs, counts where nothing else tells, and only if a network fits it. Raises
    ModelError, which says why it can't and which option supplies the network.
    """
    words = dict(assume or {})
    try:
        return _build(state, spec, words)
    except ModelError:
        if words.pop("probe", None) is None:
            raise
    # A probe that doesn't fit is an error of the probe's, which names both shapes.
    return _build(state, spec, words)


def _build(state: State, spec: str | None, assume: Mapping[str, str]) -> Live:
    return _from_spec(state, spec, assume) if spec else _from_content(state, assume)


def _from_spec(state: State, spec: str, assume: Mapping[str, str]) -> Live:
    kind, _, name = spec.partition(":")
    if spec.endswith(".pt2"):
        return exported.build(state, spec)
    if kind in ("timm", "torchvision"):
        return zoo.build(state, kind, name, assume)
    if kind == "transformers":
        return huggingface.build(state, name)
    return factory.build(state, spec, assume)


def _from_content(state: State, assume: Mapping[str, str]) -> Live:
    if huggingface.recognises(state):
        return huggingface.build(state)
    if nanogpt.recognises(state):
        return nanogpt.build(state, assume)
    if llama2c.recognises(state):
        return llama2c.build(state, assume)
    if policies.recognises(state):
        return policies.build(state, assume)
    name = zoo.name_in(state)
    if name:
        return zoo.build_named(state, name, assume)
    return chain.build(state, assume)
