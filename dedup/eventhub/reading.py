"""Reading a range of an event hub again, by position: what `consumer.log` needs for replay, `--from-log` and large bodies."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from checkpoint import given
from dedup.eventhub import rows
from dedup.eventhub.namespace import Namespace
from dedup.eventhub.reader import PartitionReader, Receive
from dedup.eventhub.settings import Connection
from dedup.log_reader import LogReader as AnyLogReader
from dedup.settings import HUB_LOG


class LogReader(AnyLogReader):
    """What `log_reader` returns: call it with source, topic, partition, first and last sequence number. Picklable."""

    def __init__(self, connection: Connection, receive: Receive, arrow: bool = False) -> None:
        self.connection, self._receive, self.arrow = connection, receive, arrow

    def __repr__(self) -> str:
        return f"log_reader({self.connection!r})"

    def read(self, topic: str, partition: int, first: int, last: int) -> pa.Table:
        """As a call gives it, and always an Arrow table."""
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
        """The first position that can still be had."""
        return Namespace(self._of(topic)).span(partition).first

    def _of(self, topic: str) -> Connection:
        return replace(self.connection, hub=topic)


def log_reader(
    connection: Connection | str, hub: str | None = None, *, group: str = "$Default", timeout: float = 60.0, arrow: bool = False
) -> LogReader:
    """What to register as `consumer.log`: `consumer.log(log_reader(connection_string, "orders"))`.

    Args:
        connection: a connection string, or a `Connection`.
        hub: name of the event hub, where the connection string has none.
        group: a consumer group in which no stream reads: streams are exclusive by default.
        timeout: seconds without an event, after which reading is given up.
        arrow: give Arrow tables also where a Spark session is active: for handlers that take them.

    Raises:
        ConfigError: the connection string cannot be read.
    """
    given.check(HUB_LOG, locals())
    made = Connection.of(connection, hub, group) if isinstance(connection, str) else connection
    return LogReader(made, Receive(timeout=timeout, fail_on_data_loss=False), arrow)
