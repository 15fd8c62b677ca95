"""Other weights for a while: so that a trace depends on no checkpoint's values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def random_parameters(module: nn.Module) -> Iterator[None]:
    """Other values for every parameter, so that no zero in the weights hides a connection.

    The parameters' own storage is set aside, not written, and put back.
    """
    generator = torch.Generator().manual_seed(0)
    saved = []
    try:
        pool = torch.randn(POOL, generator=generator)
        for count, parameter in enumerate(module.parameters()):
            saved.append((parameter, parameter.data))
            if parameter.is_floating_point():
                parameter.data = _random_like(parameter.data, pool, 7919 * count)
        yield
    finally:
        for parameter, data in saved:
            parameter.data = data


POOL = 65_537
"""How many random numbers are drawn and reused: a prime, so that no two rows come out equal."""


def _random_like(tensor: Tensor, pool: Tensor, start: int) -> Tensor:
    """Normal numbers scaled by the fan-in, or from 0.5 to 1.5 for gains and biases."""
    count = tensor.numel()
    pool = pool.roll(-start)
    drawn = pool.repeat(-(-count // POOL))[:count].reshape(tensor.shape)
    if tensor.ndim < 2:
        drawn = 1 + drawn.clamp(-1, 1) / 2
    else:
        drawn.mul_(max(tensor[0].numel(), 1) ** -0.5)
    return drawn.to(tensor.dtype).to(tensor.device)
