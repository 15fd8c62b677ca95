"""What the parts of a network are: the values that trace and family tables both produce.

Axes: B inputs, T tokens, d width, H heads, dh head width.

Canonical component names, one spelling everywhere:
  embedding; in a transformer block norm1, q, k, v, attention_output, residual1, norm2, gate, fc1,
  activation, fc2, residual2; final_norm; head. In a mixture of experts router, experts (what they
  made together) and, of each, "expert 3 gate", "expert 3 fc1", "expert 3 activation" ...
  In an MLP or CNN a block is one parametrised layer: conv or fc, norm, activation; then head.
  Anything else is a component named by its own path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

CANONICAL = (
    "embedding", "norm1", "q", "k", "v", "attention_output", "residual1", "norm2", "router", "gate",
    "fc1", "activation", "fc2", "experts", "residual2", "conv", "fc", "norm", "final_norm", "head",
)  # fmt: skip

PROJECTIONS = ("q", "k", "v")
"""Components that are seen at the block's attention."""
UNTOLD, INNERMOST = -1, -2


def own_name(tensor: str) -> str:
    """The name of a component that has no canonical one: its module's path, or the tensor's.

    Never a canonical name: a layer called "head" that isn't known to be the head is "head.weight".
    """
    path = tensor[: -len(".weight")] if tensor.endswith(".weight") else tensor
    return tensor if path in CANONICAL else path


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [out, in], or some rows or columns of it, as a place in one tensor.

    `out_axes` are the axes of the tensor that, in this order, form the rows; the others, in
    order, form the columns: (0,) for nn.Linear and convolutions, (1,) for GPT-2's Conv1D, (0, 1, 3)
    for [3, H, d, dh]. `rows` and `columns` select from the result; None means all.
    `tensor` names the effective weight: for weight_norm and spectral_norm that is the resolved
    `weight`, never its stored factors.
    """

    tensor: str
    out_axes: tuple[int, ...] = (0,)
    rows: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix [out, in] cut from the whole tensor; a scalar is [1, 1]."""
        if tensor.ndim == 0:
            return tensor.reshape(1, 1)
        others = tuple(a for a in range(tensor.ndim) if a not in self.out_axes)
        out = 1
        for axis in self.out_axes:
            out *= tensor.shape[axis]
        matrix = tensor.permute(self.out_axes + others).reshape(out, -1)
        if self.rows is not None:
            matrix = matrix[list(self.rows)]
        if self.columns is not None:
            matrix = matrix[:, list(self.columns)]
        return matrix


@dataclass(frozen=True)
class Site:
    """A tensor of the forward pass: a module's boundary, or a function called inside it.

    `module` is the path of the innermost module running ("" is the root) and `call` which of its
    calls in one forward; `op` is "" for the module itself, else the function's name, and
    `ordinal` counts the calls of that function within that call of the module. `port` is
    "output", or "output1" (the second tensor of several), or "input" (first tensor argument),
    "input1" (second), ...
    """

    module: str
    call: int = 0
    op: str = ""
    ordinal: int = 0
    port: str = "output"


@dataclass(frozen=True)
class Operand:
    """One tensor of an attention, and which of its axes are which.

    `axes` lists all its axes in the order (batch axes..., head, token, width); for attention maps
    (batch axes..., head, query, key). When `folded` is set, that many heads lie inside the last
    batch axis, inputs outermost, and no axis is the heads' own; 1 means there is a single head.
    0 means the head axis is there.
    """

    site: Site
    axes: tuple[int, ...]
    folded: int = 0


@dataclass(frozen=True)
class AttentionSite:
    """Where attention happens: scaled_dot_product_attention, or a softmax between two products.

    `heads` and `kv_heads` are distinct ones: a k that arrives repeated for grouped queries still
    has its few heads. `causal` when every query sees only earlier keys. `kv_of_head` gives the
    key/value head of each query head. `q`, `k`, `v`, `output` and, for explicit attention,
    `scores` (the softmax's input) and `probabilities` (its output) say where each tensor lies.
    Where heads are computed one by one, `parts` are their own attentions, in order, and say it.
    """

    site: Site
    heads: int
    kv_heads: int
    head_width: int
    causal: bool
    kv_of_head: tuple[int, ...] = ()
    q: Operand | None = None
    k: Operand | None = None
    v: Operand | None = None
    output: Operand | None = None
    scores: Operand | None = None
    probabilities: Operand | None = None
    parts: tuple[AttentionSite, ...] = ()


@dataclass(frozen=True)
class ExpertSite:
    """Where the tokens of a block go to different experts; an expert is known by its weights.

    `tokens` is the router's input [B, T, d] or [B*T, d], `choice` the numbers of the experts that
    it chose for each, [..., k] or [...]. `parts` are the matrices of "gate" (if there is one),
    "fc1" and "fc2", one for each expert; `whole` those parts whose product is their output as it
    is, nothing added. `before` is the part that makes the activation's input as it is, if one does.
    """

    tokens: Site
    choice: Site
    parts: Mapping[str, tuple[Matrix, ...]]
    whole: frozenset[str]
    before: str | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.parts["fc2"])


def expert_part(number: int, name: str) -> str:
    """The name of one expert's part: "expert 3 fc1"."""
    return f"expert {number} {name}"


def is_expert(name: str) -> bool:
    """Whether a component is an expert, or a part of one."""
    return name.startswith("expert ")


def plain_name(name: str) -> str:
    """The canonical name without the expert's number: "fc1" of "expert 3 fc1"."""
    return name.split(" ", 2)[2] if is_expert(name) and name.count(" ") > 1 else name


@dataclass(frozen=True)
class Component:
    """One part of the network under its canonical name.

    `weights` are its whole matrices (fused q/k/v: one Matrix of q's rows, one of k's ...);
    `heads` the slice of each head, in head order, empty when there are none (k and v have as many
    as there are key/value heads). `features` is where its output [B, T, d] (or [B, d],
    [B, C, h, w]) is seen; q, k and v are seen at the block's attention site instead.
    For an activation, `features` is what the next layer consumes (after a gate's product),
    `pre_activation` the function's input and `function` its name ("relu", "gelu", "silu",
    "tanh", "sigmoid", ...). `channel_axis` is the axis of `features` that holds channels or width
    (1 for convolutional maps [B, C, h, w]). `channels` are those that are the component's own
    where the tensor holds others too (a fused gate and fc1), `before_channels` the same for
    `pre_activation`; None: all. `input_axis` is that of the inputs: 1 for a stream [T, B, d],
    INNERMOST for rows [T*B, d], UNTOLD where rows can't be told apart by input.
    `offset_gain`: a norm's gain is 1 + its stored weight. `embeds`: a
    table of positions, a CLS or register token, which goes into the embedding's output. `linear`:
    its matrix (and perhaps a bias) makes each position of the output of that position of the input.
    `before_cls`: its output holds no CLS token, though the network has one (patches alone).
    """

    name: str
    block: int | None
    path: str
    weights: tuple[Matrix, ...] = ()
    heads: tuple[Matrix, ...] = ()
    features: Site | None = None
    pre_activation: Site | None = None
    function: str | None = None
    offset_gain: bool = False
    channel_axis: int = -1
    channels: tuple[int, ...] | None = None
    before_channels: tuple[int, ...] | None = None
    embeds: bool = False
    input_axis: int = 0
    linear: bool = False
    before_cls: bool = False

    @property
    def is_unseen(self) -> bool:
        """Whether it is a layer, by its own or its weight's name, and no value of the pass is known
        to be its output: a table not looked up by input, a weight that is computed before use."""
        layer = self.name in CANONICAL or any(m.tensor.endswith("weight") for m in self.weights)
        elsewhere = self.name in PROJECTIONS or is_expert(self.name)
        return layer and self.features is None and not (elsewhere or self.embeds)


@dataclass(frozen=True)
class Anatomy:
    """Every part of a network.

    `components` in forward order; `attention` and `experts` by block; `cls` the position of the
    CLS token in the token axis or None; `prefix_tokens` how many leading tokens aren't patches
    (CLS, distillation, registers). `source` says how it was found ("trace", "family gpt2",
    "names"). `unexplained` are tensors that no component claims. `notes` are single lines for the
    user. `unread`: modules that may be attentions and aren't read as such, each with the status
    that says why.
    """

    components: tuple[Component, ...]
    attention: Mapping[int, AttentionSite] = field(default_factory=dict)
    cls: int | None = None
    prefix_tokens: int = 0
    source: str = "names"
    unexplained: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    experts: Mapping[int, ExpertSite] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
