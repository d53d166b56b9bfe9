"""Which dead letters: one value for the Python API, the command line and both stores.

Pure; each store turns it into its own query.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from checkpoint.errors import ConfigError
from checkpoint.position import LAST


@dataclass(frozen=True)
class Selection:
    """Which dead letters: everything that is not None must match.

    Raises:
        ConfigError: a number that no position has, a negative limit, a time without a zone, or an empty text, which all letters contain.
    """

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

    def __post_init__(self) -> None:
        for name in ("partition", "first", "last", "limit"):
            if not -LAST <= (getattr(self, name) or 0) <= LAST:
                raise ConfigError(f"{name}={getattr(self, name)} does not fit into 64 bits: no letter has this number.")
        if self.limit is not None and self.limit < 0:
            raise ConfigError(f"limit={self.limit}: give how many letters, or None for all.")
        for time in (self.since, self.until):
            if time is not None and time.utcoffset() is None:
                raise ConfigError(f"{time.isoformat()} has no time zone. Give one, as in datetime.now(UTC).")
        if self.text == "":
            raise ConfigError("The text to search for is empty. Leave it out to select all letters.")
