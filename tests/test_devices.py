"""Every row on a device that stands in for a GPU, and on a GPU if there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_devices_give_the_rows_of_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/devices"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-1000:]
