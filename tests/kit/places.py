"""The kinds of place a consumer can live in, as the contract suite sees them: make a store, make a sink, read it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.store import Store
from kit.cheap import INTERPRETED

SINK = pa.schema([pa.field("id", pa.string(), nullable=False), pa.field("amount", pa.int64())])
"""The sink of most tests: what the handler makes of one order."""


POSITIONS = pa.schema([ENVELOPE.field(n) for n in POSITION])
"""A sink that keeps where each row came from."""

SHORT_LIVED = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For a JVM that is killed before it would have gained from compiling better."""


def text_schema(columns: Sequence[str]) -> pa.Schema:
    """Text columns of these names."""
    return pa.schema([pa.field(c, pa.string()) for c in columns])


class Place(Protocol):
    """Where sinks and state are; a new `store()` is what a new process would open."""

    url: str
    kind: str

    @property
    def where(self) -> str:
        """What `place_of` takes beside the kind."""

    def store(self, **options: Any) -> Store: ...
    def create_sink(self, name: str = "orders") -> None: ...
    def create_position_sink(self) -> None: ...
    def create_merge_sink(self, name: str) -> None: ...
    def create_text_sink(self, name: str, columns: Sequence[str]) -> None: ...
    def read_text(self, name: str, columns: Sequence[str]) -> pa.Table: ...
    def drop_sink(self, name: str = "orders") -> None: ...
    def accept_sink(self, name: str = "orders") -> None: ...
    def read(self, name: str = "orders") -> list[dict[str, Any]]: ...


PACKED = bool(os.environ.get("DEDUP_TEST_PACKED"))
"""Whether a store on PostgreSQL finds the reservations before it packed, and loads their filters for each look-up."""


_usual: dict[str, int] = {}


def usual_keys() -> dict[str, int]:
    """How large files of keys are in use: the first store of a place makes them small for the whole process."""
    from dedup.delta import keys

    if not _usual:
        _usual.update({name: getattr(keys, name) for name in ("FLUSH_ROWS", "RUN_ROWS", "SLICE_ROWS")})
    return _usual


class PostgresPlace:
    """A fresh database."""

    kind: str = "postgres"

    def __init__(self, dsn: str) -> None:
        self.url = self.where = dsn

    def store(self, **options: Any) -> Store:
        """A new store object. What was reserved before it is packed, if that is wanted."""
        from dedup.postgres import PostgresStore, key_filter

        if PACKED:
            key_filter.FEW = 0
        if PACKED and self.execute("SELECT to_regclass('dedup.reservation_page') IS NOT NULL") == [(True,)]:
            self.execute("SELECT dedup.rotate_reservations(), dedup.close_reservations()")
            with closing(PostgresStore(self.url)) as packer:
                packer.pack_reservations(patience=0)
        return PostgresStore(self.url, **options)

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """One statement, as the owner."""
        from kit.pg_run import run

        return run(self.url, sql)

    def create_sink(self, name: str = "orders") -> None:
        """A table with the columns of SINK."""
        self.execute(f'CREATE TABLE "{name}" (id text NOT NULL, amount bigint)')

    def create_merge_sink(self, name: str) -> None:
        """A table with the columns of SINK and one row per id."""
        self.execute(f'CREATE TABLE "{name}" (id text PRIMARY KEY, amount bigint)')

    def create_text_sink(self, name: str, columns: Sequence[str]) -> None:
        """A table of text columns, the first of which names a row."""
        first, *others = columns
        self.execute(f'CREATE TABLE "{name}" ("{first}" text PRIMARY KEY, ' + ", ".join(f'"{c}" text' for c in others) + ")")

    def read_text(self, name: str, columns: Sequence[str]) -> pa.Table:
        """All rows of such a table, in any order."""
        rows = self.execute("SELECT " + ", ".join(f'"{c}"' for c in columns) + f' FROM "{name}"')
        return pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema=text_schema(columns))

    def create_position_sink(self) -> None:
        """A table `positions` with the columns of POSITIONS."""
        self.execute("CREATE TABLE positions (source text, topic text, partition int, sequence_number bigint, part bigint)")

    def accept_sink(self, name: str = "orders") -> None:
        """What `dedup sink accept` does."""
        self.store().accept_sink("shop", f'"{name}"', by="test", reason="re-created")  # type: ignore[attr-defined]

    def drop_sink(self, name: str = "orders") -> None:
        """Gone."""
        self.execute(f'DROP TABLE "{name}"')

    def read(self, name: str = "orders") -> list[dict[str, Any]]:
        """All rows, sorted."""
        return [{"id": i, "amount": a} for i, a in self.execute(f'SELECT id, amount FROM "{name}" ORDER BY id, amount')]


FEW_KEYS = (4, 24, 5)
"""Keys in memory, in a file and in a slice of one: a few batches write files of keys, and join them, as many millions of events do."""


class DeltaPlace:
    """A folder, of this machine or of object storage."""

    kind: str = "delta"
    engine: str = "delta-rs"
    beside: tuple[str, ...] = ("heartbeat",)

    def __init__(self, where: Path | str) -> None:
        self.where = str(where)
        self.url = f"{self.where}/state"

    @property
    def folder(self) -> Path:
        """The folder, where it is one of this machine."""
        assert "://" not in self.where, f"{self.where} is no folder of this machine"
        return Path(self.where)

    def part(self, name: str) -> Self:
        """A place below it, with the sink `orders`."""
        made = type(self)(f"{self.where}/{name}")
        made.create_sink()
        return made

    def path(self, name: str) -> str:
        """Where a sink lies."""
        return f"{self.where}/sinks/{name}"

    def files(self) -> frozenset[tuple[str, bytes]]:
        """Every file with what is in it, without what threads write `beside` the steps of a batch, at any time."""
        from dedup.delta.storage import read

        steady = [path for path in _listed(self.where) if not any(f"/{folder}/" in path for folder in self.beside)]
        found = [(path, read(self.where, None, path)) for path in steady]
        return frozenset((path, bytes(content)) for path, content in found if content is not None)

    def store(self, **options: Any) -> Store:
        """A new store object that knows sinks by their plain names."""
        from dedup.delta import DeltaStore, keys

        usual_keys()
        keys.FLUSH_ROWS, keys.RUN_ROWS, keys.SLICE_ROWS = FEW_KEYS
        names = ("orders", "audit", "late", "missing", "positions", "balances", "latest", "order_lines")
        return DeltaStore(f"{self.where}/state", tables={n: self.path(n) for n in names}, **{"engine": self.engine, **options})

    def create_sink(self, name: str = "orders") -> None:
        """A table with the columns of SINK; with DEDUP_TEST_FEATURES=1 one of the features under which delta-rs makes no commit."""
        from kit import delta_features

        if os.environ.get("DEDUP_TEST_FEATURES") == "1":
            delta_features.create(self.path(name), SINK)
        else:
            self.create_merge_sink(name)

    def create_merge_sink(self, name: str) -> None:
        """A plain table with the columns of SINK: without Spark nobody merges into another one."""
        from deltalake import DeltaTable

        DeltaTable.create(self.path(name), schema=SINK)

    def create_text_sink(self, name: str, columns: Sequence[str]) -> None:
        """A table of text columns."""
        from deltalake import DeltaTable

        DeltaTable.create(self.path(name), schema=text_schema(columns))

    def read_text(self, name: str, columns: Sequence[str]) -> pa.Table:
        """All rows of such a table, in any order."""
        from deltalake import DeltaTable

        return DeltaTable(self.path(name)).to_pyarrow_table().select(list(columns)).cast(text_schema(columns))

    def create_position_sink(self) -> None:
        """A table `positions` with the columns of POSITIONS."""
        from deltalake import DeltaTable

        DeltaTable.create(self.path("positions"), schema=POSITIONS)

    def accept_sink(self, name: str = "orders") -> None:
        """What `dedup sink accept --lost` does."""
        self.store().accept_sink("shop", name, lost=True, by="test", reason="re-created")  # type: ignore[attr-defined]

    def drop_sink(self, name: str = "orders") -> None:
        """Gone."""
        import shutil

        shutil.rmtree(self.path(name))

    def read(self, name: str = "orders") -> list[dict[str, Any]]:
        """All rows, sorted."""
        from deltalake import DeltaTable

        from kit import delta_features

        if os.environ.get("DEDUP_TEST_FEATURES") == "1":
            delta_features.require_ids_once(self.path(name))
        rows = DeltaTable(self.path(name)).to_pyarrow_table().select(SINK.names).to_pylist()
        return sorted(rows, key=lambda r: (r["id"], r["amount"] if r["amount"] is not None else -1))


class SparkPlace(DeltaPlace):
    """A folder, of whose tables the store gets to see what Spark shows."""

    kind, engine = "delta-spark", "spark"

    def __init__(self, where: Path | str) -> None:
        super().__init__(where)
        self.url = f"spark:{self.url}"


class ObjectPlace(DeltaPlace):
    """A prefix of a bucket. The environment says who asks (kit.object_storage), so that other processes reach it as well."""

    beside = ("heartbeat", "keys")  # copies of the files of keys of this machine

    def drop_sink(self, name: str = "orders") -> None:
        """Gone."""
        _clear(self.path(name))

    def clear(self) -> None:
        """All of it is gone."""
        _clear(self.where)


def _clear(uri: str) -> None:
    from dedup.delta.storage import remove

    remove(uri, None, _listed(uri))


def _listed(uri: str) -> list[str]:
    """The paths of all files below it."""
    from pyarrow.fs import FileSelector, FileType

    from dedup.delta.storage import filesystem

    found = filesystem(uri, None).get_file_info(FileSelector("", recursive=True))
    return [info.path for info in found if info.type == FileType.File]


class AzPlace(ObjectPlace):
    """On Azure Blob storage."""

    kind = "delta-az"


class S3Place(ObjectPlace):
    """On S3."""

    kind = "delta-s3"


ON_DELTA = {one.kind: one for one in (DeltaPlace, AzPlace, S3Place)}

SLOW = frozenset({SparkPlace.kind, AzPlace.kind, S3Place.kind})
"""Places on which a process, a transaction and a look at the tables take seconds."""


def place_of(kind: str, where: str) -> Place:
    """The place of another process; one that needs Spark starts it."""
    if kind == "delta-spark":
        from dedup.spark.session import local_session

        local_session("dedup tests, another process", cores=1, **INTERPRETED, **SHORT_LIVED)
        return SparkPlace(where)
    return ON_DELTA[kind](where) if kind in ON_DELTA else PostgresPlace(where)


def other_place(place: Place, tmp_path: Path) -> Place:
    """A second place like this one."""
    if isinstance(place, DeltaPlace):
        other: Place = type(place)(tmp_path / "other")
        other.create_sink()
        return other
    assert isinstance(place, PostgresPlace)
    name = f"other_{uuid.uuid4().hex}"
    place.execute(f'CREATE DATABASE "{name}"')
    other = PostgresPlace(_renamed(place.url, name))
    other.create_sink()
    return other


def _renamed(dsn: str, database: str) -> str:
    from psycopg.conninfo import make_conninfo

    return make_conninfo(dsn, dbname=database)


def wait_for_rollback(place: Place) -> None:
    """Whoever died may hold letters or lanes a moment longer: a busy server notices late, and others pass by what is in hand."""
    open_ones = "select 1 from pg_stat_activity where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()"
    until = time.monotonic() + 60
    while isinstance(place, PostgresPlace) and place.execute(open_ones):
        assert time.monotonic() < until, "a transaction of a process that is dead is still open"
        time.sleep(0.02)
