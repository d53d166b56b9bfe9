"""Which dead letters: one value for the Python API, the command line and both stores.

Pure; each store turns it into its own query.
"""

from __future__ import annotations

import datetime as dt
import numbers
from dataclasses import dataclass

from checkpoint import given
from checkpoint.errors import ConfigError
from checkpoint.position import LAST
from deadletter.letter import Kind, Status


def _texts(values: object) -> bool:
    """Whether these are several texts; one text is none of them, though it is a sequence."""
    return isinstance(values, list | tuple) and all(isinstance(one, str) for one in values)


_STATUSES = tuple(one.value for one in Status)
_TEXT = given.Setting("text", '"orders"', lambda value: isinstance(value, str)).or_none
_WHOLE = given.Setting("a whole number", "0", lambda value: given.is_number(value, numbers.Integral)).or_none
_TIME = given.Setting("a datetime with a time zone", "datetime.now(UTC)", lambda value: isinstance(value, dt.datetime)).or_none

SELECTION: given.Settings = {
    **dict.fromkeys(("consumer", "source", "topic", "fingerprint", "key", "text", "sequence_key", "after"), _TEXT),
    **dict.fromkeys(("partition", "first", "last", "limit", "generation"), _WHOLE),
    "kind": given.word(*(one.value for one in Kind)).or_none,
    "status": given.word(*_STATUSES).or_none,
    "statuses": given.Setting(
        f"some of {', '.join(_STATUSES)}, in a tuple", '("OPEN", "BLOCKED")', lambda value: _texts(value) and set(value) <= set(_STATUSES)
    ).or_none,
    "id": given.Setting("an id, or its first digits", '"5f3a"', lambda value: isinstance(value, str) and bool(value)).or_none,
    "ids": given.Setting("whole ids, in a tuple", "(letter_id,)", _texts).or_none,
    "sequences": given.Setting(
        "values of the column `sequence`, in a tuple",
        "(sequence,)",
        lambda value: isinstance(value, list | tuple) and all(isinstance(one, bytes) for one in value),
    ).or_none,
    "since": _TIME,
    "until": _TIME,
}
"""What each field of `Selection` takes. Of a wrong value a store would find nothing, or everything."""


@dataclass(frozen=True)
class Selection:
    """Which dead letters: everything that is not None must match.

    Raises:
        ConfigError: a value of another type, a kind or status that no letter has, a number that no position has, a negative
            limit, a time without a zone, or an empty text or id, which all letters contain.
    """

    consumer: str | None = None
    source: str | None = None
    topic: str | None = None
    partition: int | None = None
    first: int | None = None
    """Sequence number of the first letter."""
    last: int | None = None
    """Sequence number of the last letter."""
    kind: str | None = None
    status: str | None = None
    fingerprint: str | None = None
    id: str | None = None
    """Whole, or the first digits of it."""
    limit: int | None = 100
    """The largest number of letters; None: all."""
    since: dt.datetime | None = None
    """Last failed at this time or later; with a time zone."""
    until: dt.datetime | None = None
    """Last failed before this time; with a time zone."""
    key: str | None = None
    """The readable idempotence key, whole."""
    text: str | None = None
    """Text in reason, error message or stack; upper and lower case are equal."""
    sequence_key: str | None = None
    """The readable sequence key, whole."""
    statuses: tuple[str, ...] | None = None
    """Any of these statuses."""
    ids: tuple[str, ...] | None = None
    """Any of these ids, whole."""
    sequences: tuple[bytes, ...] | None = None
    """In any of these sequences (the column `sequence`)."""
    generation: int | None = None
    after: str | None = None
    """In position order, after the letter with this id: the next page."""

    def __post_init__(self) -> None:
        given.check(SELECTION, vars(self), "Selection")
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
