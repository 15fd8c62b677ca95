"""Metrics of the task itself, on a labelled probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Outputs


@metric(
    unit="nats",
    range="0 to infinity",
    source="textbook (cross-entropy)",
    laws=("shift of an input's logits: unchanged",),
    subject="output",
)
def loss(outputs: Outputs) -> Floats:
    """Mean cross-entropy on the probe's labels.

    Formula: mean of -ln softmax(logits)[label]; labels -100 don't count.
    Read: ln(classes) is chance.
    Misleads: labels of one task measure that task, not the ability to learn another.
    """
    return outputs.loss


@metric(
    unit="share of labels",
    range="0 to 1",
    source="textbook",
    laws=("scale of the logits: unchanged",),
    subject="output",
)
def accuracy(outputs: Outputs) -> Values:
    """Share of the probe's labels that the largest logit hits.

    Formula: mean of [argmax logits = label]; labels -100 don't count.
    Read: beside loss; for a stream of tasks see average_accuracy_across_tasks.
    Misleads: accuracy on old tasks is memory, not plasticity.
    """
    return Values(outputs.accuracy, maximum=1.0)
