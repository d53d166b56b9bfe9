"""`format("eventhubs")`: the Spark data source, streaming and batch. The only module here that imports pyspark.

The driver plans partitions as ranges of sequence numbers; executors receive them in Arrow batches. One partition is one task, so its
events stay in order. The driver reads the options once, and receives at most one event per partition.

Positions have the form of Spark's Kafka source: `{"hub": {"0": 23, "1": -2}}`. The start is included and the end is not; -2 means earliest
and -1 means latest.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from checkpoint.errors import ConfigError, IncarnationChanged, PositionsMissing, SourceUnavailable
from dedup.eventhub import reader
from dedup.eventhub.connection import DEFAULT_GROUP, Connection
from dedup.eventhub.namespace import Hub, Namespace, Span, condition, explained
from dedup.eventhub.reader import STOLEN, Broken, Receive, Receiver, backoff
from dedup.eventhub.rows import numbers
from dedup.spark.features import arrow_schema

try:
    from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError as missing:
    raise ConfigError(
        "format('eventhubs') needs Spark's Python data sources with read limits, which this version of Spark does not have. Read the hub "
        "by its Kafka endpoint (dedup.kafka.eventhubs), or without Spark by dedup.eventhub.run."
    ) from missing

SCHEMA = T.StructType(
    [
        T.StructField("source", T.StringType()),
        T.StructField("topic", T.StringType()),
        T.StructField("partition", T.IntegerType()),
        T.StructField("sequence_number", T.LongType()),
        T.StructField("offset", T.StringType()),
        T.StructField("enqueued_time", T.TimestampType()),
        T.StructField("key", T.BinaryType()),
        T.StructField("body", T.BinaryType()),
        T.StructField("properties", T.ArrayType(T.StructType().add("key", T.StringType()).add("value", T.BinaryType()))),
    ]
)
"""As Spark names the columns of rows.SCHEMA."""

NAMES = (
    "connectionString",
    "fullyQualifiedNamespace",
    "credential",
    "eventHubName",
    "consumerGroup",
    "transport",
    "useDevelopmentEmulator",
    "startingPositions",
    "startingTime",
    "endingPositions",
    "maxEventsPerTrigger",
    "failOnDataLoss",
    "ownerLevel",
    "prefetch",
    "receiveTimeout",
)
"""Every option there is; case does not matter."""

log = logging.getLogger("dedup")

RECENT_SECONDS = 2.0
"""How long an answer of the hub holds, where there is work enough in it."""

EARLIEST, LATEST = -2, -1

Ends = Mapping[int, int]
"""Partition -> sequence number of the next event to be read."""


def register(spark: SparkSession) -> None:
    """Add `format("eventhubs")` to this Spark session."""
    spark.dataSource.register(EventHubsSource)


class SourcePartition(InputPartition):
    """The events of one partition for one task. It holds no secret, because Spark may show it."""

    def __init__(self, partition: int, first: int, last: int, created: str) -> None:
        self.partition, self.first, self.last, self.created = partition, first, last, created


class EventHubsSource(DataSource):
    """The data source of event hubs. docs/how-to/eventhubs.md has its options."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "eventhubs"

    def schema(self) -> T.StructType:
        """Return the columns of the envelope."""
        return SCHEMA

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """Return the reader of `spark.read`. Raises ConfigError for wrong options."""
        return BatchReader(SourceOptions.of(self.options), schema)

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        """Return the reader of `spark.readStream`. Raises ConfigError for wrong options."""
        return StreamReader(SourceOptions.of(self.options), schema)


class BatchReader(DataSourceReader):
    """All events between two positions of each partition."""

    def __init__(self, options: SourceOptions, schema: T.StructType) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> list[InputPartition]:
        """Plan on the driver. Raises what `Planner` raises."""
        planner = Planner(self._options, self._options.batch)
        return slices(planner.start(), planner.end())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Receive in a task."""
        return received(self._options, self._options.batch, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream. Its offset holds the next position of each partition, and when the hub was created."""

    def __init__(self, options: SourceOptions, schema: T.StructType) -> None:
        self._options, self._schema = options, schema
        self._planner = Planner(options, options.stream)
        self._target: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return where a stream without a Spark checkpoint begins."""
        return self._planner.start().json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of maxEventsPerTrigger."""
        return ReadMaxRows(self._options.limit) if self._options.limit else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the stream at the events that are there."""
        self._target = self._ends(self._planner.look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next batch ends.

        Raises:
            IncarnationChanged: the hub was created again. PositionsMissing: retention was faster than the stream.
        """
        since = Offset.of(start)
        hub = self._planner.look_beyond(since)
        begin = self._planner.kept(since, hub)
        ends = dict(self._ends(hub).ends)
        if self._target is not None:
            ends = {number: max(begin.ends[number], min(end, self._target.ends.get(number, 0))) for number, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            available = {number: end - begin.ends[number] for number, end in ends.items()}
            shares = admitted(available, limit.max_rows, turn=sum(begin.ends.values()))
            ends = {number: begin.ends[number] + share for number, share in shares.items()}
        return Offset(begin.hub, begin.created, ends).json()

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the ends of the log at the last look, for the query's progress."""
        return self._ends(self._planner.last_seen()).json()

    def _ends(self, hub: Hub) -> Offset:
        return Offset(self._planner.hub, hub.created, {number: span.end for number, span in hub.spans.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return one slice for each partition with new events. Raises IncarnationChanged if the hub is not the one of these offsets."""
        found = slices(Offset.of(start), Offset.of(end))
        if found:
            self._planner.same_hub(end["created_at"])
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Receive in a task."""
        return received(self._options, self._options.stream, self._schema, partition)


def slices(start: Offset, end: Offset) -> list[InputPartition]:
    """Return the slices between two offsets."""
    begins = {number: start.ends.get(number, 0) for number in end.ends}
    return [
        SourcePartition(number, begins[number], last - 1, end.created) for number, last in sorted(end.ends.items()) if last > begins[number]
    ]


def received(options: SourceOptions, receive: Receive, schema: T.StructType, part: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the slice's events as Arrow batches with Spark's own types."""
    if not isinstance(part, SourcePartition):
        return  # what Spark asks for where there is nothing to read
    _quiet()
    arrow, connection = arrow_schema(schema), options.connection
    with reader.borrowed(connection, part.partition, receive) as borrowed:
        for events in borrowed.read(part.first, part.last, part.created):
            yield events.cast(arrow)


def _quiet() -> None:
    """Leave the client's own warnings out of the worker's log, where nobody has asked for them: each error is raised or logged by us."""
    client = logging.getLogger("azure.eventhub")
    if client.level == logging.NOTSET:
        client.setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class SourceOptions:
    """The options of one read."""

    connection: Connection
    stream: Receive
    batch: Receive
    start: int | Ends
    start_time: dt.datetime | None
    end: int | Ends
    limit: int | None

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SourceOptions:
        """Read the options. Raises ConfigError for an option that is unknown, missing or wrong."""
        said = {name.lower(): value for name, value in given.items()}
        if unknown := set(said) - {name.lower() for name in NAMES}:
            raise ConfigError(f"Unknown options: {', '.join(sorted(unknown))}. There are: {', '.join(NAMES)}.")
        connection = _connection(said)
        lossless = _word(said, "failOnDataLoss", "true", ("true", "false")) == "true"
        prefetch, timeout = _number(said, "prefetch", 1000, least=1), float(_number(said, "receiveTimeout", 60, least=1))
        of_stream, of_batch = _levels(said)
        return cls(
            connection,
            Receive(prefetch, timeout, of_stream, lossless),
            Receive(prefetch, timeout, of_batch, lossless),
            parsed(said.get("startingpositions", "earliest"), connection.hub, "startingPositions"),
            _time(said),
            _end(said, connection.hub),
            _number(said, "maxEventsPerTrigger", 0, least=1) or None,
        )


def _connection(said: Mapping[str, str]) -> Connection:
    group = said.get("consumergroup", DEFAULT_GROUP)
    websocket = _word(said, "transport", "amqp", ("amqp", "websocket")) == "websocket"
    if "connectionstring" in said:
        return Connection.of(said["connectionstring"], said.get("eventhubname"), group, websocket=websocket)
    if "fullyqualifiednamespace" not in said or "eventhubname" not in said:
        raise ConfigError(
            "Give connectionString (and eventHubName, where it has no EntityPath), or fullyQualifiedNamespace and eventHubName."
        )
    credential = said.get("credential", "DefaultAzureCredential")
    tls = _word(said, "useDevelopmentEmulator", "false", ("true", "false")) == "false"
    namespace, hub = said["fullyqualifiednamespace"], said["eventhubname"]
    return Connection.entra(namespace, hub, group, credential=credential, websocket=websocket, tls=tls)


def _levels(said: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Of a stream and of a batch read."""
    text = said.get("ownerlevel", "default").lower()
    if text == "default":
        return 0, None
    level = None if text == "none" else _number(said, "ownerLevel", 0, least=0)
    return level, level


def _end(said: Mapping[str, str], hub: str) -> int | Ends:
    end = parsed(said.get("endingpositions", "latest"), hub, "endingPositions")
    if end == EARLIEST or (not isinstance(end, int) and EARLIEST in end.values()):
        raise ConfigError("endingPositions cannot be earliest.")
    return end


def _time(said: Mapping[str, str]) -> dt.datetime | None:
    if "startingtime" not in said:
        return None
    if "startingpositions" in said:
        raise ConfigError("Give startingPositions or startingTime, not both.")
    try:
        found = dt.datetime.fromisoformat(said["startingtime"])
    except ValueError:
        raise ConfigError(f"startingTime is a time such as 2026-01-31T12:00:00+00:00, not {said['startingtime']!r}.") from None
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)


def _word(said: Mapping[str, str], name: str, default: str, words: tuple[str, ...]) -> str:
    word = said.get(name.lower(), default).lower()
    if word not in words:
        raise ConfigError(f"{name} is {' or '.join(words)}, not {word!r}.")
    return word


def _number(said: Mapping[str, str], name: str, default: int, least: int) -> int:
    if name.lower() not in said:
        return default
    text = said[name.lower()]
    if not re.fullmatch("[0-9]{1,18}", text.strip()) or int(text) < least:
        raise ConfigError(f"{name} is a whole number from {least} on, not {text!r}.")
    return int(text)


class Planner:
    """The plan of reads of one hub."""

    def __init__(self, options: SourceOptions, receive: Receive) -> None:
        self.options, self.receive, self.hub = options, receive, options.connection.hub
        self.namespace = Namespace(options.connection)
        self._seen: tuple[Hub, float] | None = None

    def start(self) -> Offset:
        """Return where a new stream, or a batch read, begins.

        Raises:
            ConfigError: a named partition does not exist. PositionsMissing: a position is older than the retention.
        """
        hub, asked = self.namespace.look(), self.options.start
        self._refuse_strangers(asked, hub.spans)
        if self.options.start_time is not None:
            ends = self._at(self.options.start_time, hub.spans)
        else:
            ends = {number: _begin(_named(asked, number, EARLIEST), span) for number, span in hub.spans.items()}
        return self.kept(Offset(self.hub, hub.created, ends), hub)

    def end(self) -> Offset:
        """Return the positions before which a batch read ends. Raises ConfigError for a partition or a position that does not exist."""
        hub, asked = self.namespace.look(), self.options.end
        self._refuse_strangers(asked, hub.spans)
        ends = {number: _end_of(_named(asked, number, LATEST), span) for number, span in hub.spans.items()}
        if beyond := {number: end for number, end in ends.items() if end > hub.spans[number].end}:
            raise ConfigError(f"endingPositions are beyond the end of event hub {self.hub!r}: {_listed(beyond)}.")
        return Offset(self.hub, hub.created, ends)

    def look(self, since: Offset | None = None) -> Hub:
        """Return the hub. Raises IncarnationChanged if it is not the hub of the offset `since`."""
        hub = self.namespace.look(since.ends if since else ())
        if since is not None and since.created != hub.created:
            raise self.namespace.another(since.created, hub.created)
        self._seen = (hub, time.monotonic())
        return hub

    def look_beyond(self, since: Offset) -> Hub:
        """Return the hub of the last look if it has events behind this offset; else look again. Raises what `look` raises."""
        hub = self._recent(since.created)
        if hub is not None and any(span.end > since.ends.get(number, 0) for number, span in hub.spans.items()):
            return hub
        return self.look(since)

    def last_seen(self) -> Hub:
        """The hub at the last look."""
        return self._seen[0] if self._seen else self.look()

    def _recent(self, created: str) -> Hub | None:
        if self._seen is None or self._seen[0].created != created or time.monotonic() - self._seen[1] > RECENT_SECONDS:
            return None
        return self._seen[0]

    def kept(self, offset: Offset, hub: Hub) -> Offset:
        """Return the offset if the log still has the next events; without failOnDataLoss, else the first positions that it has.

        Raises:
            PositionsMissing: some positions are older than the retention; the error names them.
            IncarnationChanged: the log ends before the offset.
        """
        spans = hub.spans
        ends = {number: offset.ends.get(number, span.first) for number, span in spans.items()}
        beyond = {number: end for number, end in ends.items() if end > spans[number].end}
        if beyond:
            raise IncarnationChanged(
                f"Event hub {self.hub!r} ends before the position to read next, in {_listed(beyond)}. It was deleted and created again, "
                "or this is another hub. Start the stream with a new Spark checkpoint and startingPositions that are there."
            )
        if lost := {number: (end, spans[number].first - 1) for number, end in ends.items() if end < spans[number].first}:
            self._report(lost)
        return Offset(offset.hub, offset.created, {number: max(end, spans[number].first) for number, end in ends.items()})

    def same_hub(self, created: str) -> None:
        """Raise IncarnationChanged if the hub was created at another time than `then`."""
        if self._recent(created) is None:
            self.namespace.check(created)

    def _report(self, lost: Mapping[int, tuple[int, int]]) -> None:
        named = ", ".join(f"partition {number}: {first}-{last}" for number, (first, last) in sorted(lost.items()))
        what = f"Event hub {self.hub!r} does not have these positions any more (retention): {named}."
        if self.receive.fail_on_data_loss:
            raise PositionsMissing(f"{what} Find out what is lost. Then set failOnDataLoss=false to go on without them.")
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
                raise SourceUnavailable(
                    f"Event Hubs returned no event of {self.hub!r}{where}, although its newest event is from {span.newest}."
                )
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


def _end_of(asked: int, span: Span) -> int:
    return span.end if asked == LATEST else asked


def _listed(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"partition {number} (at {end})" if end else str(number) for number, end in sorted(numbers.items()))


def parsed(text: str, hub: str, option: str) -> int | Ends:
    """Return EARLIEST or LATEST for all partitions, or a position for each named one.

    Raises:
        ConfigError: the text is neither one of these words nor such a JSON document.
    """
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        named = {str(name).lower(): part for name, part in json.loads(text).items()}[hub.lower()]
        found = {int(number): _position(value) for number, value in named.items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        example = json.dumps({hub: {"0": 23, "1": EARLIEST}})
        raise ConfigError(f"{option} is earliest, latest or, for the hub {hub!r}, JSON such as {example}; not {text!r}.") from None
    return found


def _position(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < EARLIEST:
        raise ValueError(value)
    return value


@dataclass(frozen=True)
class Offset:
    """The next positions of a stream, and when their hub was created. Spark's checkpoint holds its `json`."""

    hub: str
    created: str
    ends: Ends

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Offset:
        """Make an offset from the text of `json`."""
        return cls(said["hub"], said["created_at"], {int(number): int(end) for number, end in said["partitions"].items()})

    def json(self) -> dict[str, Any]:
        """Return the text that Spark keeps."""
        return {"hub": self.hub, "created_at": self.created, "partitions": {str(number): end for number, end in sorted(self.ends.items())}}


def admitted(available: Mapping[int, int], limit: int, turn: int = 0) -> dict[int, int]:
    """Return how many events of each partition come into a batch of at most `limit`. Shares are equal; unused parts go to the others.

    Args:
        available: partition -> events that are there.
        limit: the most events of the batch.
        turn: decides which partitions get the remainder. It must change, so that no partition waits for ever behind busy ones.
    """
    shares, left, waiting = dict[int, int](), limit, sorted(available, key=lambda number: (available[number], number))
    while waiting and available[waiting[0]] <= left // len(waiting):
        shares[waiting[0]] = available[waiting[0]]
        left -= available[waiting.pop(0)]
    shares |= dict.fromkeys(waiting, left // max(1, len(waiting)))
    left -= sum(shares[number] for number in waiting)
    numbers = sorted(available)
    for number in (numbers[(turn + at) % len(numbers)] for at in range(len(numbers))):
        if left and shares[number] < available[number]:
            shares[number] += 1
            left -= 1
    return shares
