"""A probe at an address: fetched whole into a temporary file, once."""

from __future__ import annotations

import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plastiscope.errors import UsageError

TIMEOUT_SECONDS = 60


def is_address(spec: str) -> bool:
    """Whether the text is an address (https://, s3:// ...), not a path."""
    return "://" in spec


def shown(address: str) -> str:
    """The address without its query, which may be a signature."""
    return address.split("?", 1)[0]


@contextmanager
def fetched(address: str) -> Iterator[Path]:
    """The file at an address, under its own name, until the block ends."""
    name = Path(urllib.parse.urlsplit(address).path).name or "probe"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        try:
            with _open(address) as source, path.open("wb") as file:
                shutil.copyfileobj(source, file)
        except (OSError, ValueError) as error:
            # The reason may repeat the signed address, so it is told by its kind.
            kind = type(error).__name__
            raise UsageError(f"--probe {shown(address)} can't be fetched ({kind})") from error
        yield path


def _open(address: str) -> Any:
    if address.startswith(("http://", "https://", "file://")):
        return urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS)
    try:
        import fsspec
    except ImportError as error:
        raise UsageError(
            f"--probe {shown(address)} needs fsspec: python -m pip install 'plastiscope[remote]'"
        ) from error
    return fsspec.open(address, "rb").open()
