"""The gate's settings: the table [check] of plastiscope.toml or [tool.plastiscope.check]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import parse_toml, read_table
from ..errors import UnreadableError, UsageError, unknown
from .defaults import BASELINE_RULES, RUN_RULES
from .rules import Rule, parse_rule

KEYS = ("rules", "defaults", "baseline", "allow_missing", "allow_missing_baseline")


@dataclass(frozen=True)
class CheckSettings:
    """What a configuration file says of the gate.

    `rules` of the file; with `defaults` they are added to the default set, whose rules of the same
    name they replace. `baseline` is relative to the file. `allow_missing`: patterns of what may be
    gone from a new run.
    """

    rules: tuple[Rule, ...] = ()
    defaults: bool = False
    baseline: Path | None = None
    allow_missing: tuple[str, ...] = ()
    allow_missing_baseline: bool = False

    def chosen(self, baseline: bool) -> tuple[Rule, ...] | None:
        """The rules to apply; None for the default set alone."""
        if not self.rules:
            return None
        if not self.defaults:
            return self.rules
        names = {rule.name for rule in self.rules}
        base = BASELINE_RULES if baseline else RUN_RULES
        return (*(rule for rule in base if rule.name not in names), *self.rules)


def read_check_settings(file: Path | None = None, folder: Path | None = None) -> CheckSettings:
    """The settings of a rules file, or of the folder's (the working folder's) configuration.

    Raises UsageError for an unknown key or a wrong value, UnreadableError when there is no file.
    """
    folder = folder or Path.cwd()
    if file is None:
        return _settings(read_table(folder).get("check", {}), folder)
    if not file.is_file():
        raise UnreadableError(f"no rules file at {file}: `plastiscope check OUT --init` writes one")
    return _settings(_check_table(parse_toml(file)), file.parent)


def read_rules(file: Path) -> tuple[Rule, ...]:
    """The rules of a file."""
    return read_check_settings(file).rules


def _check_table(table: Mapping[str, Any]) -> Any:
    """The gate's table of a plastiscope.toml, a pyproject.toml, or a file that is nothing else."""
    if "check" in table:
        return table["check"]
    if "tool" in table:
        return table["tool"].get("plastiscope", {}).get("check", {})
    return table


def _settings(table: Any, folder: Path) -> CheckSettings:
    if not isinstance(table, Mapping):
        raise UsageError("configuration key 'check' takes a table, [check]")
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            raise unknown("key of [check]", key, KEYS)
        values[name] = value
    settings = CheckSettings(
        rules=_rules(values.get("rules", [])),
        defaults=_flag(values, "defaults"),
        allow_missing=_names(values.get("allow_missing", [])),
        allow_missing_baseline=_flag(values, "allow_missing_baseline"),
    )
    baseline = values.get("baseline")
    if baseline is None:
        return settings
    if not isinstance(baseline, str):
        raise UsageError(f"key 'baseline' of [check] takes a path, not {baseline!r}")
    return replace(settings, baseline=folder / baseline)


def _rules(tables: Any) -> tuple[Rule, ...]:
    if not isinstance(tables, list) or not all(isinstance(t, Mapping) for t in tables):
        raise UsageError("key 'rules' of [check] takes tables: [[check.rules]]")
    return tuple(parse_rule(table, n) for n, table in enumerate(tables, 1))


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise UsageError(f"key {name!r} of [check] takes true or false, not {value!r}")
    return value


def _names(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
        raise UsageError(f"key 'allow_missing' of [check] takes a list of patterns, not {value!r}")
    return tuple(items)
