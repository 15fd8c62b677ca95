"""Grams from factors equal those of the gradients written out."""

import numpy as np
import pytest
import torch
from networks import network
from torch.testing import assert_close

from plastiscope.observations import factors, observe_ntk, plan_ntk
from plastiscope.observations.factors import Outer, gram


def written_out(varying, shared):
    """The Gram of every gradient as a matrix [p, q]."""
    gradients = torch.einsum("bctp,btq->bcpq", varying.double(), shared.double())
    flat = gradients.flatten(2).flatten(0, 1)
    return flat @ flat.mT


SHAPES = {
    "explicit": (4, 3, 30, 2, 3),
    "pairs": (5, 1, 3, 40, 30),
    "outputs": (5, 3, 7, 40, 30),
}


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("entries", [1 << 18, 600, 50])
def test_every_way_equals_the_gradients_written_out(way, entries, monkeypatch):
    """R15: also some places and some inputs at a time."""
    b, c, t, p, q = SHAPES[way]
    generator = torch.Generator().manual_seed(0)
    varying = torch.randn(b, c, t, p, dtype=torch.float64, generator=generator)
    shared = torch.randn(b, t, q, dtype=torch.float64, generator=generator)
    taken = []
    for name in ("explicit", "by_pairs", "by_outputs"):
        function = getattr(factors, f"_{name}")
        monkeypatch.setattr(
            factors,
            f"_{name}",
            lambda v, s, f=function, n=name: taken.append(n.removeprefix("by_")) or f(v, s),
        )
    monkeypatch.setattr(factors, "at_once", lambda device: entries)
    monkeypatch.setattr(factors, "WORK_BYTES", 8 * entries)
    found = gram([Outer(varying, shared)])
    assert taken == [way]
    assert_close(found, written_out(varying, shared), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_without_a_gradient_are_left_out(outputs, dtype):
    varying = torch.zeros(3, outputs, 6, 8, dtype=dtype)
    varying[1, :, 0], varying[:, 0, 4] = 0.5, torch.randn(3, 8).to(dtype)
    shared = torch.randn(3, 6, 5).to(dtype)
    expected = written_out(varying, shared)
    found = gram([Outer(varying, shared)])
    assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.max()))
    shared[2, 3, 0] = torch.inf  # 0 times infinity is NaN in plain autograd too.
    assert not torch.isfinite(gram([Outer(varying, shared)])).all()
    nothing = gram([Outer(torch.zeros_like(varying), torch.ones_like(shared))])
    assert nothing.shape == (3 * outputs, 3 * outputs) and not nothing.any()


@pytest.mark.parametrize("kind", ["timm vit", "gpt2"])
def test_passes_in_threads_give_what_one_after_the_other_does(kind):
    module, forward, batch = network(kind)
    plan, before = plan_ntk(module, forward, batch), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            kernels = observe_ntk(module, forward, batch, function="logits", plan=plan)
            found.append(kernels["network"].gram)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*found)
