"""Only when they are named: `pytest tests/devices`. A device made of the CPU stays registered until
its process ends, and others ask for it: tests/test_devices.py gives it one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    return None if any(HERE in (path, *path.parents) for path in named) else True
