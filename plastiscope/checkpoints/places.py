"""Folders that can be listed and files that can be read: on this machine, or behind a URL."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from plastiscope.checkpoints.blobs import Blob, RemoteBlob, local, retried, without_secrets
from plastiscope.errors import UnreadableError, UsageError

_MAX_JSON = 1 << 26
# The coarsest clock of a file system, in nanoseconds: a second change within it leaves no trace.
_SETTLED = 2_000_000_000


@dataclass(frozen=True)
class Entry:
    """One name in a folder. `link` is a symbolic link's target, `modified` seconds or 0."""

    name: str
    path: str
    folder: bool
    size: int
    link: str | None = None
    modified: float = 0.0


class Place(Protocol):
    """A file system: the local one, or any of fsspec's."""

    remote: bool

    def entry(self, path: str) -> Entry | None:
        """What lies at `path`; None for nothing."""

    def entries(self, path: str) -> list[Entry]:
        """The names in a folder, sorted."""

    def blob(self, path: str) -> Blob:
        """A file's bytes."""

    def identity(self, path: str) -> str | None:
        """A hash of the content that the store itself keeps, if it does."""

    def stamp(self, path: str) -> str | None:
        """What is the same while the file is ("absent" for none); None where a change made right
        now couldn't be told."""

    def shown(self, path: str) -> str:
        """The path or URL as it may be printed and opened again."""


class LocalPlace:
    """This machine's file system."""

    remote = False

    def entry(self, path: str) -> Entry | None:
        where = Path(path)
        return _local_entry(where) if where.exists() else None

    def entries(self, path: str) -> list[Entry]:
        try:
            return sorted((_local_entry(p) for p in Path(path).iterdir()), key=lambda e: e.name)
        except OSError as error:
            raise UnreadableError(f"{path}: {error.strerror or type(error).__name__}") from None

    def blob(self, path: str) -> Blob:
        return local(Path(path))

    def identity(self, path: str) -> str | None:
        return None

    def stamp(self, path: str) -> str | None:
        try:
            status = Path(path).stat()
        except OSError:
            return "absent"
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        if time.time_ns() - changed < _SETTLED:
            return None
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"

    def shown(self, path: str) -> str:
        return path


def _local_entry(path: Path) -> Entry:
    link = str(path.readlink()) if path.is_symlink() else None
    try:
        status = path.stat()
        return Entry(path.name, str(path), path.is_dir(), status.st_size, link, status.st_mtime)
    except OSError:
        return Entry(path.name, str(path), False, -1, link)


class RemotePlace:
    """An fsspec file system."""

    remote = True

    def __init__(self, system: Any) -> None:
        self._system = system
        # A request for each question would cost more than the reading.
        self._listed: dict[str, dict[str, Entry]] = {}
        self._identities: dict[str, str | None] = {}

    def entry(self, path: str) -> Entry | None:
        folder = path.rstrip("/").rpartition("/")[0]
        if folder in self._listed:
            return self._listed[folder].get(path.rstrip("/"))

        def look() -> Entry | None:
            try:
                return _remote_entry(self._system.info(path))
            except FileNotFoundError:
                return None

        return retried(look, path)

    def entries(self, path: str) -> list[Entry]:
        found = retried(lambda: self._system.ls(path, detail=True), path)
        entries = [_remote_entry(info) for info in found]
        here = path.rstrip("/")
        inside = [e for e in entries if e.name and e.path.rstrip("/") != here]
        self._listed[here] = {e.path.rstrip("/"): e for e in inside}
        return sorted(inside, key=lambda e: e.name)

    def blob(self, path: str) -> Blob:
        entry = self.entry(path)
        if entry is None or entry.size < 0:
            raise UnreadableError(
                f"{without_secrets(path)}: no such object, or one without a known size"
            )
        return RemoteBlob(self._system, path, entry.size)

    def stamp(self, path: str) -> str | None:
        return "absent" if self.entry(path) is None else self.identity(path)

    def identity(self, path: str) -> str | None:
        if path not in self._identities:
            self._identities[path] = self._identified(path)
        return self._identities[path]

    def _identified(self, path: str) -> str | None:
        info = retried(lambda: self._system.info(path), path)
        for key in ("ETag", "etag", "md5Hash", "content_md5", "blob_id", "sha256"):
            if info.get(key):
                return f"{key.lower()}:{info[key]}:{info.get('size')}"
        return None

    def shown(self, path: str) -> str:
        return without_secrets(str(self._system.unstrip_protocol(path)))


def _remote_entry(info: dict[str, Any]) -> Entry:
    path = str(info["name"])
    size = info.get("size")
    return Entry(
        name=without_secrets(path).rstrip("/").rsplit("/", 1)[-1],
        path=path,
        folder=info.get("type") == "directory",
        size=int(size) if size is not None else -1,
    )


def open_place(path: str | Path) -> tuple[Place, str]:
    """The file system of a path or URL, and the path within it.

    Raises:
        UsageError: fsspec (or the file system behind it) isn't installed; the URL is wrong.
    """
    text = str(path)
    if not re.match(r"[a-zA-Z][a-zA-Z0-9+.\-]+:(//|:)", text):
        return LocalPlace(), str(Path(text))
    if text.startswith("file://"):
        return LocalPlace(), str(Path(text[len("file://") :]))
    try:
        import fsspec
    except ImportError:
        raise UsageError(
            f"{without_secrets(text)}: reading a URL needs fsspec: "
            "python -m pip install 'plastiscope[remote]'"
        ) from None
    try:
        system, inner = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise UsageError(f"{without_secrets(text)}: {error}") from None
    except Exception as error:
        raise UsageError(
            f"{without_secrets(text)}: can't be opened ({type(error).__name__})"
        ) from None
    return RemotePlace(system), inner.rstrip("/") or inner


def read_json(place: Place, path: str) -> dict[str, Any]:
    """A JSON object beside the weights; empty when absent or broken."""
    try:
        if place.entry(path) is None:
            return {}
        value = json.loads(place.blob(path).read(0, _MAX_JSON))
    except (UnreadableError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def joined(folder: str, name: str) -> str:
    """A path below a folder, with forward slashes."""
    return f"{folder.rstrip('/')}/{name}" if folder else name
