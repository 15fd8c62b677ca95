"""JUnit XML as CI servers read it: a suite for each run, a case for each rule.

A regression is a failure, missing evidence an error, a rule that had nothing to look at skipped;
what belongs to no rule is a case of its own, called "evidence".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from ..findings import GAPS, REGRESSION, Finding, Result

# What XML 1.0 can't hold, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
EVIDENCE = "evidence"


def render(result: Result) -> str:
    """The document, with its totals."""
    root = ElementTree.Element("testsuites", name="plastiscope check")
    names = [*result.runs, ""] if any(not f.run for f in result.findings) else list(result.runs)
    for name in names or [""]:
        _suite(root, result, name)
    for total in ("tests", "failures", "errors", "skipped"):
        root.set(total, str(sum(int(suite.get(total, "0")) for suite in root)))
    root.set("time", "0")
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _suite(root: ElementTree.Element, result: Result, run: str) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=f"plastiscope.{run or 'gate'}")
    mine = [f for f in result.findings if f.run == run]
    rules = [rule.name for rule in result.rules] if run else []
    loose = [f for f in mine if f.rule not in rules]
    for name in rules:
        _case(suite, result, run, name, [f for f in mine if f.rule == name])
    if loose or not rules:
        _case(suite, result, run, EVIDENCE, loose)
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    suite.set("tests", str(len(suite)))
    for total, tag in counts.items():
        suite.set(total, str(sum(case.find(tag) is not None for case in suite)))
    suite.set("time", "0")


def _case(
    suite: ElementTree.Element, result: Result, run: str, name: str, findings: Sequence[Finding]
) -> None:
    where = f"plastiscope.{run or 'gate'}"
    case = ElementTree.SubElement(suite, "testcase", classname=where, name=name, time="0")
    failing = [f for f in findings if f.fails and f.kind == REGRESSION]
    lacking = [f for f in findings if f.fails and f.kind in GAPS]
    if failing:
        _told(case, "failure", REGRESSION, result, [*failing, *lacking])
    elif lacking:
        _told(case, "error", lacking[0].kind, result, lacking)
    elif run and name != EVIDENCE and not result.matched.get(name):
        ElementTree.SubElement(case, "skipped", message="the rule found nothing to compare")
    rest = [f for f in findings if not f.fails]
    if rest:
        said = ElementTree.SubElement(case, "system-out")
        said.text = _clean("\n".join(f"{f.severity}: {f.message}" for f in rest))


def _told(
    case: ElementTree.Element, tag: str, kind: str, result: Result, findings: Sequence[Finding]
) -> None:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    message = _clean(findings[0].message + more)
    element = ElementTree.SubElement(case, tag, message=message, type=kind)
    lines = ["\n  ".join((f.message, *result.look(f))) for f in findings]
    element.text = _clean("\n".join(lines))


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)
