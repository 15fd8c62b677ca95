"""A diagnosis in plain sentences: every statement with the numbers that it stands on."""

from __future__ import annotations

from math import exp

from .diagnosis import (
    ENOUGH_CHECKPOINTS,
    SIGNIFICANT,
    SIGNS,
    STEADY,
    Diagnosis,
    Finding,
    Movement,
    Sign,
    shortfall,
)

REASONS = {
    "non_finite": "what was measured holds NaN or infinity",
    "not_converged": "an iterative method didn't converge",
    "empty": "nothing there to measure",
    "not_routed": "the router sent no token there",
    "no_queries": "no query attends there",
    "no_labels": "the probe has no labels",
    "no_optimizer_state": "the checkpoint holds no optimizer state",
    "not_matched": "what is stored fits no parameter",
    "unresolved": "below what the precision or the method can tell from zero",
    "positions_sampled": "some positions were taken, which don't have the extremes of all",
    "undefined": "not defined for these numbers",
    "shape_changed": "the shape changed, so there is nothing to compare with",
    "zero_matrix": "the matrix is all zeros",
    "layer_dead": "the whole layer is silent",
    "failed": "measuring it failed, as the run's output says; `analyze` tries again",
    "refused": "not defined for this network or these settings, as the run's output says",
    "part_of_attention": "measured with its attention",
    "no_module_of_its_own": "no module computes it and nothing else",
    "called_otherwise": "its module isn't called, or is called for something else too",
    "takes_ids": "its input is ids, which don't change by little",
    "output_not_seen": "where its output lies isn't known",
    "not_used": "the network holds it and never runs it",
    "part_of_experts": "an expert is given some tokens, not inputs: measured with the experts",
    "expert_not_read": "what the experts compute can't be told from the pass",
    "bias_added_apart": "the expert's bias is added after what is seen",
    "no_cls_token": "the network has no CLS token, or this part of it",
    "no_attention": "the network has no attention",
    "no_activation": "the network has no hidden units that are known",
    "no_softmax": "activations are multiplied with each other, with no softmax between",
    "over_channels": "the attention is over channels, not tokens",
    "same_queries": "its queries are the same for all inputs",
    "inputs_not_told_apart": "which rows belong to which input isn't known",
    "padded_inputs": "every input is padded in front or between",
    "no_gradient": "no gradient flows through it: it is cut off or a step function",
    "not_differentiated": "called alone it raised an error",
    "embedding_does_not_fit": "it can't be fed the embedding's output",
}
"""Why a row has no value, by its status."""


def number(value: float, sign: Sign) -> str:
    """A value of a sign's series: a share in percent, or three significant digits."""
    return f"{value:.3g}" if sign.relative else f"{100 * value:.0f} %"


def change(movement: Movement, sign: Sign) -> str:
    """From first to last: points of a share, a factor, or percent; empty where none is defined."""
    if not sign.relative:
        return f"{100 * (movement.last - movement.first):+.0f} pts"
    if movement.first <= 0 or movement.last < 0:
        return ""
    ratio = movement.last / movement.first
    return f"x{ratio:.2g}" if ratio >= 2 else f"{100 * (ratio - 1):+.0f} %"


def error(movement: Movement, sign: Sign) -> str:
    """The standard error of the change, in the change's own unit; empty where it isn't known."""
    if movement.error is None:
        return ""
    if not sign.relative:
        return f"{100 * movement.error:.0f}"
    return f"{100 * movement.error / movement.first:.1g}" if movement.first > 0 else ""


def evidence(diagnosis: Diagnosis) -> tuple[str, ...]:
    """One sentence a sign: how many of its series moved, and the one that moved most."""
    return tuple(_sentence(finding, diagnosis) for finding in diagnosis.findings)


def _sentence(finding: Finding, diagnosis: Diagnosis) -> str:
    sign = finding.sign
    counted = (m for m in finding.movements if not shortfall(sign, m))
    most = next(counted, finding.movements[0])
    start = f"{sign.name[0].upper()}{sign.name[1:]}: "
    start += f"{finding.moved} of {len(finding.movements)} {sign.of}"
    if finding.moved and not finding.present:
        start += f", under the {_percent(sign.share)} that make a sign"
    if most.size <= 0:
        return f"{start}; none changed in that direction."
    said = change(most, sign)
    of = error(most, sign)
    said += f" ± {of}" if said and of else ""
    why = "" if finding.moved else f"; not counted: {shortfall(sign, most)}"
    return (
        f"{start}; most in {most.where}, from {number(most.first, sign)} at step "
        f"{diagnosis.first} to {number(most.last, sign)} at step {diagnosis.last}"
        f"{f' ({said})' if said else ''}{why}."
    )


def coverage(diagnosis: Diagnosis) -> str:
    """What share was measured, where it isn't all; else empty."""
    part = [f"{100 * share:.1f} % of the {of}" for of, share in diagnosis.coverage if share < 1]
    return f"measured only {' and '.join(part)}" if part else ""


def floors(diagnosis: Diagnosis) -> str:
    """How many of the ranks the probe is too small for; empty for none."""
    if not diagnosis.floors:
        return ""
    share = f"{100 * diagnosis.floors:.0f}" if diagnosis.floors >= 0.01 else "under 1"
    return f"{share} % of the ranks are floors (insufficient_rows)"


def rule() -> str:
    """How a verdict is made, with the thresholds in force."""
    least = {sign.kind: sign.least for sign in SIGNS}
    return (
        "A series is one metric of one component or head over the checkpoints. It has moved when "
        "its change from the first checkpoint to the last is in the bad direction, large (a rank "
        f"down by {_percent(1 - exp(-least['rank']))}, weights up by "
        f"{_percent(exp(least['weights']) - 1)}, attention entropy down by "
        f"{_percent(1 - exp(-least['attention']))}, {100 * least['units']:.0f} more points of "
        f"dormant units), at least {SIGNIFICANT:g} standard errors, and steady (Kendall's tau "
        f"{STEADY:g} or more against time). A sign is present when {_percent(SIGNS[0].share)} of "
        "its series moved. Losing plasticity takes lost rank or dormant units and a second kind of "
        "sign beside it; weights grow and attention narrows in healthy training too. Fewer than "
        f"{ENOUGH_CHECKPOINTS} comparable checkpoints are not enough evidence."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
