"""What a metric is: a plain function of one observation, with its unit, range, source and laws.

The first parameter's annotation names what the function needs; its docstring is product text.
Nothing here imports torch, so that `explain` answers at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_PARTS = ("Formula", "Read", "Misleads", "Also called")


@dataclass(frozen=True)
class Values:
    """What a metric found: `values` [...] with the observation's axes, or fewer.

    `parameters` tell rows of one metric apart ("tau=0.025"), `index` the entries of a series.
    `maximum` is the attainable one, where the metric's range doesn't say. `status` replaces the
    observation's own; `standard_error` the jackknife's.
    """

    values: Floats | float
    parameters: str = ""
    index: int | None = None
    maximum: Floats | float | None = None
    status: npt.NDArray[np.str_] | str | None = None
    standard_error: float | None = None
    component: str | None = None


Found = Floats | Values | list[Values] | None


@dataclass(frozen=True)
class Metric:
    """A metric's function and the facts about it.

    `needs` is the name of the observation's type; `laws` what leaves the value unchanged (or how
    it changes); `rank`: bounded by the rows and columns of a matrix; `default`: cheap enough to be
    measured unless told otherwise; `components`: the only ones that it is for; `subject`: its
    rows' subject where that isn't the place's.
    """

    name: str
    needs: str
    function: Callable[[Any], Found]
    unit: str
    range: str
    version: int
    source: str
    laws: tuple[str, ...]
    rank: bool
    default: bool
    components: frozenset[str] | None
    subject: str | None

    def __call__(self, observation: Any) -> Found:
        return self.function(observation)


def metric(
    *,
    unit: str,
    range: str,
    version: int = 1,
    source: str,
    laws: tuple[str, ...] = (),
    rank: bool = False,
    default: bool = True,
    components: frozenset[str] | None = None,
    subject: str | None = None,
    name: str | None = None,
) -> Callable[[Callable[[Any], Found]], Metric]:
    """Make a function of one observation a metric."""

    def decorate(function: Callable[[Any], Found]) -> Metric:
        first = next(iter(inspect.signature(function).parameters.values()))
        return Metric(
            name=name or function.__name__,
            needs=str(first.annotation),
            function=function,
            unit=unit,
            range=range,
            version=version,
            source=source,
            laws=laws,
            rank=rank,
            default=default,
            components=components,
            subject=subject,
        )

    return decorate


@dataclass(frozen=True)
class Explanation:
    """A metric in words: what `explain` shows."""

    name: str
    definition: str
    formula: str
    unit: str
    range: str
    reading: str
    misleads: str
    aliases: str
    source: str
    laws: tuple[str, ...]
    subject: str
    version: int
    default: bool


_SUBJECTS = {
    "Spectrum": "weights [out, in], per-head weights [dh, in], features [rows, width], per-head "
    "features [rows, dh] and CLS tokens [inputs, width]",
    "Weight": "weights [out, in] and per-head weights [dh, in]",
    "Magnitude": "weights [out, in], per-head weights [dh, in], biases and gains [width]",
    "Features": "features [rows, width], per-head features [rows, dh] and CLS tokens "
    "[inputs, width]",
    "Units": "activations [rows, units]",
    "UnitGradients": "gradients of the loss into activations [rows, units]",
    "Attention": "attention maps [queries, keys], per head and input",
    "Outputs": "the network's outputs [labels, classes] on a labelled probe",
    "Kernel": "the tangent kernel [n, n] of n per-input gradients, whole and by component",
    "Jacobian": "the Jacobians [outputs, inputs] of each component, each block and the network, "
    "per input",
    "RateOfChange": "each component's inputs and outputs, in pairs [pairs]",
    "ChangeBound": "the weights of norms [width], linear layers [out, in] and attention heads "
    "[dh, in]",
    "OptimizerState": "each parameter's stored optimizer state, of the parameter's shape",
    "TaskAccuracies": "the accuracies [tasks] of one labelled probe a task",
    "Coverage": "the whole network",
}
"""What each kind of observation is of, and its shape."""


def explanation(found: Metric) -> Explanation:
    """The explanation that a metric's docstring and facts make."""
    definition, parts = _sections(inspect.getdoc(found.function) or "")
    return Explanation(
        name=found.name,
        definition=definition,
        formula=parts.get("Formula", ""),
        unit=found.unit,
        range=found.range,
        reading=parts.get("Read", ""),
        misleads=parts.get("Misleads", ""),
        aliases=parts.get("Also called", ""),
        source=found.source,
        laws=found.laws,
        subject=_SUBJECTS[found.needs],
        version=found.version,
        default=found.default,
    )


def _sections(text: str) -> tuple[str, dict[str, str]]:
    pieces = re.split(rf"^({'|'.join(_PARTS)}):", text, flags=re.MULTILINE)
    parts = {
        name: " ".join(body.split()) for name, body in zip(pieces[1::2], pieces[2::2], strict=True)
    }
    return " ".join(pieces[0].split()), parts
