"""Metrics of attention maps. Axes: 1 + K folds, H heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .definition import Values, metric

if TYPE_CHECKING:
    from ..observations import Attention

Mask = npt.NDArray[np.bool_]
LAZY, COLLAPSED = 0.9, 0.1
_LAWS = ("permutation of keys: unchanged",)


@metric(
    unit="nats",
    range="0 to the mean of ln(visible keys)",
    source="Zhai et al. 2023",
    laws=_LAWS,
    subject="attention",
)
def attention_entropy(attention: Attention) -> Values:
    """How widely a head's queries look, averaged over queries and inputs.

    Formula: -sum_j A_ij ln A_ij for every query i, then the mean over queries and inputs.
    Read: the maximum is uniform attention, 0 a single key. A sudden fall (entropy collapse) goes
    with unstable training.
    Misleads: early queries of a causal map see few keys and pull the mean down (see
    attention_entropy_normalized). Entropy of a map averaged over heads would be higher.
    """
    return Values(attention.entropy, maximum=attention.highest)


@metric(
    unit="share of the maximum",
    range="0 to 1",
    source="this project: attention_entropy, each row over its own maximum",
    laws=_LAWS,
    subject="attention",
)
def attention_entropy_normalized(attention: Attention) -> Values:
    """Attention entropy of each query over its own maximum, averaged.

    Formula: mean of (-sum_j A_ij ln A_ij) / ln(visible keys of i), queries with one visible key
    left out.
    Read: 1 is uniform attention whatever the length.
    Misleads: rows with few keys weigh as much as rows with many.
    """
    return Values(attention.normalized, maximum=1.0)


@metric(
    unit="share of heads",
    range="0 to 1",
    source="the LLM study [checked numerically: positions 256..2048 give Hmax 6.9215]",
    laws=_LAWS,
    subject="attention",
)
def lazy_head(attention: Attention) -> Values:
    """Share of a block's heads that look nearly uniformly at everything.

    Formula: share of heads with attention_entropy > 0.9 Hmax, Hmax = mean of ln(visible keys) over
    the query positions used.
    Read: lazy heads only average; more of them is less selective attention.
    Misleads: short sequences make every head look lazy or collapsed.
    """
    return _heads(attention, attention.entropy > LAZY * attention.highest, LAZY)


@metric(
    unit="share of heads",
    range="0 to 1",
    source="the LLM study [checked numerically]",
    laws=_LAWS,
    subject="attention",
)
def collapsed_head(attention: Attention) -> Values:
    """Share of a block's heads that look at hardly more than one key.

    Formula: share of heads with attention_entropy < 0.1 Hmax, Hmax as for lazy_head.
    Read: collapsed heads copy one token (often the first: see attention_sink_rate).
    Misleads: a head may do so on purpose (previous-token heads).
    """
    return _heads(attention, attention.entropy < COLLAPSED * attention.highest, COLLAPSED)


def _heads(attention: Attention, found: Mask, threshold: float) -> Values:
    known = np.isfinite(attention.entropy).all(-1)
    statuses: list[str] = attention.status.ravel().tolist()
    status = next((s for s in statuses if s != "ok"), "ok")
    values = np.where(known, found.mean(-1), np.nan)
    return Values(values, parameters=f"threshold={threshold:g}", maximum=1.0, status=status)


@metric(
    unit="share of inputs",
    range="0 to 1",
    source="Gu et al. 2024 (2410.10781, code)",
    laws=(),
    subject="attention",
)
def attention_sink_rate(attention: Attention) -> list[Values]:
    """How often a head pours its attention into one key.

    Formula: alpha_k = mean over the queries that see k of A_ik, on the first 64 tokens of a causal
    map and on all of another; share of inputs with alpha > 0.3 for the first key (CLS in a ViT),
    and for the key with the largest alpha.
    Read: sinks appear early in training of language models and are normal there; a change along a
    run is what to look at.
    Misleads: for the largest key, keys seen by fewer than half as many queries as the first are
    left out.
    """
    return [
        Values(attention.first_sink, parameters="column=first", maximum=1.0),
        Values(attention.largest_sink, parameters="column=largest", maximum=1.0),
    ]


@metric(
    unit="columns",
    range="1 to the number of keys",
    source="2404.08634 (code)",
    laws=_LAWS,
    subject="attention",
)
def attention_column_mass(attention: Attention) -> Values:
    """How few keys receive nearly all squared attention.

    Formula: fewest columns of the map that hold 90 % of its squared entries; mean over inputs.
    Read: 1 or 2 is attention to the same few tokens from everywhere.
    Misleads: a causal map favours its first columns by construction.
    """
    return Values(attention.column_mass, parameters="energy=0.9", maximum=float(attention.keys))


@metric(
    unit="singular values",
    range="1 to the number of keys",
    source="2404.08634 (code)",
    laws=_LAWS,
    default=False,
    subject="attention",
)
def attention_rank(attention: Attention) -> list[Values] | None:
    """Rank of a head's attention maps, and the largest over a block's heads.

    Formula: min k with 90 % of sigma^2 of the map [T, T]; mean over the inputs looked at; the
    block's value (no head) is the maximum over its heads.
    Read: 1 when every query looks alike.
    Misleads: taken on a few inputs of the probe only, since each head of each needs its own SVD.
    """
    most = float(attention.keys)
    if attention.rank is None:
        return None
    return [
        Values(attention.rank, parameters="energy=0.9", maximum=most),
        Values(attention.rank.max(-1), parameters="energy=0.9, max over heads", maximum=most),
    ]
