"""Runs each piece of work in a process of its own and sets its time and memory against another's.

A piece of work is a function `prepare()` of a bench module that builds what is needed and returns
the function to be timed. Its memory is the growth of the process's peak while that function runs.
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
import importlib, json, resource, sys, time, warnings
warnings.filterwarnings("ignore")
module, name, repeats = sys.argv[1:4]
work = getattr(importlib.import_module(module), name)()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, times, busy = peak(), [], []
for _ in range(int(repeats)):
    start, cpu = time.perf_counter(), time.process_time()
    work()
    times.append(time.perf_counter() - start)
    busy.append(time.process_time() - cpu)
found = {"seconds": min(times), "busy": min(busy), "bytes": peak() - before}
print("RESULT " + json.dumps(found))
"""


@dataclass(frozen=True)
class Measured:
    """Best time and processor time in seconds, and growth of the peak memory in bytes."""

    seconds: float
    busy: float
    bytes: int


@dataclass(frozen=True)
class Comparison:
    """One line of the table; `speed` is how many times as fast, `memory` ours over theirs."""

    work: str
    against: str
    ours: Measured
    theirs: Measured
    target: str

    @property
    def speed(self) -> float:
        return self.theirs.seconds / self.ours.seconds

    @property
    def work_saved(self) -> float:
        """The same of processor time: steadier on a machine that does other things too."""
        return self.theirs.busy / self.ours.busy

    @property
    def memory(self) -> float:
        return self.ours.bytes / max(self.theirs.bytes, 1)

    def line(self) -> str:
        """A row of a Markdown table."""
        return (
            f"| {self.work} | {self.against} | {self.ours.seconds:.2f} s, "
            f"{self.ours.bytes / 1e6:.0f} MB | {self.theirs.seconds:.2f} s, "
            f"{self.theirs.bytes / 1e6:.0f} MB | {self.speed:.2f} | {self.work_saved:.2f} "
            f"| {self.memory:.2f} | {self.target} |"
        )


HEADER = (
    "| work | against | ours | theirs | times as fast | by processor time | memory, ours/theirs "
    "| target |\n"
    "|---|---|---|---|---|---|---|---|"
)


def run(module: str, name: str, repeats: int = 1) -> Measured:
    """Time `name` of a bench module in a fresh process with two threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": THREADS, "MKL_NUM_THREADS": THREADS}
    done = subprocess.run(
        [sys.executable, "-c", _WORKER, module, name, str(repeats)],
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
    module: str, work: str, ours: str, against: str, theirs: str, target: str, repeats: int = 1
) -> Comparison:
    """Ours first, then theirs, each in its own process."""
    return Comparison(
        work, against, run(module, ours, repeats), run(module, theirs, repeats), target
    )
