"""The whole result as one JSON object, without numbers that JSON doesn't know."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from ..findings import Finding, Result

FORMAT = 1


def render(result: Result) -> str:
    """status, verdict, counts, rules and findings; null where there is no value."""
    content = {
        "format": FORMAT,
        "status": result.status,
        "passed": result.passed,
        "verdict": result.verdict,
        "compared": result.compared,
        "out": result.out,
        "baseline": result.baseline,
        "runs": list(result.runs),
        "rules": [asdict(rule) | {"compared": result.matched[rule.name]} for rule in result.rules],
        "findings": [_finding(result, finding) for finding in result.findings],
    }
    return json.dumps(_plain(content), indent=1, allow_nan=False) + "\n"


def _finding(result: Result, finding: Finding) -> dict[str, Any]:
    content = asdict(finding)
    if finding.tolerance is not None:
        content["tolerance"]["decisive"] = finding.tolerance.decisive
    return content | {"look": list(result.look(finding))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
