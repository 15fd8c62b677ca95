"""Find the probe: what the user names, else what lies beside the run, else a synthetic batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe.arrays import SUFFIXES, as_batch, read_arrays
from plastiscope.probe.fit import fit
from plastiscope.probe.sets import Probe, fingerprint
from plastiscope.probe.synthetic import synthesise


def find(
    run_path: str | Path, inputs: Inputs, spec: str | None, size: int, seed: int
) -> tuple[Probe, ...]:
    """The probe sets of a run, at least one.

    Without `spec`: probe.npz (.pt, .safetensors, .parquet), or probe_NAME.npz for several sets,
    beside the checkpoints; where there's none, `size` synthetic inputs. `size` also bounds how
    many images or texts are drawn from a larger collection. Raises UsageError when the probe can't
    be read or doesn't fit the model's inputs.
    """
    if spec is None:
        files = beside(run_path)
        return tuple(_from_file(file, inputs) for file in files) or (
            synthesise(inputs, size, seed),
        )
    path = Path(spec)
    if not path.exists():
        raise UsageError(f"--probe {spec}: no such file or folder")
    if path.suffix in SUFFIXES:
        return (_from_file(path, inputs),)
    raise UsageError(f"--probe {spec}: not a file of arrays ({', '.join(SUFFIXES)})")


def beside(run_path: str | Path) -> list[Path]:
    """The probe files in a run's folder (or beside a single checkpoint), in order of name."""
    folder = Path(run_path)
    if not folder.is_dir():
        folder = folder.parent
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if re.fullmatch(r"probe([_-].+)?", path.stem) and path.suffix in SUFFIXES
    ]
    return sorted(found, key=lambda path: [int(p) if p.isdigit() else 0 for p in _pieces(path)])


def _pieces(path: Path) -> list[str]:
    return re.split(r"(\d+)", path.stem)


def _from_file(path: Path, inputs: Inputs) -> Probe:
    return make(_name(path), as_batch(read_arrays(path), path.name), inputs, path.name)


def _name(path: Path) -> str:
    return re.sub(r"^probe[_-](?=.)", "", path.stem)


def make(name: str, batch: Mapping[str, Tensor], inputs: Inputs, source: str) -> Probe:
    """A probe of the batch, fitted to the model's inputs."""
    fitted, notes = fit(batch, inputs, source)
    note = f"probe {name}: {'; '.join(notes)}" if notes else ""
    return Probe(name, fitted, fingerprint(fitted), False, source, note)


def hint(run_path: str | Path, spec: str | None) -> dict[str, str]:
    """What the probe's shape says of the model's input, as an assumption for `models.build`:
    {"input": "1x8x8"}, or nothing."""
    path = Path(spec) if spec else None
    files = [path] if path and path.is_file() and path.suffix in SUFFIXES else []
    if spec is None:
        files = beside(run_path)[:1]
    if not files:
        return {}
    shape = tuple(as_batch(read_arrays(files[0]), files[0].name)["inputs"].shape[1:])
    return {"input": "x".join(map(str, shape))} if len(shape) in (2, 3) else {}
