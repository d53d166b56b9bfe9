"""Reading a real topic again by position: what is there, once; what never was an event is no loss; what is lost is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import IncarnationChanged
from dedup import kafka as dk
from dedup.core.envelope import KAFKA
from dedup.kafka import log
from kit import kafka_server
from kit.kafka_kit import Topic, compacted


def bodies(reader: dk.LogReader, topic: Topic, first: int, last: int) -> list[tuple[int, bytes]]:
    """(position, body) of what the reader gives."""
    rows = reader.read(topic.name, 0, first, last)
    return list(zip(rows["offset"].to_pylist(), rows["value"].to_pylist(), strict=True))


def test_a_range_is_read_with_everything_a_stream_has(kafka: kafka_server.Broker, topic: Topic) -> None:
    """Columns, times, keys and headers are those of Spark's Kafka source; no position outside the range comes along."""
    topic.send([f"b{n}" for n in range(10)], key=b"k")
    rows = dk.log_reader(kafka.servers).read(topic.name, 0, 3, 6)
    assert set(KAFKA) | {"timestampType", "headers"} == set(rows.column_names)
    assert rows["offset"].to_pylist() == [3, 4, 5, 6]
    first = rows.slice(0, 1).to_pylist()[0]
    assert (first["key"], first["value"], first["topic"], first["partition"]) == (b"k", b"b3", topic.name, 0)
    assert first["headers"] == [{"key": "origin", "value": b"test"}]
    assert first["timestamp"].year >= 2026 and first["timestampType"] == 0


@pytest.mark.full
def test_aborted_messages_and_markers_are_no_events(kafka: kafka_server.Broker, topic: Topic) -> None:
    """Of transactions only what was committed is read, also where the range ends in an aborted one; both settings are there."""
    topic.send([b"a"])
    topic.send_transaction(["no", "no"], commit=False)
    topic.send_transaction(["b"], commit=True)
    topic.send_transaction(["no"], commit=False)
    end = topic.ends()[1]
    assert end == 8
    assert bodies(dk.log_reader(kafka.servers), topic, 0, end - 1) == [(0, b"a"), (4, b"b")]
    assert bodies(dk.log_reader(kafka.servers), topic, 6, 7) == []
    everything = dk.log_reader(kafka.servers, isolation="read_uncommitted")
    assert [n for n, _ in bodies(everything, topic, 0, end - 1)] == [0, 1, 2, 4, 6]


def test_positions_below_retention_are_left_out_and_the_border_is_told(kafka: kafka_server.Broker, topic: Topic) -> None:
    """The reader gives what is there and says where the log begins, so that the lost positions can be named."""
    topic.send([f"b{n}" for n in range(10)])
    topic.delete_records(0, before=4)
    reader = dk.log_reader(kafka.servers)
    assert [n for n, _ in bodies(reader, topic, 0, 6)] == [4, 5, 6]
    assert bodies(reader, topic, 0, 3) == []
    assert reader.first_kept("any", topic.name, 0) == 4


def test_a_log_that_ends_before_the_range_is_another_one(kafka: kafka_server.Broker, topic: Topic) -> None:
    """Positions that were processed cannot lie behind the end of the topic they came from."""
    topic.send([b"a"])
    with pytest.raises(IncarnationChanged, match="ends before position 1"):
        dk.log_reader(kafka.servers).read(topic.name, 0, 0, 1)


def test_what_compaction_removed_is_left_out(kafka: kafka_server.Broker, topic: Topic) -> None:
    """Of a key that was written many times what compaction left is read, and the gaps are no reason to wait or to fail."""
    other = compacted(topic, [f"old{n}" for n in range(5)])
    reader = dk.log_reader(kafka.servers)
    assert bodies(reader, other, 0, 4) == [(0, b"old0"), (4, b"old4")]
    assert bodies(reader, other, 1, 3) == []


def test_a_time_that_no_column_holds_is_null() -> None:
    """A producer that gives nanoseconds stops nobody who reads its events again."""

    def message(time: int) -> Any:
        there = {"key": None, "value": b"v", "topic": "t", "partition": 0, "offset": 1, "headers": None, "timestamp": (1, time)}
        return SimpleNamespace(**{name: lambda told=told: told for name, told in there.items()})

    read = log._table([message(1_764_396_000_000), message(1_764_396_000_000_000_000), message(-(2**62))], headers=False)
    assert read["timestamp"].cast(pa.int64()).to_pylist() == [1_764_396_000_000_000, None, None]
