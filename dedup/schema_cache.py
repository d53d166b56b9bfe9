"""What registries have said, kept for the life of the process: ids are immutable, so a schema is asked for once.

An id that a registry does not know is asked for again after a while: its schema may still be on the way. Called by arrow_registry.py.
"""

from __future__ import annotations

import time
from typing import TypeVar

from dedup.registry import Registry

UNKNOWN_SECONDS = 30.0
"""How long an id counts as unknown."""

MOST = 10_000
"""Ids that are kept, known ones and unknown ones each: bodies that are noise may name any number."""

Key = tuple[Registry, str]
T = TypeVar("T")

_known: dict[Key, str] = {}
_unknown: dict[Key, float] = {}  # until when


def written(registry: Registry, ident: str) -> str | None:
    """As `registry.written`, from what is kept where it can. Raises RegistryUnavailable, and then keeps nothing."""
    key = (registry, ident)
    if key in _known:
        return _known[key]
    if _unknown.get(key, 0.0) > time.monotonic():
        return None
    _unknown.pop(key, None)
    found = registry.written(ident)
    if found is not None:
        return _put(_known, key, found)
    _put(_unknown, key, time.monotonic() + UNKNOWN_SECONDS)
    return None


def _put(kept: dict[Key, T], key: Key, value: T) -> T:
    if len(kept) >= MOST:
        kept.clear()
    return kept.setdefault(key, value)


def forget() -> None:
    """Ask anew for everything."""
    _known.clear()
    _unknown.clear()
