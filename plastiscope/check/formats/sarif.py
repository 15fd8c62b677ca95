"""SARIF 2.1.0 for code-scanning dashboards: a result for each finding, worst first."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..findings import GAPS, NOTES, REGRESSION, Finding, Result

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"fail": "error", "warn": "warning", "informational": "note"}


def render(result: Result) -> str:
    """One run of the tool. A finding's place is a logical location; its file the tables' folder."""
    driver = {
        "name": "plastiscope",
        "version": version("plastiscope"),
        "rules": _rules(result),
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(result)],
        "columnKind": "unicodeCodePoints",
        "results": [_result(result, f) for f in result.findings],
    }
    content = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _rules(result: Result) -> list[dict[str, Any]]:
    """The gate's rules, and one for each kind of finding that belongs to none."""
    rules = {r.name: r.reason or f"{r.metric}, bad when it moves {r.bad}" for r in result.rules}
    loose = {f.kind for f in result.findings if f.rule not in rules}
    rules |= {k: {**GAPS, **NOTES, REGRESSION: REGRESSION}[k] for k in sorted(loose)}
    return [{"id": name, "shortDescription": {"text": text}} for name, text in rules.items()]


def _invocation(result: Result) -> dict[str, Any]:
    return {
        "executionSuccessful": True,
        "exitCode": result.status,
        "exitCodeDescription": result.verdict,
    }


def _result(result: Result, finding: Finding) -> dict[str, Any]:
    names = [rule["id"] for rule in _rules(result)]
    rule = finding.rule if finding.rule in names else finding.kind
    text = "\n".join((finding.message, *result.look(finding)))
    properties = {
        name: getattr(finding, name)
        for name in ("kind", "run", "step", "before", "after")
        if getattr(finding, name) not in (None, "")
    }
    return {
        "ruleId": rule,
        "ruleIndex": names.index(rule),
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [_location(result, finding)],
        "partialFingerprints": {"plastiscope/v1": _identity(finding)},
        "properties": properties,
    }


def _location(result: Result, finding: Finding) -> dict[str, Any]:
    folder = Path(result.out or "plastiscope-out", "metrics", finding.run).as_posix()
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(folder)},
            "region": {"startLine": 1},
        }
    }
    if finding.series is not None:
        name = f"{finding.run}/{finding.series.where}/{finding.series.what}"
        location["logicalLocations"] = [{"fullyQualifiedName": name, "kind": "member"}]
    return location


def _identity(finding: Finding) -> str:
    """The same finding has the same identity in the next run of the gate."""
    place = "" if finding.series is None else f"{finding.series.where} {finding.series.what}"
    text = "\n".join((finding.kind, finding.rule, finding.run, place))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
