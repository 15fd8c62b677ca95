"""How a figure looks and is written: sizes, fonts, colours; never pyplot, never a lasting rcParam.

matplotlib reads some settings (the font type of a PDF among them) from its global rcParams at the
moment of drawing, so they are set around each piece of work and put back; a lock keeps two threads
from putting back each other's.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..errors import UnreadableError, UsageError, unknown
from ..store import replacing
from .ticks import thin_labels

MOST_PIXELS = 8000
FORMATS = ("pdf", "png", "svg")
_lock = threading.RLock()

# Okabe and Ito's palette, distinct for every common colour blindness; its yellow darkened so that
# it shows on white.
BLUE, RED, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, OLIVE, GREY = "#56B4E9", "#CC79A7", "#A89A00", "#8C8C8C"
INDIGO, NAVY, LAVENDER = "#4B3B8F", "#00386B", "#7F9FE0"
MARKS: dict[str, tuple[str, str]] = {
    "embedding": (PURPLE, "o"),
    "norm1": (SKY, "v"),
    "q": (BLUE, "o"),
    "k": (RED, "s"),
    "v": (GREEN, "^"),
    "attention_output": (BLUE, "D"),
    "attention": (INDIGO, "h"),
    "residual1": (PURPLE, "P"),
    "norm2": (OLIVE, "<"),
    "gate": (ORANGE, "h"),
    "fc1": (RED, "s"),
    "experts": (PURPLE, "*"),
    "router": (OLIVE, "d"),
    "conv": (BLUE, "o"),
    "fc": (RED, "D"),
    "norm": (SKY, "v"),
    "activation": (ORANGE, "X"),
    "fc2": (GREEN, "^"),
    "residual2": (GREY, "p"),
    "final_norm": (SKY, ">"),
    "head": (ORANGE, "*"),
}
# Beside other components q, k and v are shades of blue: alone, blue, red and green.
BLUES = {"q": BLUE, "k": SKY, "v": NAVY, "attention_output": LAVENDER}
# On dark paper: lightened, and still apart.
LIGHTER = {BLUE: "#3D9BE0", SKY: "#A5DBFF", NAVY: "#6F5FE0", LAVENDER: "#B9B4FF", INDIGO: "#A08CF0"}
OTHERS = ((PURPLE, "*"), (OLIVE, "d"), (GREY, "H"), (SKY, ">"), (ORANGE, "h"), (GREEN, "8"))
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


@dataclass(frozen=True)
class Look:
    """Sizes in inches and points, colours, and any further rcParams of a style file."""

    single: float = 3.5
    double: float = 7.16
    tallest: float = 20.0
    font: float = 7.5
    line: float = 1.1
    marker: float = 2.6
    dpi: float = 300
    ink: str = "#1a1a1a"
    paper: str = "white"
    grid: str = "#e3e3e3"
    missing: str = "#9b9b9b"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def row(self) -> float:
        """Height of one line of text with some air, in inches."""
        return self.font * 1.45 / 72


PAPER = Look()
SLIDE = Look(
    single=6.5, double=12.8, tallest=25.0, font=14, line=2.2, marker=5.0, dpi=150, grid="#dcdcdc"
)
DARK = replace(SLIDE, ink="#f0f0f0", paper="#121417", grid="#33383f", missing="#6d7278")
LOOKS = {"paper": PAPER, "slide": SLIDE, "dark": DARK}


def look(style: str | Path | Look = "paper") -> Look:
    """A style by name, or a matplotlib style file laid over the paper style."""
    if isinstance(style, Look):
        return style
    if str(style) in LOOKS:
        return LOOKS[str(style)]
    file = Path(style)
    if not file.is_file():
        raise unknown("style (and no such matplotlib style file)", str(style), LOOKS)
    try:
        settings = matplotlib.rc_params_from_file(file, use_default_template=False)
    except (OSError, UnicodeError, ValueError) as error:
        raise UnreadableError(f"{file} isn't a matplotlib style file: {error}") from error
    backend = ("backend", "savefig.bbox", "toolbar", "figure.figsize")
    kept = tuple((name, value) for name, value in settings.items() if name not in backend)
    return _sized(replace(PAPER, more=kept), dict(kept))


def _sized(base: Look, settings: dict[str, Any]) -> Look:
    """What a style file says about the things that a Look also says."""
    names = {
        "font.size": "font",
        "lines.linewidth": "line",
        "lines.markersize": "marker",
        "savefig.dpi": "dpi",
        "text.color": "ink",
        "figure.facecolor": "paper",
        "grid.color": "grid",
    }
    numbers = ("font", "line", "marker", "dpi")
    said = {field: settings[name] for name, field in names.items() if name in settings}
    said = {f: v for f, v in said.items() if f not in numbers or isinstance(v, int | float)}
    return replace(base, **said)


def settings(of: Look) -> dict[str, Any]:
    """The rcParams of a look. Text is embedded as TrueType (type 42), as journals demand."""
    ink, font = of.ink, of.font
    params: dict[str, Any] = {
        "font.family": "sans-serif",
        "font.size": font,
        "axes.titlesize": font,
        "axes.labelsize": font,
        "xtick.labelsize": font * 0.9,
        "ytick.labelsize": font * 0.9,
        "legend.fontsize": font * 0.9,
        "figure.titlesize": font * 1.1,
        "lines.linewidth": of.line,
        "lines.markersize": of.marker,
        "axes.linewidth": 0.6 * of.line,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlepad": 3,
        "grid.color": of.grid,
        "grid.linewidth": 0.5 * of.line,
        "legend.frameon": False,
        "axes.formatter.useoffset": False,
        "figure.facecolor": of.paper,
        "axes.facecolor": of.paper,
        "savefig.facecolor": of.paper,
    }
    inked = ["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"]
    params |= dict.fromkeys(inked, ink) | dict(of.more)
    fixed = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "plastiscope"}
    return params | fixed | {"savefig.bbox": None, "text.usetex": False, "axes.titley": None}


@contextmanager
def applied(of: Look) -> Iterator[None]:
    """The look's settings in force, the caller's put back afterwards."""
    params: Any = settings(of)
    with _lock, matplotlib.rc_context(params):
        yield


def new_figure(of: Look, width: float, height: float) -> Figure:
    """An empty figure on an Agg canvas, no higher than the look allows; sizes in inches."""
    figure = Figure(figsize=(width, min(height, of.tallest)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def settle(figure: Figure) -> None:
    """Lay the figure out once, take out labels that touch, and keep that layout."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    if thin_labels(figure):
        engine.execute(figure)
    figure.set_layout_engine("none")


def save(figure: Figure, file: Path, style: str | Path | Look = "paper") -> Path:
    """Write a figure, whole or not at all; the format is the file's ending (png, pdf, svg).

    The resolution is lowered where a side would pass 8000 pixels. The bytes depend on the figure
    alone: no date is written.
    """
    kind = file.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise unknown("format", kind, FORMATS)
    of = look(style)
    dpi = min(of.dpi, (MOST_PIXELS - 1) / max(figure.get_size_inches()))
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[kind]
    with applied(of):
        try:
            with replacing(file) as partial:
                figure.savefig(partial, format=kind, dpi=dpi, metadata=metadata)
        except OSError as error:
            raise UsageError(f"can't write {file}: {error}") from error
    return file


def mark(component: str, among: Collection[str] = ()) -> tuple[str, str]:
    """Colour and marker of a component, among the others that are drawn with it."""
    if component in BLUES and {"q", "k", "v"} & set(among) and {"fc1", "fc2"} & set(among):
        return BLUES[component], MARKS[component][1]
    if component in MARKS:
        return MARKS[component]
    return OTHERS[sum(component.encode()) % len(OTHERS)]
