"""Words of messages about names that nothing has: which one a mistyped name may have meant. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

_ALIKE = 0.65
"""How alike two names are at least, where 1 is the same: one letter in three may be wrong or missing."""

_MOST = 40
"""Names that a message lists."""


GUESSED = " (the type is guessed from the values of these rows: check it)"
"""Behind a statement with the type of a column that only Python objects have."""


OTHERS = {"value": "body", "offset": "sequence_number", "timestamp": "enqueued_time", "headers": "properties"}
"""What Kafka calls it -> what dedup does."""


def near(name: str, known: Iterable[str], alike: float = _ALIKE) -> str | None:
    """The name that is nearest to this one, of those that are alike enough; None where none is near."""
    known = list(known)
    if (ours := OTHERS.get(name.lower())) in known:
        return ours
    by_lower = {one.lower(): one for one in reversed(known)}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, alike)
    return by_lower[found[0]] if found else None


def like(name: str, known: Iterable[str]) -> str:
    """A question in brackets with the name that was meant; empty where none is near."""
    found = near(name, known)
    return f" (did you mean {found}?)" if found else ""


def meant(names: Iterable[str], known: Collection[str]) -> str:
    """`Did you mean ...? ` with the known names that are near to these; empty where none is."""
    found = dict.fromkeys(one for name in names if (one := near(name, known)) is not None)
    return f"Did you mean {' and '.join(map(repr, found))}? " if found else ""


def listed(names: Collection[str]) -> str:
    """The names, as many as a message takes."""
    shown = list(names)[:_MOST]
    return ", ".join(shown) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
