"""`format("eventhubs")`: the Spark data source, streaming and batch. The only module here that imports pyspark.

Partitions are planned on the driver as ranges of sequence numbers, and received on executors in Arrow batches. One partition is one task,
so that its events stay in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from dedup.eventhub import pool
from dedup.eventhub.namespace import Hub
from dedup.eventhub.options import Options
from dedup.eventhub.planning import Planner
from dedup.eventhub.positions import Offset, admitted
from dedup.eventhub.reader import Receive

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


def register(spark: SparkSession) -> None:
    """Make `format("eventhubs")` known to this session."""
    spark.dataSource.register(EventHubsSource)


class Slice(InputPartition):
    """Events of one partition for one task. Has no secret: Spark may show it."""

    def __init__(self, partition: int, first: int, last: int, created: str) -> None:
        self.partition, self.first, self.last, self.created = partition, first, last, created


class EventHubsSource(DataSource):
    """Reads an event hub; options in docs/eventhubs.md."""

    @classmethod
    def name(cls) -> str:
        """What `format` is called with."""
        return "eventhubs"

    def schema(self) -> T.StructType:
        """The columns of the envelope."""
        return SCHEMA

    def reader(self, schema: T.StructType) -> DataSourceReader:
        """For `spark.read`. Raises ConfigError for options that make no sense."""
        return BatchReader(Options.of(self.options), schema)

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        """For `spark.readStream`. Raises ConfigError for options that make no sense."""
        return StreamReader(Options.of(self.options), schema)


class BatchReader(DataSourceReader):
    """All events between two positions of each partition."""

    def __init__(self, options: Options, schema: T.StructType) -> None:
        self._options, self._schema = options, schema

    def partitions(self) -> list[InputPartition]:
        """Runs on the driver. Raises what `Planner` raises."""
        planner = Planner(self._options, self._options.batch)
        return slices(planner.start(), planner.end())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        return received(self._options, self._options.batch, self._schema, partition)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One stream; its offset is the next position of each partition, and when the hub was created."""

    def __init__(self, options: Options, schema: T.StructType) -> None:
        self._options, self._schema = options, schema
        self._planner = Planner(options, options.stream)
        self._target: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Where a stream without a Spark checkpoint begins."""
        return self._planner.start().json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """maxEventsPerTrigger."""
        return ReadMaxRows(self._options.limit) if self._options.limit else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is all there is."""
        self._target = self._ends(self._planner.look())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next batch ends.

        Raises:
            IncarnationChanged: the hub was created anew. PositionsMissing: retention was faster than the stream.
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
        """The ends of the log as they were last seen, for the query's progress."""
        return self._ends(self._planner.last_seen()).json()

    def _ends(self, hub: Hub) -> Offset:
        return Offset(self._planner.hub, hub.created, {number: span.end for number, span in hub.spans.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One slice for each partition that has something new. Raises IncarnationChanged if the hub is not the one of these offsets."""
        found = slices(Offset.of(start), Offset.of(end))
        if found:
            self._planner.same_hub(end["created_at"])
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        return received(self._options, self._options.stream, self._schema, partition)


def slices(start: Offset, end: Offset) -> list[InputPartition]:
    """What lies between two offsets."""
    begins = {number: start.ends.get(number, 0) for number in end.ends}
    return [Slice(number, begins[number], last - 1, end.created) for number, last in sorted(end.ends.items()) if last > begins[number]]


def received(options: Options, receive: Receive, schema: T.StructType, part: InputPartition) -> Iterator[pa.RecordBatch]:
    """The slice's events as Arrow batches with Spark's own types."""
    if not isinstance(part, Slice):
        return  # what Spark asks for where there is nothing to read
    _quiet()
    arrow, connection = to_arrow_schema(schema, timezone="UTC"), options.connection
    with pool.borrowed(connection, part.partition, receive) as reader:
        for events in reader.read(part.first, part.last, part.created):
            yield events.cast(arrow)


def _quiet() -> None:
    """Leave the client's own warnings out of the worker's log, where nobody has asked for them: each error is raised or logged by us."""
    client = logging.getLogger("azure.eventhub")
    if client.level == logging.NOTSET:
        client.setLevel(logging.CRITICAL)
