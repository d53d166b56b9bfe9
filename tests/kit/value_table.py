"""Each type of a sink with each type of Python value: what is stored, and the table of docs/how-to/handlers.md that says so."""

from __future__ import annotations

import datetime as dt
import enum
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

EAST = dt.timezone(dt.timedelta(hours=2))
UUID = uuid.UUID("6ba7b810-9dad-11d1-80b4-00c04fd430c8")


class Colour(enum.Enum):
    """A class of the user's."""

    RED = "red"


VALUES: dict[str, dict[str, Any]] = {
    "bool": {"true": True},
    "int": {"one": 1, "300": 300, "70000": 70_000, "2^40": 2**40, "2^53+1": 2**53 + 1, "2^63": 2**63},
    "float": {"1.5": 1.5, "2.0": 2.0, "0.1": 0.1, "1e300": 1e300, "nan": float("nan"), "inf": float("inf")},
    "Decimal": {"d1.50": Decimal("1.50"), "d1.000": Decimal("1.000"), "d1.005": Decimal("1.005"), "d0.1": Decimal("0.1")}
    | {"dnan": Decimal("NaN"), "dlong": Decimal("12345678901.123456789012345")},
    "str": {"x": "x", "long": "longer", "nul": "a\0b", "uuid text": str(UUID), "half": "\ud800"},
    "bytes": {"raw": b"\x00\xff", "array": bytearray(b"\x01")},
    "UUID": {"uuid": UUID},
    "date": {"day": dt.date(2024, 5, 6)},
    "datetime": {"moment": dt.datetime(2024, 5, 6, 7, 8, 9, 10), "midnight": dt.datetime(2024, 5, 6)}
    | {"east": dt.datetime(2024, 5, 6, 7, 0, tzinfo=EAST), "before time": dt.datetime(1, 1, 1, tzinfo=EAST)},
    "time": {"noon": dt.time(12, 0, 0, 1), "noon east": dt.time(12, tzinfo=EAST)},
    "timedelta": {"hours": dt.timedelta(hours=30, microseconds=1)},
    "list, tuple": {"[1, 2]": [1, 2], "(1, 2.5)": (1, 2.5), "[None]": [None], "[]": []},
    "set": {"{1}": {1}},
    "dict": {"a b": {"a": 1, "b": ["x", None]}, "a": {"a": 2}, "z": {"z": 3}, "deep": {"a": [1, {"b": None}]}}
    | {
        "dated": {"d": dt.datetime(2024, 5, 6, 7, 8), "e": Decimal("1.50")},
        "day in": {"d": dt.date(2024, 5, 6)},
        "nan in": {"a": float("nan")},
    }
    | {"bytes in": {"a": b"x"}, "keys": {1: 1}},
    "list of pairs": {"pairs": [("k", 1)], "twice": [("k", 1), ("k", 2)]},
    "Enum": {"enum": Colour.RED},
    "numpy scalar": {
        "np int": np.int64(5),
        "np float": np.float32(0.5),
        "np bool": np.bool_(True),
        "np us": np.datetime64("2024-05-06T07:08", "us"),
    }
    | {"np ns": np.datetime64("2024-05-06T07:08:09.000000001", "ns"), "np nat": np.datetime64("NaT")},
    "numpy array": {"np array": np.array([1, 2])},
    "pandas scalar": {
        "pd moment": pd.Timestamp("2024-05-06 07:08"),
        "pd ns": pd.Timestamp("2024-05-06 07:08:09.000000001"),
        "pd nat": pd.NaT,
    }
    | {"pd na": pd.NA},
    "another class": {"object": object()},
}
"""Python type -> values of it by name."""

NULL = {"np nat": None, "pd nat": None, "pd na": None}
"""What counts as NULL everywhere."""


class Column(NamedTuple):
    """One type of a sink."""

    delta: pa.DataType | None
    postgres: str | None
    shown: str  # in the docs
    stored: dict[str, Any]  # of the values that go in by name: what is read back; all others are refused


def _numbers(*names: str) -> dict[str, Any]:
    """Those values as they are."""
    return {name: VALUES[kind][name] for kind in ("int", "float", "Decimal") for name in names if name in VALUES[kind]}


_WHOLE = {"one": 1, "300": 300, "2.0": 2, "d1.000": 1, "np int": 5}
_FLOATS = {"one": 1.0, "300": 300.0, "70000": 70000.0, "2^40": 2.0**40, "2^63": 2.0**63, "1.5": 1.5, "2.0": 2.0, "0.1": 0.1} | {
    "nan": float("nan"), "inf": float("inf"), "d1.50": 1.5, "d1.000": 1.0, "d0.1": 0.1, "dnan": float("nan"), "d1.005": 1.005,
    "np int": 5.0, "np float": 0.5,
}  # fmt: skip
_TEXTS = {"x": "x", "long": "longer", "uuid text": str(UUID), "uuid": str(UUID), "enum": "red"}
_AT, _UTC = dt.datetime(2024, 5, 6, 7, 8), dt.UTC
_MOMENTS = {"day": dt.datetime(2024, 5, 6), "moment": VALUES["datetime"]["moment"], "midnight": dt.datetime(2024, 5, 6)} | {
    "east": dt.datetime(2024, 5, 6, 5), "np us": _AT, "pd moment": _AT,
}  # fmt: skip
_JSON = {"[1, 2]": [1, 2], "(1, 2.5)": [1, 2.5], "[None]": [None], "[]": [], "a b": {"a": 1, "b": ["x", None]}, "a": {"a": 2}} | {
    "z": {"z": 3}, "deep": {"a": [1, {"b": None}]}, "dated": {"d": "2024-05-06T07:08:00", "e": "1.50"}, "day in": {"d": "2024-05-06"},
    "pairs": [["k", 1]], "twice": [["k", 1], ["k", 2]], "true": True, "one": 1, "300": 300, "70000": 70_000, "2^40": 2**40,
    "2^53+1": 2**53 + 1, "2^63": 2**63, "1.5": 1.5, "2.0": 2.0, "0.1": 0.1, "1e300": 10**300, "d1.50": "1.50", "d1.000": "1.000",
    "d1.005": "1.005", "d0.1": "0.1", "dnan": "NaN", "dlong": "12345678901.123456789012345", "day": "2024-05-06",
    "moment": "2024-05-06T07:08:09.000010", "midnight": "2024-05-06T00:00:00", "east": "2024-05-06T07:00:00+02:00", "uuid": str(UUID),
    "before time": "0001-01-01T00:00:00+02:00", "noon": "12:00:00.000001", "noon east": "12:00:00+02:00", "np int": 5, "np float": 0.5,
    "np bool": True, "np us": "2024-05-06T07:08:00", "np array": [1, 2], "pd moment": "2024-05-06T07:08:00", "half": None,
}  # fmt: skip

COLUMNS = {
    "boolean": Column(pa.bool_(), "boolean", "BOOLEAN", {"true": True, "np bool": True}),
    "tiny": Column(pa.int8(), None, "TINYINT", {"one": 1, "2.0": 2, "d1.000": 1, "np int": 5}),
    "small": Column(pa.int16(), "smallint", "SMALLINT", _WHOLE),
    "int": Column(pa.int32(), "integer", "INT", _WHOLE | {"70000": 70_000}),
    "big": Column(pa.int64(), "bigint", "BIGINT", _WHOLE | _numbers("70000", "2^40", "2^53+1")),
    "single": Column(pa.float32(), "real", "FLOAT, real", _FLOATS),
    "double": Column(pa.float64(), "double precision", "DOUBLE", _FLOATS | {"1e300": 1e300}),
    "decimal": Column(
        pa.decimal128(10, 2),
        "numeric(10,2)",
        "DECIMAL(p,s)",
        {"one": Decimal(1), "300": Decimal(300), "70000": Decimal(70_000), "1.5": Decimal("1.50"), "2.0": Decimal(2), "0.1": Decimal("0.1")}
        | {"d1.50": Decimal("1.50"), "d1.000": Decimal(1), "d0.1": Decimal("0.1"), "np int": Decimal(5), "np float": Decimal("0.5")},
    ),
    "numeric": Column(
        None,
        "numeric",
        "numeric",
        {name: Decimal(value) for name, value in VALUES["int"].items()}
        | {name: Decimal(repr(value)) for name, value in VALUES["float"].items()}
        | VALUES["Decimal"]
        | {"np int": Decimal(5), "np float": Decimal("0.5")},
    ),
    "string": Column(pa.string(), None, "STRING", _TEXTS | {"nul": "a\0b"}),
    "text": Column(None, "text", "text", _TEXTS),
    "varchar": Column(None, "varchar(3)", "varchar(n)", {"x": "x", "enum": "red"}),
    "binary": Column(pa.binary(), "bytea", "BINARY, bytea", {"raw": b"\x00\xff", "array": b"\x01"}),
    "uuid": Column(None, "uuid", "uuid", {"uuid": UUID, "uuid text": UUID}),
    "date": Column(pa.date32(), "date", "DATE", {"day": dt.date(2024, 5, 6), "midnight": dt.date(2024, 5, 6)}),
    "moment": Column(
        pa.timestamp("us", tz="UTC"), "timestamptz", "TIMESTAMP, timestamptz", {n: v.replace(tzinfo=_UTC) for n, v in _MOMENTS.items()}
    ),
    "local": Column(pa.timestamp("us"), "timestamp", "TIMESTAMP_NTZ, timestamp", _MOMENTS),
    "seconds": Column(
        None,
        "timestamptz(0)",
        "timestamp(p), timestamptz(p)",
        {n: v.replace(tzinfo=_UTC) for n, v in _MOMENTS.items() if not v.microsecond},
    ),
    "time": Column(None, "time", "time", {"noon": dt.time(12, 0, 0, 1)}),
    "zoned": Column(None, "timetz", "timetz", {"noon": dt.time(12, 0, 0, 1, _UTC), "noon east": dt.time(12, tzinfo=EAST)}),
    "interval": Column(None, "interval", "interval", {"hours": dt.timedelta(hours=30, microseconds=1)}),
    "oid": Column(None, "oid", "oid", {"one": 1, "300": 300, "70000": 70_000, "np int": 5}),
    "array": Column(
        pa.list_(pa.float64()),
        "double precision[]",
        "ARRAY, arrays",
        {"[1, 2]": [1.0, 2.0], "(1, 2.5)": [1.0, 2.5], "[None]": [None], "[]": [], "np array": [1.0, 2.0]},
    ),
    "struct": Column(
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
        None,
        "STRUCT",
        {"a b": {"a": 1, "b": ["x", None]}, "a": {"a": 2, "b": None}},
    ),
    "map": Column(
        pa.map_(pa.string(), pa.int32()),
        None,
        "MAP",
        {"a": [("a", 2)], "z": [("z", 3)], "pairs": [("k", 1)], "[]": []},
    ),
    "json": Column(None, "jsonb", "json, jsonb", {name: value for name, value in _JSON.items() if name != "half"}),
}
"""By name of the column."""


def pairs(column: str) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it goes in) of each value."""
    for values in VALUES.values():
        for name, value in values.items():
            yield name, value, name in COLUMNS[column].stored or name in NULL


def goes_in(column: str, kind: str) -> str:
    """Whether values of a Python type go into a column: yes, no, or some of them."""
    taken = {name in COLUMNS[column].stored for name in VALUES[kind] if name not in NULL}
    return "some" if len(taken) == 2 else "yes" if taken == {True} else "no"


def markdown() -> str:
    """The table of the docs."""
    lines = ["| Column | Takes | Takes where nothing is lost |", "| --- | --- | --- |"]
    for name, column in COLUMNS.items():
        told = {answer: ", ".join(kind for kind in VALUES if goes_in(name, kind) == answer) or "-" for answer in ("yes", "some")}
        lines.append(f"| {column.shown} | {told['yes']} | {told['some']} |")
    return "\n".join(lines)
