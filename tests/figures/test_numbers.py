"""The numbers that reach the picture are the table's, and nothing is drawn where there is none."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from plastiscope import figures
from plastiscope.errors import NotEnoughEvidenceError, UsageError
from plastiscope.figures.kind import choose
from plastiscope.figures.panels import symmetric_limit
from plastiscope.store import Row

spec = importlib.util.spec_from_file_location("tables", Path(__file__).with_name("tables.py"))
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def small(tmp_path, values, **options):
    """A run whose `values[checkpoint][(block, component)]` are effective ranks of features."""

    def make(point):
        return [
            Row("effective_rank", "feature", value, name, block, tokens="all",
                status="ok" if value is not None else "non_finite")
            for (block, name), value in values[point].items()
        ]  # fmt: skip

    return tables.table(tmp_path, make, points=len(values), **options)


def image(figure: Figure, panel=0):
    return figure.axes[panel].images[0]


VALUES = [
    {(0, "norm1"): 10.0, (0, "fc1"): 8.0, (3, "norm1"): 9.0, (3, "fc1"): 8.5},
    {(0, "norm1"): 12.0, (0, "fc1"): 7.0, (3, "norm1"): 4.0, (3, "fc1"): None},
    {(0, "norm1"): 11.0, (0, "fc1"): 6.0, (3, "norm1"): 5.0, (3, "fc1"): 9.0},
]


def test_delta_heatmap_shows_last_block_minus_first(tmp_path):
    shown = image(figures.delta_heatmap(small(tmp_path, VALUES)))
    expected = [[9 - 10, 4 - 12, 5 - 11], [8.5 - 8, np.nan, 9 - 6]]
    np.testing.assert_array_equal(np.ma.filled(shown.get_array(), np.nan), expected)
    assert shown.get_clim() == (-8, 8)


def test_delta_heatmap_is_grey_where_there_is_no_value(tmp_path):
    shown = image(figures.delta_heatmap(small(tmp_path, VALUES)))
    colours = shown.to_rgba(shown.get_array())
    red, green, blue, _ = colours[1, 1]
    assert red == green == blue and 0.4 < red < 0.75
    middle = shown.cmap(0.5)
    assert min(middle[:3]) > 0.9, "zero is white, so grey can't be read as zero"


def test_delta_heatmap_of_two_chosen_blocks(tmp_path):
    values = [{(b, "fc1"): float(10**b) for b in range(4)}] * 2
    shown = image(figures.delta_heatmap(small(tmp_path, values), block=(1, 2)))
    np.testing.assert_array_equal(shown.get_array(), [[90, 90]])
    with pytest.raises(UsageError, match="unknown block '9': known: 0, 1, 2, 3"):
        figures.delta_heatmap(small(tmp_path, values), block=(0, 9))


def test_runs_of_different_depth_have_their_own_last_block(tmp_path):
    for run, blocks in (("deep", 3), ("flat", 2)):
        table = small(tmp_path, [{(b, "fc1"): float(10**b) for b in range(blocks)}], run=run)
    figure = figures.delta_heatmap(table)
    assert [image(figure, n).get_array().tolist() for n in (0, 1)] == [[[99]], [[9]]]
    assert figure.get_suptitle() == "last block minus first block"
    heads = tables.table(tmp_path / "h", run="deep", points=1, blocks=3)
    heads = tables.table(tmp_path / "h", run="flat", points=1, blocks=2)
    assert set(figures.head_rank.data(heads, choose())["block"]) == {1}
    assert set(figures.head_rank.data(heads, choose())["run"]) == {"deep", "flat"}


def test_one_checkpoint_and_nothing_but_zeros_get_sensible_axes(tmp_path):
    def make(point):
        return [Row("dormant_fraction", "unit", 0.0, "activation", 0, parameters="tau=0.025")]

    (axes,) = figures.dormant_layers(tables.table(tmp_path, make, points=1)).axes
    assert axes.get_ylim() == (-0.03, 1.03)
    assert axes.get_xticks().tolist() == [0]


def test_a_run_has_one_dash_pattern_in_every_panel(tmp_path):
    for run, blocks in (("flat", 1), ("deep", 2)):
        table = small(tmp_path, [{(b, "fc1"): 5.0 for b in range(blocks)}] * 2, run=run)
    first, second = figures.component_rank(table).axes
    styles = [line.get_linestyle() for line in first.lines]
    assert sorted(styles) == ["-", "--"], "deep comes first in the table"
    assert [line.get_linestyle() for line in second.lines] == ["-"]
    (legend,) = figures.component_rank(table).legends
    keys = {t.get_text(): h.get_linestyle()
            for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}  # fmt: skip
    assert keys == {"fc1": "-", "run: deep": "-", "run: flat": "--"}
    for run, blocks in (("a_flat", 1), ("deep", 2)):
        table = small(tmp_path / "b", [{(b, "fc1"): 5.0 for b in range(blocks)}] * 2, run=run)
    first, second = figures.component_rank(table).axes
    assert [line.get_linestyle() for line in second.lines] == ["--"], "deep comes second"


def test_every_block_against_the_first_checkpoint(tmp_path):
    figure = figures.delta_heatmap_blocks(small(tmp_path, VALUES))
    expected = [[0, 2, 1], [0, -1, -2], [0, -5, -4], [0, np.nan, 0.5]]
    np.testing.assert_array_equal(np.ma.filled(image(figure).get_array(), np.nan), expected)
    assert image(figure).get_clim() == (-5, 5)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["0: norm 1", "0: fc1", "3: norm 1", "3: fc1"]


@pytest.mark.parametrize(
    ("differences", "limit"),
    [
        ([0.1, 0.5], 0.5),
        ([-5.0, 3.0], 5.0),
        ([0.0, 0.0], 1.0),
        ([1.0, None, -2.0], 2.0),
        ([-0.2, -0.1], 0.2),
    ],
)
def test_zero_has_the_middle_colour(tmp_path, differences, limit):
    """O04: symmetric, finite limits for one-sided, zero and missing differences."""
    values = [
        {(0, "fc1"): 0.0, (1, "fc1"): d, (0, "fc2"): 1.0, (1, "fc2"): 1.0} for d in differences
    ]
    shown = image(figures.delta_heatmap(small(tmp_path, values)))
    assert shown.get_clim() == (-limit, limit)
    assert shown.norm(0.0) == 0.5


def test_symmetric_limit_ignores_what_is_not_finite():
    assert symmetric_limit([math.nan, math.inf, -3.0, 2.0]) == 3.0
    assert symmetric_limit([math.nan]) == 1.0
    assert symmetric_limit([]) == 1.0


def test_several_runs_share_one_scale(tmp_path):
    """O04: one scale for all panels."""
    one = small(tmp_path / "a", [{(0, "fc1"): 0.0, (1, "fc1"): 2.0}] * 2, run="a")
    two = small(tmp_path / "b", [{(0, "fc1"): 0.0, (1, "fc1"): -7.0}] * 2, run="b")
    figure = figures.delta_heatmap(pd.concat([one, two]))
    assert [image(figure, panel).get_clim() for panel in (0, 1)] == [(-7, 7)] * 2
    assert [float(image(figure, panel).get_array()[0, 0]) for panel in (0, 1)] == [2, -7]


def test_a_null_breaks_the_line(tmp_path):
    figure = figures.component_rank(small(tmp_path, VALUES), block=3, component="fc1")
    (line,) = figure.axes[0].lines
    np.testing.assert_array_equal(line.get_xdata(), [0, 1000, 2000])
    np.testing.assert_array_equal(line.get_ydata(), [8.5, np.nan, 9.0])
    assert line.get_markevery() == [0, 1, 2] or set(line.get_markevery()) >= {0, 2}


def test_a_missing_row_breaks_the_line_too(tmp_path):
    values = [dict(one) for one in VALUES]
    del values[1][0, "fc1"]
    figure = figures.component_rank(small(tmp_path, values), block=0, component=["fc1", "norm1"])
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    np.testing.assert_array_equal(lines["fc1"].get_ydata(), [8, np.nan, 6])
    np.testing.assert_array_equal(lines["norm 1"].get_ydata(), [10, 12, 11])


def test_panels_of_component_rank_share_one_scale(tmp_path):
    figure = figures.component_rank(tables.table(tmp_path))
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert [axes.get_title() for axes in figure.axes[:2]] == ["block 0", "block 1"]


def test_head_figures_show_each_head(tmp_path):
    table = tables.table(tmp_path, points=3)
    figure = figures.head_magnitude(table, block=2)
    assert [axes.get_title() for axes in figure.axes] == [f"head {h}" for h in range(4)]
    rows = table[(table["metric"] == "weight_magnitude") & (table["block"] == 2)]
    for head, axes in enumerate(figure.axes):
        for name, line in zip("qkv", axes.lines, strict=True):
            mine = rows[(rows["head"] == head) & (rows["component"] == name)]
            np.testing.assert_array_equal(line.get_ydata(), mine["value"])
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == ["#0072B2", "#D55E00", "#009E73"]


def test_head_maps_share_one_scale(tmp_path):
    table = tables.table(tmp_path, points=3)
    figure = figures.head_rank_map(table, block=1)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["q", "k", "v"]
    assert len({axes.images[0].get_clim() for axes in panels}) == 1
    rows = table[(table["metric"] == "effective_rank") & (table["block"] == 1)]
    rows = rows[(rows["component"] == "k") & (rows["head"] == 2) & (rows["subject"] == "feature")]
    np.testing.assert_array_equal(panels[1].images[0].get_array()[2], rows["value"])


def test_cls_rank_follows_the_depth(tmp_path):
    table = tables.table(tmp_path, points=9, blocks=2)
    data = figures.cls_rank.data(table, choose())
    assert sorted(data["x"].unique()) == [0, 2000, 4000, 6000, 8000]
    figure = figures.cls_rank(table)
    last = next(line for line in figure.axes[0].lines if line.get_label() == "step 8k")
    rows = table[(table["step"] == 8000) & (table["tokens"] == "cls")]
    inner = rows[rows["block"].notna()].sort_values("block", kind="stable")["value"].tolist()
    outer = rows[rows["block"].isna()].set_index("component")["value"]
    expected = [outer["embedding"], *inner, outer["final_norm"], outer["head"]]
    np.testing.assert_array_equal(last.get_ydata(), expected)


@pytest.mark.parametrize(("blocks", "labels"), [(3, 27), (20, 20)])
def test_depth_names_every_place_or_every_block(tmp_path, blocks, labels):
    axes = figures.cls_rank(tables.table(tmp_path, points=2, blocks=blocks)).axes[0]
    texts = [text.get_text() for text in axes.get_xticklabels()]
    assert len(texts) == labels
    if blocks == 3:
        assert texts[:2] == ["embedding", "0: norm 1"] and texts[-2:] == ["final norm", "head"]
        assert axes.get_xlabel() == ""
    else:
        assert texts == [str(n) for n in range(20)]
        said = axes.get_xlabel().replace("\n", " ")
        assert said.startswith("block; from left to right in each: norm 1, attention output,")
        assert said.endswith("Outside: embedding, final norm, head")


def test_a_network_without_cls_says_so(tmp_path):
    with pytest.raises(NotEnoughEvidenceError, match="CLS"):
        figures.cls_rank(tables.table(tmp_path, cls=False, points=2))


def test_statuses_explain_an_empty_figure(tmp_path):
    values = [{(0, "fc1"): None, (1, "fc1"): None}] * 2
    with pytest.raises(NotEnoughEvidenceError, match=r"non_finite \(4 rows\)"):
        figures.component_rank(small(tmp_path, values))


def test_units_take_tau_0025_unless_another_is_chosen(tmp_path):
    table = tables.table(tmp_path, points=2, blocks=2)
    dormant = [
        [line.get_ydata()[0] for line in axes.lines if "dormant" in line.get_label()]
        for axes in figures.units(table).axes
    ]
    assert dormant == [[0.1], [0.1]]
    other = figures.units(table, parameters="tau=0.1").axes[0].lines
    assert [line.get_ydata()[0] for line in other] == [0.5, 0.2]


def test_group_is_mean_and_standard_deviation(tmp_path):
    ranks = {"a": 1.0, "b": 2.0, "c": 6.0}
    parts = [
        small(tmp_path / run, [{(0, "fc1"): rank}, {(0, "fc1"): rank * 2}], run=run)
        for run, rank in ranks.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    data = figures.component_rank.data(table, choose(groups={"all": ["a", "b", "c"]}))
    assert data["run"].unique().tolist() == ["all"]
    np.testing.assert_allclose(data["value"], [3, 6])
    np.testing.assert_allclose(
        data["spread"], [np.std([1, 2, 6], ddof=1), np.std([2, 4, 12], ddof=1)]
    )
    figure = figures.component_rank(table, groups={"all": ["a", "b", "c"]})
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(6 + np.std([2, 4, 12], ddof=1))


def test_runs_with_probes_of_their_own_are_all_shown(tmp_path):
    parts = []
    for run, probe, ranks in (("a", "p", [1.0, 2.0, 3.0]), ("b", "q", [4.0, 5.0])):
        made = small(tmp_path / run, [{(0, "fc1"): rank} for rank in ranks], run=run)
        parts.append(made.assign(probe=probe))
    table = pd.concat(parts, ignore_index=True)
    data = figures.component_rank.data(table, choose())
    assert data.groupby("run")["value"].agg(list).to_dict() == {"a": [1, 2, 3], "b": [4, 5]}
    (drawn,) = figures.draw(table, tmp_path / "f", ["component-rank"], ["png"])
    assert "different probes" in drawn.note and len(drawn.files) == 2
    group = {"both": ["a", "b"]}
    (drawn,) = figures.draw(table, tmp_path / "g", ["component-rank"], ["png"], groups=group)
    assert "different probes" in drawn.note
    alone = figures.draw(parts[0], tmp_path / "h", ["component-rank"], ["png"])
    assert alone[0].note == ""


def test_a_group_needs_the_metric_in_every_run(tmp_path):
    ranks = small(tmp_path / "a", [{(0, "fc1"): 1.0}], run="a")
    other = small(tmp_path / "b", [{(0, "fc1"): 1.0}], run="b").assign(metric="stable_rank")
    table = pd.concat([ranks, other], ignore_index=True)
    with pytest.raises(NotEnoughEvidenceError, match="run 'b' has no value here"):
        figures.component_rank(table, groups={"both": ["a", "b"]})


def test_a_group_with_a_failed_run_has_no_mean(tmp_path):
    whole = small(tmp_path / "a", [{(0, "fc1"): 1.0}, {(0, "fc1"): 2.0}], run="a")
    failed = small(tmp_path / "b", [{(0, "fc1"): 3.0}, {(0, "fc1"): None}], run="b")
    table = pd.concat([whole, failed], ignore_index=True)
    data = figures.component_rank.data(table, choose(groups={"both": ["a", "b"]}))
    np.testing.assert_array_equal(data["value"], [2, np.nan])
    with pytest.raises(UsageError, match="did you mean 'a'"):
        figures.component_rank(table, groups={"x": ["aa"]})


def test_a_chosen_block_is_shown_alone(tmp_path):
    table = tables.table(tmp_path, points=2)
    (axes,) = figures.component_rank(table, block=3).axes
    assert axes.get_title() == "block 3"
    assert len(figures.component_rank(table).axes) == 5, "four blocks and what lies outside"
    assert set(figures.cls_rank.data(table, choose(block=3))["block"]) == {3}


def test_two_values_for_one_place_are_an_error(tmp_path):
    table = small(tmp_path, VALUES)
    doubled = pd.concat([table, table.assign(value=table["value"] + 1)], ignore_index=True)
    with pytest.raises(UsageError, match="several values at one place"):
        figures.component_rank(doubled)
    again = pd.concat([table, table], ignore_index=True)
    assert len(figures.component_rank.data(again, choose())) == 12


def test_steps_blocks_and_x(tmp_path):
    table = tables.table(tmp_path, points=5, blocks=2)
    data = figures.component_rank.data(table, choose(steps=(1000, 3000), block=1))
    assert sorted(data["x"].unique()) == [1000, 2000, 3000]
    assert set(data["block"].dropna()) == {1}
    tasks = figures.component_rank.data(table, choose(x="task"))
    assert sorted(tasks["x"].unique()) == [0, 1, 2, 3, 4]
    tokens = figures.component_rank.data(table, choose(x="tokens", tokens_per_step=16))
    assert sorted(tokens["x"].unique()) == [0, 16000, 32000, 48000, 64000]
    with pytest.raises(UsageError, match="tokens_per_step"):
        figures.component_rank(table, x="tokens")
    with pytest.raises(UsageError, match="did you mean 'task'"):
        figures.component_rank(table, x="tasks")


def test_whole_component_is_the_mean_over_heads_only_when_every_head_has_a_value(tmp_path):
    def make(point):
        ranks = [2.0, 4.0 if point == 0 else None]
        return [
            Row("effective_rank", "feature", rank, "q", 0, head) for head, rank in enumerate(ranks)
        ]

    data = figures.component_rank.data(tables.table(tmp_path, make, points=2), choose())
    np.testing.assert_array_equal(data["value"], [3, np.nan])
    assert data["head_mean"].iloc[0]


def test_a_course_stops_where_the_shape_changed(tmp_path):
    table = small(tmp_path, [{(0, "fc1"): float(v)} for v in (1, 2, 30, 31)])
    table = table.assign(segment=[0, 0, 1, 1])
    (line,) = figures.component_rank(table).axes[0].lines
    np.testing.assert_array_equal(line.get_ydata(), [1, 2, np.nan, 30, 31])
    shown = image(figures.delta_heatmap_blocks(table)).get_array()
    np.testing.assert_array_equal(np.ma.filled(shown, np.nan), [[0, 1, np.nan, np.nan]])


def test_forked_branches_are_two_courses(tmp_path):
    table = small(tmp_path, [{(0, "fc1"): 1.0}] * 4)
    forked = table.assign(branch=["main", "main", "fork", "fork"])
    data = figures.component_rank.data(forked, choose())
    assert sorted(data["run"].unique()) == ["vit/fork", "vit/main"]


def test_choice_of_head(tmp_path):
    table = tables.table(tmp_path, points=2)
    figure = figures.head_rank(table, block=1, head=[1, 3])
    assert [axes.get_title() for axes in figure.axes] == ["head 1", "head 3"]
    chosen = replace(choose(), heads=(0,))
    assert set(figures.head_rank.data(table, chosen)["head"]) == {0}


def test_labels_say_what_the_numbers_are(tmp_path):
    def make(point):
        return [
            Row("attention_sink_rate", "attention", 0.1 * point, "attention", block, head,
                parameters=f"column={column}")
            for block in range(2) for head in range(2) for column in ("first", "largest")
        ]  # fmt: skip

    table = tables.table(tmp_path, make, points=2)
    figure = figures.delta_heatmap(table, metric="attention_sink_rate")
    assert figure.axes[-1].get_ylabel() == "difference in\nattention sink rate (column=first)"
    other = figures.head_rank(table, metric="attention_sink_rate", parameters="column=largest")
    assert "(column=largest), block 1" in other.get_suptitle()
    ranks = figures.component_rank(small(tmp_path / "r", VALUES), block=0)
    assert ranks.axes[0].get_ylabel() == "effective rank of features"


def test_labels_say_the_unit(tmp_path):
    def make(point):
        return [Row("attention_entropy", "attention", 2.0, "attention", block, 0)
                for block in range(2)]  # fmt: skip

    figure = figures.head_rank(tables.table(tmp_path, make, points=2), metric="attention_entropy")
    assert figure.axes[0].get_ylabel() == "attention entropy (nats)"
    assert figure.get_suptitle() == "attention entropy (nats), block 1"


def test_weight_magnitude_is_drawn_without_a_rank_beside_it(tmp_path):
    table = tables.table(tmp_path, points=3)
    alone = figures.weight_magnitude(table[table["metric"] == "weight_magnitude"], block=1)
    assert [axes.get_title() for axes in alone.axes] == ["weight magnitude"]
    both = [axes.get_title() for axes in figures.weight_magnitude(table, block=1).axes]
    assert both == ["weight magnitude", "effective rank of weights"]
    with pytest.raises(NotEnoughEvidenceError, match="weight_magnitude"):
        figures.weight_magnitude(table[table["metric"] == "stable_rank"], block=1)
