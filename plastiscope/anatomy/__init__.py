"""What every tensor of a network is: found from its own computation, or from its stored names."""

from __future__ import annotations

from plastiscope.anatomy.effective import Effective, effective_tensors
from plastiscope.anatomy.families import from_names
from plastiscope.anatomy.parts import (
    Anatomy,
    AttentionSite,
    Component,
    ExpertSite,
    Matrix,
    Operand,
    Site,
)
from plastiscope.anatomy.routing import Routed
from plastiscope.anatomy.trace import trace
from plastiscope.anatomy.verify import Proof, verify
from plastiscope.anatomy.watch import AttentionCall, Watch, watch

VERSION = 3
"""Of what is found in a network. Raise it with every change that finds, places or proves a
component, a head, an expert or an activation otherwise than before, by the trace or by the stored
names: rows of an earlier version are measured again."""

__all__ = [
    "Anatomy",
    "AttentionCall",
    "AttentionSite",
    "Component",
    "Effective",
    "ExpertSite",
    "Matrix",
    "Operand",
    "Proof",
    "Routed",
    "Site",
    "Watch",
    "effective_tensors",
    "from_names",
    "trace",
    "verify",
    "watch",
]
