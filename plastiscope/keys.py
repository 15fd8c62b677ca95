"""What a checkpoint's rows depend on: the files, the settings and the code that measured."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import anatomy, derivatives, metrics, models, probe, replay, store, weigh
from .checkpoints import Checkpoint
from .config import Settings
from .past import Past
from .probe.find import beside

DIFFERENCES = frozenset({"weight_change", "weight_drift", "ntk_drift"})
"""Metrics that compare a checkpoint with an earlier one, and so depend on that one's content."""


def content(
    past: Past, position: int, settings: Settings, chosen: frozenset[str], found: dict[str, str]
) -> str:
    """The key of the rows of a run's checkpoint at a position; `found` are its `sources`."""
    s, checkpoint = settings, past.run.checkpoints[position]
    earlier: list[Checkpoint | None] = []
    if chosen & DIFFERENCES:
        earlier += past.earlier(position)
    return store.content_key(
        schema=store.SCHEMA_VERSION,
        checkpoint=[checkpoint.name, checkpoint.fingerprint, checkpoint.step, checkpoint.task],
        breaks=[[b.checkpoint, *b.tensors] for b in past.before(position)],
        earlier=[c.fingerprint for c in earlier if c is not None],
        sources=found,
        metrics=sorted(chosen),
        settings=[
            s.probe, s.model, dict(s.assume), s.probe_inputs, s.probe_rows, s.folds, s.seed,
            s.weights, s.prefix, s.base, s.rename, s.families, s.allow_partial, s.trust_pickle,
            s.gradient_inputs, s.jacobian_inputs, s.kernel, s.second_probe, s.sensitivity_pairs,
        ],
    )  # fmt: skip


def versions(chosen: frozenset[str]) -> dict[str, int]:
    """The versions of the chosen metrics and of the code that finds and feeds what they measure:
    rows of another version are measured again."""
    code = {
        "models": models.VERSION,
        "probe": probe.VERSION,
        "anatomy": anatomy.VERSION,
        "weights": weigh.VERSION,
        "replay": replay.VERSION,
        "rows": metrics.ROWS_VERSION,
    }
    if any(derivatives.wants(name, chosen) for name in derivatives.FAMILIES):
        code["derivatives"] = derivatives.VERSION
    return code | {n: v for n, v in metrics.metric_versions().items() if n in chosen}


def sources(run_path: str | Path, settings: Settings) -> dict[str, str]:
    """A digest of every file, beside the checkpoints, that the rows depend on: the probes, the
    user's model with the modules near it, and families; of a folder the names, sizes, times and
    inodes of its files."""
    model = Path((settings.model or "").rpartition(":")[0])
    named = [settings.probe, settings.second_probe, *settings.families]
    files = [Path(n) for n in named if n and Path(n).exists()]
    if model.suffix == ".py" and model.exists():
        # It may import any of them.
        near = {model, *model.parent.glob("*.py"), *model.parent.glob("*/*.py")}
        files += sorted(near)
    if settings.probe is None:
        files += beside(run_path)
    return {str(i): _digest(file) for i, file in enumerate(files)}


def _digest(path: Path) -> str:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file())
        stats = [(str(p.relative_to(path)), *_stamp(p)) for p in found]
        return store.content_key(folder=stats)
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
