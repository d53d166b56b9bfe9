"""Events of azure-eventhub as rows of the envelope, and the order they are put into."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

import pyarrow as pa
import pytest
from azure.eventhub import EventData
from azure.eventhub.amqp import AmqpAnnotatedMessage
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.errors import ConfigError
from dedup.core.envelope import ENVELOPE
from dedup.decode.prepare import Prepare, prepare_events
from dedup.eventhub import rows
from dedup.eventhub.reader import MOST_EARLY, InOrder
from dedup.eventhub.source import EARLIEST, LATEST, Offset, SourceOptions, admitted, parsed

SECRET = "c2VjcmV0LXNlY3JldC1zZWNyZXQ="
CONNECTION = f"Endpoint=sb://Shop.servicebus.windows.net/;SharedAccessKeyName=read;SharedAccessKey={SECRET}"


def event(number: int, body: Any = b"body", properties: dict[Any, Any] | None = None, **annotations: Any) -> EventData:
    """One as the client hands it over."""
    made = EventData(body)
    made.properties = properties or {}
    marks = {rows.NUMBER: number, rows.OFFSET: str(number * 10).encode(), rows.ENQUEUED: 1_767_225_600_123}
    made.raw_amqp_message.annotations = {**marks, **annotations}
    return made


def came(*numbers: int) -> pa.RecordBatch:
    """Events with these sequence numbers, in this order."""
    return rows.batch([event(number) for number in numbers], "s", "t", 0)


def test_rows_are_the_envelope() -> None:
    """Every column of the envelope but the part, with the position, the exact body, and the time to the millisecond."""
    made = rows.table([event(5, b"\x00\xff")], "shop.servicebus.windows.net", "orders", 3)
    assert made.schema.names == [name for name in ENVELOPE.names if name != "part"]
    row = made.to_pylist()[0]
    assert (row["source"], row["topic"], row["partition"], row["sequence_number"]) == ("shop.servicebus.windows.net", "orders", 3, 5)
    assert (row["offset"], row["body"], row["key"]) == ("50", b"\x00\xff", None)
    assert row["enqueued_time"] == dt.datetime(2026, 1, 1, 0, 0, 0, 123_000, tzinfo=dt.UTC)


def test_the_consumer_recognises_the_rows() -> None:
    """They go into a consumer without columns=, and the AMQP message id is the idempotence key."""
    first = event(1)
    first.message_id = "m-1"
    prepared = prepare_events(rows.table([first], "s", "orders", 0), Prepare("c"))
    assert prepared["idempotence_key"].to_pylist() == ["m-1"] if "idempotence_key" in prepared.column_names else True
    again = event(2)
    again.properties = {b"message-id": b"m-1"}
    both = prepare_events(rows.table([first, again], "s", "orders", 0), Prepare("c"))
    assert len(set(both["_key"].to_pylist())) == 1


ONE = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("as_bytes", "as_text"), [({b"a": b"x"}, {"a": "x"}), ({b"n": 1, b"f": 1.5, b"t": True}, {"n": 1, "f": 1.5, "t": True})]
)
def test_bytes_and_texts_are_one_spelling(as_bytes: dict[Any, Any], as_text: dict[Any, Any]) -> None:
    """The client hands names and texts over as bytes or as text; the row is the same, so that hashes are."""
    made = [rows.table([event(1, properties=given)], "s", "t", 0)["properties"].to_pylist() for given in (as_bytes, as_text)]
    assert made[0] == made[1]


def test_property_values_have_one_spelling_each() -> None:
    """Numbers, truth, ids, nothing and nested values."""
    given = {"i": -3, "b": False, "u": ONE, "none": None, "map": {b"k": [b"v", 1]}, "raw": b"\x00\xfe"}
    found = {pair["key"]: pair["value"] for pair in rows.table([event(1, properties=given)], "s", "t", 0)["properties"].to_pylist()[0]}
    wanted = {"i": b"-3", "b": b"false", "u": str(ONE).encode(), "none": None, "map": b'{"k":["v",1]}', "raw": b"\x00\xfe"}
    assert found == wanted


def test_amqps_own_properties_come_first() -> None:
    """message-id, content-type and the like are there by their AMQP names, before those of the application."""
    made = event(1, properties={"content-type": "mine"})
    made.content_type, made.message_id = "application/json", "m"
    names = [pair["key"] for pair in rows.table([made], "s", "t", 0)["properties"].to_pylist()[0]]
    assert names == ["message-id", "content-type", "content-type"]


@pytest.mark.parametrize(
    ("kind", "body", "wanted"),
    [
        ("data", [b"a", b"b"], b"ab"),
        ("data", [None], b""),
        ("value", {b"x": 1}, b'{"x":1}'),
        ("value", None, None),
        ("value", b"raw", b"raw"),
        ("sequence", [[1, b"a"]], b'[[1,"a"]]'),
    ],
)
def test_every_kind_of_body(kind: str, body: Any, wanted: bytes | None) -> None:
    """Data sections are joined, AMQP values and sequences become JSON, an AMQP null is null and no bytes are no bytes."""
    made = event(1)
    message = AmqpAnnotatedMessage(**{f"{kind}_body": body if body is not None else "x"})
    if body is None:
        message._value_body = None
    message.annotations = made.raw_amqp_message.annotations
    made._raw_amqp_message = message
    assert rows.body(made) == wanted


@given(st.permutations(range(10)), st.lists(st.integers(0, 9), max_size=10), st.integers(1, 4))
def test_order_gives_each_event_once_and_in_order(arrival: list[int], again: list[int], size: int) -> None:
    """However late or often they come."""
    order, given_out, stream = InOrder(0), list[int](), arrival + again
    for at in range(0, len(stream), size):
        given_out += rows.numbers(order.add(came(*stream[at : at + size]), 0.0)).tolist()
    assert given_out == list(range(10))
    assert order.next == 10


def test_a_gap_is_given_up_after_a_while() -> None:
    """An event that is missing is waited for while it can still come, and not for ever; what is behind it is kept."""
    order = InOrder(0)
    assert rows.numbers(order.add(came(0, 3), 10.0)) == [0]
    assert order.hole(11.0) is None
    assert order.hole(12.0) == 3
    assert rows.numbers(order.skip_to(3)) == [3]
    assert order.hole(99.0) is None


def test_what_is_kept_behind_a_gap_is_bounded() -> None:
    """Before memory fills, the gap is given up."""
    order, one = InOrder(0), came(1)
    order._early = dict.fromkeys(range(1, MOST_EARLY + 2), (one, 0.0))
    assert order.hole(0.0) == 1


@given(st.dictionaries(st.integers(0, 40), st.integers(0, 1000), min_size=1), st.integers(1, 2000), st.integers(0, 100))
def test_admission_is_fair_and_whole(available: dict[int, int], limit: int, turn: int) -> None:
    """A batch takes as much as it may, nobody more than there is, and nobody less than another unless there is no more."""
    shares = admitted(available, limit, turn)
    assert sum(shares.values()) == min(limit, sum(available.values()))
    assert all(0 <= shares[number] <= available[number] for number in available)
    waiting = [shares[number] for number in available if shares[number] < available[number]]
    assert not waiting or max(shares.values()) - min(waiting) <= 1


def test_no_partition_waits_for_ever() -> None:
    """With a limit below the number of partitions, the turns go around."""
    ends = dict.fromkeys(range(3), 0)
    for _ in range(6):
        for number, share in admitted(dict.fromkeys(range(3), 5), 1, turn=sum(ends.values())).items():
            ends[number] += share
    assert ends == {0: 2, 1: 2, 2: 2}


def test_positions_are_written_as_in_sparks_kafka_source() -> None:
    """Words, or JSON of hub, partition and position; anything else is an error that shows how."""
    assert parsed("Latest", "orders", "x") == LATEST
    assert parsed('{"Orders": {"0": 23, "1": -2}}', "orders", "x") == {0: 23, 1: EARLIEST}
    for wrong in (
        "",
        "23",
        '{"orders": 3}',
        '{"other": {"0": 1}}',
        '{"orders": {"0": -3}}',
        '{"orders": {"0": "5"}}',
        '{"orders": {"a": 1}}',
    ):
        with pytest.raises(ConfigError, match=r'startingPositions is earliest, latest or, for the hub .* JSON such as \{"orders"'):
            parsed(wrong, "orders", "startingPositions")


def test_an_offset_survives_sparks_checkpoint() -> None:
    """It comes back from JSON as it was, and has nothing in it but hub, time and positions."""
    offset = Offset("orders", "2026-01-01T00:00:00+00:00", {0: 5, 11: 7})
    assert Offset.of(json.loads(json.dumps(offset.json()))) == offset
    assert set(offset.json()) == {"hub", "created_at", "partitions"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "Give connectionString"),
        ({"connectionString": CONNECTION}, "names no event hub"),
        ({"connectionString": f"nonsense {SECRET}", "eventHubName": "o"}, "cannot be read"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "startPosition": "x"}, "Unknown options: startposition"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "prefetch": "0"}, "prefetch is a whole number"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "failOnDataLoss": "no"}, "failOnDataLoss is true or false"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "ownerLevel": "-1"}, "ownerLevel is a whole number"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "startingTime": "now"}, "startingTime is a time"),
        ({"connectionString": CONNECTION, "eventHubName": "o", "endingPositions": "earliest"}, "cannot be earliest"),
        (
            {"connectionString": CONNECTION, "eventHubName": "o", "startingTime": "2026-01-01", "startingPositions": "latest"},
            "not both",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], says: str) -> None:
    """Each with one sentence, and never with the secret."""
    with pytest.raises(ConfigError, match=says) as caught:
        SourceOptions.of(options)
    assert SECRET not in str(caught.value)


def test_options_never_show_the_secret() -> None:
    """Neither they nor the connection do; the source is the namespace's host name."""
    options = SourceOptions.of({"connectionstring": CONNECTION, "EVENTHUBNAME": "orders"})
    assert options.connection.source == "shop.servicebus.windows.net"
    assert SECRET not in repr(options) + str(options.connection)


def test_streams_are_exclusive_and_batch_reads_are_not() -> None:
    """Unless the option says otherwise for both."""
    base = {"connectionString": CONNECTION, "eventHubName": "orders"}
    levels = [
        (o.stream.level, o.batch.level)
        for o in (SourceOptions.of({**base, **more}) for more in ({}, {"ownerLevel": "none"}, {"ownerLevel": "3"}))
    ]
    assert levels == [(0, None), (None, None), (3, 3)]
