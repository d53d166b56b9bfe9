"""Sinks with columns of types of the store, made and read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from kit.places import DeltaPlace, Place, PostgresPlace


def create(place: Place, name: str, columns: dict[str, Any]) -> None:
    """A sink with these columns, of types of this store: on PostgreSQL as it writes them, on Delta Arrow types or whole fields."""
    if isinstance(place, PostgresPlace):
        place.execute(f'create table "{name}" (' + ", ".join(f'"{column}" {kind}' for column, kind in columns.items()) + ")")
    elif isinstance(place, DeltaPlace):
        from deltalake import DeltaTable

        fields = [kind if isinstance(kind, pa.Field) else pa.field(column, kind) for column, kind in columns.items()]
        DeltaTable.create(place.path(name), schema=pa.schema(fields))


def read(place: Place, name: str, columns: list[str]) -> list[tuple[Any, ...]]:
    """Its rows."""
    if isinstance(place, PostgresPlace):
        return place.execute("select " + ", ".join(f'"{column}"' for column in columns) + f' from "{name}"')
    from deltalake import DeltaTable

    assert isinstance(place, DeltaPlace)
    return [tuple(row.values()) for row in DeltaTable(place.path(name)).to_pyarrow_table().select(columns).to_pylist()]
