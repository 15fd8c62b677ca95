"""Figures for papers and slides, from the tables alone.

Each is a function of the table: `delta_heatmap(table, block=(0, 11)) -> Figure`; `draw` writes
them to files by name, with their numbers. No torch, no pyplot, no display.
"""

from .components import component_rank, component_rank_grid, component_stable_rank, weight_magnitude
from .delta import delta_heatmap, delta_heatmap_blocks
from .depth import cls_rank
from .draw import FIGURES, Drawn, draw
from .heads import head_magnitude, head_magnitude_map, head_rank, head_rank_map
from .kind import Kind
from .style import DARK, PAPER, SLIDE, Look, look, save
from .units import units

__all__ = [
    "DARK",
    "FIGURES",
    "PAPER",
    "SLIDE",
    "Drawn",
    "Kind",
    "Look",
    "cls_rank",
    "component_rank",
    "component_rank_grid",
    "component_stable_rank",
    "delta_heatmap",
    "delta_heatmap_blocks",
    "draw",
    "head_magnitude",
    "head_magnitude_map",
    "head_rank",
    "head_rank_map",
    "look",
    "save",
    "units",
    "weight_magnitude",
]
