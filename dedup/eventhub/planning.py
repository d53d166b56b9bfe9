"""Which positions a read begins and ends at, with what the hub says now. Runs on the driver; receives at most one event per partition."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from checkpoint.errors import ConfigError, IncarnationChanged, PositionsMissing, SourceUnavailable
from dedup.eventhub.namespace import Hub, Namespace, Span, condition, explained
from dedup.eventhub.options import Options
from dedup.eventhub.positions import EARLIEST, LATEST, Ends, Offset
from dedup.eventhub.reader import STOLEN, Receive
from dedup.eventhub.receiver import Broken, Receiver, backoff
from dedup.eventhub.rows import numbers

log = logging.getLogger("dedup")

RECENT_SECONDS = 2.0
"""How long an answer of the hub holds, where there is work enough in it."""


class Planner:
    """Plans for one hub."""

    def __init__(self, options: Options, receive: Receive) -> None:
        self.options, self.receive, self.hub = options, receive, options.connection.hub
        self.namespace = Namespace(options.connection)
        self._seen: tuple[Hub, float] | None = None

    def start(self) -> Offset:
        """Where a new stream, or a batch read, begins.

        Raises:
            ConfigError: a partition is named that is not there. PositionsMissing: one begins past the retention.
        """
        hub, asked = self.namespace.look(), self.options.start
        self._refuse_strangers(asked, hub.spans)
        if self.options.start_time is not None:
            ends = self._at(self.options.start_time, hub.spans)
        else:
            ends = {number: _begin(_named(asked, number, EARLIEST), span) for number, span in hub.spans.items()}
        return self.kept(Offset(self.hub, hub.created, ends), hub)

    def end(self) -> Offset:
        """Where a batch read ends: before these positions. Raises ConfigError for a partition or a position that is not there."""
        hub, asked = self.namespace.look(), self.options.end
        self._refuse_strangers(asked, hub.spans)
        ends = {number: _end(_named(asked, number, LATEST), span) for number, span in hub.spans.items()}
        if beyond := {number: end for number, end in ends.items() if end > hub.spans[number].end}:
            raise ConfigError(f"endingPositions are beyond the end of event hub {self.hub!r}: {_listed(beyond)}.")
        return Offset(self.hub, hub.created, ends)

    def look(self, since: Offset | None = None) -> Hub:
        """The hub now. Raises IncarnationChanged if it is not the one in which `since` is an offset."""
        hub = self.namespace.look(since.ends if since else ())
        if since is not None and since.created != hub.created:
            raise self.namespace.another(since.created, hub.created)
        self._seen = (hub, time.monotonic())
        return hub

    def look_beyond(self, since: Offset) -> Hub:
        """The hub as it was seen a moment ago, if there is something behind this offset in it; else now. Raises what `look` raises."""
        hub = self._recent(since.created)
        if hub is not None and any(span.end > since.ends.get(number, 0) for number, span in hub.spans.items()):
            return hub
        return self.look(since)

    def last_seen(self) -> Hub:
        """As it was when it was last asked."""
        return self._seen[0] if self._seen else self.look()

    def _recent(self, created: str) -> Hub | None:
        if self._seen is None or self._seen[0].created != created or time.monotonic() - self._seen[1] > RECENT_SECONDS:
            return None
        return self._seen[0]

    def kept(self, offset: Offset, hub: Hub) -> Offset:
        """The offset, if the log still has what comes next; without failOnDataLoss, the first position that it has.

        Raises:
            PositionsMissing: some positions are past the retention; names them.
            IncarnationChanged: the log ends before the offset.
        """
        spans = hub.spans
        ends = {number: offset.ends.get(number, span.first) for number, span in spans.items()}
        beyond = {number: end for number, end in ends.items() if end > spans[number].end}
        if beyond:
            raise IncarnationChanged(
                f"Event hub {self.hub!r} ends before where reading is to go on, in {_listed(beyond)}. It was deleted and created again, "
                "or this is another one. Start the stream with a new Spark checkpoint and startingPositions that are there."
            )
        if lost := {number: (end, spans[number].first - 1) for number, end in ends.items() if end < spans[number].first}:
            self._report(lost)
        return Offset(offset.hub, offset.created, {number: max(end, spans[number].first) for number, end in ends.items()})

    def same_hub(self, created: str) -> None:
        """Raises IncarnationChanged if the hub is not the one of then."""
        if self._recent(created) is None:
            self.namespace.check(created)

    def _report(self, lost: Mapping[int, tuple[int, int]]) -> None:
        named = ", ".join(f"partition {number}: {first}-{last}" for number, (first, last) in sorted(lost.items()))
        what = f"Event hub {self.hub!r} does not have these positions any more (retention): {named}."
        if self.receive.fail_on_data_loss:
            raise PositionsMissing(f"{what} To go on without them, once the loss is understood: failOnDataLoss=false.")
        log.warning("%s Going on without them; they count as absent.", what)

    def _refuse_strangers(self, asked: int | Ends, spans: Mapping[int, Span]) -> None:
        if not isinstance(asked, int) and (strangers := set(asked) - set(spans)):
            raise ConfigError(f"Event hub {self.hub!r} has no partition {_listed(dict.fromkeys(strangers, 0))}; it has {len(spans)}.")

    def _at(self, when: dt.datetime, spans: Mapping[int, Span]) -> dict[int, int]:
        with ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda item: self._first_from(item[0], item[1], when), spans.items())
            return dict(zip(spans, found, strict=True))

    def _first_from(self, partition: int, span: Span, when: dt.datetime) -> int:
        """Sequence number of the first event enqueued then or later; the end where there is none."""
        if span.end == span.first or span.newest is None or span.newest < when:
            return span.end
        until, attempt, where = time.monotonic() + self.receive.timeout, 0, f", partition {partition}"
        while True:
            receiver = Receiver(self.options.connection, partition, when, 1, self.receive.level)
            try:
                if (events := receiver.get(self.receive.timeout)) is not None:
                    return int(numbers(events)[0])
                raise SourceUnavailable(f"Event Hubs gives no event of {self.hub!r}{where}, although its newest is of {span.newest}.")
            except Broken as broken:
                known = explained(broken.error, self.options.connection, where)
                if condition(broken.error) == STOLEN or not isinstance(known, SourceUnavailable) or time.monotonic() > until:
                    raise known from None
            finally:
                receiver.close()
            backoff(attempt)
            attempt += 1


def _named(asked: int | Ends, number: int, default: int) -> int:
    return asked if isinstance(asked, int) else asked.get(number, default)


def _begin(asked: int, span: Span) -> int:
    return span.first if asked == EARLIEST else span.end if asked == LATEST else asked


def _end(asked: int, span: Span) -> int:
    return span.end if asked == LATEST else asked


def _listed(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"partition {number} (at {end})" if end else str(number) for number, end in sorted(numbers.items()))
