"""Runs each piece of work in a process of its own and sets its time and memory against another's.

A piece of work is a function `prepare()` of a bench module that builds what is needed and returns
the function to be timed. Both of a pair are prepared, then run by turns, so that what else the
machine does meets both. A piece's memory is the growth of its process's peak in the first run; its
time the best of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREADS = os.environ.get("BENCH_THREADS", "2")
WHOLE = "BENCH_WHOLE" in os.environ
"""Whether what takes the other side ten minutes is run whole."""
ROUNDS, ENOUGH, TOO_MUCH = 40, 10.0, 60.0
"""At most so many rounds: fewer once both took so many seconds in all, or one so many."""

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

print("READY", flush=True)
for _ in sys.stdin:
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    work()
    found = {"seconds": time.perf_counter() - start, "busy": time.process_time() - cpu}
    print("RESULT " + json.dumps({**found, "bytes": peak() - before}), flush=True)
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


@dataclass
class Worker:
    """A prepared piece of work in a process with two threads, and what its runs took."""

    name: str
    process: subprocess.Popen[str]
    errors: Path
    runs: list[Measured] = field(default_factory=list)

    def answer(self, word: str) -> str:
        """The rest of the next line that starts with a word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self.name} failed:\n{self.errors.read_text()[-2000:]}")

    def run(self) -> None:
        """Once."""
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        self.runs.append(Measured(**json.loads(self.answer("RESULT "))))

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def best(self) -> Measured:
        return Measured(
            min(run.seconds for run in self.runs),
            min(run.busy for run in self.runs),
            self.runs[0].bytes,
        )


@contextlib.contextmanager
def prepared(module: str, name: str) -> Iterator[Worker]:
    """`name` of a bench module, ready to be run."""
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), THREADS)}
    # A waiting thread that spins takes the core from the one it waits for on a busy machine.
    environment["OMP_WAIT_POLICY"] = "passive"
    with tempfile.NamedTemporaryFile("w+", suffix=".txt") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, module, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        try:
            worker = Worker(f"{module}.{name}", process, Path(errors.name))
            worker.answer("READY")
            yield worker
        finally:
            process.kill()
            process.wait()


def compare(
    module: str, work: str, ours: str, against: str, theirs: str, target: Target, parts: int = 1
) -> Comparison:
    """Both by turns, each in its own process."""
    with prepared(module, ours) as one, prepared(module, theirs) as other:
        for _ in range(ROUNDS):
            one.run()
            other.run()
            taken = one.seconds, other.seconds
            if min(taken) > ENOUGH or max(taken) > TOO_MUCH:
                break
        return Comparison(work, against, one.best, other.best, target, parts)
