"""The probe's padding reaches a model that takes a mask, the right way round; else it is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plastiscope.models.outputs import positional, takes_mask, unmasked

IDS = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
MEANS = torch.tensor([1.5, 4.0])
WITH_PADDING = torch.tensor([4.0, 4.0])


class Counts(nn.Module):
    def forward(self, inputs, attention_mask=None):
        kept = torch.ones_like(inputs) if attention_mask is None else attention_mask
        return (inputs * kept).sum(1) / kept.sum(1)


class Ignores(nn.Module):
    def forward(self, inputs, src_key_padding_mask=None):
        if src_key_padding_mask is None:
            return inputs.mean(1)
        return Counts()(inputs, (~src_key_padding_mask).long())


class Unclear(nn.Module):
    def forward(self, inputs, mask=None):
        assert mask is None
        return inputs.mean(1)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (Counts, "attention_mask", MEANS),
        (Ignores, "src_key_padding_mask", MEANS),
        (Unclear, None, WITH_PADDING),
    ],
)
def test_the_mask_is_passed_where_its_meaning_is_known(kind, name, expected):
    module = kind()
    assert takes_mask(module) == name
    assert torch.equal(positional(module)({"inputs": IDS, "mask": MASK}), expected)
    assert torch.equal(positional(module)({"inputs": IDS}), WITH_PADDING)
    line = unmasked(module, MASK)
    assert (line is None) == (name is not None)
    assert line is None or "takes no attention_mask: padding takes part" in line


def test_nothing_is_said_without_padding():
    assert unmasked(Unclear(), None) is None
    assert unmasked(Unclear(), torch.ones(2, 3)) is None
