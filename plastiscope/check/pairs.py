"""What is compared with what: for each selected value its reference, or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .rules import Rule
from .values import Series, Value

ENOUGH_FOR_A_TREND = 4
# The median absolute deviation of normal noise, in standard deviations.
_MAD = 1.4826


@dataclass(frozen=True)
class Pair:
    """A value beside its reference; either may be absent (None) or null (its value None).

    `at` says where the reference stands ("step 0", "the baseline"); `trend` is Kendall's tau of
    the run up to the value, for rules that ask for it; `beside` is the median of the same metric in
    the block's other places, for a reference of zero, which has no multiples; `gap` is the kind of
    reason why the two may not be compared, `why` that reason in words.
    """

    rule: Rule
    run: str
    before: Value | None
    after: Value | None
    at: str
    trend: float | None = None
    beside: float | None = None
    gap: str = ""
    why: str = ""

    @property
    def from_zero(self) -> bool:
        """Whether the reference is a matrix of zeros, which has no factor of growth."""
        return self.before is not None and self.before.status == "zero_matrix"

    @property
    def series(self) -> Series:
        either = self.after or self.before
        assert either is not None
        return either.series

    @property
    def step(self) -> int:
        either = self.after or self.before
        assert either is not None
        return either.step


def select(rule: Rule, values: Iterable[Value]) -> list[Value]:
    """The values that the rule's metric, place and tokens take, at every step."""
    values = [v for v in values if v.series.metric == rule.metric]
    blocks = 1 + max((v.series.block for v in values if v.series.block is not None), default=-1)
    return [
        v for v in values if _takes(rule, v.series, blocks) and (v.is_matrix or not rule.matrices)
    ]


def _takes(rule: Rule, series: Series, blocks: int) -> bool:
    wanted = {"subject": rule.subject, "parameters": rule.parameters, "tokens": rule.tokens}
    return (
        all(want is None or want == (getattr(series, name) or "") for name, want in wanted.items())
        and rule.takes_component(series.component)
        and rule.takes_block(series.block, blocks)
        and rule.takes_head(series.head)
    )


def chosen_steps(rule: Rule, values: Iterable[Value]) -> set[int]:
    """The steps, of those that the values have, which the rule looks at."""
    steps = {v.step for v in values}
    if rule.steps == "all" or not steps:
        return steps
    if rule.steps == "last":
        return {max(steps)}
    after = int(rule.steps.removeprefix("after "))
    return {step for step in steps if step > after}


def pair_within(rule: Rule, run: str, values: Sequence[Value]) -> list[Pair]:
    """Pairs of one run with its own past, or with the rule's limit."""
    wanted = chosen_steps(rule, values)
    refer = {"first": _first, "trend": _trend, "limit": _limit}[rule.against]
    pairs = []
    for series in _by_series(values):
        present = {v.step for v in series}
        pairs += [refer(rule, run, series, v) for v in series if v.step in wanted]
        pairs += [
            Pair(rule, run, replace(series[-1], step=step), None, f"step {series[-1].step}")
            for step in sorted(wanted - present)
            if step > series[-1].step
        ]
    # An early checkpoint without a past is no finding; the last one without a past is.
    last = max(wanted, default=0)
    return with_siblings([p for p in pairs if p.gap != "reference" or p.step == last])


def with_siblings(pairs: list[Pair]) -> list[Pair]:
    """The pairs, those from zero with the median of what grew from something: in the same block at
    the same step, or in the whole network where the block has nothing else."""
    grown = [
        (p, p.after.value)
        for p in pairs
        if p.before and p.after and p.after.value is not None and not p.gap and not p.from_zero
    ]

    def beside(pair: Pair) -> float | None:
        whole = pair.series.head is None
        alike = [
            (p.series.block, value)
            for p, value in grown
            if p.step == pair.step and (p.series.head is None) == whole
        ]
        block = [value for block, value in alike if block == pair.series.block]
        found = block or [value for _, value in alike]
        return median(found) if found else None

    return [replace(p, beside=beside(p)) if p.from_zero else p for p in pairs]


def _by_series(values: Iterable[Value]) -> Iterator[list[Value]]:
    groups: dict[Series, list[Value]] = {}
    for value in values:
        groups.setdefault(value.series, []).append(value)
    for series in sorted(groups, key=lambda s: s.order):
        yield sorted(groups[series], key=lambda v: v.step)


def _first(rule: Rule, run: str, series: Sequence[Value], value: Value) -> Pair:
    joined = [v for v in series if v.segment == value.segment and v.step < value.step]
    if not joined:
        why = (
            f"step {value.step} is the first comparable checkpoint (a break lies before it)"
            if series[0].step < value.step
            else f"step {value.step} is the only checkpoint"
        )
        return Pair(rule, run, None, value, "the first checkpoint", gap="reference", why=why)
    pair = Pair(rule, run, joined[0], value, f"step {joined[0].step}")
    if rule.steady:
        known = [v.value for v in (*joined, value) if v.value is not None]
        if len(joined) < ENOUGH_FOR_A_TREND and value.value is not None:
            return replace(pair, gap="reference", why=_too_few(len(joined)))
        pair = replace(pair, trend=kendall(known))
    return matched(pair)


def _too_few(earlier: int) -> str:
    return f"a trend needs {ENOUGH_FOR_A_TREND} earlier checkpoints, there are {earlier}"


def kendall(values: Sequence[float]) -> float:
    """Kendall's tau against time: rising minus falling pairs over all pairs, -1 to 1."""
    signs = [(b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :]]
    return sum(signs) / len(signs) if signs else 0.0


def _trend(rule: Rule, run: str, series: Sequence[Value], value: Value) -> Pair:
    joined = [
        v
        for v in series
        if v.segment == value.segment and v.step < value.step and v.value is not None
    ]
    at = "the trend of the checkpoints before"
    if len(joined) < ENOUGH_FOR_A_TREND:
        return Pair(rule, run, None, value, at, gap="reference", why=_too_few(len(joined)))
    points = [(v.step, v.value) for v in joined if v.value is not None]
    predicted, scatter = extrapolate(points, value.step)
    # A line leaves a fraction's range, and a transient bends; the checkpoint before does neither.
    reference = _nearer(rule, predicted, points[-1][1], value)
    before = replace(joined[-1], value=reference, error=scatter)
    return matched(Pair(rule, run, before, value, at))


def _nearer(rule: Rule, predicted: float, previous: float, value: Value) -> float:
    """The worse of two references, so that only what neither explains counts."""
    if rule.bad == "either":
        at = predicted if value.value is None else value.value
        return min(predicted, previous, key=lambda v: abs(v - at))
    return max(predicted, previous) if rule.bad == "up" else min(predicted, previous)


def extrapolate(points: Sequence[tuple[int, float]], step: int) -> tuple[float, float]:
    """What a Theil-Sen line through the points (step, value) says of a step, and the points'
    scatter about it as a standard deviation."""
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for i, a in enumerate(points)
        for b in points[i + 1 :]
        if b[0] != a[0]
    ]
    slope = median(slopes) if slopes else 0.0
    level = median(y - slope * x for x, y in points)
    scatter = _MAD * median(abs(y - slope * x - level) for x, y in points)
    return level + slope * step, scatter


def _limit(rule: Rule, run: str, series: Sequence[Value], value: Value) -> Pair:
    bound = replace(value, value=rule.limit, error=None, status="ok")
    return Pair(rule, run, bound, value, "the limit")


def pair_with_baseline(
    rule: Rule,
    run: str,
    values: Sequence[Value],
    baseline: Sequence[Value],
    growing: bool = False,
) -> list[Pair]:
    """Pairs of a run with the baseline run at the same steps.

    The baseline's steps count: each must be there in the new run, unless that is still `growing`.
    """
    reached = max((v.step for v in values), default=None)
    if growing and reached is not None:
        baseline = [v for v in baseline if v.step <= reached]
    # Where the baseline has nothing at all, the new rows still may not be null.
    wanted = chosen_steps(rule, baseline) or chosen_steps(rule, values)
    old = {(v.series, v.step, v.probe): v for v in baseline if v.step in wanted}
    new = {(v.series, v.step, v.probe): v for v in values if v.step in wanted}
    _rejoin(old, new)
    keys = sorted({*old, *new}, key=lambda k: (k[0].order, k[1], k[2] or ""))
    return with_siblings(
        [matched(Pair(rule, run, old.get(k), new.get(k), "the baseline")) for k in keys]
    )


_Keyed = dict[tuple[Series, int, "str | None"], Value]


def _rejoin(old: _Keyed, new: _Keyed) -> None:
    """Put values side by side whose probes differ, so that it is said, not passed over."""
    free = {(k[0], k[1]): k for k in new if k not in old}
    for key in [k for k in old if k not in new]:
        other = free.pop((key[0], key[1]), None)
        if other is not None:
            new[key] = new.pop(other)


def matched(pair: Pair) -> Pair:
    """The pair, with a gap when its two values don't measure the same thing."""
    before, after = pair.before, pair.after
    if before is None or after is None:
        return pair
    tests: tuple[tuple[str, str, Callable[[Value], object]], ...] = (
        ("probe", "another probe", lambda v: v.probe),
        ("version", "another version of the metric", lambda v: v.version),
        ("architecture", "another architecture", lambda v: v.shape),
        ("architecture", "a break of the sequence", lambda v: v.segment),
    )
    for gap, words, of in tests:
        if of(before) != of(after):
            return replace(pair, gap=gap, why=f"{words}: {of(before)} there, {of(after)} here")
    return pair
