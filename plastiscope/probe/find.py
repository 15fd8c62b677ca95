"""Find the probe: what the user names, else what lies beside the run, else a synthetic batch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.factory import load_object
from plastiscope.models.live import Inputs
from plastiscope.probe import pictures
from plastiscope.probe.arrays import SUFFIXES as ARRAYS
from plastiscope.probe.arrays import as_batch, read_arrays
from plastiscope.probe.dataset import data_files, read_dataset
from plastiscope.probe.fit import fit
from plastiscope.probe.remote import fetched, is_address, shown
from plastiscope.probe.sets import Probe, fingerprint
from plastiscope.probe.synthetic import synthesise
from plastiscope.probe.texts import read_texts
from plastiscope.probe.user import call

TEXTS = (".txt", ".md", ".text", ".jsonl", ".json", ".csv", ".py")


def find(
    run_path: str | Path, inputs: Inputs, spec: str | None, size: int, seed: int
) -> tuple[Probe, ...]:
    """The probe sets of a run, at least one.

    `spec` is a file of arrays (.npz, .npy, .pt, .safetensors, .parquet), a text, a folder (of
    images, of a Hugging Face dataset, or of several such files, each a set of its own), the address
    of such a file, or module:function. Without it: probe.npz (.pt ...), or probe_NAME.npz for
    several sets, beside the checkpoints; where there's none, `size` synthetic inputs. `size` also
    bounds how many images or texts are drawn from a larger collection. Raises UsageError when the
    probe can't be read or doesn't fit the model's inputs.
    """
    search = Search(_folder(run_path), inputs, size, seed)
    if spec is None:
        files = beside(run_path)
        return tuple(search.file(file) for file in files) or (synthesise(inputs, size, seed),)
    if is_address(spec):
        with fetched(spec) as path:
            return (replace(search.file(path), source=shown(spec)),)
    path = Path(spec)
    if not path.exists() and ":" in spec:
        return search.function(spec)
    if path.is_dir():
        return search.folder(path)
    if not path.is_file():
        raise UsageError(f"--probe {spec}: no such file or folder")
    return (search.file(path),)


@dataclass(frozen=True)
class Search:
    """What reading a probe needs to know: the run's folder, the model's inputs, how many to take.

    Tokenizer and preprocessing are looked for in the run's folder, then in its checkpoints'.
    """

    run: Path
    inputs: Inputs
    size: int
    seed: int

    def places(self) -> list[Path]:
        """Where the files that belong to the model may lie."""
        if not self.run.is_dir():
            return []
        return [self.run, *sorted(path for path in self.run.iterdir() if path.is_dir())]

    def settings(self) -> dict[str, Any]:
        """The model's preprocessor_config.json, {} when there's none."""
        for place in self.places():
            path = place / "preprocessor_config.json"
            if path.is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                return found if isinstance(found, dict) else {}
        return {}

    def file(self, path: Path) -> Probe:
        """One file: arrays, an image, or else a text."""
        if path.suffix in ARRAYS:
            return make(_name(path), as_batch(read_arrays(path), path.name), self.inputs, path.name)
        if path.suffix.lower() in pictures.SUFFIXES:
            batch, notes = pictures.prepare([path], self.inputs, self.settings())
            return make(path.stem, batch, self.inputs, path.name, notes)
        batch, notes = read_texts([_text(path)], self.inputs, self.places(), self.size)
        return make(path.stem, batch, self.inputs, path.name, notes)

    def folder(self, path: Path) -> tuple[Probe, ...]:
        """A folder of arrays or texts (a set each), of a dataset, or of images."""
        files = sorted(each for each in path.iterdir() if each.suffix in ARRAYS)
        dataset = data_files(path)
        if files and not (dataset and all(each.suffix == ".parquet" for each in files)):
            return tuple(self.file(each) for each in _in_order(files))
        if dataset:
            batch, notes = read_dataset(
                path, self.inputs, self.settings(), [path, *self.places()], self.size
            )
            return (make(path.name, batch, self.inputs, path.name, notes),)
        if pictures.find_images(path):
            batch, notes = pictures.read_folder(path, self.inputs, self.settings(), self.size)
            return (make(path.name, batch, self.inputs, path.name, notes),)
        texts = [each for each in path.iterdir() if each.suffix in TEXTS]
        if not texts:
            raise UsageError(f"--probe {path}: no arrays, images, texts or dataset in it")
        return tuple(self.file(each) for each in _in_order(texts))

    def function(self, spec: str) -> tuple[Probe, ...]:
        """What the user's function gives: one batch, or several by name."""
        found = call(load_object(spec, "--probe"), self.inputs, self.size, self.seed, spec)
        return tuple(
            make(name, as_batch(arrays, spec), self.inputs, spec) for name, arrays in found.items()
        )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        known = ", ".join(ARRAYS)
        raise UsageError(f"--probe {path}: neither arrays ({known}), image nor text") from error


def _folder(run_path: str | Path) -> Path:
    path = Path(run_path)
    return path if path.is_dir() else path.parent


def beside(run_path: str | Path) -> list[Path]:
    """The probe files in a run's folder (or beside a single checkpoint), in order of name."""
    folder = _folder(run_path)
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if re.fullmatch(r"probe([_-].+)?", path.stem) and path.suffix in ARRAYS
    ]
    return _in_order(found)


def _in_order(paths: list[Path]) -> list[Path]:
    """By name, numbers by value."""

    def key(path: Path) -> list[tuple[int, str]]:
        pieces = re.split(r"(\d+)", path.name)
        return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in pieces]

    return sorted(paths, key=key)


def _name(path: Path) -> str:
    return re.sub(r"^probe[_-](?=.)", "", path.stem)


def make(
    name: str, batch: Mapping[str, Tensor], inputs: Inputs, source: str, notes: Sequence[str] = ()
) -> Probe:
    """A probe of the batch, fitted to the model's inputs."""
    fitted, more = fit(batch, inputs, source)
    notes = [*notes, *more]
    note = f"probe {name}: {'; '.join(notes)}" if notes else ""
    return Probe(name, fitted, fingerprint(fitted), False, source, note)


def hint(run_path: str | Path, spec: str | None) -> dict[str, str]:
    """What the probe's shape says of the model's input, as an assumption for `models.build`:
    {"probe": "1x8x8"}, or nothing."""
    path = Path(spec) if spec else None
    files = [path] if path and path.is_file() and path.suffix in ARRAYS else []
    if spec is None:
        files = beside(run_path)[:1]
    if not files:
        return {}
    shape = tuple(as_batch(read_arrays(files[0]), files[0].name)["inputs"].shape[1:])
    return {"probe": "x".join(map(str, shape))} if len(shape) in (2, 3) else {}
