"""Metrics of the task itself, on a labelled probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .definition import Floats, Values, metric

if TYPE_CHECKING:
    from ..observations import Outputs, TaskAccuracies


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


@metric(
    unit="share of labels",
    range="0 to 1",
    source="Kumar et al. 2023 (AAT); the LLM study",
    laws=("permutation of tasks: unchanged",),
    subject="output",
)
def average_accuracy_across_tasks(tasks: TaskAccuracies) -> Values:
    """Mean over a stream's tasks of the accuracy on each task right after it was learned.

    Formula: AAT = (1/K) sum_k accuracy on task k at the checkpoint at the end of task k.
    Read: the plainest summary of plasticity: a network that keeps it learns every task as well as
    the first.
    Misleads: needs one labelled probe and one checkpoint a task, and tasks of like difficulty.
    """
    values = np.asarray(tasks.accuracies, dtype=np.float64)
    n = len(values)
    error = float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    mean = float(values.mean()) if n else float("nan")
    return Values(mean, parameters=f"tasks={n}", maximum=1.0, standard_error=error)
