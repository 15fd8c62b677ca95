"""Errors a user can mend. Each says what, where and what to do, and carries its exit status."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

PASSED, FAILED, USAGE, UNREADABLE, NOT_ENOUGH_EVIDENCE = range(5)
LISTED = 12


class PlastiscopeError(Exception):
    """An error with one clear line for the user; anything else keeps its traceback."""

    status = USAGE


class UsageError(PlastiscopeError):
    """A wrong option, argument or configuration value."""


class UnreadableError(PlastiscopeError):
    """A file, or a whole run, that can't be read."""

    status = UNREADABLE


class NotEnoughEvidenceError(PlastiscopeError):
    """Nothing was measured or compared, so nothing may be concluded."""

    status = NOT_ENOUGH_EVIDENCE


def unknown(kind: str, name: str, known: Iterable[Any]) -> UsageError:
    """The error for a name or number that isn't known: says the nearest ones, then others."""
    names = [str(each) for each in sorted(known)]
    near = difflib.get_close_matches(name, names, n=LISTED)
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = names
    if len(names) > LISTED:
        shown = list(dict.fromkeys([*near, *names]))[:LISTED]
    more = f", ... {len(names) - LISTED} more" if len(names) > LISTED else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}known: {', '.join(shown) or 'none'}{more}")
