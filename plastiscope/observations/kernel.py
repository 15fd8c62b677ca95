"""The empirical neural tangent kernel of a live network on a batch of the probe.

Axes: B inputs, C outputs told apart, n = B*C; [1 + K] everything, then all but one fold of inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..errors import unknown
from .device import fetched
from .gradients import MEMORY_LIMIT, gradient_grams
from .plans import Plan, plan_gradients
from .single_inputs import Batch, Forward
from .spectra import Floats

FUNCTIONS = ("mean_logit", "loss", "logits")
OUTPUTS = 16
"""More outputs than this are projected (seeded, orthonormal) before they are told apart."""
IGNORED = -100
ROUNDING = 1024
"""Times the precision: the length of a bias's gradients, against its weight's, that may be nothing
but rounding."""


@dataclass(frozen=True)
class Kernel:
    """K [n, n] of the parameters' gradients: K_ij = <grad f_i, grad f_j>.

    `function` is "mean_logit", "loss" or "logits"; `outputs` is C (1 but for logits, where entry
    i*C + c belongs to input i and output c). `labels` [B] or None; `counts` [B] says how many
    labels each input's loss is the mean of (None: one). `eps` is the precision of the network's
    dtype. Of biases `beside` is the trace of the kernel of their layers' weights, else 0. `first`
    and `previous` are the same kernel at earlier checkpoints.
    """

    gram: Floats
    function: str
    outputs: int
    eps: float
    labels: npt.NDArray[np.int64] | None = None
    counts: npt.NDArray[np.int64] | None = None
    first: Floats | None = None
    previous: Floats | None = None
    folds: int = 8
    beside: float = 0.0
    replicated: ClassVar[bool] = True

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Kernel": self}

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.gram), len(self.gram)

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return len(self.gram) // self.outputs

    @property
    def status(self) -> str:
        """ "ok", "non_finite", "zero_matrix", or "unresolved" for what rounding leaves of nothing.

        A bias of the keys cancels in the softmax. Its gradients are sums of what cancels: in
        float32 some 1e-5 of those of the keys' weights, where those of other biases are 1e-2.
        """
        if not np.isfinite(self.gram).all():
            return "non_finite"
        trace = float(np.trace(self.gram))
        if 0 < trace < (ROUNDING * self.eps) ** 2 * self.beside:
            return "unresolved"
        return "ok" if self.gram.any() else "zero_matrix"

    def kept(self) -> list[npt.NDArray[np.int64]]:
        """Indices of the inputs of every replicate [1 + K]: all, then all but a fold."""
        folds = np.arange(self.inputs) % min(self.folds, self.inputs)
        every = [np.arange(self.inputs)]
        return every + [np.flatnonzero(folds != k) for k in range(folds.max() + 1)]

    def part(self, gram: Floats, inputs: npt.NDArray[np.int64]) -> Floats:
        """The kernel of some of the inputs."""
        index = (inputs[:, None] * self.outputs + np.arange(self.outputs)).ravel()
        return np.asarray(gram[np.ix_(index, index)])

    def traced(self, gram: Floats) -> Floats:
        """[B, B]: summed over the outputs of equal name."""
        b = self.inputs
        blocks = gram.reshape(b, self.outputs, b, self.outputs)
        return np.asarray(np.einsum("icjc->ij", blocks))


def observe_ntk(
    module: nn.Module,
    forward: Forward,
    batch: Batch,
    *,
    function: str = "mean_logit",
    components: Mapping[str, Hashable] | None = None,
    plan: Plan | None = None,
    memory_limit: int = MEMORY_LIMIT,
    seed: int = 0,
) -> dict[Hashable, Kernel]:
    """The kernel over all trainable parameters ("network") and its part from each component.

    `forward(batch)` gives [B, classes] or [B, T, vocabulary]; `components` maps a parameter's name
    to what it belongs to. A plan can be reused for other checkpoints of the same network. Padding
    (`mask`) and ignored labels don't count. Raises UsageError in train mode and above the limit.
    """
    if function not in FUNCTIONS:
        raise unknown("function of the kernel", function, FUNCTIONS)
    outputs, projection = _outputs(forward, batch, seed) if function == "logits" else (1, None)
    plan = plan or plan_ntk(module, forward, batch)

    def scalars(logits: Tensor, given: Batch) -> Tensor:
        return _scalars(logits, given, function, projection)

    groups = {} if components is None else components
    grams = gradient_grams(
        module,
        forward,
        batch,
        scalars,
        plan,
        groups,
        outputs=outputs,
        memory_limit=memory_limit,
    )
    labels = batch.get("labels")
    classes = labels.cpu().numpy() if labels is not None and labels.ndim == 1 else None
    counts = _counts(labels).cpu().numpy() if labels is not None else None
    eps = float(torch.finfo(next(iter(module.parameters())).dtype).eps)
    every = dict(zip(grams, fetched(*grams.values()), strict=True))
    own = every.pop("network", None)
    whole = sum(every.values()) + (0.0 if own is None else own)
    if own is not None and every:
        every["other"] = own
    found = {
        group: Kernel(np.asarray(part), function, outputs, eps, classes, counts)
        for group, part in {"network": whole, **every}.items()
    }
    for group, weights in _beside(groups).items():
        if group in found:
            beside = sum(float(np.trace(found[w].gram)) for w in weights if w in found)
            found[group] = replace(found[group], beside=beside)
    return found


def _beside(groups: Mapping[str, Hashable]) -> dict[Hashable, set[Hashable]]:
    """For every group of nothing but biases the groups of the weights that these stand beside."""
    found: dict[Hashable, set[Hashable]] = {}
    mixed = {group for name, group in groups.items() if not name.endswith("bias")}
    for name, group in groups.items():
        weight = name.removesuffix("bias") + "weight"
        if group not in mixed and weight in groups:
            found.setdefault(group, set()).add(groups[weight])
    return found


def plan_ntk(module: nn.Module, forward: Forward, batch: Batch) -> Plan:
    """How each parameter's gradients are taken: to be made once for a run's checkpoints."""
    return plan_gradients(
        module, forward, batch, lambda logits, given: _scalars(logits, given, "mean_logit", None)
    )


def _outputs(forward: Forward, batch: Batch, seed: int) -> tuple[int, Tensor | None]:
    with torch.no_grad():
        single = forward({key: value[:1] for key, value in batch.items()})
    width = single.shape[-1]
    if width <= OUTPUTS:
        return width, None
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(width, OUTPUTS, generator=generator)).Q
    return OUTPUTS, basis.to(single)


def _scalars(logits: Tensor, batch: Batch, function: str, projection: Tensor | None) -> Tensor:
    """f of each input: [B, 1], or [B, C] for logits."""
    if function == "loss":
        return _losses(logits, batch["labels"])[:, None]
    if function == "mean_logit":
        return _over_tokens(logits.mean(-1, keepdim=True), batch.get("mask"))
    return _over_tokens(logits if projection is None else logits @ projection, batch.get("mask"))


def _over_tokens(values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, C] of [B, C] or [B, T, C]."""
    if values.ndim == 2:
        return values
    if mask is None:
        return values.mean(1)
    counted = mask.to(values)[..., None]
    return (values * counted).sum(1) / counted.sum(1).clamp(min=1)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        reduction="none",
        ignore_index=IGNORED,
    ).reshape(len(logits), -1)
    return loss.sum(1) / _counts(labels).clamp(min=1)


def _counts(labels: Tensor) -> Tensor:
    """How many labels [B] of each input count."""
    return (labels.reshape(len(labels), -1) != IGNORED).sum(1)
