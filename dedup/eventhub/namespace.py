"""What a hub reports about itself: when it was created, and the first and last position of each partition. Nothing here receives events.

The service takes about 0.4 s for each question, so dedup asks about the partitions at the same time. All of this package and
`dedup consumer lag` call this module.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub.exceptions import AuthenticationError, EventHubError

from checkpoint.errors import ConfigError, IncarnationChanged, SourceUnavailable, command
from checkpoint.head import Head
from checkpoint.start import End
from deadletter.redact import redact
from dedup.eventhub.connection import Connection, hidden

SIDE_BY_SIDE = 16

MOST_TEXT = 2_000
"""Characters that are kept of what the client says."""

MOST_LINKS = 20

_STATUS = re.compile(r"Status code: (\d+)")

_BROKEN = re.compile(r"(?i)failed to (?:resolve|establish a new connection)|timed out|connection (?:aborted|broken|reset|refused)")
"""How azure-identity tells of a network that is broken. DefaultAzureCredential has one class for that and for all other failures."""


@dataclass(frozen=True)
class Span:
    """The positions that a partition holds."""

    first: int  # sequence number of the oldest event that can still be had
    end: int  # sequence number after the newest
    newest: dt.datetime | None  # when that came; None of a partition that never had one


@dataclass(frozen=True)
class Hub:
    """What a hub reports about itself."""

    created: str  # ISO 8601: another hub of the same name has another
    spans: Mapping[int, Span]  # of every partition


class KnownEnds:
    """The positions of one hub's partitions, in the form that checkpoint/start.py asks for."""

    def __init__(self, spans: Mapping[int, Span]) -> None:
        self._spans = spans

    def spans(self, topics: Sequence[str]) -> dict[tuple[str, int], tuple[int, int]]:
        """Return (first, end) for each (hub, partition)."""
        return {(topics[0], number): (span.first, span.end) for number, span in self._spans.items()}


def refuse_spelling(head: Head, source: str, hub: str) -> None:
    """Raise ConfigError if the state has checkpoints of this hub in another spelling only, which is the same hub for Event Hubs.

    The name is part of the positions and of most keys: in another spelling all events would be new.
    """
    topics = {p.topic for p in head.checkpoints if p.source == source}
    known = sorted(topic for topic in topics if topic.lower() == hub.lower())
    if known and hub not in known:
        raise ConfigError(
            f"Consumer {head.consumer!r} is to read event hub {hub!r}, and its state has it as {known[0]!r}. Event Hubs takes any case for "
            f"the same hub, the state does not: its events would be handled a second time. Write {known[0]!r}."
        )


class Namespace:
    """Questions about one hub. It can be pickled; each process makes its own client.

    Each method raises SourceUnavailable if the service does not answer, and ConfigError if the hub does not exist or access is denied.

    Args:
        connection: of the hub.
        client: further arguments of EventHubConsumerClient.
    """

    def __init__(self, connection: Connection, **client: Any) -> None:
        self.connection, self._options = connection, client

    def __repr__(self) -> str:
        return f"Namespace({self.connection!r})"

    def look(self, known: Iterable[int] = ()) -> Hub:
        """Return the hub with all its partitions. It asks about known partitions at the same time as about the hub."""
        with self._client() as client, ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            hub = pool.submit(self._ask, client.get_eventhub_properties)
            spans = {number: pool.submit(self._span, client, number) for number in known}
            numbers = sorted(int(number) for number in hub.result()["partition_ids"])
            spans |= {number: pool.submit(self._span, client, number) for number in numbers if number not in spans}
            return Hub(_created(hub.result()), {number: spans[number].result() for number in numbers})

    def span(self, partition: int) -> Span:
        """Return the positions of one partition."""
        with self._client() as client:
            return self._span(client, partition)

    def created(self) -> str:
        """Return when the hub was created, in ISO 8601."""
        with self._client() as client:
            return _created(self._ask(client.get_eventhub_properties))

    def spans(self, topics: Sequence[str]) -> Mapping[tuple[str, int], tuple[int, int]]:
        """Return (first position that the hub has, position after the last) for each (hub, partition), if this hub is one of the topics."""
        hub = self.connection.hub
        return {(hub, number): (span.first, span.end) for number, span in self.look().spans.items()} if hub in topics else {}

    def topic_ids(self, source: str, topics: Sequence[str]) -> Mapping[str, str]:
        """Return when the hub was created, for `Consumer(incarnation=...)`. Other topics than this hub are left out."""
        return {self.connection.hub: self.created()} if self.connection.hub in topics else {}

    def check(self, created: str) -> None:
        """Raise IncarnationChanged if the hub was created at another time than this."""
        if (now := self.created()) != created:
            raise self.another(created, now)

    def another(self, then: str, now: str) -> IncarnationChanged:
        """Return the error for positions of a hub that was created at `then`, if the hub of that name was created at `now`."""
        return IncarnationChanged(
            f"Event hub {self.connection.hub!r} was deleted and created again: it was created {now}, these positions are of the one "
            f"created {then}. Its sequence numbers began anew. Once what that loses is understood: start the stream with a new Spark "
            f"checkpoint, and run "
            f"{command('consumer', 'accept-incarnation', 'NAME', '--source', self.connection.source, '--topic', self.connection.hub)}."
        )

    def _client(self) -> Any:
        return self.connection.client(**{"retry_backoff_factor": 0.2, **self._options})

    def _span(self, client: Any, partition: int) -> Span:
        return _spanned(self._ask(lambda: client.get_partition_properties(str(partition))))

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except EventHubError as error:
            raise explained(error, self.connection) from None


def explained(error: Exception, connection: Connection, what: str = "") -> SourceUnavailable | ConfigError:
    """Return the client's error as one of dedup, without secrets."""
    said, where = told(error, connection), f"{connection.hub!r} at {connection.namespace}{what}"
    if is_without_token(error):
        return ConfigError(f"The credential gets no token from Entra ID to read {where}: {said}")
    if is_refused(error):
        return ConfigError(f"Event Hubs refuses to read {where}: {said}. Check the key, or the role Azure Event Hubs Data Receiver.")
    if is_missing(error):
        return ConfigError(f"There is no event hub, partition or consumer group of this name: {where}, group {connection.group!r}: {said}")
    return SourceUnavailable(f"Event Hubs could not be read, {where}: {said}")


def told(error: Exception, connection: Connection) -> str:
    """Return what the client says in one line, without secrets and repetitions, cut at MOST_TEXT characters."""
    lines = hidden(redact(str(error)), connection).splitlines()
    return " ".join(filter(None, dict.fromkeys(line.strip().removeprefix("Error Description: ") for line in lines)))[:MOST_TEXT]


def is_missing(error: Exception) -> bool:
    """Return whether the service does not know a name. In further lines a credential may say what it has not found."""
    first = str(error).split("\n")[0]
    return condition(error) == "not-found" or "could not be found" in first or "Status code: 404" in first


def is_without_token(error: Exception) -> bool:
    """Return whether the credential has no token, and would have none the next time: not if Entra ID could not be asked, or was busy."""
    for link in _links(error):
        if isinstance(link, ClientAuthenticationError):
            status = link.status_code or 400
            return status < 500 and status != 429 and _BROKEN.search(str(link)) is None
    return False


def _links(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it. The client hides them (`from None`), and its own class says less."""
    for _ in range(MOST_LINKS):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def is_refused(error: Exception) -> bool:
    """Return whether the service refuses the login. The client has the same class for a token that has expired, and for a time-out."""
    if not isinstance(error, AuthenticationError):
        return False
    status = _STATUS.search(str(error))
    return status[1] in ("401", "403", "404") if status else condition(error) == "unauthorized-access"


def condition(error: Exception) -> str:
    """Return the AMQP condition of the client's error, without the part before the first colon. Return an empty text if it has none."""
    return str(getattr(error, "error", None) or "")


def _created(said: Mapping[str, Any]) -> str:
    return str(said["created_at"].isoformat())


def _spanned(said: Mapping[str, Any]) -> Span:
    end = int(said["last_enqueued_sequence_number"]) + 1
    newest = said["last_enqueued_time_utc"] if end > 0 else None
    return Span(end if said["is_empty"] else int(said["beginning_sequence_number"]), end, newest)


class Hubs:
    """The hubs of one namespace.

    Args:
        connection_string: of the namespace, or of one hub.
    """

    def __init__(self, connection_string: str) -> None:
        self._text = connection_string

    def __repr__(self) -> str:
        return "Hubs(***)"

    def ends(self, topics: Sequence[str]) -> Mapping[tuple[str, int], End]:
        """Return the ends of each (hub, partition).

        Raises:
            SourceUnavailable: the service does not answer. ConfigError: a hub does not exist.
        """
        found = {hub: Namespace(Connection.of(self._text, hub)).look() for hub in topics}
        return {(name, part): End(s.first, s.end, s.newest) for name, hub in found.items() for part, s in hub.spans.items()}
