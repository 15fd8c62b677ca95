"""What `plastiscope check` does, short of parsing its options: decide, tell, return the status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import store
from ..errors import (
    PASSED,
    NotEnoughEvidenceError,
    PlastiscopeError,
    UnreadableError,
    UsageError,
    unknown,
)
from .baseline import write_baseline
from .configuration import CheckSettings, read_check_settings
from .findings import Finding, Result
from .formats import FORMATS
from .gate import baseline_values, check
from .starting import write_starting_rules

BASELINE = Path("plastiscope-baseline.jsonl")


def run_check(
    out: Path,
    baseline: Path | None = None,
    rules: Path | None = None,
    formats: Sequence[str] = ("text",),
    outputs: Sequence[Path] = (),
    runs: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_missing_baseline: bool = False,
) -> int:
    """Check the tables in `out`, write or print the report, and return the exit status.

    Each of `outputs` takes the format at its position, and is there, whole, before this returns;
    the text then goes to standard output. Raises UsageError for options that don't fit.
    """
    _fits(formats, outputs)
    settings = read_check_settings(rules)
    result = _decide(out, baseline, settings, runs, allow_missing, allow_missing_baseline)
    for name, file in zip(formats, outputs, strict=False):
        _write(file, FORMATS[name](result))
    tell(FORMATS["text" if outputs else formats[0]](result))
    return result.status


def _fits(formats: Sequence[str], outputs: Sequence[Path]) -> None:
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if len(formats) != len(outputs) and (outputs or len(formats) != 1):
        raise UsageError(
            f"{len(formats)} --format and {len(outputs)} --output: give one --output for each "
            "--format, or one --format alone for standard output"
        )


def _decide(
    out: Path,
    baseline: Path | None,
    settings: CheckSettings,
    runs: Sequence[str],
    allow_missing: Sequence[str],
    allow_missing_baseline: bool,
) -> Result:
    """The result; tables without rows and files that can't be read are results too, so that a
    report says so."""
    baseline = baseline or settings.baseline
    rules = settings.chosen(baseline is not None)
    try:
        return check(
            out,
            baseline,
            rules,
            runs=runs,
            allow_missing=(*settings.allow_missing, *allow_missing),
            allow_missing_baseline=allow_missing_baseline or settings.allow_missing_baseline,
        )
    except (NotEnoughEvidenceError, UnreadableError) as error:
        return _without(error, out)


def _without(error: PlastiscopeError, out: Path) -> Result:
    kind = "unreadable" if isinstance(error, UnreadableError) else "nothing"
    return Result((Finding(kind, "fail", str(error)),), 0, (), out=str(out))


def _write(file: Path, text: str) -> None:
    try:
        with store.replacing(file) as partial:
            partial.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"can't write {file}: {error.strerror or error}") from error


def tell(text: str) -> None:
    """Print; a reader that has gone away changes nothing about the exit status.

    Raises UsageError when standard output can't be written for another reason (a full disk).
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Nothing more may be flushed into it at exit, which would change the status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"can't write to standard output: {error.strerror}") from error


def run_init(out: Path, baseline: Path | None = None, rules: Path | None = None) -> int:
    """Write a commented rules file from the run at hand, and say where."""
    file = write_starting_rules(out, rules, baseline)
    tell(f"wrote {file}: adjust it, then run `plastiscope check {out}`\n")
    return PASSED


def run_update_baseline(
    out: Path,
    baseline: Path | None = None,
    rules: Path | None = None,
    runs: Sequence[str] = (),
) -> int:
    """Write the values that the rules will want from a baseline, and say where."""
    settings = read_check_settings(rules)
    file = baseline or settings.baseline or BASELINE
    if file.is_dir():
        raise UsageError(f"{file} is a folder: --update-baseline writes a file")
    count = write_baseline(file, baseline_values(out, settings.chosen(True), runs))
    tell(f"wrote {file}: {count} values; commit it\n")
    return PASSED
