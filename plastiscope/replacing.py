"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UsageError


class replacing:  # noqa: N801
    """Context manager: gives a temporary path beside `file`, which replaces it on success."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Path:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(
                prefix=".", suffix=self.file.suffix, dir=self.file.parent
            )
        except OSError as error:
            where = self.file.parent
            raise UsageError(f"can't write in {where}: {error.strerror}: choose another") from error
        os.close(handle)
        self.partial = Path(name)
        return self.partial

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            mask = os.umask(0)
            os.umask(mask)
            self.partial.chmod(0o666 & ~mask)
            try:
                self.partial.replace(self.file)
            except OSError as error:
                self.partial.unlink(missing_ok=True)
                why = error.strerror
                raise UsageError(f"can't write {self.file}: {why}: choose another") from error
        else:
            self.partial.unlink(missing_ok=True)
