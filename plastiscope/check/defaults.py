"""The default rules, each with its reason. RUN_RULES judge a run by itself, BASELINE_RULES a run
against one that is known to be good."""

from __future__ import annotations

from dataclasses import replace

from .rules import Rule

NO_CLS = ("no_cls_token",)

_FEATURES = Rule(
    name="features-lose-rank",
    metric="effective_rank",
    subject="feature",
    tokens="all",
    heads="none",
    bad="down",
    absolute=1.0,
    relative=0.3,
    optional=True,
    nulls=("layer_dead",),
)

RUN_RULES: tuple[Rule, ...] = (_FEATURES,)
BASELINE_RULES: tuple[Rule, ...] = (replace(_FEATURES, against="baseline"),)
