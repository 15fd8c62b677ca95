"""What a gate looks at: a rule selects series of the table and bounds how far they may move.

A rule fails on a value only when it moved in the bad direction by more than the absolute *and* more
than the relative *and* more than the statistical tolerance, so that a metric near zero can't fail
by a rounding error and a large one can't fail by a trifle.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UsageError, unknown

BAD = ("up", "down", "either")
AGAINST = ("first", "baseline", "trend", "limit")
SEVERITIES = ("fail", "warn", "informational")
HEADS = ("any", "none", "each")
# A tolerance is never below these: sums over threads and devices move the last digits.
ABSOLUTE_FLOOR = 1e-9
RELATIVE_FLOOR = 1e-6
SIGNIFICANT = 3.0


@dataclass(frozen=True)
class Rule:
    """One rule. Every field but `name` is also its key in the configuration file.

    Selection: `metric` exactly; `subject`, `parameters` and `tokens` exactly, any when None;
    `components` by pattern (`fc*`, or `!*.bias` for all others), any when empty; `matrices` only
    what has two sides, no gain, bias or token (of weights); `blocks` as "0",
    "0:6" (end excluded), "-1" or a list, any when None; `heads` any, none (whole layers only) or
    each (heads only); `steps` last, all, or "after N".

    Reference: `against` first (the first checkpoint that the value may be compared with),
    baseline (the baseline run at the same step), trend (what a robust line through the earlier
    checkpoints predicts, or the checkpoint before where that is worse), or limit (the value
    `limit` itself).

    Tolerance, in the direction `bad` (up, down, either): `absolute` in the metric's unit,
    `relative` as a share of the reference, `errors` in standard errors of the difference; a value
    must exceed all of them. `steady` asks that the run, from its first checkpoint on, moved the
    bad way as well: Kendall's tau against time, 0 to 1, over five checkpoints or more (a network
    that dips as it starts to learn, then recovers, isn't falling). `share` of the selected series
    (at least one) must exceed them for the rule to fail; 0 means any single one.

    `severity` fail, warn or informational (listed, never fails). `optional` rules may match
    nothing and, against a trend, may lack the checkpoints for one; `nulls` lists the statuses
    under which a missing value is accepted.
    """

    name: str
    metric: str
    subject: str | None = None
    parameters: str | None = None
    tokens: str | None = None
    components: tuple[str, ...] = ()
    matrices: bool = False
    blocks: tuple[str, ...] | None = None
    heads: str = "any"
    steps: str = "last"
    bad: str = "either"
    against: str = "first"
    limit: float | None = None
    absolute: float = 0.0
    relative: float = 0.0
    errors: float = SIGNIFICANT
    steady: float = 0.0
    share: float = 0.0
    severity: str = "fail"
    optional: bool = False
    nulls: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        _one_of(self, "bad", BAD)
        _one_of(self, "against", AGAINST)
        _one_of(self, "severity", SEVERITIES)
        _one_of(self, "heads", HEADS)
        for name in ("absolute", "relative", "errors", "share", "steady"):
            _tolerance(self, name)
        for name in ("share", "steady"):
            if getattr(self, name) > 1:
                raise UsageError(f"rule {self.name!r}: {name} is at most 1")
        if self.steady and self.against != "first":
            raise UsageError(f"rule {self.name!r}: `steady` goes with against = 'first'")
        if (self.limit is None) is (self.against == "limit"):
            raise UsageError(f"rule {self.name!r}: `limit` and against = 'limit' go together")
        if self.limit is not None and not math.isfinite(self.limit):
            raise UsageError(f"rule {self.name!r}: limit must be a finite number")
        if self.against == "limit" and self.bad == "either":
            raise UsageError(f"rule {self.name!r}: a limit needs bad = 'up' or 'down'")
        if not re.fullmatch(r"last|all|after -?\d+", self.steps):
            raise UsageError(
                f"rule {self.name!r}: steps takes 'last', 'all' or 'after N', not {self.steps!r}"
            )
        for text in self.blocks or ():
            _block_test(self.name, text)

    def takes_component(self, component: str | None) -> bool:
        """Whether the rule's component patterns take this one; a pattern with "!" leaves out."""
        name = component or ""
        wanted = [c for c in self.components if not c.startswith("!")]
        unwanted = [c[1:] for c in self.components if c.startswith("!")]
        return (not wanted or _matches(name, wanted)) and not _matches(name, unwanted)

    def takes_block(self, block: int | None, blocks: int) -> bool:
        """Whether a block is selected; `blocks` is how many there are (for "-1")."""
        if self.blocks is None:
            return True
        if block is None:
            return False
        return any(_in_blocks(text, block, blocks) for text in self.blocks)

    def takes_head(self, head: int | None) -> bool:
        return self.heads == "any" or (self.heads == "each") is (head is not None)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _one_of(rule: Rule, field: str, known: tuple[str, ...]) -> None:
    value = getattr(rule, field)
    if value not in known:
        raise unknown(f"value for {field} of rule {rule.name!r}:", str(value), known)


def _tolerance(rule: Rule, field: str) -> None:
    value = getattr(rule, field)
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(
            f"rule {rule.name!r}: {field} must be a finite number of at least 0, not {value}"
        )


def _block_test(rule: str, text: str) -> None:
    if not re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?", text):
        raise UsageError(f"rule {rule!r}: blocks takes '3', '-1' or '0:6', not {text!r}")


def _in_blocks(text: str, block: int, blocks: int) -> bool:
    if ":" not in text:
        return block == _counted(int(text), blocks)
    first, last = (int(part) if part else None for part in text.split(":"))
    return block in range(blocks)[first:last]


def _counted(block: int, blocks: int) -> int:
    return block + blocks if block < 0 else block


def parse_rule(table: Mapping[str, Any], position: int) -> Rule:
    """A rule from its TOML table; `position` counts from 1 and stands in for a missing name."""
    kinds = {f.name: f.type for f in fields(Rule)}
    values: dict[str, Any] = {}
    where = f"rule {table.get('name', position)!r}"
    for key, value in table.items():
        name = key.replace("-", "_")
        name = {"component": "components", "block": "blocks", "head": "heads"}.get(name, name)
        if name not in kinds:
            raise unknown(f"key of {where}:", key, kinds)
        values[name] = _coerced(where, key, value, str(kinds[name]))
    if "metric" not in values:
        raise UsageError(f'{where} says no metric: add `metric = "effective_rank"` or the like')
    values.setdefault("name", values["metric"])
    return Rule(**values)


def _coerced(where: str, key: str, value: Any, kind: str) -> Any:
    """The value in the field's type: numbers as floats, one string for a list of one."""
    if kind.startswith("tuple"):
        items = value if isinstance(value, list) else [value]
        if all(isinstance(i, (str, int)) and not isinstance(i, bool) for i in items):
            return tuple(str(i) for i in items)
        raise UsageError(f"{where}: {key} takes a string or a list of them, not {value!r}")
    if kind.startswith("float"):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise UsageError(f"{where}: {key} takes a number, not {value!r}")
    want = bool if kind == "bool" else str
    if type(value) is not want:
        raise UsageError(f"{where}: {key} takes a value of type {want.__name__}, not {value!r}")
    return value
