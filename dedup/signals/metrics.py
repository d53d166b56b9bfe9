"""The numbers of a store, with their names in Prometheus and in OpenTelemetry. `dedup metrics` and `signals.observe` read them here.

Their labels are bounded: consumers, topics, partitions, states and kinds; never keys, ids or texts of errors. Names of Prometheus end in
the unit, as its naming rules ask for. Names of OpenTelemetry leave the unit out and tell an age where Prometheus has a time stamp, since
its backends differ in how they subtract times.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from checkpoint.errors import ConfigError, DedupError, SourceUnavailable, StoreUnavailable
from checkpoint.start import Ends
from deadletter.letter import Kind
from dedup.core.store import Store
from dedup.signals.standing import Activity, Standing, look

log = logging.getLogger("dedup")

Value = tuple[Sequence[str], float]
"""Values of the labels, and the number."""

Read = Callable[[Standing], Iterator[Value]]

Values = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Name of the metric in Prometheus -> labels and values."""

UP, UP_OTEL, ABOUT_UP = "dedup_up", "dedup.up", "Whether the store, and the broker, could be read."
"""The number that is there even if nothing else can be read."""

DAMAGE = "dedup_damage"
"""The number that is there even if nothing else can be told of a consumer."""


class Metric(NamedTuple):
    """One number, or one for each value of its labels."""

    about: str
    labels: tuple[str, ...]  # beside `consumer`
    read: Read
    otel: str  # its name in OpenTelemetry
    unit: str = "1"  # in OpenTelemetry, as UCUM writes it
    grows: bool = False  # it never gets smaller
    age: bool = False  # OpenTelemetry: the seconds since this time stamp


def _plain(get: Callable[[Standing], float | None]) -> Read:
    """One number without labels; none where it is not known."""

    def read(one: Standing) -> Iterator[Value]:
        if (number := get(one)) is not None:
            yield (), number

    return read


def _seconds(moment: dt.datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _states(one: Standing) -> Iterator[Value]:
    for activity in Activity:
        yield (activity,), float(one.activity is activity)


def _checkpoints(one: Standing) -> Iterator[Value]:
    for partition, point in one.head.checkpoints.items():
        yield tuple(map(str, partition)), point.sequence_number


def _lag_events(one: Standing) -> Iterator[Value]:
    for lag in one.lags or ():
        yield tuple(map(str, lag.partition)), lag.events


def _lag_seconds(one: Standing) -> Iterator[Value]:
    for lag in one.lags or ():
        if lag.seconds is not None:
            yield tuple(map(str, lag.partition)), lag.seconds


def _by_kind(get: Callable[[Standing], Mapping[str, int]]) -> Read:
    """One number for each kind of letters of events."""

    def read(one: Standing) -> Iterator[Value]:
        for kind in (kind for kind in Kind if kind != Kind.UNSENT):  # those are messages of the outbox
            yield (kind,), get(one).get(kind, 0)

    return read


def _outbox(one: Standing) -> Iterator[Value]:
    yield from ((("waiting",), one.outbox.waiting), (("behind",), one.outbox.behind), (("dead",), one.outbox.dead))


_PLACE = ("source", "topic", "partition")

METRICS: Mapping[str, Metric] = {
    "dedup_state": Metric("Whether the consumer is in this state: the one that is has 1.", ("state",), _states, "dedup.state"),
    "dedup_decisions": Metric(
        "Decisions that were committed; it only grows.",
        (),
        _plain(lambda one: one.head.seq),
        "dedup.decisions",
        "{decision}",
        grows=True,
    ),
    "dedup_epoch": Metric(
        "How often an instance took the consumer over.",
        (),
        _plain(lambda one: one.head.epoch),
        "dedup.takeovers",
        "{takeover}",
        grows=True,
    ),
    "dedup_last_commit_timestamp_seconds": Metric(
        "When a batch was committed last.",
        (),
        _plain(lambda one: _seconds(one.last_commit)),
        "dedup.last_commit.age",
        "s",
        age=True,
    ),
    "dedup_checkpoint": Metric("The last position that is decided.", _PLACE, _checkpoints, "dedup.checkpoint"),
    "dedup_lag_events": Metric("Positions up to the end of the log that are not decided.", _PLACE, _lag_events, "dedup.lag", "{event}"),
    "dedup_lag_seconds": Metric(
        "Time between the event at the checkpoint and the newest one.", _PLACE, _lag_seconds, "dedup.lag.time", "s"
    ),
    "dedup_open_letters": Metric(
        "Dead letters that wait for a person.", ("kind",), _by_kind(lambda one: one.letters), "dedup.letters.open", "{letter}"
    ),
    "dedup_blocked_letters": Metric(
        "Dead letters that wait behind another one of their sequence.",
        ("kind",),
        _by_kind(lambda one: one.blocked),
        "dedup.letters.blocked",
        "{letter}",
    ),
    "dedup_oldest_letter_timestamp_seconds": Metric(
        "When the oldest open dead letter failed first.",
        (),
        _plain(lambda one: _seconds(one.oldest)),
        "dedup.letters.oldest.age",
        "s",
        age=True,
    ),
    "dedup_outbox_messages": Metric(
        "Messages that are not sent: waiting, behind a dead one, or dead.", ("state",), _outbox, "dedup.outbox.unsent", "{message}"
    ),
    "dedup_oldest_message_timestamp_seconds": Metric(
        "When the oldest message that is not sent was stored.",
        (),
        _plain(lambda one: _seconds(one.outbox.oldest)),
        "dedup.outbox.oldest.age",
        "s",
        age=True,
    ),
    "dedup_oldest_reservation_timestamp_seconds": Metric(
        "When the oldest reservations were made that no purge has dropped.",
        (),
        _plain(lambda one: _seconds(one.reserved_since)),
        "dedup.reservations.oldest.age",
        "s",
        age=True,
    ),
    "dedup_oldest_unpublished_timestamp_seconds": Metric(
        "When the first batch was committed that a Delta sink does not show yet.",
        (),
        _plain(lambda one: _seconds(one.unpublished_since)),
        "dedup.publication.oldest.age",
        "s",
        age=True,
    ),
    DAMAGE: Metric(
        "Tables that were restored or cannot be read, partitions that the log lost positions of: what `dedup status` warns of.",
        (),
        _plain(lambda one: bool(one.damage) + sum(bool(lag.lost or lag.another) for lag in one.lags or ())),
        "dedup.damage",
    ),
}
"""By name in Prometheus."""


def _tell(error: Exception) -> None:
    log.warning("the metrics cannot be read now: %s", error)


class Numbers:
    """Reads the store anew each time. What cannot be read now is left out, and `dedup_up` is 0.

    Args:
        name: of one consumer. Default: all.
        broker: where the logs end: with it there is the lag.
        source: the broker's name in the state, where the state has several.
        tell: is told why something could not be read.
    """

    def __init__(
        self, store: Store, name: str = "", broker: Ends | None = None, source: str = "", *, tell: Callable[[Exception], None] = _tell
    ) -> None:
        self._store, self._name, self._broker, self._source, self._tell = store, name, broker, source, tell
        self._was_there = False
        self._reading = threading.Lock()  # a store is for one reader at a time; requests come in threads

    def values(self) -> Values:
        """All numbers as of now."""
        with self._reading:
            try:
                looked = {name: self._look(name) for name in self._consumers()}
            except DedupError as error:
                self._tell(error)
                return {UP: [({}, 0.0)]}
        found = [one for one in looked.values() if isinstance(one, Standing)]
        told = {name: list(_labelled(found, metric)) for name, metric in METRICS.items()}
        told[DAMAGE] += [({"consumer": name}, 1.0) for name, one in looked.items() if _is_damage(one)]
        return {UP: [({}, 1.0)], **told}

    def _consumers(self) -> list[str]:
        """Raises StoreUnavailable where a store was and is no more: without a number nobody would notice that a folder is not mounted."""
        names = self._store.consumers()
        there = bool(names) or self._store.was_used()
        if self._was_there and not there:
            raise StoreUnavailable("There is no store any more where it was: the folder is empty or gone.")
        self._was_there = there
        return [self._name] if self._name else names

    def _look(self, name: str) -> Standing | DedupError:
        """One consumer, or why nothing can be told of it: the others have their numbers. What its lag is may not be known alone."""
        try:
            one = look(self._store, name, self._broker, self._source)
        except (StoreUnavailable, SourceUnavailable):
            raise
        except DedupError as error:
            self._tell(error)
            return error
        if one.lag_problem is not None:
            self._tell(one.lag_problem)
        return one


def _is_damage(looked: Standing | DedupError) -> bool:
    """Whether it has to be seen as a number that nothing can be told; wrong options of the command are told when it starts."""
    return isinstance(looked, DedupError) and not isinstance(looked, ConfigError)


def _labelled(looked: Sequence[Standing], metric: Metric) -> Iterator[tuple[dict[str, str], float]]:
    for one in looked:
        for values, number in metric.read(one):
            yield dict(zip(("consumer", *metric.labels), (one.head.consumer, *values), strict=True)), float(number)


class Collected:
    """One reading for all metrics of one collection: the store is read when a metric is asked for that was taken from it before."""

    def __init__(self, numbers: Numbers) -> None:
        self._numbers, self._taken = numbers, set[str]()
        self._values: Values | None = None
        self._at = 0.0
        self._taking = threading.Lock()

    def take(self, name: str) -> Sequence[tuple[Mapping[str, str], float]]:
        """Labels and values of one metric; of time stamps the ages."""
        with self._taking:
            if self._values is None or name in self._taken:
                self._values, self._taken, self._at = self._numbers.values(), set(), time.time()
            self._taken.add(name)
            found, now = self._values.get(name, ()), self._at
        if name in METRICS and METRICS[name].age:
            return [(labels, max(0.0, now - number)) for labels, number in found]
        return found
