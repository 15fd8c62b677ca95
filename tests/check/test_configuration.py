"""The rules file: every key read, every wrong one named with the nearest right one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from plastiscope.check import Rule
from plastiscope.check.configuration import CheckSettings, read_check_settings, read_rules
from plastiscope.check.defaults import BASELINE_RULES, RUN_RULES
from plastiscope.errors import UnreadableError, UsageError

EVERY_KEY = """
[check]
baseline = "base.jsonl"
defaults = true
allow-missing = ["weight_*"]
allow_missing_baseline = true

[[check.rules]]
name = "q loses rank"
metric = "effective_rank"
subject = "weight"
parameters = "p=1"
tokens = "cls"
component = "q"
matrices = true
blocks = ["0:6", -1]
head = "each"
steps = "after 100"
bad = "down"
against = "first"
absolute = 1
relative = 0.25
errors = 2
steady = 0.4
share = 0.5
severity = "warn"
optional = true
nulls = ["no_cls_token"]
reason = "because"
"""


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "plastiscope.toml").write_text(EVERY_KEY, "utf-8")
    settings = read_check_settings(folder=tmp_path)
    rule = Rule(
        name="q loses rank", metric="effective_rank", subject="weight", parameters="p=1",
        tokens="cls", components=("q",), matrices=True, blocks=("0:6", "-1"), heads="each",
        steps="after 100", bad="down", against="first", absolute=1.0, relative=0.25, errors=2.0,
        steady=0.4, share=0.5, severity="warn", optional=True, nulls=("no_cls_token",),
        reason="because",
    )  # fmt: skip
    assert settings == CheckSettings((rule,), True, tmp_path / "base.jsonl", ("weight_*",), True)
    assert {f.name for f in fields(Rule)} - {"limit", "components", "heads"} <= {
        line.split(" =")[0] for line in EVERY_KEY.splitlines()
    }


@pytest.mark.parametrize(
    ("name", "before"),
    [("plastiscope.toml", "check"), ("pyproject.toml", "tool.plastiscope.check"), ("r.toml", "")],
)
def test_the_rules_may_stand_in_three_places(tmp_path: Path, name: str, before: str) -> None:
    head = f"[[{before}.rules]]" if before else "[[rules]]"
    (tmp_path / name).write_text(f'{head}\nmetric = "accuracy"\n', "utf-8")
    (rule,) = read_rules(tmp_path / name)
    assert rule == Rule("accuracy", "accuracy")
    if before:
        assert read_check_settings(folder=tmp_path).rules == (rule,)


def test_no_file_means_the_default_rules(tmp_path: Path) -> None:
    assert read_check_settings(folder=tmp_path) == CheckSettings()
    assert CheckSettings().chosen(True) is None
    with pytest.raises(UnreadableError, match="--init` writes one"):
        read_rules(tmp_path / "absent.toml")


def test_own_rules_replace_or_extend_the_defaults() -> None:
    own = Rule(RUN_RULES[0].name, "accuracy")
    new = Rule("mine", "accuracy")
    assert CheckSettings((own, new)).chosen(False) == (own, new)
    assert CheckSettings((own, new), defaults=True).chosen(False) == (*RUN_RULES[1:], own, new)
    assert CheckSettings((new,), defaults=True).chosen(True) == (*BASELINE_RULES, new)


RULE = '[[check.rules]]\nmetric = "m"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[check]\nbaselin = 'x'", "unknown key of [check] 'baselin': did you mean 'baseline'?"),
        ("[check]\nbaseline = 3", "takes a path"),
        ("[check]\ndefaults = 'yes'", "takes true or false"),
        ("[check]\nallow_missing = [1]", "takes a list of patterns"),
        ("[check]\nrules = 3", "takes tables"),
        ("check = 3", "takes a table"),
        ("[check]\nrules =", "isn't valid TOML"),
        ('[[check.rules]]\nname = "n"', "rule 'n' says no metric"),
        (RULE + "absolut = 1", "did you mean 'absolute'?"),
        (RULE + "severity = 'error'", "known: fail, informational, warn"),
        (RULE + "bad = 'dwn'", "did you mean 'down'?"),
        (RULE + "against = 'baselin'", "did you mean 'baseline'?"),
        (RULE + "heads = 'all'", "known: any, each, none"),
        (RULE + "steps = 'first'", "takes 'last', 'all' or 'after N'"),
        (RULE + "blocks = 'x'", "blocks takes '3', '-1' or '0:6', not 'x'"),
        (RULE + "blocks = [true]", "takes a string or a list"),
        (RULE + "absolute = '1'", "takes a number"),
        (RULE + "absolute = nan", "a finite number of at least 0"),
        (RULE + "relative = inf", "a finite number of at least 0"),
        (RULE + "errors = -1", "a finite number of at least 0"),
        (RULE + "share = 2", "share is at most 1"),
        (RULE + "steady = 0.5\nagainst = 'trend'", "`steady` goes with against = 'first'"),
        (RULE + "optional = 1", "takes a value of type bool"),
        (RULE + "limit = 3", "`limit` and against = 'limit' go together"),
        (RULE + "against = 'limit'", "`limit` and against = 'limit' go together"),
        (RULE + "against = 'limit'\nlimit = nan\nbad = 'up'", "must be a finite number"),
        (RULE + "against = 'limit'\nlimit = 1", "needs bad = 'up' or 'down'"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plastiscope.toml").write_text(text, "utf-8")
    with pytest.raises(UsageError) as caught:
        read_check_settings(folder=tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "taken"),
    [
        (None, [0, 1, 2, 3, None]),
        (("2",), [2]),
        (("-1",), [3]),
        (("0:2",), [0, 1]),
        (("1:",), [1, 2, 3]),
        (("-2:",), [2, 3]),
        (("0", "3"), [0, 3]),
        ((), []),
    ],
)
def test_blocks_are_counted_as_in_python(
    blocks: tuple[str, ...] | None, taken: list[int | None]
) -> None:
    rule = Rule("r", "m", blocks=blocks)
    assert [b for b in [0, 1, 2, 3, None] if rule.takes_block(b, 4)] == taken


def test_heads_and_components_are_chosen() -> None:
    assert [Rule("r", "m", heads=h).takes_head(1) for h in ("any", "none", "each")] == [1, 0, 1]
    assert [Rule("r", "m", heads=h).takes_head(None) for h in ("any", "none", "each")] == [1, 1, 0]
    rule = Rule("r", "m", components=("fc*", "q"))
    assert [rule.takes_component(c) for c in ("fc1", "q", "q_norm", "FC1", None)] == [1, 1, 0, 0, 0]
    others = Rule("r", "m", components=("!*.bias",))
    assert [others.takes_component(c) for c in ("fc1", "fc1.bias", None)] == [1, 0, 1]
    both = Rule("r", "m", components=("fc*", "!*.bias"))
    assert [both.takes_component(c) for c in ("fc1", "fc1.bias", "q")] == [1, 0, 0]


def test_every_default_rule_has_a_reason_and_a_name_of_its_own() -> None:
    for rules in (RUN_RULES, BASELINE_RULES):
        assert len({rule.name for rule in rules}) == len(rules) > 4
        assert all(len(rule.reason) > 40 for rule in rules)
        assert all(rule.absolute > 0 and rule.severity == "fail" for rule in rules)
    assert [rule.name for rule in BASELINE_RULES if rule.against != "baseline"] == [
        "units-die-at-once"
    ]
    assert "baseline" not in {rule.against for rule in RUN_RULES}
