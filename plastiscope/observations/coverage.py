"""How much of a network was measured: a number to read before all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Coverage:
    """Counts of parameters (entries of weights, tied ones once) and of components.

    `parameters` of `all_parameters` were measured, and `components` of `all_components` (those
    whose output belongs in the forward pass) were seen in the replay.
    """

    parameters: int
    all_parameters: int
    components: int
    all_components: int
    status: str = "ok"
    replicated: ClassVar[bool] = False

    @property
    def parts(self) -> dict[str, Any]:
        """What a metric may ask for, by the name of its type."""
        return {"Coverage": self}

    @property
    def size(self) -> tuple[int | None, int | None]:
        """Parameters and components in all."""
        return self.all_parameters, self.all_components
