"""The same on the double and, where DEDUP_TEST_EVENTHUBS names a hub, on the real service: whatever needs no fault on command."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import Any

import pytest

from checkpoint.errors import ConfigError, ReceiverStolen
from dedup.eventhub import Connection, Namespace, log_reader
from dedup.eventhub.reader import PartitionReader, Receive
from dedup.eventhub.source import LATEST, SCHEMA, SourceOptions, StreamReader
from fixtures.fix_eventhubs import AnyHub


def bodies(count: int) -> list[bytes]:
    """Of events that no other test sends."""
    return [f"{time.time_ns()} {number}".encode() for number in range(count)]


@pytest.mark.full
def test_what_was_sent_is_read_by_position(any_hub: AnyHub) -> None:
    """Bounded, in order, whole; and once more as an Arrow table by the log reader."""
    sent, first = bodies(25), any_hub.begin[0]
    any_hub.send(0, sent)
    table = log_reader(any_hub.connection).read(any_hub.name, 0, first + 5, first + 14)
    assert table["sequence_number"].to_pylist() == list(range(first + 5, first + 15))
    assert table["body"].to_pylist() == sent[5:15]
    span = Namespace(Connection.of(any_hub.connection)).span(0)
    assert (span.end, span.newest is not None) == (first + 25, True)


@pytest.mark.full
def test_links_stay_open_from_range_to_range(any_hub: AnyHub) -> None:
    """Events that come later are read over the same link."""
    connection, first = Connection.of(any_hub.connection), any_hub.begin[1]
    reader = PartitionReader(connection, 1, Receive(prefetch=50))
    for turn in range(2):
        sent = bodies(10)
        any_hub.send(1, sent)
        begin = first + 10 * turn
        pieces = reader.read(begin, begin + 9)
        assert [body for piece in pieces for body in piece["body"].to_pylist()] == sent
        assert reader.next == begin + 10
    reader.close()


@pytest.mark.full
def test_a_stream_goes_from_offset_to_offset(any_hub: AnyHub) -> None:
    """From the end, by sequence number and by time, as Spark asks it."""
    began = dt.datetime.now(dt.UTC)
    other = {str(number): LATEST for number in any_hub.begin}
    readers: list[Any] = []
    for start in ({"startingPositions": json.dumps({any_hub.name: {**other, "0": any_hub.begin[0]}})}, {"startingPositions": "latest"}):
        readers.append(StreamReader(SourceOptions.of({"connectionString": any_hub.connection, **start}), SCHEMA))
    starts = [reader.initialOffset() for reader in readers]
    sent = bodies(12)
    any_hub.send(0, sent)
    for reader, start in zip(readers, starts, strict=True):
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert end["partitions"]["0"] == any_hub.begin[0] + 12
        (part,) = reader.partitions(start, end)
        assert [body for found in reader.read(part) for body in found["body"].to_pylist()] == sent
    since = (began - dt.timedelta(seconds=5)).isoformat()
    late = StreamReader(SourceOptions.of({"connectionString": any_hub.connection, "startingTime": since}), SCHEMA).initialOffset()
    assert late["partitions"]["0"] <= any_hub.begin[0] + 12


@pytest.mark.full
def test_the_newcomer_takes_the_partition(any_hub: AnyHub) -> None:
    """Owner levels, as the service has them: the reader that was there is told."""
    connection, first = Connection.of(any_hub.connection), any_hub.begin[0]
    any_hub.send(0, bodies(5))
    old, new = (PartitionReader(connection, 0, Receive(level=level)) for level in (1, 2))
    reading = old.read(first, first + 10)
    next(reading)
    list(new.read(first, first + 4))
    with pytest.raises(ReceiverStolen):
        list(reading)
    new.close()


@pytest.mark.full
def test_what_is_not_there_is_told(any_hub: AnyHub) -> None:
    """A hub, and a consumer group."""
    for lost in (Connection.of(any_hub.connection, "no-such-hub-here"), Connection.of(any_hub.connection, group="no-such-group")):
        with pytest.raises(ConfigError):
            list(PartitionReader(lost, 0, Receive(timeout=20)).read(0, 0))
