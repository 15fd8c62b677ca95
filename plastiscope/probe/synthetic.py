"""A made-up batch of the right kind, for a run without a probe."""

from __future__ import annotations

import torch

from plastiscope.models.live import Inputs
from plastiscope.probe.sets import Probe, fingerprint


def synthesise(inputs: Inputs, size: int, seed: int) -> Probe:
    """Standard normal images or vectors, or uniform token ids; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, *inputs.shape)
    if inputs.kind == "tokens":
        values = torch.randint(inputs.vocabulary or 2, shape, generator=generator)
        what = "uniformly random token ids"
    else:
        values = torch.randn(shape, generator=generator)
        what = "Gaussian noise"
    batch = {"inputs": values}
    return Probe(
        name="synthetic",
        batch=batch,
        fingerprint=fingerprint(batch),
        synthetic=True,
        source=f"synthetic, seed {seed}",
        note=(
            f"SYNTHETIC PROBE: {size} inputs of {what}, not data; what features and units show "
            "on it may not hold on real inputs: give real ones with --probe"
        ),
    )
