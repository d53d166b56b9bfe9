"""Read a range of an event hub again by position, and find where a stream continues if Spark's own checkpoint is lost.

`consumer.register_log_reader` needs the first for replay, `--from-log` and large bodies. A stream continues behind the consumer's
checkpoints. The user's program calls this module; executors read.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa

from checkpoint import given, start
from checkpoint.errors import ConfigError
from dedup.consumer import Consumer
from dedup.core.log import AnyLogReader
from dedup.core.settings import HUB_LOG
from dedup.eventhub import rows
from dedup.eventhub.connection import Connection
from dedup.eventhub.namespace import Namespace, refuse_spelling
from dedup.eventhub.reader import PartitionReader, Receive


class LogReader(AnyLogReader):
    """What `log_reader` returns: call it with source, topic, partition, first and last sequence number. Picklable."""

    def __init__(self, connection: Connection, receive: Receive, arrow: bool = False) -> None:
        self.connection, self._receive, self.arrow = connection, receive, arrow

    def __repr__(self) -> str:
        return f"log_reader({self.connection!r})"

    def read(self, topic: str, partition: int, first: int, last: int) -> pa.Table:
        """Return what a call returns, always as an Arrow table."""
        begin = max(first, self.first_kept("", topic, partition))
        if begin > last:
            return rows.SCHEMA.empty_table()
        reader = PartitionReader(self._of(topic), partition, self._receive)
        try:
            batches = list(reader.read(begin, last))
        finally:
            reader.close()
        return pa.Table.from_batches(batches, rows.SCHEMA)

    def first_kept(self, source: str, topic: str, partition: int) -> int:
        """Return the first position that the hub still has."""
        return Namespace(self._of(topic)).span(partition).first

    def _of(self, topic: str) -> Connection:
        return replace(self.connection, hub=topic)


def log_reader(
    connection: Connection | str, hub: str | None = None, *, group: str = "$Default", timeout: given.Duration = 60.0, arrow: bool = False
) -> LogReader:
    """Make the function that reads a range again: `consumer.register_log_reader(log_reader(connection_string, "orders"))`.

    Args:
        connection: a connection string, or a `Connection`.
        hub: name of the event hub, if the connection string has none.
        group: a consumer group in which no stream reads: streams are exclusive by default.
        timeout: how long to wait for an event before the read fails.
        arrow: return Arrow tables also if a Spark session is active, for handlers that take them.

    Raises:
        ConfigError: the connection string cannot be read.
    """
    given.check(HUB_LOG, locals())
    made = Connection.of(connection, hub, group) if isinstance(connection, str) else connection
    return LogReader(made, Receive(timeout=given.to_seconds(timeout), fail_on_data_loss=False), arrow)


def starting_positions(consumer: Consumer, connection: Connection | str | None = None, *, source: str | None = None) -> str:
    """Return the option `startingPositions` with which a stream begins after the consumer's checkpoints.

    It is JSON: hub -> partition -> next sequence number. Partitions without a checkpoint begin at their earliest event.

    Args:
        consumer: the consumer with the checkpoints.
        connection: of the hub, or its connection string. With it dedup also asks the hub which events it still has.
        source: the host name of the namespace, if there is no connection and the consumer has read from several namespaces.

    Raises:
        ConfigError: the consumer has no checkpoint, or has read from several namespaces and `source` names none of them; or its state
            has the hub in another spelling.
        PositionGap: retention has passed a checkpoint, and nobody has accepted the gap (only with a connection).
        IncarnationChanged: the hub ends below a checkpoint (only with a connection).
    """
    head = consumer.known_head()
    if connection is not None:
        hub = Connection.of(connection) if isinstance(connection, str) else connection
        where = consumer.source or hub.source
        refuse_spelling(head, where, hub.hub)
        return start.spark_json(start.positions(head, where, Namespace(hub), [hub.hub]))
    where = _only(consumer, sorted({place.source for place in head.checkpoints}), source)
    found: dict[str, dict[str, int]] = {}
    for place, checkpoint in sorted(head.checkpoints.items()):
        if place.source == where:
            found.setdefault(place.topic, {})[str(place.partition)] = checkpoint.sequence_number + 1
    return json.dumps(found)


def _only(consumer: Consumer, sources: list[str], asked: str | None) -> str:
    chosen = [source for source in sources if asked in (None, source)]
    if len(chosen) == 1:
        return chosen[0]
    raise ConfigError(
        f"Consumer {consumer.name!r} has checkpoints of these namespaces: {', '.join(sources) or 'none'}. Name one with source=; where "
        "there is no checkpoint, choose startingPositions yourself."
    )
