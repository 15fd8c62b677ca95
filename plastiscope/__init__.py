"""plastiscope: diagnose loss of plasticity from the checkpoints of any training run.

`analyze` measures a run and returns an `Analysis`; `read_tables` gives the rows of one or several
analyses as one frame. Nothing here prints or exits.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analysis import Analysis, analyze
    from .check import check
    from .checkpoints import discover
    from .config import Settings, read_settings
    from .diagnosis import Diagnosis, diagnose
    from .errors import PlastiscopeError
    from .store import read as read_tables

__version__ = _version("plastiscope")
__all__ = [
    "Analysis",
    "Diagnosis",
    "PlastiscopeError",
    "Settings",
    "analyze",
    "check",
    "diagnose",
    "discover",
    "read_settings",
    "read_tables",
]

# Imported on first use: `plastiscope --help` must not wait for torch.
_HOMES = {
    "Analysis": ("analysis", "Analysis"),
    "analyze": ("analysis", "analyze"),
    "check": ("check", "check"),
    "discover": ("checkpoints", "discover"),
    "Settings": ("config", "Settings"),
    "read_settings": ("config", "read_settings"),
    "Diagnosis": ("diagnosis", "Diagnosis"),
    "diagnose": ("diagnosis", "diagnose"),
    "PlastiscopeError": ("errors", "PlastiscopeError"),
    "read_tables": ("store", "read"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'plastiscope' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(f".{module}", __name__), attribute)
