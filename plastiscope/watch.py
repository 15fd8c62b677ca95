"""Follow a live training directory: measure each checkpoint once it is whole, apply the rules.

A file is whole when two looks, an interval apart, find it readable with the same identity, size
and time; until then it is hidden from the analysis. Nothing is remembered but the tables
themselves, so a restart goes on where the last one was killed.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import pyarrow.parquet as pq

from . import store
from .analysis import analyze
from .check import Result, Rule, check
from .check.findings import Finding
from .config import Settings
from .errors import (
    FAILED,
    NOT_ENOUGH_EVIDENCE,
    PASSED,
    NotEnoughEvidenceError,
    UnreadableError,
    UsageError,
)

HOPELESS = frozenset({"probe", "version", "architecture", "baseline", "unreadable"})
"""Kinds of missing evidence that no further checkpoint can mend."""

Look = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Watch:
    """What to follow and what to do.

    `interval` is in seconds. `most` ends the watch after so many checkpoints, `once` after one
    pass over what is whole now. `on_fail` is a shell command; without it the first failure ends
    the watch. `say` gets one line a checkpoint.
    """

    run: Path
    settings: Settings
    baseline: Path | None = None
    rules: tuple[Rule, ...] | None = None
    interval: float = 10.0
    on_fail: str | None = None
    once: bool = False
    most: int | None = None
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        if re.match(r"[a-z][a-z0-9+.-]+:/", str(self.run)):
            raise UsageError(f"watch follows a local folder, not {self.run}")
        if self.run.is_file():
            raise UsageError(f"watch follows a folder, {self.run} is a file")
        if self.interval <= 0:
            raise UsageError(f"--interval must be above 0, not {self.interval:g}")
        if self.most is not None and self.most < 1:
            raise UsageError(f"--max must be at least 1, not {self.most}")


class Ended(Exception):  # noqa: N818
    """The watch is over, with this exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def follow(watch: Watch) -> int:
    """Follow the run until a rule fails (without `on_fail`), or until `once` or `most` end it.

    Returns the exit status: 1 when a rule failed at any checkpoint, 4 when a new value was no
    number or nothing could be decided, else 0. Raises UsageError for settings that don't fit.
    """
    watcher = _Watcher(watch)
    try:
        while True:
            watcher.look()
            if watch.once and watcher.looks > 1:
                return watcher.status()
            time.sleep(watch.interval)
    except Ended as end:
        return end.status


def take_look(run: Path, out: Path) -> dict[str, tuple[int, int, int]]:
    """Every readable file below the run: its identity, size and time. Hidden and temporary files
    and the tables themselves are passed over."""
    found: dict[str, tuple[int, int, int]] = {}
    for folder, folders, names in os.walk(run):
        here = Path(folder)
        folders[:] = [d for d in folders if not d.startswith(".") and (here / d) != out]
        for name in names:
            file = here / name
            if name.startswith(".") or name.endswith((".tmp", ".part", "~")):
                continue
            facts = _facts(file)
            if facts is not None:
                found[file.relative_to(run).as_posix()] = facts
    return found


def _facts(file: Path) -> tuple[int, int, int] | None:
    """Identity, size and time of a file; None when it is gone or not ours to read yet."""
    try:
        with file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def unsettled(before: Look, now: Look) -> list[str]:
    """Patterns of what has changed since the look before: each file, and the folders it is in,
    since a folder with a growing file is no whole checkpoint."""
    moving = {name for name in now if before.get(name) != now[name]}
    moving |= {str(p) for name in moving for p in PurePosixPath(name).parents if str(p) != "."}
    return sorted(glob.escape(name) for name in moving)


class _Watcher:
    """The state of a watch; also the reporter that the analysis talks to."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.looks = 0
        self.last: Look = {}
        self.measured: Look = {}
        self.told = 0
        self.said: set[str] = set()
        self.run = ""
        self.resumed: tuple[str, int] | None = None
        self.retry = True
        self.judged = False
        self.worst = PASSED
        self.latest = NOT_ENOUGH_EVIDENCE

    def status(self) -> int:
        """The exit status of a watch that ends by itself: the worst failure, else the latest
        verdict."""
        return self.worst or self.latest

    def look(self) -> None:
        """One look; measures what is whole and wasn't measured as it is now."""
        now = take_look(self.watch.run, self.watch.settings.out.absolute())
        patterns = unsettled(self.last, now)
        whole = {n: facts for n, facts in now.items() if self.last.get(n) == facts}
        self.last = now
        self.looks += 1
        if any(self.measured.get(name) != facts for name, facts in whole.items()):
            self._measure(patterns, whole)

    def _measure(self, patterns: Sequence[str], whole: Look) -> None:
        settings = self.watch.settings
        settings = replace(settings, exclude=(*settings.exclude, *patterns))
        try:
            analysis = analyze(self.watch.run.absolute(), settings, self, retry=self.retry)
        except OSError as error:
            # A checkpoint may be deleted or replaced at any moment; the next look sees what is.
            self.note(f"waiting: {error}")
            return
        except (UnreadableError, NotEnoughEvidenceError) as error:
            self.note(f"waiting: {error}")
            self.measured = whole
            return
        self.measured = whole
        # What failed was tried again: the next time is when its checkpoint changes, or a restart.
        self.retry = False
        for line in analysis.failures:
            self.note(f"not measured: {line}")
        for analyzed in analysis.runs:
            present = {c.name for c in analyzed.run.checkpoints}
            forget_renamed(settings.out, analyzed.run.name, present)
        if not self.judged and self.resumed is not None:
            # Nothing new since the watch was stopped: say where the run stands.
            self._judge(*self.resumed)

    def note(self, line: str) -> None:
        """A line that is said once, however often it comes up."""
        if line not in self.said:
            self.said.add(line)
            self.watch.say(line)

    def say(self, line: str) -> None:
        self.note(line)

    def start(self, run: str, total: int) -> None:
        self.run = run

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None:
        """A checkpoint's rows are there: say so and apply the rules, once."""
        if resumed:
            self.resumed = (checkpoint, step)
            return
        if not self._as_seen(checkpoint):
            # It changed while it was read: these rows are of no checkpoint that ever was.
            out = self.watch.settings.out
            store.checkpoint_file(out, self.run, checkpoint).unlink(missing_ok=True)
            return
        self.told += 1
        self._judge(checkpoint, step)
        if self.watch.most is not None and self.told >= self.watch.most:
            raise Ended(self.status())

    def _as_seen(self, checkpoint: str) -> bool:
        """Whether the checkpoint's files are still what the last look saw."""
        mine = {
            name: facts
            for name, facts in self.last.items()
            if name == checkpoint or name.startswith(f"{checkpoint}/")
        }
        return all(_facts(self.watch.run / name) == facts for name, facts in mine.items())

    def _judge(self, checkpoint: str, step: int) -> None:
        result = self._check()
        failing = [f for f in result.findings if f.fails and f.kind in ("regression", "null")]
        self.judged, self.latest = True, result.status
        self.watch.say(f"{self.run} step {step} {checkpoint}: {_told(result, failing)}")
        self._act(result, failing, checkpoint, step)

    def _check(self) -> Result:
        watch = self.watch
        try:
            return check(
                watch.settings.out, watch.baseline, watch.rules, runs=[self.run], growing=True
            )
        except NotEnoughEvidenceError as error:
            return Result((Finding("nothing", "fail", str(error)),), 0, ())

    def _act(self, result: Result, failing: Sequence[Finding], checkpoint: str, step: int) -> None:
        hopeless = [f for f in result.gaps if f.kind in HOPELESS]
        for finding in (*failing, *hopeless):
            self.watch.say(f"    {finding.message}")
        if hopeless and not failing:
            raise Ended(NOT_ENOUGH_EVIDENCE)
        if not failing:
            return
        status = FAILED if result.regressions else NOT_ENOUGH_EVIDENCE
        self.worst = status if self.worst in (PASSED, NOT_ENOUGH_EVIDENCE) else self.worst
        if self.watch.on_fail is None:
            raise Ended(self.worst)
        self._call(self.watch.on_fail, failing, checkpoint, step)

    def _call(self, command: str, failing: Sequence[Finding], checkpoint: str, step: int) -> None:
        """Run the user's command; what it needs to know is in its environment."""
        facts = {
            "PLASTISCOPE_RUN": self.run,
            "PLASTISCOPE_CHECKPOINT": checkpoint,
            "PLASTISCOPE_STEP": str(step),
            "PLASTISCOPE_FINDINGS": "\n".join(f.message for f in failing),
        }
        done = subprocess.run(command, shell=True, env={**os.environ, **facts}, check=False)
        if done.returncode:
            self.watch.say(f"    --on-fail ended with {done.returncode}: {command}")


def _told(result: Result, failing: Sequence[Finding]) -> str:
    if failing:
        more = f" (and {len(failing) - 1} more)" if len(failing) > 1 else ""
        return f"FAILED {failing[0].rule}{more}"
    if result.gaps:
        return f"not enough evidence yet: {result.gaps[0].message}"
    return result.verdict


def forget_renamed(out: Path, run: str, present: set[str]) -> None:
    """Remove the rows of a checkpoint that is gone and whose content was measured under another
    name: it was renamed, not lost."""
    seen: dict[tuple[str, int], list[tuple[Path, str]]] = {}
    for file in store.metric_files(out):
        columns = ["run", "checkpoint", "step", "checkpoint_fingerprint"]
        with pq.ParquetFile(file) as opened:
            rows = next(opened.iter_batches(1, columns=columns), None)
        if rows is None or not len(rows):
            continue
        row = rows.to_pylist()[0]
        if row["run"] == run:
            key = (row["checkpoint_fingerprint"], row["step"])
            seen.setdefault(key, []).append((file, row["checkpoint"]))
    for copies in seen.values():
        if any(name in present for _, name in copies):
            for file, name in copies:
                if name not in present:
                    file.unlink(missing_ok=True)
