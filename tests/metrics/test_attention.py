"""Attention maps per head: masks, uniform maps, sinks and planted collapse."""

import math

import numpy as np
import pytest
import torch

from plastiscope.metrics import Place, measure
from plastiscope.observations import AttentionSums, OutputSums

PLACE = Place("attention", 0, "attention")


def rows(probabilities, visible=None, query_mask=None, folds=2, **options):
    sums = AttentionSums(folds, **options)
    fold = torch.arange(len(probabilities)) % folds
    sums.add(probabilities, visible, fold, query_mask)
    return {(r.metric, r.parameters, r.head): r for r in measure(sums.finish(), PLACE)}


def causal_uniform(n, inputs=2):
    seen = torch.ones(n, n, dtype=torch.float64).tril()
    return (seen / seen.sum(1, keepdim=True)).expand(inputs, 1, n, n)


@pytest.mark.parametrize("hidden", [0.0, math.nan, 0.5])
def test_causal_uniform_rows_give_their_logarithms(hidden):
    """R10: 0, ln 2, ln 3, ln 4, whatever stands where nothing may be seen."""
    maps = causal_uniform(4).clone()
    maps[..., ~torch.ones(4, 4).tril().bool()] = hidden
    found = rows(maps, causal=True)
    expected = np.mean([0, math.log(2), math.log(3), math.log(4)])
    row = found["attention_entropy", "", 0]
    assert row.value == pytest.approx(expected) and row.maximum == pytest.approx(expected)
    assert found["attention_entropy_normalized", "", 0].value == pytest.approx(1)
    assert row.rows == 8 and row.columns == 4


def test_single_rows_of_the_causal_map():
    for i in range(4):
        mask = torch.zeros(2, 4)
        mask[:, i] = 1
        row = rows(causal_uniform(4), query_mask=mask, causal=True)["attention_entropy", "", 0]
        assert row.value == pytest.approx(math.log(i + 1), abs=1e-12)


def test_heads_are_not_averaged_before_the_entropy():
    """R02: two heads on one key each have entropy 0, their mean map ln 2."""
    maps = torch.zeros(2, 2, 3, 4)
    maps[:, 0, :, 1] = maps[:, 1, :, 2] = 1
    found = rows(maps)
    for head in (0, 1):
        assert found["attention_entropy", "", head].value == 0
    assert found["collapsed_head", "threshold=0.1", None].value == 1
    assert found["lazy_head", "threshold=0.9", None].value == 0


def test_lazy_and_collapsed_heads_are_counted():
    maps = torch.full((2, 4, 8, 8), 1 / 8)
    maps[:, 0] = torch.eye(8)
    found = rows(maps)
    assert found["lazy_head", "threshold=0.9", None].value == 0.75
    assert found["collapsed_head", "threshold=0.1", None].value == 0.25


def test_padding_counts_for_nothing():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 2, 6, 6, generator=generator)
    keys = torch.ones(4, 6, dtype=torch.bool)
    keys[:, 4:] = False
    maps = scores.masked_fill(~keys[:, None, None], -torch.inf).softmax(-1)
    padded = rows(maps, keys[:, None, None], keys)
    short = rows(scores[..., :4, :4].softmax(-1))
    for key, row in short.items():
        assert padded[key].value == pytest.approx(row.value, rel=1e-6), key


def test_fully_masked_row_is_left_out():
    maps = torch.full((2, 1, 3, 3), 1 / 3)
    maps[:, :, 1] = torch.nan
    visible = torch.ones(3, 3, dtype=torch.bool)
    visible[1] = False
    assert rows(maps, visible)["attention_entropy", "", 0].value == pytest.approx(math.log(3))
    nothing = rows(maps, torch.zeros(3, 3, dtype=torch.bool))["attention_entropy", "", 0]
    assert nothing.value is None and nothing.status == "no_queries"


def test_non_finite_head_is_null_alone():
    maps = torch.full((2, 2, 3, 3), 1 / 3)
    maps[0, 1, 0, 0] = torch.nan
    found = rows(maps)
    assert found["attention_entropy", "", 1].status == "non_finite"
    assert found["attention_entropy", "", 1].value is None
    assert found["attention_entropy", "", 0].value == pytest.approx(math.log(3))
    assert found["lazy_head", "threshold=0.9", None].value is None


def test_sinks():
    n = 100
    maps = causal_uniform(n, 4).clone().repeat(1, 2, 1, 1)
    maps[:, 1] = 0
    maps[:, 1, :, 0] = 1
    maps[:2, 1] = torch.eye(n)
    found = rows(maps, causal=True)
    # alpha of the first key over 64 uniform causal queries: H_64 / 64 = 0.074.
    assert found["attention_sink_rate", "column=first", 0].value == 0
    assert found["attention_sink_rate", "column=first", 1].value == 0.5
    later = torch.zeros(2, 1, 5, 5)
    later[..., 3] = 1
    found = rows(later)
    assert found["attention_sink_rate", "column=first", 0].value == 0
    assert found["attention_sink_rate", "column=largest", 0].value == 1


def test_rank_and_column_mass_of_maps():
    maps = torch.zeros(4, 2, 10, 10)
    maps[:, 0] = torch.eye(10)
    maps[:, 1, :, 0] = 1
    found = rows(maps, maps=4)
    assert found["attention_rank", "energy=0.9", 0].value == 9
    assert found["attention_rank", "energy=0.9", 1].value == 1
    assert found["attention_rank", "energy=0.9, max over heads", None].value == 9
    assert found["attention_column_mass", "energy=0.9", 0].value == 9
    assert found["attention_column_mass", "energy=0.9", 1].value == 1
    assert not any(key[0] == "attention_rank" for key in rows(maps))


def outputs(logits, labels, batch=3):
    sums = OutputSums(2)
    for start in range(0, len(logits), batch):
        sums.add(logits[start : start + batch], labels[start : start + batch])
    return {r.metric: r for r in measure(sums.finish(), Place("network", None, "output"))}


def test_loss_and_accuracy_leave_ignored_labels_out():
    logits = torch.randn(6, 5, 11, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(2))
    labels[:, 3:] = -100
    labels[0] = -100
    flat, truth = logits.reshape(-1, 11).double(), labels.reshape(-1)
    found = outputs(logits, labels)
    expected = torch.nn.functional.cross_entropy(flat, truth, ignore_index=-100)
    assert found["loss"].value == pytest.approx(float(expected), rel=1e-12)
    kept = truth != -100
    right = (flat.argmax(1) == truth)[kept].double().mean()
    assert found["accuracy"].value == pytest.approx(float(right)) and found["loss"].rows == 15


def test_no_label_and_no_number_are_reasons():
    none = outputs(torch.zeros(4, 3), torch.full((4,), -100))
    assert none["loss"].value is None and none["loss"].status == "no_labels"
    broken = outputs(torch.full((4, 3), torch.nan), torch.zeros(4, dtype=torch.long))
    assert {r.status for r in broken.values()} == {"non_finite"}
    assert {r.value for r in broken.values()} == {None}


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="don't fit"):
        OutputSums(2).add(torch.zeros(2, 5, 3), torch.zeros(2, 4, dtype=torch.long))


def test_highest_entropy_of_the_llm_study():
    """Causal queries at positions 256 to 2048 see as many keys: Hmax 6.9215 nats."""
    seen = torch.arange(2048)[None] < torch.arange(256, 2049)[:, None]
    uniform = (seen / seen.sum(1, keepdim=True))[None, None]
    found = rows(uniform, seen, folds=1)
    assert found["attention_entropy", "", 0].maximum == pytest.approx(6.9215, abs=2e-4)
    assert found["attention_entropy", "", 0].value == pytest.approx(6.9215, abs=2e-4)
    assert found["lazy_head", "threshold=0.9", None].value == 1
