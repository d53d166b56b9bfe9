"""What the clocks of hosts say about the days of decisions, which a purge judges by, and where the order of decisions knows better.

Promises that no key is purged earlier because the host that reserved it had a clock that was late, and that the keys of a host whose clock
was ahead keep no others. Two hosts that differ cannot tell which of them is right. So small differences are evened out when a decision is
made. Large ones are when a purge is: it sees what was decided before and after. Called by the consumer state and the purges.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable

from dedup.delta.ledger import KEYS, Header, LedgerFile

EVENED_OUT = dt.timedelta(hours=1)
"""By how much a decision is dated later than its own clock says, where the last one is. A larger difference leads nobody, and is told."""

log = logging.getLogger("dedup")


class DecisionTimes:
    """When decisions of one consumer are made, as this process dates them."""

    def __init__(self, consumer: str) -> None:
        self._consumer, self._told = consumer, False

    def following(self, last: Header, now: dt.datetime) -> dt.datetime:
        """The time of the decision after the last one, which this host's clock says is made now.

        It is of no earlier day than the last purge: a purge drops whole days, and must not drop what is reserved after it.
        """
        self._tell(last, now)
        purged = now if last.purged_on is None else dt.datetime.combine(dt.date.fromisoformat(last.purged_on), dt.time(), dt.UTC)
        known = last.committed_at if last.committed_at - now <= EVENED_OUT else now
        return max(now, purged, known)

    def _tell(self, last: Header, now: dt.datetime) -> None:
        """Once, until the clock is right again."""
        late = last.committed_at - now > EVENED_OUT
        if late and not self._told:
            log.warning(
                "%s: this host's clock shows %s, and decision %s was made at %s. One of the two clocks is wrong. No key is purged earlier "
                "because of it; set the clocks of your hosts by NTP.",
                self._consumer,
                f"{now:%Y-%m-%d %H:%M} UTC",
                last.seq,
                f"{last.committed_at:%Y-%m-%d %H:%M} UTC",
            )
        self._told = late


def purged_up_to(files: Iterable[LedgerFile], before: dt.date, today: dt.date) -> dt.date:
    """The day before which all keys were reserved before that day, by the order of decisions, too.

    A decision that follows one of `before` or later is of no earlier day, whatever its host's clock said. What lies in the future of this
    host tells nothing: that clock was ahead.
    """
    known = list(files)
    first = min((f.first for f in known if before <= f.day <= today), default=None)
    late = [f.day for f in known if first is not None and f.section == KEYS and f.day < before and f.last > first]
    return min(late, default=before)
