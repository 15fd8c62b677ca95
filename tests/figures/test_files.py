"""What is written: formats, fonts, sizes, numbers; without a display and without global state."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from plastiscope import figures
from plastiscope.errors import UnreadableError, UsageError
from plastiscope.figures import panels
from plastiscope.figures.style import mark
from plastiscope.store import Row, checkpoint_file, write

spec = importlib.util.spec_from_file_location("tables", Path(__file__).with_name("tables.py"))
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return tables.table(tmp_path_factory.mktemp("run"), points=4, blocks=2)


def test_every_figure_is_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "figures.md").read_text("utf-8")
    listed = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    names = [name for cell in listed for name in re.findall("`([^`]+)`", cell)]
    assert sorted(names) == sorted(kind.name for kind in figures.FIGURES)


def test_each_format_and_the_numbers_are_written(table, tmp_path):
    (drawn,) = figures.draw(table, tmp_path / "new", ["delta-heatmap"])
    names = [file.name for file in drawn.files]
    assert names == [f"delta-heatmap.{ending}" for ending in ("png", "pdf", "svg", "csv")]
    assert all(file.stat().st_size > 500 for file in drawn.files)
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == sorted(names)
    numbers = pd.read_csv(drawn.files[-1])
    shown = figures.delta_heatmap(table).axes[0].images[0].get_array()
    fc1 = numbers[numbers["component"] == "fc1"].sort_values("x")["value"]
    np.testing.assert_allclose(shown[4], fc1, rtol=1e-12)
    np.testing.assert_allclose(numbers["value"], numbers["last_value"] - numbers["first_value"])


def test_what_has_no_data_says_so(tmp_path):
    made = tables.table(tmp_path / "t", tables.layers, points=3)
    drawn = {one.name: one for one in figures.draw(made, tmp_path / "f", formats=["png"])}
    assert set(drawn) == {kind.name for kind in figures.FIGURES}
    assert drawn["cls-rank"].files == () and "no data" in drawn["cls-rank"].note
    assert "by head" in drawn["head-rank"].note
    assert drawn["component-rank"].note == "" and len(drawn["component-rank"].files) == 2
    written = {file.stem for file in (tmp_path / "f").iterdir()}
    assert written == {name for name, one in drawn.items() if one.files}


def test_pdf_fonts_are_type_42(table, tmp_path):
    """O06: no Type 3 font, and the caller's rcParams as they were."""
    before = dict(matplotlib.rcParams)
    (drawn,) = figures.draw(table, tmp_path, ["component-rank"], formats=["pdf"])
    raw = drawn.files[0].read_bytes()
    assert b"/Type3" not in raw and b"/FontFile2" in raw
    assert dict(matplotlib.rcParams) == before


def test_type_3_is_found_when_it_is_there(tmp_path):
    """The negative control of the test above."""
    figure = Figure()
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, "x")
    figure.savefig(tmp_path / "x.pdf")
    assert b"/Type3" in (tmp_path / "x.pdf").read_bytes()


def test_no_display_and_no_pyplot(tmp_path):
    """O05: written without a display; the user's backend stays."""
    tables.table(tmp_path / "t", points=2, blocks=2)
    code = (
        "import sys, pathlib, os\n"
        "from plastiscope import store, figures\n"
        f"table = store.read(pathlib.Path({str(tmp_path / 't')!r}))\n"
        f"figures.draw(table, pathlib.Path({str(tmp_path / 'f')!r}), ['units'], ['png'])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "import matplotlib\n"
        "print(matplotlib.rcParams._get_backend_or_none() or matplotlib.rcParams['backend'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"MPLBACKEND": "TkAgg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().lower() == "tkagg"
    assert (tmp_path / "f" / "units.png").stat().st_size > 1000


def resident() -> int:
    """Memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sixty_figures_without_a_warning_and_without_growth(table):
    """O07: nothing is left open."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(60):
            figures.units(table, block=0)
            if number == 20 and Path("/proc/self/statm").exists():
                gc.collect()
                before = resident()
    gc.collect()
    if Path("/proc/self/statm").exists():
        assert resident() - before < 30e6


def wide_table(layers: int, points: int) -> pd.DataFrame:
    """Effective ranks of many layers at many checkpoints, without the detour over files."""
    made = pd.DataFrame(
        {
            "run": "big",
            "block": np.tile(np.arange(layers), points),
            "step": np.repeat(np.arange(points) * 100, layers),
            "metric": "effective_rank",
            "subject": "feature",
            "component": "fc",
            "value": np.arange(layers * points) % 997,
            "status": "ok",
        }
    )
    made["checkpoint"] = made["step"].astype(str)
    missing = ("task", "branch", "head", "tokens", "parameters", "index", "standard_error")
    missing += ("rows", "columns", "maximum", "probe", "segment")
    return made.assign(**dict.fromkeys(missing, None))


@pytest.mark.parametrize(("layers", "points"), [(300, 12), (6, 3000)])
def test_hundreds_of_layers_and_thousands_of_steps_stay_legible(tmp_path, layers, points):
    made = wide_table(layers, points)
    names = ["delta-heatmap", "delta-heatmap-blocks", "component-rank", "component-rank-grid"]
    for drawn in figures.draw(made, tmp_path, names, ["png"], style="slide"):
        with Image.open(drawn.files[0]) as picture:
            assert max(picture.size) < 8000, drawn.name
    assert overlapping(figures.delta_heatmap_blocks(made)) == []
    assert len(figures.component_rank(made).axes) == min(layers, 24)


def test_very_many_numbers_are_written_as_parquet(table, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["plastiscope.figures.draw"], "MOST_LINES", 10)
    (drawn,) = figures.draw(table, tmp_path, ["delta-heatmap"], ["png"])
    assert drawn.files[-1].name == "delta-heatmap.parquet"
    shown = figures.delta_heatmap(table).axes[0].images[0].get_array()
    numbers = pd.read_parquet(drawn.files[-1])
    fc1 = numbers[numbers["component"] == "fc1"].sort_values("x")["value"]
    np.testing.assert_array_equal(shown[4], fc1)


@pytest.mark.parametrize(
    ("count", "most", "marked"), [(5, 20, 5), (20, 20, 20), (100, 20, 10), (2000, 20, 10)]
)
def test_every_point_is_marked_or_a_few(count, most, marked):
    assert len(panels._marked(np.arange(float(count)), most)) == marked


def test_a_huge_picture_loses_resolution_not_its_size_cap(tmp_path):
    figure = Figure(figsize=(60, 2))
    FigureCanvasAgg(figure)
    with Image.open(figures.save(figure, tmp_path / "x.png")) as picture:
        assert 7900 < picture.size[0] < 8000


def overlapping(figure: Figure) -> list[str]:
    """Pairs of tick labels of one axis that touch."""
    found = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_visible():
                continue
            labels = [x for x in axis.get_ticklabels() if x.get_text() and x.get_visible()]
            low, high = sorted(axis.get_view_interval())
            labels = [
                label
                for label, place in zip(labels, axis.get_majorticklocs(), strict=False)
                if low <= place <= high
            ]
            boxes = [label.get_window_extent() for label in labels]
            found += [
                f"{one.get_text()} | {two.get_text()}"
                for one, two, a, b in zip(labels, labels[1:], boxes, boxes[1:], strict=False)
                if a.overlaps(b)
            ]
    return found


WIDTHS = {"paper": (3.5, 7.16), "slide": (6.5, 12.8), "dark": (6.5, 12.8)}
STYLED = [(kind, "paper") for kind in figures.FIGURES]
STYLED += [(figures.delta_heatmap_blocks, "slide"), (figures.cls_rank, "dark")]


@pytest.mark.parametrize(("kind", "style"), STYLED, ids=lambda one: getattr(one, "name", one))
def test_labels_never_touch(tmp_path_factory, kind, style):
    base = tmp_path_factory.getbasetemp() / "labels"
    if not base.exists():
        for seed in range(3):
            for make in (tables.transformer, tables.study):
                out = base / make.__name__
                tables.table(out, make, f"run{seed}", 8, 1_234_567, seed=seed, blocks=3)
    studies = ("isometry", "jacobian", "sensitivity", "network", "law", "tasks")
    other = kind.data.__module__.endswith(studies) and kind.name != "dormant-layers"
    source = base / ("study" if other else "transformer")
    rows = figures_table(source)
    figure = kind(rows, style=style)
    assert overlapping(figure) == []
    assert figure.get_figwidth() in WIDTHS[style]


def figures_table(out: Path) -> pd.DataFrame:
    from plastiscope.store import read

    return read(out)


def test_legends_are_capped(tmp_path):
    made = tables.table(tmp_path, tables.layers, points=2, count=40)
    (legend,) = figures.weight_magnitude(made).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert len(texts) == 13 and texts[-1] == "(28 more)"
    assert texts[0] == "0: fc" and texts[-2] == "39: fc"


def test_a_legend_names_every_component_beside_the_runs(tmp_path):
    for seed in range(3):
        tables.table(tmp_path, run=f"run{seed}", points=2, blocks=1, seed=seed)
    (legend,) = figures.component_rank(figures_table(tmp_path)).legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[-3:] == ["run: run0", "run: run1", "run: run2"]
    assert len(texts) == 14 and "residual 1" in texts and "more" not in texts[-1]


def test_drawing_into_given_axes(table):
    figure = Figure()
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    assert figures.delta_heatmap(table, axes=left) is figure
    assert left.images and not right.images
    assert figures.component_rank(table, block=1, component="fc1", axes=right) is figure
    assert right.lines
    with pytest.raises(UsageError, match="3 panels"):
        figures.component_rank(table, axes=right)


def test_style_file(table, tmp_path):
    file = tmp_path / "mine.mplstyle"
    file.write_text("font.size: 11\nlines.linewidth: 4\npdf.fonttype: 3\nbackend: TkAgg\n")
    figure = figures.component_rank(table, style=file)
    assert figure.axes[0].lines[0].get_linewidth() == 4
    written = figures.save(figure, tmp_path / "x.pdf", file)
    assert b"/Type3" not in written.read_bytes()
    with pytest.raises(UsageError, match="did you mean 'paper'"):
        figures.component_rank(table, style="papers")
    bad = tmp_path / "bad.mplstyle"
    bad.write_bytes(b"\xff\xfe\x00font.size: 1")
    with pytest.raises(UnreadableError, match="style file"):
        figures.component_rank(table, style=bad)


def test_components_drawn_together_look_different():
    parts = ["norm1", "attention", "attention_output", "residual1", "norm2", "fc1", "activation",
             "fc2", "residual2", "q", "k", "v"]  # fmt: skip
    for of in (figures.PAPER, figures.DARK):
        for among in (parts, parts[:9], ["q", "k", "v"], ["embedding", "head", "final_norm"]):
            marks = [(panels.visible(c, of), m) for c, m in (mark(name, among) for name in among)]
            assert len(set(marks)) == len(among)
    blues = [panels.visible(mark(name, parts)[0], figures.DARK) for name in "qkv"]
    distances = [np.linalg.norm(np.subtract(to_rgb(a), to_rgb(b)))
                 for a, b in combinations(blues, 2)]  # fmt: skip
    assert min(distances) > 0.3


def test_names_that_would_break_a_picture(tmp_path):
    names = ["cost $x", "_hidden", "<script>alert(1)</script>", "two\nlines", "x" * 300]
    for name in names:
        rows = [Row("effective_rank", "feature", 2.0 + step, "fc1", 0) for step in (0,)]
        common = {"run": name, "checkpoint": "c", "step": 1, "task": None, "branch": None}
        common |= {"probe": "p", "checkpoint_fingerprint": "f"}
        write(checkpoint_file(tmp_path / "t", name, "c"), rows, common, "k", {})
    made = figures_table(tmp_path / "t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (drawn,) = figures.draw(made, tmp_path / "f", ["component-rank"], ["png", "svg"])
        figure = figures.component_rank(made)
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == 6 and all(len(text) <= 45 and "\n" not in text for text in texts)
    assert b"<script>" not in drawn.files[1].read_bytes()


def test_the_same_table_gives_the_same_bytes(table, tmp_path):
    one, two = (
        figures.draw(table, tmp_path / name, ["units"], ["png", "pdf", "svg"])[0] for name in "ab"
    )
    for first, second in zip(one.files, two.files, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.suffix


def test_mistakes_name_what_is_there(table, tmp_path):
    with pytest.raises(UsageError, match="did you mean 'head-rank'"):
        figures.draw(table, tmp_path, ["head-ranks"])
    with pytest.raises(UsageError, match="unknown format 'gif'"):
        figures.draw(table, tmp_path, formats=["gif"])
    with pytest.raises(UsageError, match="did you mean 'stable_rank'"):
        figures.draw(table, tmp_path, metric="stable_ranks")
    with pytest.raises(UsageError, match=r"unknown block '99': known: 0, 1$"):
        figures.draw(table, tmp_path, block=99)
    with pytest.raises(UsageError, match=r"unknown head '7': known: 0, 1, 2, 3$"):
        figures.draw(table, tmp_path, head=7)
    with pytest.raises(UsageError, match="unknown subject 'weights': did you mean 'weight'"):
        figures.draw(table, tmp_path, subject="weights")
    with pytest.raises(UsageError, match="leave out the metric"):
        figures.draw(table, tmp_path, ["units"], metric="stable_rank")
    (drawn,) = figures.draw(table, tmp_path, ["delta-heatmap"], ["png"], metric="stable_rank")
    assert drawn.files[0].name == "delta-heatmap-stable_rank.png"


def test_an_unwritable_place_is_one_clear_line(table, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="can't write"):
        figures.save(figures.units(table), blocked / "x.png")
