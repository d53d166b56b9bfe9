"""A time-out of one event, or of everybody for a while? Told by what passes beside it. Pure.

Where all tries of an event end in a time-out, or wait for a lock in vain, its own statement may be too slow, or its own row locked. Or the
database is overloaded, and what comes next runs out of time, too. Called by the attempts of a chunk.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

IN_A_ROW = 5
"""Events that run out of time one after another, with none that passes in between, before it must be an outage."""


@dataclass
class Brownout:
    """The events of a chunk that ran out of time since one passed.

    Args:
        known: rows that failed alone when this chunk was tried before.
        before: events right before this chunk that failed, without one that passed in between.
    """

    known: Collection[int]
    before: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, row: int) -> bool:
        """This event ran out of time with all its tries; returns whether it must be an outage."""
        self.rows.append(row)
        return self.before + len(self.rows) >= IN_A_ROW

    def passed(self) -> bool:
        """Something passed; returns whether it is over: several ran out of time before, and have not been tried since.

        One event alone between others that pass is not tried again: it is slow by itself.
        """
        over = len(self.rows) > 1 and any(row not in self.known for row in self.rows)
        self.rows, self.before = [], 0
        return over


def failed_last(failures: Collection[int], decided: int, lifted: int) -> int:
    """How many of the last events failed in a row, at most IN_A_ROW.

    Args:
        failures: clock values of events that failed.
        decided: the clock.
        lifted: failures up to this clock value are admitted and do not count.
    """
    found, clock = set(failures), decided
    while clock > lifted and clock in found and decided - clock < IN_A_ROW:
        clock -= 1
    return decided - clock
