"""Find a run's checkpoints, order them, and read one tensor at a time; one format a file."""

from __future__ import annotations

from plastiscope.checkpoints.discover import discover
from plastiscope.checkpoints.options import Options
from plastiscope.checkpoints.run import Break, Checkpoint, Run, Skipped, State, TensorInfo
from plastiscope.checkpoints.seen import Seen

__all__ = [
    "Break",
    "Checkpoint",
    "Options",
    "Run",
    "Seen",
    "Skipped",
    "State",
    "TensorInfo",
    "discover",
]
