"""Workflow commands of GitHub Actions: each finding becomes an annotation of the job."""

from __future__ import annotations

from ..findings import Finding, Result

_LEVELS = {"fail": "error", "warn": "warning", "informational": "notice"}


def render(result: Result) -> str:
    """One line a finding (notes left out), worst first, then the verdict."""
    lines = [_line(result, f) for f in result.findings if f.severity != "informational"]
    level = "notice" if result.passed else "error"
    lines.append(f"::{level} title=plastiscope check::{_data(result.verdict)}")
    return "\n".join(lines) + "\n"


def _line(result: Result, finding: Finding) -> str:
    title = f"plastiscope: {finding.rule or finding.kind}"
    message = "\n".join((finding.message, *result.look(finding)))
    return f"::{_LEVELS[finding.severity]} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
