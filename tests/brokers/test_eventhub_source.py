"""What the data source plans and reads, asked as Spark asks it, without a JVM: where a stream begins, what it holds, what it refuses."""

from __future__ import annotations

import datetime as dt
import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from checkpoint.errors import ConfigError, IncarnationChanged, PositionsMissing
from dedup.eventhub import reader
from dedup.eventhub.source import SCHEMA, BatchReader, EventHubsSource, SourceOptions, SourcePartition, StreamReader
from fixtures.fix_eventhubs import MakeHub
from kit.eventhubs.control import Double

BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
Place = tuple[int, int]
"""(partition, sequence number)"""


@pytest.fixture
def hub(new_hub: MakeHub) -> Iterator[str]:
    yield new_hub(partitions=2)
    reader.close_all()


def made(double: Double, hub: str, **more: str) -> SourceOptions:
    """Options of a hub of the double."""
    return SourceOptions.of({"connectionString": double.connection_string, "eventHubName": hub, "receiveTimeout": "20", **more})


class Stream:
    """Does what Spark does with a stream's reader; `offset` is what Spark's checkpoint would hold."""

    def __init__(self, options: SourceOptions, offset: Mapping[str, Any] | None = None) -> None:
        self.reader = pickle.loads(pickle.dumps(StreamReader(options, SCHEMA)))
        self.offset = json.loads(json.dumps(offset or self.reader.initialOffset()))

    def batch(self) -> list[Place]:
        """The next one, which may be empty."""
        return self.repeat(self.offset, self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit()))

    def repeat(self, start: Any, end: Any) -> list[Place]:
        """A batch that is planned already."""
        self.offset = json.loads(json.dumps(end))
        return read(self.reader, self.reader.partitions(start, self.offset))

    def rest(self) -> list[list[Place]]:
        """Batch after batch, until one is empty."""
        found = []
        while batch := self.batch():
            found.append(batch)
        return found


def read(reader: Any, parts: list[Any]) -> list[Place]:
    """What the tasks give."""
    tables = [batch.to_pydict() for part in parts for batch in reader.read(pickle.loads(pickle.dumps(part)))]
    return [place for table in tables for place in zip(table["partition"], table["sequence_number"], strict=True)]


def span(partition: int, first: int, end: int) -> list[Place]:
    """Positions of one partition, the end not included."""
    return [(partition, number) for number in range(first, end)]


@pytest.mark.full
def test_a_stream_takes_fair_shares(eventhubs: Double, hub: str) -> None:
    """maxEventsPerTrigger is shared equally, what one partition does not need goes to the other, and nothing is read twice."""
    eventhubs.fill(hub, 0, 100)
    eventhubs.fill(hub, 1, 250)
    stream = Stream(made(eventhubs, hub, maxEventsPerTrigger="90"))
    batches = stream.rest()
    assert [len(batch) for batch in batches] == [90, 90, 90, 80]
    assert [sum(partition == 0 for partition, _ in batch) for batch in batches] == [45, 45, 10, 0]
    assert sorted(place for batch in batches for place in batch) == span(0, 0, 100) + span(1, 0, 250)
    assert stream.batch() == []


def test_a_read_limit_of_the_trigger_wins(eventhubs: Double, hub: str) -> None:
    """ReadAllAvailable takes all there is; the default is what maxEventsPerTrigger says."""
    eventhubs.fill(hub, 0, 30)
    stream = Stream(made(eventhubs, hub, maxEventsPerTrigger="10"))
    assert stream.reader.getDefaultReadLimit() == ReadMaxRows(10)
    assert stream.reader.latestOffset(stream.offset, ReadAllAvailable())["partitions"] == {"0": 30, "1": 0}


def test_available_now_ends_at_what_was_there(eventhubs: Double, hub: str) -> None:
    """Events and partitions that come later are for the next run."""
    eventhubs.fill(hub, 0, 10)
    stream = Stream(made(eventhubs, hub, maxEventsPerTrigger="6"))
    stream.reader.prepareForTriggerAvailableNow()
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("grow", hub=hub, partitions=3)
    eventhubs.fill(hub, 2, 5)
    assert stream.rest() == [span(0, 0, 6), span(0, 6, 10)]
    later = Stream(made(eventhubs, hub), stream.offset)
    assert sorted(later.rest()[0]) == span(0, 10, 20) + span(2, 0, 5)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        pytest.param("startingPositions", "earliest", span(0, 2, 8) + span(1, 0, 4), marks=pytest.mark.full),
        pytest.param("startingPositions", "latest", span(0, 6, 8) + span(1, 3, 4), marks=pytest.mark.full),
        pytest.param("startingPositions", {"0": 4}, span(0, 4, 8) + span(1, 0, 4), marks=pytest.mark.full),
        ("startingPositions", {"0": -1, "1": -2}, span(0, 6, 8) + span(1, 0, 4)),
        ("startingTime", "2026-01-01T00:04:30+00:00", span(0, 5, 8) + span(1, 3, 4)),
        pytest.param("startingTime", "2026-01-01T00:00:00", span(0, 2, 8) + span(1, 0, 4), marks=pytest.mark.full),
        pytest.param("startingTime", "2030-01-01", span(0, 6, 8) + span(1, 3, 4), marks=pytest.mark.full),
    ],
)
def test_where_a_stream_begins(eventhubs: Double, hub: str, option: str, value: Any, expected: list[Place]) -> None:
    """Positions and times, of partitions that retention has cut, and nothing before them."""
    minutes = [int((BEGIN + dt.timedelta(minutes=minute)).timestamp() * 1000) for minute in range(6)]
    for number, at in enumerate(minutes):
        eventhubs.fill(hub, 0, 1, enqueued=at)
        if number < 3:
            eventhubs.fill(hub, 1, 1, enqueued=at)
    eventhubs.order("expire", hub=hub, partition=0, before=2)
    given = value if isinstance(value, str) else json.dumps({hub: value})
    stream = Stream(made(eventhubs, hub, **{option: given}))
    eventhubs.fill(hub, 0, 2)
    eventhubs.fill(hub, 1, 1)
    assert sorted(stream.batch()) == expected


def test_starts_that_are_not_there_are_refused(eventhubs: Double, hub: str) -> None:
    """Past the retention, beyond the end, in a partition that the hub has not."""
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("expire", hub=hub, partition=0, before=4)
    for start, error, says in (
        ({"0": 1}, PositionsMissing, r"does not have these positions any more \(retention\): partition 0: 1-3"),
        ({"0": 11}, IncarnationChanged, r"ends before the position to read next, in partition 0 \(at 11\)"),
        ({"2": 0}, ConfigError, "has no partition 2; it has 2"),
    ):
        with pytest.raises(error, match=says):
            Stream(made(eventhubs, hub, startingPositions=json.dumps({hub: start})))


@pytest.mark.full
def test_retention_that_overtakes_a_stream_is_named(eventhubs: Double, hub: str, caplog: pytest.LogCaptureFixture) -> None:
    """The positions lost; with failOnDataLoss=false they are logged, and the rest is read."""
    eventhubs.fill(hub, 0, 10)
    stream = Stream(made(eventhubs, hub))
    stream.batch()
    eventhubs.fill(hub, 0, 20)
    eventhubs.order("expire", hub=hub, partition=0, before=15)
    with pytest.raises(PositionsMissing, match="partition 0: 10-14"):
        stream.batch()
    with caplog.at_level(logging.WARNING, "dedup"):
        assert Stream(made(eventhubs, hub, failOnDataLoss="false"), stream.offset).batch() == span(0, 15, 30)
    assert "partition 0: 10-14" in caplog.text


def test_a_hub_that_was_created_anew_is_refused(eventhubs: Double, hub: str) -> None:
    """Also where it has as many events as the old one, or more, and where a batch was planned before: nothing of it goes into that."""
    eventhubs.fill(hub, 0, 10)
    stream = Stream(made(eventhubs, hub))
    begin = stream.offset
    stream.batch()
    eventhubs.create(hub, 2)
    eventhubs.fill(hub, 0, 10)
    with pytest.raises(IncarnationChanged, match="deleted and created again"):
        stream.batch()
    eventhubs.fill(hub, 0, 40)
    for refused in (stream.batch, lambda: Stream(made(eventhubs, hub), begin).repeat(begin, stream.offset)):
        with pytest.raises(IncarnationChanged, match="deleted and created again"):
            refused()


def test_a_batch_read_is_bounded(eventhubs: Double, hub: str) -> None:
    """The start included, the end not; an end that is not there is refused."""
    eventhubs.fill(hub, 0, 10)
    eventhubs.fill(hub, 1, 3)
    bounded = {"startingPositions": json.dumps({hub: {"0": 2}}), "endingPositions": json.dumps({hub: {"0": 5}})}
    reader = BatchReader(made(eventhubs, hub, **bounded), SCHEMA)
    assert read(reader, reader.partitions()) == span(0, 2, 5) + span(1, 0, 3)
    beyond = BatchReader(made(eventhubs, hub, endingPositions=json.dumps({hub: {"0": 11}})), SCHEMA)
    with pytest.raises(ConfigError, match=r"beyond the end of event hub .*partition 0 \(at 11\)"):
        beyond.partitions()


def test_what_spark_shows_of_it_has_no_secret(eventhubs: Double, hub: str) -> None:
    """Slices go into plans; they hold positions only."""
    assert repr(SourcePartition(0, 1, 2, "now")) == "SourcePartition(partition=0, first=1, last=2, created='now')"
    assert EventHubsSource.name() == "eventhubs"
