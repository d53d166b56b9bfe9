"""What outlives every process: the tables of a model store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dedup.store import Head
from simulation.invariants import WAITING, place
from simulation.log import Log

if TYPE_CHECKING:
    from simulation.transaction import SimTransaction

NAME = "simulated"


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
    published: int = 0
    trials: dict[str, str | None] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    freed: set[bytes] = field(default_factory=set)  # keys that a person let go
    seen: set[tuple[int, int]] = field(default_factory=set)  # positions in batch records
    version: int = 0  # of the ledger's table: a restore is one more
    open: list[SimTransaction] = field(default_factory=list)
    backups: list[Shared] | None = None  # one after each commit, where the schedule restores any
    restored: bool = False  # and nobody has accepted it yet
    begun: set[str] = field(default_factory=set)  # queries that committed since
    ahead: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)  # query -> position that a restore took away -> its batch

    def waiting(self, sequence: bytes | None) -> list[dict[str, Any]]:
        """Open and blocked letters of a sequence, in position order."""
        if sequence is None:
            return []
        return sorted((x for x in self.letters.values() if x["sequence"] == sequence and x["status"] in WAITING), key=place)

    def next(self, head: Head, rows: list[dict[str, Any]], **changes: Any) -> None:
        """One decision more."""
        self.head = replace(head, **changes, seq=self.head.seq + 1)
        self.version += 1
        self.decided.append(rows)

    def back_up(self) -> None:
        """Keep a copy that nothing changes any more."""
        if self.backups is not None:
            self.backups.append(replace(self, **self._copied(), open=[], backups=None))

    def restore(self, backup: Shared) -> None:
        """The tables are as they were then; who is at work on them finds out."""
        for name, value in {**backup._copied(), "head": backup.head, "published": backup.published}.items():
            setattr(self, name, value)
        self.version, self.restored, self.begun = self.version + 1, True, set()
        for transaction in self.open:
            transaction.ended = True

    def _copied(self) -> dict[str, Any]:
        plain = ("reserved", "batches", "sink", "decided", "history", "freed", "seen", "trials")
        letters: Mapping[str, dict[str, Any]] = {i: dict(letter) for i, letter in self.letters.items()}
        return {name: getattr(self, name).copy() for name in plain} | {"letters": letters}
