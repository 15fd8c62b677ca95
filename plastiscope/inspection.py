"""What is there, before anything is measured: runs, checkpoints, tensors, the model and its parts.

The values are plain, so that `inspect --format json` is one `json.dumps`; SCHEMA names the version
of that layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .analysis import find_runs
from .checkpoints import Checkpoint, Run, State
from .config import Settings
from .errors import UnreadableError
from .network import Network, open_network, signature
from .probe.find import beside

SCHEMA = "plastiscope.inspect/1"
LOOKED_THROUGH = 1 << 28
"""Entries up to which a checkpoint is searched for NaN and infinity."""


def inspect(paths: Iterable[str | Path], settings: Settings | None = None) -> dict[str, Any]:
    """Describe the runs at `paths`, with the proof of each block's attention map.

    Raises UsageError and UnreadableError as `analyze` does.
    """
    settings = settings or Settings()
    runs = [_describe(run, settings) for run in find_runs(paths, settings)]
    return {"schema": SCHEMA, "runs": runs}


def _describe(run: Run, settings: Settings) -> dict[str, Any]:
    probes = [file.name for file in beside(run.path)]
    skipped = [
        {"name": s.name, "reason": s.reason, "unreadable": s.unreadable}
        for s in run.skipped
        if s.name not in probes
    ]
    listed: list[dict[str, Any]] = []
    networks: dict[str, dict[str, Any]] = {}
    for checkpoint in run.checkpoints:
        try:
            state = checkpoint.open()
            name = signature(state)
            if name not in networks:
                networks[name] = _network(state, run, settings)
            listed.append(_checkpoint(checkpoint, state) | {"architecture": name})
        except UnreadableError as error:
            skipped.append({"name": checkpoint.name, "reason": str(error), "unreadable": True})
    return {
        "name": run.name,
        "path": str(run.path),
        "notes": list(run.notes),
        "checkpoints": listed,
        "probes": [{"name": name, "used": settings.probe is None} for name in probes],
        "skipped": skipped,
        "breaks": [
            {"checkpoint": b.checkpoint, "reason": b.reason, "tensors": list(b.tensors)}
            for b in run.breaks
        ],
        "architectures": networks,
    }


def _checkpoint(checkpoint: Checkpoint, state: State) -> dict[str, Any]:
    infos = list(state.tensors.values())
    counted = [i for i in infos if i.kind == "weight" and i.alias_of is None]
    return {
        "name": checkpoint.name,
        "step": checkpoint.step,
        "step_source": checkpoint.step_source,
        "task": checkpoint.task,
        "format": checkpoint.format,
        "bytes": checkpoint.size,
        "branch": state.branch,
        "dtypes": sorted({str(i.dtype).removeprefix("torch.") for i in infos}),
        "tensors": len(infos),
        "parameters": sum(torch.Size(i.shape).numel() for i in counted),
        "optimizer": state.optimizer() is not None,
        "stubs": sorted(state.stubs),
        "non_finite": _non_finite(state),
        "fingerprint": checkpoint.fingerprint,
        "notes": list(state.notes),
    }


def _non_finite(state: State) -> list[str] | None:
    """Weights that hold NaN or infinity; None when there is too much to look through."""
    weights = [n for n, i in state.tensors.items() if i.kind == "weight" and i.alias_of is None]
    sizes = [torch.Size(state.tensors[n].shape).numel() for n in weights]
    if sum(sizes) > LOOKED_THROUGH:
        return None
    return [n for n in weights if not torch.isfinite(state.read(n).float()).all()]


def _network(state: State, run: Run, settings: Settings) -> dict[str, Any]:
    network = open_network(state, run.path, settings)
    return {
        **network.facts(),
        "components": _components(network),
        "buffers": [n for n, i in state.tensors.items() if i.kind == "buffer"],
        "no_data": [n for n, i in state.tensors.items() if i.kind == "no_data"],
        "tied": {n: i.alias_of for n, i in state.tensors.items() if i.alias_of},
        "probes": [
            {"name": p.name, "source": p.source, "synthetic": p.synthetic, "inputs": _length(p)}
            for p in network.probes
        ],
    }


def _length(probe: Any) -> int:
    return len(probe.batch["inputs"])


def _components(network: Network) -> list[dict[str, Any]]:
    return [
        {
            "component": c.name,
            "block": c.block,
            "path": c.path,
            "tensors": sorted({network.stored_name(m.tensor) for m in c.weights}),
            "heads": len(c.heads),
            "replayed": network.is_observed(c),
        }
        for c in network.anatomy.components
    ]
