"""Where a consumer stands, as a consumer group of Kafka: for monitors of lag that read what groups have committed.

Nobody reads as a member of that group. It has a position for each partition: the one that comes after the checkpoint. `dedup checkpoint
mirror-group` calls it, and whoever runs a mirror beside a stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from checkpoint.errors import ConfigError, DedupError, Refused
from checkpoint.given import Duration
from checkpoint.mirror import EVERY, Mirror, Mirrored
from checkpoint.start import Place
from dedup.kafka.broker import Broker, settings_taken

NOTE = "dedup"
"""What stands beside each position that a mirror commits. Positions without it are another program's."""

LOADING = frozenset(
    {
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)
"""What passes by itself: the groups of a broker that has just started, or that takes over from another one; an open transaction."""

NOWHERE = KafkaError.UNKNOWN_TOPIC_OR_PART

NOT_ALLOWED = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED})

HAS_MEMBERS = frozenset({KafkaError.UNKNOWN_MEMBER_ID, KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION})
"""What a broker answers to a commit from outside for a group that has members (GroupCoordinator of Kafka)."""


def mirror(broker: Broker, group: str, ours: Mapping[Place, int], *, overwrite: bool = False, dry_run: bool = False) -> Mirrored:
    """Make a consumer group stand where we stand, once; it goes back as well, as after a reset.

    Args:
        ours: the next position of each (topic, partition): `checkpoint.start.next_positions`.
        overwrite: also positions that another program has committed. When it reads with this group again, it goes on at ours.

    Raises:
        Refused: a program reads as a member of this group. SourceUnavailable: the broker does not answer.
        ConfigError: this is no name of a group, there is no such topic or partition, or the login may not commit.

    Crash: each position is committed or not; the next look commits the rest. Of two mirrors at once the slower one may commit an older
    position, which the next look of any of them corrects.
    """
    require_name(group)
    with closing(_Client(broker, group)) as client:
        there = client.committed(ours)
        other = {place: position for place, position in sorted(ours.items()) if place not in there or there[place][0] != position}
        foreign = [place for place in other if not overwrite and place in there and there[place][1] != NOTE]
        changed = {place: position for place, position in other.items() if place not in foreign}
        if changed and not dry_run:
            client.commit(changed)
    return Mirrored(written=_named(changed), foreign=_named(foreign))


def require_name(group: str) -> None:
    """Raises ConfigError: a client of librdkafka without a name would end the process."""
    if not isinstance(group, str) or not group.strip() or "\0" in group:
        raise ConfigError(f"{group!r} is no name of a consumer group.")


def _named(places: Iterable[Place]) -> tuple[str, ...]:
    return tuple(f"{topic}/{partition}" for topic, partition in places)


class _Client:
    """Asks for a group's positions and commits others; it reads nothing, and is no member.

    An AdminClient could do both, but one of librdkafka 2.16 ends the process where the group's coordinator is still loading, or goes away.
    """

    def __init__(self, broker: Broker, group: str) -> None:
        self._broker, self._group = broker, group
        self._answers: list[tuple[KafkaError | None, list[TopicPartition]]] = []
        settings: dict[str, Any] = broker.settings(group_id=group, enable_auto_commit=False)
        with settings_taken():
            self._client = Consumer({**settings, "on_commit": lambda error, places: self._answers.append((error, places))})

    def close(self) -> None:
        """End it; what it has not heard of by now it never does."""
        self._client.close()

    def committed(self, places: Iterable[Place]) -> dict[Place, tuple[int, str]]:
        """(position, note) of those that have one, within the broker's time-out."""
        wanted, until = [TopicPartition(*place) for place in places], time.monotonic() + self._broker.timeout
        while True:
            try:
                found = self._client.committed(wanted, max(until - time.monotonic(), 0.1))
            except KafkaException as error:
                self._wait_or_refuse(error.args[0], until)
                continue
            if unknown := next((error for error in (place.error for place in found) if error and error.code() != NOWHERE), None):
                self._wait_or_refuse(unknown, until)  # another program may have a position there
                continue
            return {(place.topic, place.partition): (place.offset, place.metadata or "") for place in found if place.offset >= 0}

    def commit(self, positions: Mapping[Place, int]) -> None:
        """All of them, within the broker's time-out."""
        until = time.monotonic() + self._broker.timeout
        while (refused := self._commit(positions, until)) is not None:
            if refused.code() == NOWHERE:
                raise self._nowhere(positions)
            self._wait_or_refuse(refused, until)

    def _wait_or_refuse(self, error: KafkaError, until: float) -> None:
        """Wait a moment where the broker's refusal passes by itself; raise what it means otherwise, or when the time is up."""
        if error.code() not in LOADING or time.monotonic() >= until:
            raise self._refused(error)
        self._client.poll(0.2)

    def _commit(self, positions: Mapping[Place, int], until: float) -> KafkaError | None:
        """Why the broker refuses; None where it does not. A call that waits by itself would wait for as long as the broker hangs."""
        self._answers.clear()
        wanted = [TopicPartition(*place, position, NOTE) for place, position in positions.items()]
        self._client.commit(offsets=wanted, asynchronous=True)
        while not self._answers:
            if time.monotonic() >= until:
                raise self._refused(KafkaError(KafkaError._TIMED_OUT))
            self._client.poll(0.1)
        error, places = self._answers[0]
        return error or next((place.error for place in places if place.error is not None), None)

    def _refused(self, error: KafkaError) -> DedupError:
        """What the broker's answer means; where it only took too long, what the client heard meanwhile."""
        heard = [error]
        while (message := self._client.poll(0)) is not None:
            heard += [told for told in [message.error()] if told is not None]
        if error.code() in HAS_MEMBERS:
            who = f"A program reads as a member of the consumer group {self._group!r}, and commits for itself."
            return Refused(f"{who} Name a group that nobody reads with.")
        for told in heard:
            if told.code() in NOT_ALLOWED:
                rights = f"The login needs the right to READ with consumer group {self._group!r}, and from the topics."
                return ConfigError(f"The broker at {self._broker.servers} refuses: {told.str()}. {rights}")
        return self._broker.unavailable(heard[-1].str())

    def _nowhere(self, places: Iterable[Place]) -> ConfigError:
        spans = self._broker.spans(sorted({topic for topic, _ in places}))
        told = ", ".join(f"{topic}, partition {partition}" for topic, partition in places if (topic, partition) not in spans)
        where = f"has no {told or 'such partition'}"
        return ConfigError(f"The broker at {self._broker.servers} {where}: the consumer group {self._group!r} cannot stand there.")


class GroupMirror(Mirror):
    """Keeps a consumer group of Kafka where a consumer stands, from a thread of its own.

    A broker that is away stops nobody, and shows in the log and in `health`.

    Args:
        broker: of the topics.
        group: its name. No program reads with it.
        read: gives the next positions; asked at every look, e.g. `lambda: next_positions(store.head("orders"))`.
        every: the time between the beginnings of two looks, as a timedelta or in seconds.
        overwrite: also positions that another program has committed for this group.

    Raises:
        ConfigError: this is no name of a group.
    """

    def __init__(
        self, broker: Broker, group: str, read: Callable[[], Mapping[Place, int]], *, every: Duration = EVERY, overwrite: bool = False
    ) -> None:
        require_name(group)
        super().__init__(f"consumer group {group}", "Kafka", every)
        self._broker, self._group, self._read, self._overwrite = broker, group, read, overwrite
        self._stood = False

    def _mirror(self) -> Mirrored:
        ours = self._read()
        if self._stood and not ours:
            raise ConfigError("the consumer has no checkpoints any more: was it deleted?")
        self._stood = bool(ours)
        return mirror(self._broker, self._group, ours, overwrite=self._overwrite) if ours else Mirrored()
