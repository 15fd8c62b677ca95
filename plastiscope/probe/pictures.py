"""Images from files, prepared as the model's own preprocessing would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe.draw import spread

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".pgm", ".ppm")


def find_images(folder: Path) -> list[Path]:
    """The image files of a folder and its subfolders, in order of path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def read_folder(
    folder: Path, inputs: Inputs, settings: Mapping[str, Any], size: int
) -> tuple[dict[str, Tensor], list[str]]:
    """At most `size` images of a folder, spread evenly; subfolders are classes in order of name.

    `settings` is the model's preprocessor_config.json, {} when there's none.
    """
    files = find_images(folder)
    chosen = spread(files, size)
    batch, notes = prepare(chosen, inputs, settings)
    classes = sorted({path.relative_to(folder).parts[0] for path in files if path.parent != folder})
    if len(chosen) < len(files):
        notes.append(f"{len(chosen)} of {len(files)} images")
    if classes and all(path.parent != folder for path in files):
        numbers = {name: _class_number(name, at, classes) for at, name in enumerate(classes)}
        labels = [numbers[path.relative_to(folder).parts[0]] for path in chosen]
        batch["labels"] = torch.tensor(labels)
        notes.append(f"labels from {len(classes)} folders in order of name")
    return batch, notes


def _class_number(name: str, at: int, classes: Sequence[str]) -> int:
    return int(name) if all(each.isdigit() for each in classes) else at


def prepare(
    files: Sequence[Path | BinaryIO], inputs: Inputs, settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], list[str]]:
    """Images scaled so that they cover the model's size, cropped at the centre, normalised."""
    if inputs.kind != "image":
        raise UsageError(f"the probe holds images, but the model takes {inputs.kind} inputs")
    channels, high, wide = inputs.shape
    pixels = torch.stack([_read(file, channels, high, wide) for file in files]) / 255
    mean = settings.get("image_mean") or inputs.mean
    std = settings.get("image_std") or inputs.std
    if settings.get("do_normalize") is False or not mean or not std or len(mean) != channels:
        return {"inputs": pixels}, [f"{high}x{wide} centre crops scaled to 0..1, not normalised"]
    centre, spread_ = (torch.tensor(part).reshape(1, -1, 1, 1) for part in (mean, std))
    said = f"{high}x{wide} centre crops normalised by the model's mean and std"
    return {"inputs": (pixels - centre) / spread_}, [said]


def _read(file: Path | BinaryIO, channels: int, high: int, wide: int) -> Tensor:
    try:
        with Image.open(file) as opened:
            image = opened.convert("L" if channels == 1 else "RGB")
    except (UnidentifiedImageError, OSError) as error:
        name = file.name if isinstance(file, Path) else "a stored image"
        raise UsageError(f"the probe's {name} isn't a readable image") from error
    scale = max(high / image.height, wide / image.width)
    covering = (max(wide, round(image.width * scale)), max(high, round(image.height * scale)))
    image = image.resize(covering, Image.Resampling.BICUBIC)
    left, top = (covering[0] - wide) // 2, (covering[1] - high) // 2
    image = image.crop((left, top, left + wide, top + high))
    values = torch.from_numpy(np.asarray(image, dtype=np.float32).copy())
    return values.unsqueeze(0) if channels == 1 else values.permute(2, 0, 1)
