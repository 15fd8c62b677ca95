"""The default rules, each with its reason. RUN_RULES judge a run by itself, BASELINE_RULES a run
against one that is known to be good.

A healthy network also changes: it compresses its features as it learns, its weights grow, a few of
its units go quiet. The bounds lie beyond what healthy runs of an MLP, a CNN, a ViT and a GPT do.
"""

from __future__ import annotations

from dataclasses import replace

from .rules import Rule

# A layer that is dead altogether has no rank and no entropy; the dead units are told themselves.
DEAD = ("layer_dead",)
NO_CLS = ("no_cls_token", *DEAD)
WEIGHTS = ("!*.bias", "!network")

RUN_RULES: tuple[Rule, ...] = (
    Rule(
        name="units-go-dormant",
        metric="dormant_fraction",
        subject="unit",
        parameters="tau=0.025",
        components=("!network",),
        bad="up",
        absolute=0.25,
        steady=0.3,
        optional=True,
        reason="Units whose activation fades take no part in learning the next task; their share "
        "is the most direct sign. In healthy runs a layer's share stays within a fifth of where "
        "it began.",
    ),
    Rule(
        name="units-die",
        metric="dead_fraction",
        subject="unit",
        parameters="",
        components=("!network",),
        bad="up",
        absolute=0.25,
        steady=0.3,
        optional=True,
        reason="A unit that is zero on every input gets no gradient and stays dead. Healthy small "
        "networks lose up to an eighth of a layer while they specialise.",
    ),
    Rule(
        name="units-die-at-once",
        metric="dead_fraction",
        subject="unit",
        parameters="",
        components=("!network",),
        bad="up",
        against="trend",
        absolute=0.1,
        optional=True,
        reason="More than a tenth of a layer dead, against what the checkpoints before predict: a "
        "step that was too large, a bad restart, a bug. Needs four earlier checkpoints.",
    ),
    Rule(
        name="features-lose-rank",
        metric="effective_rank",
        subject="feature",
        parameters="",
        tokens="all",
        heads="none",
        bad="down",
        absolute=1.0,
        relative=0.6,
        share=0.25,
        steady=0.3,
        optional=True,
        nulls=DEAD,
        reason="Features that span few directions leave little for a new task to combine. Learning "
        "itself compresses: healthy networks keep 40 % of their initial effective rank nearly "
        "everywhere, ageing ones lose more than that in a quarter of their components.",
    ),
    Rule(
        name="cls-loses-rank",
        metric="effective_rank",
        subject="feature",
        parameters="",
        tokens="cls",
        components=("!network",),
        heads="none",
        bad="down",
        absolute=1.0,
        relative=0.5,
        share=0.25,
        steady=0.3,
        optional=True,
        nulls=NO_CLS,
        reason="The class token is all that the classifier sees; in healthy training its rank "
        "over the inputs rises.",
    ),
    Rule(
        name="heads-lose-rank",
        metric="effective_rank",
        subject="feature",
        parameters="",
        tokens="all",
        heads="each",
        bad="down",
        absolute=0.5,
        relative=0.5,
        share=0.25,
        steady=0.3,
        optional=True,
        nulls=DEAD,
        reason="Queries, keys and values of a head that span few directions can't attend in new "
        "ways. Half of the rank gone in a quarter of the heads doesn't happen in healthy runs.",
    ),
    Rule(
        name="weights-lose-rank",
        metric="effective_rank",
        subject="weight",
        parameters="",
        components=WEIGHTS,
        bad="down",
        absolute=0.5,
        relative=0.4,
        optional=True,
        reason="A weight matrix, or one head's slice of it, that has collapsed. Training alone "
        "rarely takes a fifth of a matrix's effective rank.",
    ),
    Rule(
        name="weights-blow-up",
        metric="weight_magnitude",
        subject="weight",
        parameters="",
        components=WEIGHTS,
        matrices=True,
        bad="up",
        absolute=0.02,
        relative=3.0,
        optional=True,
        reason="A matrix that has grown fourfold turns slowly under the same updates, so the layer "
        "learns less from each. Healthy runs of the samples' length double or triple at most. "
        "Gains (LayerScale, from 1e-5 on) are meant to grow. A matrix that was zero at first is "
        "held against the others of its block.",
    ),
    Rule(
        name="attention-collapses",
        metric="attention_entropy",
        subject="attention",
        parameters="",
        components=("!network",),
        bad="down",
        absolute=0.1,
        relative=0.75,
        share=0.25,
        optional=True,
        nulls=DEAD,
        reason="Attention so sharp that a head reads a single token passes hardly any gradient to "
        "its queries and keys. Sharpening is part of learning; three quarters of the entropy gone "
        "in a quarter of the heads isn't.",
    ),
)

# Against a good run at the same step much less is tolerated, but always more than what another
# seed of the same training does.
_CLOSER: dict[str, tuple[float | None, float | None]] = {
    "units-go-dormant": (0.15, None),
    "units-die": (0.15, None),
    "features-lose-rank": (None, 0.35),
    "cls-loses-rank": (None, 0.4),
    "heads-lose-rank": (None, 0.3),
    "weights-lose-rank": (None, 0.25),
    "weights-blow-up": (None, 1.0),
    "attention-collapses": (None, 0.5),
}


def _closer(rule: Rule) -> Rule:
    """The rule against a baseline, with its own absolute and relative tolerance."""
    absolute, relative = _CLOSER[rule.name]
    return replace(
        rule,
        against="baseline",
        steady=0.0,
        absolute=rule.absolute if absolute is None else absolute,
        relative=rule.relative if relative is None else relative,
    )


BASELINE_RULES: tuple[Rule, ...] = (
    *(_closer(rule) if rule.name in _CLOSER else rule for rule in RUN_RULES),
    Rule(
        name="one-place-loses-rank",
        metric="effective_rank",
        subject="feature",
        parameters="",
        tokens="all",
        heads="none",
        bad="down",
        against="baseline",
        absolute=1.0,
        relative=0.5,
        optional=True,
        nulls=DEAD,
        reason="Half of one component's effective rank gone, against a good run at the same step: "
        "more than any component differs between seeds.",
    ),
)
