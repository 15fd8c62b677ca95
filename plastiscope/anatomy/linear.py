"""What a linear map makes: with its bias, and whether position by position."""

from __future__ import annotations

import math

from plastiscope.anatomy.flow import RESHAPES
from plastiscope.anatomy.products import Product, weight_base
from plastiscope.anatomy.record import Record
from plastiscope.anatomy.sites import SUMS


def with_bias(record: Record, product: Product) -> int:
    """The value that a linear map makes, its bias included: where nothing but a sum with a
    parameter [d] takes the product, that sum."""
    made, takers = product.output, record.consumers(product.output)
    if len(takers) != 1 or takers[0].op not in SUMS or len(product.channels) != 1:
        return made
    others = [n for n in takers[0].inputs if n != made]
    if len(others) != 1 or weight_base(record, others[0]) is None:
        return made
    value, bias = record.values[made].tensor, record.values[others[0]].tensor
    shape = (1,) * (value.ndim - bias.ndim) + tuple(bias.shape)
    expected = tuple(n if a == product.channels[0] else 1 for a, n in enumerate(value.shape))
    return takers[0].outputs[0] if shape == expected else made


def adds_weights(record: Record, product: Product) -> bool:
    """Whether something learned is added to what a linear map makes, as the biases of chosen
    experts are."""
    reshaped = [c for c in record.consumers(product.output) if c.op in RESHAPES]
    values = [product.output, *(o for c in reshaped for o in c.outputs)]
    return any(
        call.op in SUMS and any(n != made and record.values[n].learned for n in call.inputs)
        for made in values
        for call in record.consumers(made)
    )


def is_plain(record: Record, product: Product) -> bool:
    """Whether its matrix makes each position of the output of that position of the source: no
    kernel of several places, no groups, no matrix for each head or expert alone."""
    source, made = (record.values[n].tensor for n in (product.source, product.output))
    *own, kernel = product.columns.shape
    width = math.prod(own)
    if kernel != 1 or width != math.prod(source.shape[a] for a in product.summed):
        return False
    return source.numel() // width == made.numel() // product.rows.numel()
