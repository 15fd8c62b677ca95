"""The second data set of the component sensitivity, whose inputs are paired with the probe's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe.find import find
from plastiscope.probe.sets import Probe, fingerprint


def find_second(
    run_path: str | Path, inputs: Inputs, spec: str, size: int, seed: int, probes: Sequence[Probe]
) -> Probe:
    """The one data set of `spec` (as for `find`), without labels: they may be of other classes.

    Raises UsageError when it can't be read, is several, or doesn't pair with each of the probes:
    inputs of another shape, or the probe's own.
    """
    try:
        found = find(run_path, replace(inputs, classes=None), spec, size, seed)
    except UsageError as error:
        raise UsageError(str(error).replace("--probe", "--second-probe")) from error
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise UsageError(f"--second-probe {spec}: give one data set, not {names}")
    batch = {name: tensor for name, tensor in found[0].batch.items() if name != "labels"}
    second = replace(found[0], batch=batch, fingerprint=fingerprint(batch))
    for each in probes:
        _pairs_with(each, second)
    return second


def _pairs_with(first: Probe, second: Probe) -> None:
    x, y = first.batch["inputs"], second.batch["inputs"]
    if x.shape[1:] != y.shape[1:]:
        there, here = ("x".join(map(str, t.shape[1:])) for t in (y, x))
        raise UsageError(
            f"--second-probe {second.source}: inputs of {there} don't pair with those of {here} "
            f"of the probe {first.name}: give inputs of the same shape"
        )
    count = min(len(x), len(y))
    if count < 2:
        raise UsageError(
            f"--second-probe {second.source}: {count} pair with the probe {first.name} is too few: "
            "give two inputs at least"
        )
    if torch.equal(x[:count], y[:count]):
        raise UsageError(
            f"--second-probe {second.source}: its inputs are those of the probe {first.name}, and "
            "equal inputs have no rate of change: give another data set"
        )
