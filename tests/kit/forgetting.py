"""Whether something can still be read from the tables of a place, in any form: by the tests of forgetting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from dedup.delta.storage import filesystem
from kit.places import DeltaPlace, Place, PostgresPlace

_BOUNDS = re.compile(r'"stats":"(?:[^"\\]|\\.)*"')
"""In the ledger's headers: the smallest and largest values of files of sinks, which are not dedup's to erase."""


def places_with(place: Place, secret: str) -> list[str]:
    """Tables of the state of which a row says it, as text or as bytes."""
    if isinstance(place, PostgresPlace):
        names = [name for (name,) in place.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'dedup'")]
        texts = {name: str(place.execute(f'SELECT t::text FROM dedup."{name}" t')) for name in names}
        return [name for name, text in texts.items() if secret in text or secret.encode().hex() in text]
    assert isinstance(place, DeltaPlace)
    return [uri for uri in _tables(f"{place.where}/state") if _says(DeltaTable(uri).to_pyarrow_table(), secret)]


def _tables(root: str) -> list[str]:
    """The URIs of all Delta tables below."""
    found = filesystem(root, None).get_file_info(FileSelector("", recursive=True))
    return sorted({f"{root}/{info.path.partition('/_delta_log/')[0]}" for info in found if "/_delta_log/" in info.path})


def files_with(folder: Path, secret: str) -> list[str]:
    """Files of Delta tables in a folder that hold it, whether a table lists them or not, and their logs, but for the ledger's.

    The ledger's says what its files are, and sinks' files are: their bounds are not dedup's to erase.
    """
    found = [path for path in sorted(folder.rglob("*.parquet")) if not _is_ledgers_log(path) and _says(pq.read_table(path), secret)]
    entries = [path for path in sorted(folder.rglob("_delta_log/*.json")) if not _is_ledgers_log(path)]
    return [path.name for path in (*found, *(path for path in entries if secret in path.read_text()))]


def _is_ledgers_log(path: Path) -> bool:
    return "_delta_log" in path.parts and "ledger" in path.parts


def _says(rows: pa.Table, secret: str) -> bool:
    return any(_in(value, secret) for row in rows.to_pylist() for value in row.values())


def _in(value: Any, secret: str) -> bool:
    if isinstance(value, bytes):
        return secret.encode() in value
    if isinstance(value, dict):
        return any(_in(one, secret) for one in value.values())
    if isinstance(value, list):
        return any(_in(one, secret) for one in value)
    return isinstance(value, str) and secret in _BOUNDS.sub("", value)
