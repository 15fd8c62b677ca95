"""Runs each piece of work in a process of its own and sets its time and memory against another's.

A piece of work is a function `prepare()` of a bench module that builds what is needed and returns
the function to be timed. Its memory is the growth of the process's peak while that function first
runs; its time the best of some runs, as many as fit in ten seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREADS = os.environ.get("BENCH_THREADS", "2")

_WORKER = """
import importlib, json, sys, time, warnings
from pathlib import Path
warnings.filterwarnings("ignore")
module, name = sys.argv[1:3]
work = getattr(importlib.import_module(module), name)()

def peak():
    # Of this program alone: getrusage's maximum includes the process that started it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before, grown, times, busy = peak(), None, [], []
while not times or (sum(times) < 10 and len(times) < 20):
    start, cpu = time.perf_counter(), time.process_time()
    work()
    times.append(time.perf_counter() - start)
    busy.append(time.process_time() - cpu)
    grown = peak() - before if grown is None else grown
found = {"seconds": min(times), "busy": min(busy), "bytes": grown}
print("RESULT " + json.dumps(found))
"""


@dataclass(frozen=True)
class Measured:
    """Best time and processor time in seconds, and growth of the peak memory in bytes."""

    seconds: float
    busy: float
    bytes: int


@dataclass(frozen=True)
class Target:
    """What is promised: at least so many times as fast, at most this share of the memory, at most
    so many bytes; None where nothing is."""

    speed: float | None = None
    memory: float | None = None
    bytes: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.speed is not None:
            fast = self.speed >= 1
            parts.append(f"{self.speed:g}x as fast" if fast else f"time x{1 / self.speed:.3g}")
        if self.memory is not None:
            parts.append(f"memory x{self.memory:.3g}")
        if self.bytes is not None:
            parts.append(f"under {self.bytes / 1e9:g} GB")
        return ", ".join(parts) or "-"


@dataclass(frozen=True)
class Comparison:
    """One line of the table; `speed` is how many times as fast, `memory` ours over theirs.

    `parts`: of how many equal parts theirs was measured one.
    """

    work: str
    against: str
    ours: Measured
    theirs: Measured
    target: Target
    parts: int = 1

    @property
    def speed(self) -> float:
        return self.theirs.seconds * self.parts / self.ours.seconds

    @property
    def work_saved(self) -> float:
        """The same of processor time: steadier on a machine that does other things too."""
        return self.theirs.busy * self.parts / self.ours.busy

    @property
    def memory(self) -> float:
        return self.ours.bytes / max(self.theirs.bytes, 1)

    @property
    def met(self) -> bool:
        """Whether all that is promised holds."""
        target = self.target
        return (
            (target.speed is None or self.speed >= target.speed)
            and (target.memory is None or self.memory <= target.memory)
            and (target.bytes is None or self.ours.bytes <= target.bytes)
        )

    def line(self) -> str:
        """A row of a Markdown table."""
        times = "" if self.parts == 1 else f" x {self.parts}"
        verdict = "-" if self.target == Target() else "yes" if self.met else "NO"
        return (
            f"| {self.work} | {self.against} "
            f"| {self.ours.seconds:.2f} s, {self.ours.bytes / 1e6:.0f} MB "
            f"| {self.theirs.seconds:.2f} s{times}, {self.theirs.bytes / 1e6:.0f} MB "
            f"| {self.speed:.2f} | {self.work_saved:.2f} | {self.memory:.2f} "
            f"| {self.target} | {verdict} |"
        )


HEADER = (
    "| work | against | ours | theirs | times as fast | by processor time | memory, ours/theirs "
    "| target | met |\n|---|---|---|---|---|---|---|---|---|"
)


def run(module: str, name: str) -> Measured:
    """Time `name` of a bench module in a fresh process with two threads."""
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), THREADS)}
    # A waiting thread that spins takes the core from the one it waits for on a busy machine.
    environment["OMP_WAIT_POLICY"] = "passive"
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, module, name],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{module}.{name} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(lines[-1].removeprefix("RESULT ")))


def compare(
    module: str, work: str, ours: str, against: str, theirs: str, target: Target, parts: int = 1
) -> Comparison:
    """Ours first, then theirs, each in its own process."""
    return Comparison(work, against, run(module, ours), run(module, theirs), target, parts)
