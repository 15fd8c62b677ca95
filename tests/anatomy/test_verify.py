"""Maps are proved from their slices, and every wrong one is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from plastiscope.anatomy import Anatomy, Matrix, trace, verify
from tests.anatomy import zoo
from tests.anatomy.nets import FusedGPT, PlainGPT, inputs_to
from tests.anatomy.test_trace import MODELS, traced


def weights(module: nn.Module) -> Mapping[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


def doubled(model: zoo.Model) -> zoo.Model:
    """The same model in float64 (inputs too, when they aren't token ids)."""
    module = copy.deepcopy(model.module).double()
    inputs = model.batch["inputs"]
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return zoo.Model(module, model.forward, {"inputs": inputs})


@pytest.mark.parametrize("name", MODELS)
def test_traced_map_is_proved(name: str) -> None:
    model, anatomy = traced(name)
    proofs = verify(model.module, model.forward, model.batch, anatomy, weights(model.module))
    assert [p.block for p in proofs] == list(anatomy.attention)
    assert all(p.ok for p in proofs), proofs
    assert max(p.error for p in proofs) < 1e-5


def test_error_in_float64() -> None:
    net = PlainGPT().double()
    batch = {"inputs": torch.arange(12).reshape(2, 6) % 9}
    anatomy = trace(net, inputs_to(net), batch)
    proofs = verify(net, inputs_to(net), batch, anatomy, weights(net))
    assert all(p.ok and p.tolerance == 1e-6 and p.error < 1e-13 for p in proofs)


def with_heads(anatomy: Anatomy, name: str, heads: tuple[Matrix, ...]) -> Anatomy:
    parts = [
        replace(c, heads=heads) if (c.name, c.block) == (name, 0) else c for c in anatomy.components
    ]
    return replace(anatomy, components=tuple(parts))


def heads_of(anatomy: Anatomy, name: str) -> tuple[Matrix, ...]:
    (found,) = [c for c in anatomy.components if (c.name, c.block) == (name, 0)]
    return found.heads


def shifted(head: Matrix) -> Matrix:
    rows = head.rows or ()
    return replace(head, rows=(*rows[1:], rows[0] - 1 if rows[0] else rows[-1] + 1))


WRONG = {
    "heads in another order": lambda h: h[1:] + h[:1],
    "one row too far": lambda h: tuple(map(shifted, h)),
    "strided instead of blocks": lambda h: tuple(
        replace(one, rows=tuple(sorted(m for each in h for m in each.rows or ())[k :: len(h)]))
        for k, one in enumerate(h)
    ),
    "every head has everything": lambda h: tuple(
        replace(one, rows=tuple(sorted(m for each in h for m in each.rows or ()))) for one in h
    ),
    "half of the rows": lambda h: tuple(replace(one, rows=(one.rows or ())[::2]) for one in h),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize(
    "name", ["neox-sdpa", "gpt2-eager", "vit-sdpa", "timm_swin", "olmo2-eager"]
)
def test_wrong_map_is_refused(name: str, part: str, wrong: str) -> None:
    model, anatomy = traced(name)
    changed = with_heads(anatomy, part, WRONG[wrong](heads_of(anatomy, part)))
    proofs = verify(model.module, model.forward, model.batch, changed, weights(model.module))
    assert not proofs[0].ok and proofs[0].reason
    assert all(p.ok for p in proofs[1:])


@pytest.mark.parametrize("name", ["neox-sdpa", "llama-eager", "einsum_vit"])
def test_swapped_parts_and_columns_are_refused(name: str) -> None:
    model, anatomy = traced(name)
    q, k = heads_of(anatomy, "q"), heads_of(anatomy, "k")
    columns = heads_of(anatomy, "attention_output")
    swapped = with_heads(with_heads(anatomy, "q", k), "k", q)
    rolled = with_heads(anatomy, "attention_output", columns[1:] + columns[:1])
    for changed in (swapped, rolled):
        proofs = verify(model.module, model.forward, model.batch, changed, weights(model.module))
        assert not proofs[0].ok


def as_blocks(anatomy: Anatomy, height: int, heads: int) -> Anatomy:
    """NeoX's interleaved tensor read as GPT-2's [Q | K | V]: the same shapes, nothing raises."""
    width = height // 3 // heads
    for part, start in zip("qkv", range(0, height, height // 3), strict=True):
        rows = [range(start + h * width, start + (h + 1) * width) for h in range(heads)]
        old = heads_of(anatomy, part)[0]
        anatomy = with_heads(anatomy, part, tuple(replace(old, rows=tuple(r)) for r in rows))
    return anatomy


def test_interleaved_read_as_blocks_is_refused_with_a_large_error() -> None:
    model, anatomy = traced("neox-sdpa")
    changed = as_blocks(anatomy, 96, 4)
    (proof, _) = verify(model.module, model.forward, model.batch, changed, weights(model.module))
    assert not proof.ok and proof.error > 0.1


def test_other_weights_than_the_models_are_refused() -> None:
    """The checkpoint's tensors have to be those that the model computes with."""
    net = FusedGPT(layers=1)
    batch = {"inputs": torch.arange(8)[None]}
    anatomy = trace(net, inputs_to(net), batch)
    other = {n: p + 0.01 for n, p in weights(net).items()}
    assert not verify(net, inputs_to(net), batch, anatomy, other)[0].ok
    broken = {n: p * float("nan") for n, p in weights(net).items()}
    assert not verify(net, inputs_to(net), batch, anatomy, broken)[0].ok


def test_part_without_heads_claims_nothing() -> None:
    """The others are still proved, or refused; with no heads at all nothing is."""
    model, anatomy = traced("gpt2-sdpa")
    own = weights(model.module)
    without = with_heads(anatomy, "k", ())
    assert verify(model.module, model.forward, model.batch, without, own)[0].ok
    wrong = with_heads(without, "q", heads_of(anatomy, "q")[::-1])
    assert not verify(model.module, model.forward, model.batch, wrong, own)[0].ok
    for part in "qv":
        without = with_heads(without, part, ())
    proof = verify(model.module, model.forward, model.batch, without, own)[0]
    assert not proof.ok and "heads" in proof.reason
