"""Synthetic tables: a few lines make a run on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from plastiscope import store
from plastiscope.store import Row

Maker = Callable[..., Path]


def write_run(
    out: Path,
    steps: Mapping[int, list[Row]],
    run: str = "r",
    probe: str | None = "digits@1",
) -> Path:
    """Write OUT/metrics/RUN with one checkpoint a step; rows that replay needs get the probe."""
    for step, rows in steps.items():
        name = f"c{step:06d}"
        shared = {"run": run, "checkpoint": name, "step": step, "task": None}
        shared |= {"branch": "raw", "checkpoint_fingerprint": f"{run}{step}"}
        probed = [r if r.subject == "weight" or r.probe else replace(r, probe=probe) for r in rows]
        store.write(store.checkpoint_file(out, run, name), probed, shared, "k", {})
    return out


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """make(name, {step: rows}, ...) writes an OUT folder below tmp_path and returns it."""

    def make_one(name: str, steps: Mapping[int, list[Row]], **options: str | None) -> Path:
        return write_run(tmp_path / name, steps, **options)

    return make_one
