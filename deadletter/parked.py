"""What others are told of the dead letters that a transaction has parked: one `ParkedGroup` for each cause.

Called by the pipeline after the commit, with the letters of that transaction; of Spark's tasks by the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pyarrow as pa

from deadletter.letter import Kind

log = logging.getLogger("dedup")


@dataclass(frozen=True)
class ParkedGroup:
    """New dead letters of one transaction that have the same cause."""

    consumer: str
    """The consumer's name."""
    kind: Kind
    """Why these events were parked."""
    fingerprint: str
    """What they have in common. `dedup dead-letter list --fingerprint` selects them."""
    letters: int
    """How many."""
    reason: str
    """Of the example."""
    example: str
    """The id of the first one."""


def groups_of(letters: pa.Table) -> tuple[ParkedGroup, ...]:
    """The groups of these letters (LETTERS), the largest first."""
    rows = letters.select(["consumer", "kind", "fingerprint", "reason", "id"]).to_pylist()
    return together(ParkedGroup(row["consumer"], Kind(row["kind"]), row["fingerprint"], 1, row["reason"], row["id"]) for row in rows)


def together(groups: Iterable[ParkedGroup]) -> tuple[ParkedGroup, ...]:
    """Each cause once, with the reason and the example that came first; the largest first."""
    found: dict[tuple[str, str], ParkedGroup] = {}
    for group in groups:
        key = (group.kind, group.fingerprint)
        found[key] = replace(found[key], letters=found[key].letters + group.letters) if key in found else group
    return tuple(sorted(found.values(), key=lambda group: -group.letters))


OnParked = Callable[[ParkedGroup], object]
"""Told of each group of new dead letters, after the commit that parked them."""


def tell_parked(on_parked: OnParked | None, groups: Iterable[ParkedGroup]) -> None:
    """Call what the user gave as `on_parked=`. What it raises is logged with its stack: the letters are committed.

    Crash: between the commit and the call nobody is told.
    """
    for group in groups if on_parked is not None else ():
        try:
            on_parked(group)  # type: ignore[misc]
        except Exception:
            log.exception("%s has parked %d (%s); on_parked= raised:", group.consumer, group.letters, group.reason)
