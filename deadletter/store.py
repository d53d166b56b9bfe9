"""What is asked of a store about dead letters: `LetterStore`, `LetterTransaction`, and the steps that change letters.

Steps are values without behaviour: planned by pure code, executed by both stores inside the transaction of the decision. `KEYS` is how
idempotence keys are handed over. Part of the seam; dedup/core/store.py has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import pyarrow as pa

from checkpoint.head import Head, StateStore
from deadletter.letter import HISTORY
from deadletter.selection import Selection

KEYS = pa.schema([pa.field("key", pa.binary(16), nullable=False), pa.field("payload_hash", pa.int64(), nullable=False)])
"""One row per reservation: 128-bit key hash, 64-bit payload hash."""


class LetterTransaction(Protocol):
    """Some letters and their keys. Left without Commit executed, nothing of it is true."""

    @property
    def head(self) -> Head:
        """As read under this transaction's fence."""

    def reserve(self, keys: pa.Table) -> pa.Table:
        """Reserve the new ones of these distinct keys (KEYS); returns the known ones with the payload hash they were reserved with."""

    def known(self, keys: pa.Table) -> pa.Table:
        """Those of these distinct keys (KEYS) that are reserved or held by a letter, with their payload hash. Reserves nothing.

        A letter holds the keys that edits replaced (`plans.keys_of`), too, whatever a purge has forgotten.
        """

    def lock(self, ids: Sequence[str]) -> pa.Table:
        """LETTERS + duplicates of these letters, in position order; nobody else can change them now.

        Those that somebody else has locked are left out.
        """

    def execute(self, step: LetterStep) -> None:
        """Do one step of the decision."""


class LetterStore(StateStore, Protocol):
    """What failed, beside where consumers stand."""

    on_step: Callable[[str], None]  # called with each name right before the step acts

    def begin_letters(self, consumer: str, *, positions: bool = False) -> AbstractContextManager[LetterTransaction]:
        """Open a transaction of letters under the epoch that there is: it takes none and stalls no stream."""

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Dead letters (LETTERS + duplicates int64, or only these columns) in position order."""

    def groups(self, selection: Selection) -> pa.Table:
        """GROUPS: the selected letters (its limit counts groups) by fingerprint, the largest first."""

    def history(self, *letter_ids: str) -> pa.Table:
        """HISTORY of these letters, each one's oldest first."""

    def named(self, consumer: str, key: str, hashes: Sequence[bytes] = ()) -> list[str]:
        """Ids of all letters of this consumer that show this idempotence key, or showed it, or had one of these hashes, before an edit."""


@dataclass(frozen=True)
class Park:
    """Keep these dead letters (LETTERS, in position order) and their history. Of one whose id is there, `plans.parked_again` says what
    becomes of it: it is open again where this decision has reserved its key, else it is left as it is.

    Those with a sequence that are OPEN or BLOCKED block it: see `Transaction.blocked`.
    """

    name: ClassVar[str] = "park"
    letters: pa.Table
    history: pa.Table = field(default_factory=HISTORY.empty_table)


@dataclass(frozen=True)
class Change:
    """Change letters that `Transaction.lock` gave, and append to their history.

    Columns: `id` and those of LETTERS that change. In each sequence that one of them belongs to, of the letters that are OPEN or
    BLOCKED afterwards the first by position is OPEN, each other one BLOCKED by the one before it; without any it is free.
    """

    name: ClassVar[str] = "change"
    letters: pa.Table
    history: pa.Table


@dataclass(frozen=True)
class Free:
    """Forget these reservations (column key binary(16)): their messages count as new again."""

    name: ClassVar[str] = "free"
    keys: pa.Table


@dataclass(frozen=True)
class Note:
    """Count duplicates on the letters that hold these keys: columns key binary(16), count int64. Keys without a letter are ignored."""

    name: ClassVar[str] = "note"
    duplicates: pa.Table


@dataclass(frozen=True)
class Commit:
    """Make everything of this transaction true at once."""

    name: ClassVar[str] = "commit"


@dataclass(frozen=True)
class Erase:
    """Erase what letters that `Transaction.lock` gave hold of their events: CONTENTS are null, the reason is ERASED, and their history
    says no more than what was done, when and by whom. Position, kind, status, counts, times and hashes stay.

    Columns: `id`. The history is appended, and stays as it is. On Delta older files still hold it: see `Store.scrub`.
    """

    name: ClassVar[str] = "erase"
    letters: pa.Table
    history: pa.Table


LetterStep = Park | Change | Free | Note | Erase | Commit
