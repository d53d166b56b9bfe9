"""How many letters wait behind those that a reprocess is asked for: where these pass, it runs the others, too. Called by letters.py."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from deadletter.letter import Status
from deadletter.selection import Selection
from dedup.core.store import Store

SEQUENCES = 1_000
"""Sequences that are asked for at once."""


class Behind:
    """The letters of a dry run that keep an order, and those that they hold up."""

    def __init__(self) -> None:
        self._asked: dict[str, bytes] = {}  # letter -> its sequence
        self._free: set[str] = set()  # letters that nothing blocks but others of these

    def add(self, page: pa.Table) -> None:
        """Letters that would be run: id, sequence and status."""
        ordered = page.filter(pc.is_valid(page["sequence"]))
        self._asked.update(zip(ordered["id"].to_pylist(), ordered["sequence"].to_pylist(), strict=True))
        self._free.update(ordered.filter(pc.equal(ordered["status"], Status.OPEN.value))["id"].to_pylist())

    def count(self, store: Store, consumer: str, keep: Callable[[pa.Table], pa.Table], most: int | None) -> int:
        """How many others are run if all pass.

        Args:
            keep: leaves out those that the consumer runs no more.
            most: how many may be.
        """
        sequences = sorted(set(self._asked.values()))
        found = 0
        for first in range(0, len(sequences), SEQUENCES):
            asked = Selection(consumer, sequences=tuple(sequences[first : first + SEQUENCES]), status=Status.BLOCKED, limit=None)
            found += self._freed(keep(store.letters(asked, ["id", "blocked_by", "first_failed_at"])))
        return found if most is None else min(found, most)

    def _freed(self, blocked: pa.Table) -> int:
        """Each letter names the one right before it, which stands before it here as well."""
        found = 0
        for letter, before in zip(blocked["id"].to_pylist(), blocked["blocked_by"].to_pylist(), strict=True):
            if before in self._free:
                self._free.add(letter)
                found += letter not in self._asked
        return found
