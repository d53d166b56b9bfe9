"""Which dead letters: one value for the Python API, the command line and both stores.

Pure; each store turns it into its own query.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Which dead letters: everything that is not None must match."""

    consumer: str | None = None
    source: str | None = None
    topic: str | None = None
    partition: int | None = None
    first: int | None = None  # sequence numbers, both ends included
    last: int | None = None
    kind: str | None = None
    status: str | None = None
    fingerprint: str | None = None
    id: str | None = None  # whole or a prefix
    limit: int | None = 100
    since: dt.datetime | None = None  # last failed at or after; aware
    until: dt.datetime | None = None  # last failed before; aware
    key: str | None = None  # the readable idempotence key, whole
    text: str | None = None  # somewhere in reason, error message or stack; upper and lower case are equal
    sequence_key: str | None = None  # the readable sequence key, whole
    statuses: tuple[str, ...] | None = None  # any of these
    ids: tuple[str, ...] | None = None  # any of these, whole
    sequences: tuple[bytes, ...] | None = None  # in any of these sequences (LETTERS.sequence)
    generation: int | None = None
    after: str | None = None  # in position order, behind the letter with this id: the next page
