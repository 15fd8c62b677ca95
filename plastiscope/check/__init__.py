"""The gate: rules over the tables, so that continuous integration stops a loss of plasticity.

`plastiscope.check(...)` is `plastiscope.check.check(...)`. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .findings import Finding, Result
from .gate import baseline_values, check
from .rules import Rule


class _Callable(ModuleType):
    """This package, which may also be called: the module and the function share their name."""

    def __call__(self, *arguments: Any, **options: Any) -> Result:
        return check(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

__all__ = ["Finding", "Result", "Rule", "baseline_values", "check"]
