"""Figures for papers and slides, from the tables alone.

Each is a function of the table: `delta_heatmap(table, block=(0, 11)) -> Figure`; `draw` writes
them to files by name, with their numbers. No torch, no pyplot, no display.
"""

from .components import component_rank, component_rank_grid, component_stable_rank, weight_magnitude
from .delta import delta_heatmap, delta_heatmap_blocks
from .depth import cls_rank
from .draw import FIGURES, STANDARD, Drawn, draw
from .heads import head_magnitude, head_magnitude_map, head_rank, head_rank_map
from .isometry import isometry, isometry_map, isometry_types, isometry_violins, ntk
from .jacobian import jacobian_depth
from .kind import Kind
from .law import onset_law
from .network import dormant_layers, head_shares, network_course, probe_auc
from .sensitivity import rate_bound, rate_box, rate_of_change
from .style import DARK, PAPER, SLIDE, Look, look, save
from .tasks import accuracy
from .units import units

__all__ = [
    "DARK",
    "FIGURES",
    "PAPER",
    "SLIDE",
    "STANDARD",
    "Drawn",
    "Kind",
    "Look",
    "accuracy",
    "cls_rank",
    "component_rank",
    "component_rank_grid",
    "component_stable_rank",
    "delta_heatmap",
    "delta_heatmap_blocks",
    "dormant_layers",
    "draw",
    "head_magnitude",
    "head_magnitude_map",
    "head_rank",
    "head_rank_map",
    "head_shares",
    "isometry",
    "isometry_map",
    "isometry_types",
    "isometry_violins",
    "jacobian_depth",
    "look",
    "network_course",
    "ntk",
    "onset_law",
    "probe_auc",
    "rate_bound",
    "rate_box",
    "rate_of_change",
    "save",
    "units",
    "weight_magnitude",
]
