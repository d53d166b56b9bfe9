"""What outlives every process: the tables of a model store."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from checkpoint.head import Head
from simulation.invariants import WAITING, place
from simulation.log import Log

if TYPE_CHECKING:
    from simulation.transaction import SimTransaction

NAME = "simulated"

_IDENTITIES = itertools.count(1)

_SINK = ("sink", "published", "published_id")
"""What is a table of its own beside the state."""


@dataclass
class Shared:
    """The state of the one consumer, and its sink."""

    log: Log
    head: Head = field(default_factory=lambda: Head(NAME))
    reserved: dict[bytes, int] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    letters: dict[str, dict[str, Any]] = field(default_factory=dict)
    sink: list[dict[str, Any]] = field(default_factory=list)
    decided: list[list[dict[str, Any]]] = field(default_factory=list)  # ledger: sink rows by seq
    published: int = 0  # the sink's mark: number and identity of the last decision that it took
    published_id: int = 0
    ids: list[int] = field(default_factory=list)  # identities of decisions, by seq: none is ever given twice
    told: int = 0  # how far the sink is, as the newest decision says
    then: Shared | None = None  # holds the sink as it was with the state that was copied back
    newest: Shared | None = None  # holds the sink as it was before it was copied back
    crash_markers: dict[str, str | None] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    freed: set[bytes] = field(default_factory=set)  # keys that a person let go
    seen: set[tuple[int, int]] = field(default_factory=set)  # positions in batch records
    version: int = 0  # of the ledger's table: a restore is one more
    open: list[SimTransaction] = field(default_factory=list)
    backups: list[Shared] | None = None  # one after each commit, where the schedule restores any
    restored: bool = False  # and nobody has accepted it yet
    begun: set[str] = field(default_factory=set)  # queries that committed since
    lost: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)  # query -> position that a restore took away -> its batch

    def waiting(self, sequence: bytes | None) -> list[dict[str, Any]]:
        """Open and blocked letters of a sequence, in position order."""
        if sequence is None:
            return []
        return sorted((x for x in self.letters.values() if x["sequence"] == sequence and x["status"] in WAITING), key=place)

    def next(self, head: Head, rows: list[dict[str, Any]], **changes: Any) -> None:
        """One decision more."""
        self.head, self.told = replace(head, **changes, seq=self.head.seq + 1), self.published
        self.ids.append(next(_IDENTITIES))
        self.version += 1
        self.decided.append(rows)

    def back_up(self) -> None:
        """Keep a copy that nothing changes any more."""
        if self.backups is not None:
            self.backups.append(replace(self, **self._copied(), open=[], backups=None))

    def restore(self, backup: Shared) -> None:
        """The tables are as they were then; who is at work on them finds out."""
        self.copy_back(backup)
        self._take_sink(backup)
        self.then = self.newest = None

    def copy_back(self, backup: Shared) -> None:
        """All but the sink are as they were then."""
        kept = {name: getattr(self, name) for name in _SINK}
        for name, value in {**backup._copied(), "head": backup.head, "told": backup.told, **kept}.items():
            setattr(self, name, value)
        self.version, self.restored, self.begun, self.then = self.version + 1, True, set(), backup
        for transaction in self.open:
            transaction.ended = True

    def copy_sink_back(self, backup: Shared) -> None:
        """The sink alone is as it was then."""
        if not self.behind or self.newest is None:
            self.newest = replace(self, **self._copied(), open=[], backups=None)
        self._take_sink(backup)

    def _take_sink(self, other: Shared) -> None:
        self.sink, self.published, self.published_id = other.sink.copy(), other.published, other.published_id

    @property
    def ahead(self) -> bool:
        """Whether the sink shows a decision that the ledger does not have, or has another one for."""
        return self.published > len(self.ids) or self.published_id != (self.ids[self.published - 1] if self.published else 0)

    @property
    def next_to_publish(self) -> int:
        """The first decision that is not known to be published: what the sink itself lacks of those before is nobody's concern."""
        return max(self.published, self.told) + 1

    @property
    def behind(self) -> bool:
        """Whether the sink lacks a decision of which it is known that it had it."""
        return self.published < self.told

    def put_right(self) -> None:
        """Where the sink is older than the state, its newer one is found and put back; then it is taken to the time of a restored state."""
        self.put_newest_back()
        if self.ahead and self.then is not None:
            self._take_sink(self.then)
        self.then = None

    def put_newest_back(self) -> None:
        """The sink from before it was copied back, where the state knows of decisions that it lacks."""
        if self.behind and self.newest is not None:
            self._take_sink(self.newest)
        self.newest = None

    def _copied(self) -> dict[str, Any]:
        plain = ("reserved", "batches", "sink", "decided", "ids", "history", "freed", "seen", "crash_markers")
        letters: Mapping[str, dict[str, Any]] = {i: dict(letter) for i, letter in self.letters.items()}
        return {name: getattr(self, name).copy() for name in plain} | {"letters": letters}
