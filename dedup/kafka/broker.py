"""What dedup asks a Kafka cluster: its id, the ids of its topics, and the first and last position of each partition.

Nothing here consumes or changes anything. The consumer calls it to tell a topic from one that was created again; start.py and
`dedup consumer lag` call it for the ends.
"""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from checkpoint import given
from checkpoint.errors import ConfigError, SourceUnavailable
from checkpoint.start import End, Place
from dedup.core.envelope import LATEST
from dedup.core.settings import BROKER

T = TypeVar("T")

NO_ID = ("", "AAAAAAAAAAAAAAAAAAAAAA")
"""What a broker that gives its topics no ids says of them: Kafka before 2.8."""


@contextmanager
def settings_taken() -> Iterator[None]:
    """Raise ConfigError where librdkafka refuses the settings of a client that the block makes."""
    try:
        yield
    except KafkaException as error:
        raise ConfigError(f"librdkafka does not take these settings: {error.args[0].str()}") from None


class Broker:
    """One Kafka cluster. It connects at the first question. It can be pickled, and its `repr` leaves the settings out.

    Args:
        servers: host:port, several with commas between them.
        settings: of librdkafka, beside the servers: `{"security.protocol": "SASL_SSL", "sasl.mechanism": ...}`.
        timeout: how long to wait for each answer.

    Raises:
        ConfigError: `servers` is empty.
    """

    def __init__(self, servers: str, settings: Mapping[str, Any] | None = None, *, timeout: given.Duration = 30.0) -> None:
        given.check(BROKER, locals())
        self.servers, self.timeout = servers, given.to_seconds(timeout)
        self._settings = dict(settings or {})
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._client: tuple[int, AdminClient] | None = None
        self._said = ""  # what the connection's last trouble was

    def __getstate__(self) -> dict[str, Any]:
        return {"servers": self.servers, "timeout": self.timeout, "_settings": self._settings}

    def __setstate__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._begin_anew()

    def __repr__(self) -> str:
        return f"Broker({self.servers!r})"

    def cluster_id(self) -> str:
        """The cluster's own id. It is the same under every address and after every restart, so it is a good `source=`.

        Raises:
            SourceUnavailable: the cluster does not answer. ConfigError: it has no id.
        """
        told = self._answer(self._admin().describe_cluster(request_timeout=self.timeout)).cluster_id
        if not told:
            raise ConfigError(f"The broker at {self.servers} reports no cluster id. Give one yourself: Consumer(source=...).")
        return str(told)

    def topic_ids(self, source: str, topics: Sequence[str]) -> Mapping[str, str]:
        """Return the id that the cluster gave to each topic at its creation. Topics that do not exist are left out.

        Pass it as `Consumer(incarnation=broker.topic_ids)`: the consumer then refuses a topic that was deleted and created again. It fits a
        consumer of one cluster, because it ignores `source`.

        Raises:
            SourceUnavailable: the broker does not answer. ConfigError: it gives its topics no ids.
        """
        found = {topic: str(described.topic_id or "") for topic, described in self._describe(topics).items()}
        without = sorted(topic for topic, told in found.items() if told in NO_ID)
        if without:
            raise ConfigError(f"The broker at {self.servers} reports no ids for topics ({', '.join(without)}). Leave incarnation= out.")
        return found

    def spans(self, topics: Sequence[str]) -> Mapping[Place, tuple[int, int]]:
        """Return (first position that the log still has, position after the last) for each (topic, partition) of these topics.

        Raises:
            SourceUnavailable: the broker does not answer. ConfigError: it has no such topic.
        """
        found = self._describe(topics)
        if missing := sorted(set(topics) - set(found)):
            raise ConfigError(f"There is no topic {', '.join(missing)} at {self.servers}.")
        places = [(topic, part.id) for topic, described in found.items() for part in described.partitions]
        first, end = self._offsets(places, OffsetSpec.earliest()), self._offsets(places, OffsetSpec.latest())
        return {place: (first[place].offset, end[place].offset) for place in sorted(places)}

    def ends(self, topics: Sequence[str]) -> Mapping[Place, End]:
        """Return what `spans` returns, with the time of the newest event where the broker knows it.

        `dedup consumer lag` needs it. Raises what `spans` raises.
        """
        spans = self.spans(topics)
        newest = self.newest(spans)
        return {place: End(*span, newest.get(place)) for place, span in spans.items()}

    def newest(self, places: Iterable[Place]) -> Mapping[Place, dt.datetime]:
        """Return when the newest event of each partition was written. Partitions without an event are left out.

        So are those whose newest event has a time that no datetime has.

        Raises:
            SourceUnavailable: the broker does not answer.
        """
        found = {place: told.timestamp for place, told in self._offsets(list(places), OffsetSpec.max_timestamp()).items()}
        return {place: dt.datetime.fromtimestamp(stamp / 1000, dt.UTC) for place, stamp in found.items() if _is_time(stamp)}

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the configuration of a client of librdkafka. It holds secrets: do not show it."""
        own = {"bootstrap.servers": self.servers, "log_level": 0, "error_cb": self._heard, **self._settings}
        return own | {name.replace("_", "."): value for name, value in more.items()}

    def unavailable(self, cause: object) -> SourceUnavailable:
        """Return the error for a broker that does not answer, with the last error of the connection."""
        if self._client is not None:
            self._client[1].poll(0)  # what it heard meanwhile
        said = f" ({self._said})" if self._said else ""
        advice = "Check that it runs, its address and the login; then try again."
        return SourceUnavailable(f"The Kafka broker at {self.servers} cannot be asked now: {cause}{said}. {advice}")

    def _heard(self, error: KafkaError) -> None:
        self._said = error.str()

    def _admin(self) -> AdminClient:
        if self._client is None or self._client[0] != os.getpid():  # its threads do not survive a fork
            with settings_taken():
                self._client = (os.getpid(), AdminClient(self.settings()))
        return self._client[1]

    def _describe(self, topics: Sequence[str]) -> dict[str, Any]:
        found = {}
        for topic, future in self._admin().describe_topics(TopicCollection(list(topics)), request_timeout=self.timeout).items():
            try:
                found[topic] = self._answer(future)
            except _NoSuchTopic:
                continue
        return found

    def _offsets(self, places: list[Place], where: OffsetSpec) -> dict[Place, Any]:
        if not places:
            return {}
        asked = {TopicPartition(*place): where for place in places}
        every = IsolationLevel.READ_UNCOMMITTED  # an open transaction is no end of the log
        futures = self._admin().list_offsets(asked, isolation_level=every, request_timeout=self.timeout)
        return {(place.topic, place.partition): self._answer(future) for place, future in futures.items()}

    def _answer(self, future: concurrent.futures.Future[T]) -> T:
        try:
            return future.result(self.timeout + 5)
        except KafkaException as error:
            told: KafkaError = error.args[0]
            if told.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise _NoSuchTopic(told.str()) from None
            raise self.unavailable(told.str()) from error
        except concurrent.futures.TimeoutError as error:
            raise self.unavailable("no answer") from error


def _is_time(stamp: int | None) -> bool:
    """Whether these milliseconds are in the calendar. Producers may claim any time: in microseconds today is the year 57000."""
    return stamp is not None and 0 < stamp / 1000 < LATEST


class _NoSuchTopic(ConfigError):
    """The broker has no such topic."""
