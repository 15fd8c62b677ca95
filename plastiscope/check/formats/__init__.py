"""How a result is told; each format is a function of the one Result, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..findings import Result
from .github import render as github
from .json import render as json
from .junit import render as junit
from .markdown import render as markdown
from .sarif import render as sarif
from .text import render as text

FORMATS: Mapping[str, Callable[[Result], str]] = {
    "text": text,
    "json": json,
    "junit": junit,
    "markdown": markdown,
    "github": github,
    "sarif": sarif,
}

__all__ = ["FORMATS"]
