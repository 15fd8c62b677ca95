"""Which stored tensors are buffers (masks, tables, statistics, counters) and not weights.

Known by name, type and shape together: a GPT-2 `attn.bias` of shape [1, 1, L, L] is the causal
mask, one of shape [d] is a bias.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from plastiscope.checkpoints.stored import Stored

_BUFFER_NAMES = {
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "masked_bias",
    "relative_position_index",
    "relative_coords_table",
    "relative_coords",
    "coords_table",
    "attn_mask",
    "causal_mask",
    "inv_freq",
    "original_inv_freq",
    "position_ids",
    "token_type_ids",
    "freqs_cis",
    "freqs_cos",
    "freqs_sin",
    "cos_cached",
    "sin_cached",
    "rope_cos",
    "rope_sin",
    "min_val",
    "max_val",
    "zero_point",
    "eps_tensor",
    "num_updates",
    "_step_count",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "SCB",
    "weight_scale",
    "weight_scale_inv",
    "input_scale",
}
# Square over its last two axes: a mask; anything else under these names may be learned.
_MASKS = {"bias", "mask", "tril", "triu", "future_mask", "attn_bias_mask", "tgt_mask"}
_ROTARY = re.compile(r"(rotary|rope)\w*\.(freqs|cos|sin|scale|periods|.*cached)$")


def kind_of(name: str, tensor: Stored, siblings: Collection[str]) -> str:
    """ "weight", "buffer" or "no_data"; `siblings` are all names of the same checkpoint."""
    if not tensor.has_data:
        return "no_data"
    if tensor.buffer or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return "buffer"
    last = name.rsplit(".", 1)[-1]
    if last == "scales" and f"{name[: -len(last)]}qweight" in siblings:
        return "buffer"
    if last in _BUFFER_NAMES or _ROTARY.search(name) or _is_mask(last, tensor.shape):
        return "buffer"
    return "buffer" if _is_norm_vector(name, last, tensor.shape, siblings) else "weight"


def _is_mask(last: str, shape: tuple[int, ...]) -> bool:
    if last not in _MASKS or len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    leading_ones = all(n == 1 for n in shape[:-2])
    return leading_ones and (len(shape) > 2 or last != "bias")


def _is_norm_vector(
    name: str, last: str, shape: tuple[int, ...], siblings: Collection[str]
) -> bool:
    # Spectral normalisation keeps its power-iteration vectors beside the original weight.
    if len(shape) != 1:
        return False
    base = name[: -len(last)]
    if last in ("weight_u", "weight_v"):
        return f"{base}weight_orig" in siblings
    if last in ("_u", "_v") and ".parametrizations." in f".{name}":
        return f"{base.rsplit('.', 2)[0]}.original" in siblings
    return False


def is_flat_shard(name: str, tensor: Stored) -> bool:
    """Whether this is FSDP's flattened parameter: one process's part, without shapes."""
    last = name.rsplit(".", 1)[-1]
    flat = last in ("_flat_param", "flat_param") or last.startswith("flat_param_")
    return flat and len(tensor.shape) == 1
