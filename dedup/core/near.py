"""Words of messages about columns that a sink does not have: which one a mistyped name may have meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_ALIKE = 0.65
"""How alike two names are at least, where 1 is the same: one letter in three may be wrong or missing."""

_MOST = 40
"""Names that a message lists."""


GUESSED = " (the type is guessed from the values of these rows: check it)"
"""Behind a statement with the type of a column that only Python objects have."""


def near(name: str, known: Iterable[str]) -> str | None:
    """The name that is nearest to this one; None where none is near."""
    by_lower = {one.lower(): one for one in reversed(list(known))}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, _ALIKE)
    return by_lower[found[0]] if found else None


def meant(names: Iterable[str], known: Collection[str]) -> str:
    """`Did you mean ...? ` with the known names that are near to these; empty where none is."""
    found = dict.fromkeys(one for name in names if (one := near(name, known)) is not None)
    return f"Did you mean {' and '.join(map(repr, found))}? " if found else ""


def listed(names: Collection[str]) -> str:
    """The names, as many as a message takes."""
    shown = list(names)[:_MOST]
    return ", ".join(shown) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
