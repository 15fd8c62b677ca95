"""Find what may be a checkpoint in a tree of folders: single files, and folders that are one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from plastiscope.checkpoints.content import Content
from plastiscope.checkpoints.dcp import read_dcp
from plastiscope.checkpoints.names import step_numbers
from plastiscope.checkpoints.places import Entry, Place, joined
from plastiscope.checkpoints.run import Skipped
from plastiscope.checkpoints.shards import SHARD, read_indexed, read_numbered
from plastiscope.checkpoints.sniff import read_content
from plastiscope.checkpoints.zero import is_zero_folder, read_zero

_MAX_DEPTH = 8
_MODEL_FILES = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
    "pytorch_model_fsdp.bin",
    "consolidated.safetensors",
)
_FOLDER_MARKS = {"config.json", "adapter_config.json", "trainer_state.json", "training_args.bin"}
_WEIGHT_ENDS = {
    *(".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".zip", ".pkl", ".pickle", ".tar"),
    *(".th", ".t7", ".model", ".weights", ".params", ".ptl", ".jit", ".torchscript"),
}
_IGNORED_ENDS = {
    *(".json", ".jsonl", ".txt", ".md", ".rst", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini"),
    *(".py", ".ipynb", ".sh", ".log", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".html", ".gif"),
    *(".mp4", ".wav", ".lock", ".cfg", ".out", ".err", ".c", ".cpp", ".h", ".npy", ".parquet"),
    *(".db", ".sqlite", ".wandb", ".arrow", ".h5", ".hdf5", ".onnx", ".gguf", ".gz", ".xml"),
}
_UNFINISHED = re.compile(r"^tmp-|\.(tmp|part|partial|incomplete|temp)(-\w+)?$")
_SIDE_FILES = re.compile(
    r"(?:rng_state.*|random_states?_.*|scheduler|lr_scheduler|scaler|training_args|optimizer.*|"
    r"optim([_-].*)?|.*\.optimizer|.*_?replay_buffer.*|.*vecnormalize.*|probe|.*_probe|results?|"
    r"sampler.*|dataloader.*|custom_checkpoint_.*|.*optim_states|args|tokenizer|spiece|"
    r"sentencepiece.*|vocab.*|merges|trainer_state|batch|batches|dataset|.*_dataset|data)"
    r"\.\w+$"
)


@dataclass(frozen=True)
class Unit:
    """One candidate: what its checkpoint is called, and how its content is read.

    `folder` is where side files (config, optimizer) lie, which are this unit's own where
    `whole_folder`; `group` is the folder that holds the run; `files` are what identifies it.
    """

    name: str
    path: str
    folder: str
    group: str
    files: tuple[str, ...]
    size: int
    modified: float
    load: Callable[[], Content]
    whole_folder: bool = False


@dataclass(frozen=True)
class Listing:
    """What a walk found: candidates, and files left out by what they are called or point to."""

    units: tuple[Unit, ...]
    skipped: tuple[tuple[str, Skipped], ...]


@dataclass(frozen=True)
class _Walk:
    place: Place
    root: str
    skipped: list[tuple[str, Skipped]]


def find_units(place: Place, root: str) -> Listing:
    """Walk the tree under `root`; nothing is opened yet."""
    walk = _Walk(place, root, [])
    units = _visit(walk, root, 0)
    return Listing(tuple(units), tuple(walk.skipped))


def file_unit(place: Place, entry: Entry, group: str) -> Unit:
    """A single file as a candidate."""
    return Unit(
        name=entry.name,
        path=entry.path,
        folder=group,
        group=group,
        files=(entry.path,),
        size=entry.size,
        modified=entry.modified,
        load=lambda: read_content(place.blob(entry.path)),
        whole_folder=entry.name in _MODEL_FILES,
    )


def _visit(walk: _Walk, folder: str, depth: int) -> list[Unit]:
    entries = walk.place.entries(folder)
    whole = folder_unit(walk.place, folder, entries)
    inner = _inside(walk, folder, entries, depth, whole)
    if whole is None:
        return inner
    if depth == 0 or any(unit.group == folder for unit in inner):
        # The final save lies in the folder that holds the steps' folders.
        named = PurePosixPath(whole.files[0]).name if inner else whole.name
        whole = replace(whole, group=folder, name=named)
    return [whole, *inner]


def _inside(
    walk: _Walk, folder: str, entries: list[Entry], depth: int, whole: Unit | None
) -> list[Unit]:
    units: list[Unit] = []
    own = set(whole.files) if whole is not None else set()
    shards: dict[str, list[Entry]] = {}
    for entry in entries:
        hidden = entry.name.startswith(".") or entry.name == "__pycache__"
        if hidden or entry.path in own or _is_link(walk, folder, entry):
            continue
        if _UNFINISHED.search(entry.name):
            walk.skipped.append((folder, Skipped(entry.name, "temporary, of an unfinished save")))
            continue
        if entry.folder:
            # The step folder of a Trainer holds its ZeRO shards; they are one checkpoint.
            if depth < _MAX_DEPTH and not _part_of(entry, whole):
                units += _lifted(folder, entry, _visit(walk, entry.path, depth + 1))
        elif (match := SHARD.match(entry.name)) is not None:
            shards.setdefault(match["stem"], []).append(entry)
        elif (other := foreign(entry.name)) is not None:
            walk.skipped.append((folder, other))
        elif is_candidate(entry.name) and (whole is None or step_numbers(entry.name)):
            units.append(file_unit(walk.place, entry, folder))
    if whole is None:
        units += [_shard_unit(walk.place, folder, stem, files) for stem, files in shards.items()]
    return units


def _is_link(walk: _Walk, folder: str, entry: Entry) -> bool:
    """Whether a symbolic link is reported instead of followed."""
    if entry.link is None:
        return False
    if entry.size < 0:
        walk.skipped.append(
            (folder, Skipped(entry.name, f"dangling symbolic link to {entry.link}"))
        )
        return True
    target, root = os.path.realpath(entry.path), os.path.realpath(walk.root)
    inside = target.startswith(root + os.sep)
    above = os.path.realpath(folder).startswith(target.rstrip(os.sep) + os.sep) or target == root
    if inside and not above and (entry.folder or is_candidate(entry.name)):
        walk.skipped.append((folder, Skipped(entry.name, f"symbolic link to {entry.link}")))
    return inside or above


_FOREIGN = {
    ".h5": "an HDF5 (Keras) file",
    ".hdf5": "an HDF5 (Keras) file",
    ".keras": "a Keras archive",
    ".onnx": "an ONNX graph",
    ".gguf": "a GGUF file",
    ".msgpack": "a Flax file",
    ".tflite": "a TensorFlow Lite file",
}


def foreign(name: str) -> Skipped | None:
    """A file of weights in a format that isn't read, with what to do."""
    kind = _FOREIGN.get(PurePosixPath(name).suffix.lower())
    return Skipped(name, f"{kind}: save the weights as .safetensors or .npz") if kind else None


def is_candidate(name: str) -> bool:
    """Whether a file's name allows it to be a checkpoint; its content decides."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix in _IGNORED_ENDS or name.startswith("events.out.tfevents"):
        return False
    if name in ("LICENSE", "README", "Makefile", "latest", "NOTICE", "COPYING"):
        return False
    return not _SIDE_FILES.fullmatch(name)


def is_weights_name(name: str) -> bool:
    """Whether a file that can't be read should have been: its extension says weights."""
    return PurePosixPath(name).suffix.lower() in _WEIGHT_ENDS


def _part_of(entry: Entry, whole: Unit | None) -> bool:
    side = ("global_step", "pytorch_model_fsdp", "optimizer")
    return whole is not None and entry.name.startswith(side)


def _lifted(parent: str, entry: Entry, units: list[Unit]) -> list[Unit]:
    """A folder that is one step (`step_100/model.pt`) belongs to its parent's run."""
    direct = [u for u in units if u.group == entry.path]
    if not step_numbers(entry.name):
        return units
    if len(units) == 1:
        inner = PurePosixPath(units[0].path).relative_to(PurePosixPath(entry.path))
        name = entry.name if inner == PurePosixPath(".") else f"{entry.name}/{inner}"
        return [replace(units[0], name=name, group=parent, whole_folder=True)]
    if len(direct) != len(units) or any(step_numbers(unit.name) for unit in direct):
        return units
    return [replace(unit, name=f"{entry.name}/{unit.name}", group=parent) for unit in direct]


def folder_unit(place: Place, folder: str, entries: list[Entry]) -> Unit | None:
    """The folder as one checkpoint, or None where it is just a folder."""
    names = {entry.name: entry for entry in entries}
    load: Callable[[], Content] | None = None
    files: list[str] = []
    indexes = sorted(name for name in names if name.endswith(".index.json"))
    marked = bool(_FOLDER_MARKS & set(names))
    single = next((name for name in _MODEL_FILES if name in names), None)
    zero = [e for e in entries if e.folder and e.name.startswith("global_step")]
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        files = [e.path for e in entries if e.name == ".metadata" or e.name.endswith(".distcp")]
        load = lambda: read_dcp(place, folder)  # noqa: E731
    elif is_zero_folder(list(names)):
        files = [e.path for e in entries if not e.folder and e.name.endswith(".pt")]
        load = lambda: read_zero(place, folder)  # noqa: E731
    elif indexes:
        index = next((n for n in indexes if "safetensors" in n), indexes[0])
        files = [e.path for e in entries if e.name == index or SHARD.match(e.name)]
        load = lambda: read_indexed(place, folder, index)  # noqa: E731
    elif marked and single is not None:
        path = names[single].path
        files = [path]
        if zero and names[single].size < 1 << 16:
            files += [e.path for e in place.entries(zero[-1].path) if not e.folder]
            load = lambda: _placeholder_or_zero(place, path, zero[-1].path)  # noqa: E731
        else:
            load = lambda: read_content(place.blob(path))  # noqa: E731
    elif marked and (shards := [n for n in sorted(names) if SHARD.match(n)]):
        files = [names[n].path for n in shards]
        load = lambda: read_numbered(place, folder, shards)  # noqa: E731
    elif marked and (inner := _inner_folder(entries)) is not None:
        files, load = _of_inner(place, inner)
    if load is None:
        return None
    own = [names[PurePosixPath(f).name] for f in files if PurePosixPath(f).name in names]
    return Unit(
        name=PurePosixPath(folder.rstrip("/")).name or folder,
        path=folder,
        folder=folder,
        group=str(PurePosixPath(folder).parent),
        files=tuple(files),
        size=sum(max(e.size, 0) for e in own),
        modified=max((e.modified for e in own), default=0.0),
        load=load,
        whole_folder=True,
    )


def _inner_folder(entries: list[Entry]) -> Entry | None:
    for start in ("pytorch_model_fsdp", "global_step"):
        found = [e for e in entries if e.folder and e.name.startswith(start)]
        if found:
            return found[-1]
    return None


def _of_inner(place: Place, inner: Entry) -> tuple[list[str], Callable[[], Content]]:
    files = [e.path for e in place.entries(inner.path) if not e.folder]
    if inner.name.startswith("global_step"):
        return files, lambda: read_zero(place, inner.path)
    return files, lambda: read_dcp(place, inner.path)


def _placeholder_or_zero(place: Place, path: str, zero: str) -> Content:
    """Under ZeRO-3 the small file beside the shards holds names with 0 elements."""
    content = read_content(place.blob(path))
    values = list(content.tree.values()) if isinstance(content.tree, dict) else []
    empty = values and all(getattr(t, "numel", 1) == 0 for t in values)
    return read_zero(place, zero) if empty else content


def _shard_unit(place: Place, folder: str, stem: str, entries: list[Entry]) -> Unit:
    names = [entry.name for entry in entries]
    return Unit(
        name=stem,
        path=joined(folder, names[0]),
        folder=folder,
        group=folder,
        files=tuple(entry.path for entry in entries),
        size=sum(entry.size for entry in entries),
        modified=max(entry.modified for entry in entries),
        load=lambda: read_numbered(place, folder, names),
    )
