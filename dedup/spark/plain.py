"""Which inputs need nothing of Spark but their rows: pyarrow then decodes and computes keys on the driver, several times as fast.

What only Spark can do - SQL expressions, functions of columns, types to convert - and Avro without a registry is prepared by
dedup/spark/prepare.py.
Called by dedup/spark/feed.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dedup import keys
from dedup.decode import Decoder
from dedup.envelope import ENVELOPE, Constant, Layout, Named, Origin, Prepare, layout
from dedup.spark.prepare import identity, prepare
from dedup.spark.selects import kept

_worked_out: dict[Hashable, Plain | None] = {}


@dataclass(frozen=True)
class Plain:
    """What to read of an input, and what its prepared rows look like."""

    columns: tuple[str, ...]
    schema: StructType


def plain(df: DataFrame, spec: Prepare) -> Plain | None:
    """How to read the input where pyarrow can prepare it; None where Spark has to.

    Raises:
        ConfigError: as `prepare.prepare`.
    """
    ident = identity(df, df.schema, spec)
    return kept(_worked_out, ident, lambda: _work_out(df, spec))


def _work_out(df: DataFrame, spec: Prepare) -> Plain | None:
    schema = prepare(df, spec).schema  # also finds what is wrong with the input
    if not _by_arrow(spec):
        return None
    found = layout(df.schema.names, spec)
    try:
        given = {f.name: f.type for f in to_arrow_schema(df.schema, timezone="UTC")}
        after = {f.name: f.type for f in to_arrow_schema(schema, timezone="UTC")}
    except Exception:  # noqa: BLE001 - whatever Arrow has no type for
        return None
    origins = all(fits(name, origin, given) for name, origin in found.envelope.items())
    named = {*spec.keys.columns, *spec.keys.payload, *spec.keys.sequence}
    if not origins or not all(_resolves(name, after) for name in named):
        return None
    return Plain(_read(found), schema)


def _by_arrow(spec: Prepare) -> bool:
    """Whether bodies are decoded by pyarrow at least as quickly: JSON by columns, and what Spark would ask pyarrow for."""
    decoder = spec.decoder
    return decoder is None or (isinstance(decoder, Decoder) and (decoder.format == "json" or decoder.registry is not None))


def fits(name: str, origin: Origin, given: Mapping[str, pa.DataType]) -> bool:
    """Whether pyarrow makes of this origin, in an input with these types, the envelope column that Spark makes of it."""
    wanted = ENVELOPE.field(name).type
    if not isinstance(origin, Named):
        return isinstance(origin, Constant) and _holds(wanted, origin.value)
    kind = given[origin.column]
    text = pa.types.is_binary(wanted) and pa.types.is_string(kind)
    listed = pa.types.is_list(kind) and [f.name for f in kind.value_type] == ["key", "value"]
    pairs = name == "properties" and (pa.types.is_map(kind) or listed)
    return kind == wanted or text or pairs or (name == "offset" and pa.types.is_integer(kind))


def _holds(kind: pa.DataType, value: str | int | None) -> bool:
    """Whether pyarrow takes the value as it is: Spark casts."""
    try:
        pa.scalar(value, kind)
    except (pa.ArrowInvalid, TypeError):
        return False
    return True


def _resolves(name: str, columns: Mapping[str, pa.DataType]) -> bool:
    """Whether the name is a column or a field of one, spelled exactly so."""
    if name in columns or name == keys.MESSAGE_ID:
        return True
    first, *path = name.split(".")
    kind = columns.get(first)
    for step in path:
        if kind is None or not pa.types.is_struct(kind) or kind.get_field_index(step) < 0:
            return False
        kind = kind.field(step).type
    return kind is not None


def _read(found: Layout) -> tuple[str, ...]:
    named = [origin.column for origin in found.envelope.values() if isinstance(origin, Named)]
    said = [found.log_time] if isinstance(found.log_time, str) else []
    return tuple(dict.fromkeys([*named, *said, *found.extras]))
