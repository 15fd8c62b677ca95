"""The gate answers at once: its own processor time, start to end, on a real table."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plastiscope.store import Row

Maker = Callable[..., Path]
RANK = Row("effective_rank", "feature", 10.0, "fc1", 0, tokens="all", rows=64, columns=32)
MAIN = "from plastiscope.cli import main; main()"


def seconds(folder: Path, *arguments: str) -> float:
    """User and system time of a command; not wall time, which other processes stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], cwd=folder, capture_output=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_check_takes_less_than_a_second(make: Maker, tmp_path: Path) -> None:
    rows = [replace(RANK, component=f"c{i}", block=b) for i in range(20) for b in range(12)]
    make("out", dict.fromkeys(range(10), rows))
    taken = min(seconds(tmp_path, "check", "out") for _ in range(3))
    assert 0 < taken < 1.0


def test_help_and_a_wrong_rule_are_as_quick(tmp_path: Path) -> None:
    (tmp_path / "plastiscope.toml").write_text("[check]\nruls = 1\n", "utf-8")
    assert min(seconds(tmp_path, "check", "--help") for _ in range(2)) < 1.0
    assert min(seconds(tmp_path, "check", "out") for _ in range(2)) < 1.0
