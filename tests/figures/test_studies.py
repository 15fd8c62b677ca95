"""The studies' own figures: accuracy, isometry, Jacobians, the onset law, rates of change."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

from plastiscope import figures
from plastiscope.errors import NotEnoughEvidenceError
from plastiscope.figures import law, network
from plastiscope.figures.kind import choose
from plastiscope.recorded import read_recorded
from plastiscope.store import Row, checkpoint_file, read, results_file, write

spec = importlib.util.spec_from_file_location("tables", Path(__file__).with_name("tables.py"))
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def test_running_mean_of_accuracy_stops_at_a_missing_task(tmp_path):
    accuracies = [0.9, 0.7, None, 0.5]

    def make(point):
        status = "ok" if accuracies[point] is not None else "unreadable"
        return [Row("accuracy", "task", accuracies[point], status=status)]

    data = figures.accuracy.data(tables.table(tmp_path, make, points=4), choose())
    series = {name: part["value"].tolist() for name, part in data.groupby("series")}
    np.testing.assert_allclose(series["task"], [0.9, 0.7, np.nan, 0.5])
    np.testing.assert_allclose(series["running mean (AAT)"], [0.9, 0.8, np.nan, np.nan])


def test_isometry_is_the_plain_mean_over_whole_matrices(tmp_path):
    def make(point):
        rows = [
            Row("squared_singular_value", "weight", value, name, 0, head, parameters=part)
            for name, head, values in (("q", None, (9, 1, 4)), ("fc1", None, (1, 0.5, 0.8)),
                                       ("q", 0, (100, 100, 100)))
            for part, value in zip(("max", "min", "mean"), values, strict=True)
        ]  # fmt: skip
        rows.append(Row("squared_singular_value", "weight", 7.0, "network", parameters="max"))
        rows.append(Row("condition_number", "weight", 3.0 if point else None, "q", 0))
        return [*rows, Row("condition_number", "weight", 5.0, "fc1", 0)]

    data = figures.isometry.data(tables.table(tmp_path, make, points=2), choose())
    both = data.pivot(index="metric", columns="x", values="value")
    assert both.loc["sigma_squared_max"].tolist() == [5, 5]
    assert both.loc["sigma_squared_min"].tolist() == [0.75, 0.75]
    assert both.loc["sigma_squared_mean"].tolist() == [2.4, 2.4]
    np.testing.assert_array_equal(both.loc["condition_number"], [np.nan, 4])
    assert (data["matrices"] == 2).all()


def test_of_several_kernels_the_mean_logit_is_drawn_and_named(tmp_path):
    def make(point):
        values = {"logits": 1.0, "loss": 2.0, "mean_logit": 3.0}
        return [
            Row("ntk_spectrum", "ntk", value, "network", index=0, parameters=f"f={name}, n=32")
            for name, value in values.items()
        ]

    table = tables.table(tmp_path, make, points=2)
    data = figures.ntk.data(table, choose())
    assert data["value"].tolist() == [3.0, 3.0]
    assert figures.ntk(table).get_suptitle() == "f=mean_logit, n=32"
    other = choose(parameters="f=loss, n=32")
    assert figures.ntk.data(table, other)["value"].tolist() == [2.0, 2.0]
    without = table[table["parameters"] != "f=mean_logit, n=32"]
    assert figures.ntk(without).get_suptitle() == "f=logits, n=32"


def test_runs_that_a_figure_has_no_value_of_are_named(tmp_path):
    tables.table(tmp_path, tables.study, "measured", 2)
    table = tables.table(tmp_path, tables.transformer, "other", 2)
    (drawn,) = figures.draw(table, tmp_path / "f", ["ntk"], ["png"])
    assert drawn.note == "no value in other" and len(drawn.files) == 2


def test_the_legend_says_what_a_band_is(tmp_path):
    for seed in range(2):
        tables.table(tmp_path, tables.study, f"run{seed}", 2, seed=seed)
    table = read(tmp_path)
    figure = figures.network_course(table, groups={"both": ["run0", "run1"]})
    rate = figures.rate_of_change(table[table["run"] == "run0"])
    texts = [text.get_text() for legend in (*figure.legends, *rate.legends)
             for text in legend.get_texts()]  # fmt: skip
    assert "shaded: standard deviation over runs" in texts and "shaded: 95 % band" in texts


def test_violins_are_of_powers_only_where_the_values_span_them(tmp_path):
    def make(point):
        return [Row(metric, "weight", value, "fc1", block)
                for metric, values in (("condition_number", (1.0, 10.0, 1000.0)),
                                       ("stable_rank", (0.0, 2.0, 4.0)))
                for block, value in enumerate(values)]  # fmt: skip

    table = tables.table(tmp_path, make, points=1)
    for metric, label, expected in (
        ("condition_number", "log₁₀ condition number", [0, 1, 3]),
        ("stable_rank", "stable rank", [0, 2, 4]),
    ):
        (axes,) = figures.isometry_violins(table, metric=metric).axes
        assert axes.get_ylabel() == label
        np.testing.assert_allclose(axes.lines[-1].get_ydata(), expected)


def test_bounds_of_several_runs_have_a_colour_each(tmp_path):
    for seed in range(2):
        table = tables.table(tmp_path, tables.study, f"run{seed}", 1, seed=seed)
    figure = figures.rate_bound(table)
    lines = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert lines == [("#0072B2", "-"), ("#0072B2", "--"), ("#D55E00", "-"), ("#D55E00", "--")]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["measured", "bound", "run: run0", "run: run1"]


def test_network_totals_are_the_pooled_ones(tmp_path):
    def make(point):
        return [
            Row("weight_magnitude", "weight", 1.0, "fc", 0),
            Row("weight_magnitude", "weight", 2.0 + point, "network", parameters="pooled"),
            Row("weight_magnitude", "weight", 5.0, "network", parameters="mean"),
        ]

    data = figures.network_course.data(tables.table(tmp_path, make, points=2), choose())
    assert data["value"].tolist() == [2, 3]


def test_probe_accuracy_gets_no_running_mean(tmp_path):
    def make(point):
        return [Row("accuracy", "output", 0.5 + point / 10, "head")]

    data = figures.accuracy.data(tables.table(tmp_path, make, points=3), choose())
    assert data["series"].unique().tolist() == ["probe"]
    np.testing.assert_allclose(data["value"], [0.5, 0.6, 0.7])


def test_recorded_results_go_before_those_on_the_probe(tmp_path):
    def make(point):
        return [Row("accuracy", "output", 0.5, "head"), Row("loss", "task", 2.0 - point)]

    data = figures.accuracy.data(tables.table(tmp_path, make, points=2), choose())
    assert set(data["metric"]) == {"loss"}
    assert data[data["series"] == "task"]["value"].tolist() == [2, 1]


def test_running_mean_over_some_tasks_is_not_called_aat(tmp_path):
    table = tables.table(tmp_path, lambda point: [Row("accuracy", "task", 0.5)], points=3)
    data = figures.accuracy.data(table.assign(task=table["task"] * 10), choose())
    assert set(data["series"]) == {"task", "running mean of these tasks"}


def test_isometry_map_is_clipped_to_the_2nd_and_98th_percentile(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.uniform(1, 2, (3, 50))
    values[1, 7] = 1e9

    def make(point):
        return [
            Row("condition_number", "weight", float(value), "fc1", block)
            for block, value in enumerate(values[point])
        ]

    figure = figures.isometry_map(tables.table(tmp_path, make, points=3))
    panels = [axes for axes in figure.axes if axes.images]
    low, high = np.percentile(values, (2, 98))
    assert len(panels) == 3
    for axes in panels:
        assert axes.images[0].get_clim() == pytest.approx((low, high))


def test_recorded_trainability_feeds_the_onset_and_its_law(tmp_path):
    for run, size, onset in (("small", 10, 2), ("middle", 100, 4), ("large", 1000, 8)):
        lines = [f"{1000 * n},{(n - onset) ** 2},{size}" for n in range(1, 13)]
        file = tmp_path / f"{run}.csv"
        file.write_text("\n".join(["step,probe_auc,parameter_count", *lines]) + "\n")
        common = {"run": run, "checkpoint": "results.csv", "step": None, "task": None}
        common |= {"branch": None, "checkpoint_fingerprint": None}
        write(results_file(tmp_path, run), read_recorded(file), common, "k", {})
        write(checkpoint_file(tmp_path, run, "c"), [Row("loss", "output", 1.0)],
              common | {"checkpoint": "c", "step": 1}, "k", {})  # fmt: skip
    table = read(tmp_path, results=True)
    course = figures.probe_auc.data(table, choose())
    assert course[course["onset"]].set_index("run")["x"].to_dict() == {
        "small": 2000, "middle": 4000, "large": 8000,
    }  # fmt: skip
    panels = figures.probe_auc(table).axes
    assert [axes.get_title() for axes in panels] == ["large", "middle", "small"]
    points, smooth, onset = panels[1].lines
    np.testing.assert_array_equal(points.get_ydata(), [(n - 4) ** 2 for n in range(1, 13)])
    assert smooth.get_ydata()[3] == pytest.approx(2 / 3) and onset.get_xdata()[0] == 4000
    data = figures.onset_law.data(table, choose())
    assert data.set_index("run")["parameter_count"].to_dict() == {
        "small": 10, "middle": 100, "large": 1000,
    }  # fmt: skip
    np.testing.assert_allclose(data["exponent"], np.log10(2))
    np.testing.assert_allclose(data["value"], data["fitted"])
    bare = read(tmp_path)
    with pytest.raises(NotEnoughEvidenceError, match=r"records it, step by step, in results\.csv"):
        figures.onset_law.data(bare, choose())


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([9, 4, 1, 0, 1, 4, 9, 16], 3),
        ([5, 4, 3, 2, 1, 0], None),
        ([0, 1, 2, 3, 4, 5], 1),
        ([0, 3, 6, 3, 0, 3, 6, 9], 4),
        ([9, 4, math.nan, 0, 1, 4, 9], None),
        ([1, 2], None),
    ],
)
def test_onset_is_where_the_moving_average_rises_for_good(values, place):
    assert network.onset_place(np.array(values, float)) == place


def test_law_of_the_study():
    """The study's eight models give its published fit."""
    sizes = np.array([5, 12, 27, 39, 53, 83, 106, 314]) * 1e6
    onsets = np.array([6, 6, 16, 18, 54, 54, 62, 118.0])
    fit = law.fit_law(sizes, onsets)
    slope, intercept = np.polyfit(np.log(sizes), np.log(onsets), 1)
    assert fit.exponent == pytest.approx(slope)
    assert fit.intercept == pytest.approx(intercept)
    assert fit.exponent == pytest.approx(0.8269, abs=0.02)
    assert fit.r_squared == pytest.approx(0.8969, abs=0.02)
    assert fit.exponent_error == pytest.approx(0.1027, abs=0.02)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (6, 2.44691), (30, 2.04227)]
)
def test_student_quantile(freedom, quantile):
    assert law.student_quantile(freedom) == pytest.approx(quantile, rel=1e-4)


def test_rate_band_is_1_96_standard_errors(tmp_path):
    data = figures.rate_of_change.data(tables.table(tmp_path, tables.study, points=2), choose())
    np.testing.assert_allclose(data["high"] - data["value"], 0.196)
    assert data["x"].unique().tolist() == [1000]


def test_jacobian_quantiles_of_exact_and_estimated_components(tmp_path):
    data = figures.jacobian_depth.data(tables.table(tmp_path, tables.study, points=3), choose())
    assert sorted(data["quantile"].unique()) == [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1]
    assert set(data["component"]) == {"norm1", "attention_output", "norm2", "fc1", "fc2"}
    median = data[data["quantile"] == 0.5]
    assert (median["value"] == 1.0).all() and len(median) == 3 * 3 * 5
    greatest = data[(data["quantile"] == 1) & (data["x"] == 2000)]
    assert (greatest["value"] == 5.0).all()


def test_jacobian_shows_the_spread_of_each_component(tmp_path):
    figure = figures.jacobian_depth(tables.table(tmp_path, tables.study, points=3))
    assert [axes.get_title() for axes in figure.axes] == ["step 0", "step 1k", "step 2k"]
    last = figure.axes[2]
    assert last.get_yscale() == "log"
    (median,) = [line for line in last.lines if line.get_marker() == "o"]
    np.testing.assert_array_equal(median.get_ydata(), [1.0] * 15)
    ends = [path.vertices[:, 1].tolist() for path in last.collections[0].get_paths()]
    assert ends == [[0.01 / 3, 5.0]] * 15
    ends = [path.vertices[:, 1].tolist() for path in last.collections[2].get_paths()]
    assert ends == [[0.5, 1.5]] * 15
    assert any(set(line.get_ydata()) == {1} for line in last.lines), "the line of isometry"


def test_an_exact_zero_of_a_jacobian_lies_on_the_lower_edge(tmp_path):
    def make(point):
        return [tables.jacobian("jacobian_sigma_min", 0.0, "norm1", 0),
                tables.jacobian("jacobian_sigma_max", 2.0, "norm1", 0)]  # fmt: skip

    (axes,) = figures.jacobian_depth(tables.table(tmp_path, make, points=1)).axes
    assert axes.get_ylim()[0] == 1e-4
    assert axes.collections[0].get_paths()[0].vertices[:, 1].tolist() == [1e-4, 2.0]


def test_whole_blocks_have_no_place_among_their_components(tmp_path):
    def make(point):
        return [tables.jacobian("jacobian_sigma_max", v, name, 0)
                for name, v in (("fc1", 2.0), ("block", 500.0))]  # fmt: skip

    table = tables.table(tmp_path, make, points=1)
    assert figures.jacobian_depth.data(table, choose())["component"].tolist() == ["fc1"]
    asked = figures.jacobian_depth.data(table, choose(component="block"))
    assert asked["value"].tolist() == [500.0]


def test_of_very_many_blocks_the_depth_shows_some(tmp_path):
    def make(point):
        return [tables.jacobian(f"jacobian_sigma_{end}", value + block, "fc1", block)
                for block in range(400) for end, value in (("min", 0.5), ("max", 1.0))]  # fmt: skip

    table = tables.table(tmp_path, make, points=1)
    assert len(figures.jacobian_depth.data(table, choose())) == 800
    figure = figures.jacobian_depth(table)
    assert figure.get_suptitle() == "130 of 400 blocks, evenly spaced"
    ends = [path.vertices[1, 1] for path in figure.axes[0].collections[0].get_paths()]
    assert len(ends) == 130 and (ends[0], ends[-1]) == (1.0, 400.0)


def test_bounds_of_every_component_are_drawn(tmp_path):
    data = figures.rate_bound.data(tables.table(tmp_path, tables.study, points=2), choose())
    assert len(data) == 15
    np.testing.assert_allclose(data["bound"], 40 * data["value"])
