"""State as a version of the library leaves it, kept so that later versions prove that they go on with it.

`python -m kit.kept_state` writes it below tests/data for the version of this checkout: once for a release, and never again for that one.
A folder of Delta knows its sinks by absolute paths, so it is made and unpacked at one fixed place.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from dedup import Consumer, DeadLetters, Selection, __version__, decode, reprocess
from kit import pg_server
from kit.grouped import grouped
from kit.orders import ORDER, batch, event, flatten, orders
from kit.paths import ROOT
from kit.people import ANN
from kit.places import DeltaPlace, Place, PostgresPlace

DATA = ROOT / "tests" / "data"

FOLDER = Path("/tmp/dedup-kept-state")


def handle(rows: pa.Table, tx: Any) -> None:
    """Writes each order to `orders`, keeps the latest of each in `latest`, publishes its id; rejects negative amounts."""
    good = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative amount")
    told = flatten(good)
    tx.write(told, "orders")
    tx.merge(told, "latest", keys="id", newer_by="amount")
    tx.publish(pa.table({"body": told["id"], "id": told["id"]}), "shipments", key="id")


def consumer(place: Place, query: str, handler: Callable[[pa.Table, Any], None] = handle) -> Consumer:
    """With keys, in order for each of them, and without waiting for another instance."""
    settings = {
        "idempotence_key": "data.id",
        "decode": decode.json(ORDER),
        "sequence_key": "data.id",
        "query": query,
        "takeover_after": 0.0,
    }
    made = Consumer("shop", place.store(), **grouped(**settings))
    made.foreach_batch(handler)
    return made


def story(place: Place) -> None:
    """Two processes: duplicates, redeliveries, letters of two kinds, one behind another, one discarded, one reprocessed in vain."""
    with mock.patch("socket.gethostname", return_value="host"):
        _story(place)


def _story(place: Place) -> None:
    place.create_sink()
    place.create_merge_sink("latest")
    first = consumer(place, "q1")
    odd = [event(5, "p0-2", 2), event(6, "o6", -1), event(7, body=b"{"), event(8, "o6", 8)]
    first(batch(*orders(range(5)), *odd), 0)
    second = consumer(place, "q2")
    second(batch(*odd[1:], *orders(range(4), partition=1), event(9, "o9", -9)), 0)
    reprocess(Selection(kind="REJECTED"), second)
    DeadLetters(place.store()).discard(Selection(kind="UNDECODABLE"), **ANN)


def write() -> None:
    """Both stores, for this version."""
    folder = DATA / f"state-{__version__}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with the_folder():
        story(DeltaPlace(FOLDER))
        shutil.make_archive(str(folder / "delta"), "gztar", FOLDER)
    with pg_server.running_server() as server:
        story(PostgresPlace(server.dsn))
        programs = pg_server.binaries()
        assert programs is not None
        line = [programs / "pg_dump", "--inserts", "--no-owner", "--no-privileges", "-d", server.dsn]
        told = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    kept = "".join(one for one in told.splitlines(keepends=True) if not one.startswith(("\\", "--", "\n")))  # no commands of psql
    (folder / "postgres.sql").write_text(kept)


@contextmanager
def the_folder(archive: Path | None = None) -> Iterator[DeltaPlace]:
    """FOLDER for one process at a time, empty or with what is in the archive; removed afterwards."""
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        if archive is not None:
            with tarfile.open(archive) as packed:
                packed.extractall(FOLDER, filter="data")
        yield DeltaPlace(FOLDER)
        shutil.rmtree(FOLDER)


def load(dsn: str, file: Path) -> PostgresPlace:
    """A database as it was dumped."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(file.read_text().encode())
    return PostgresPlace(dsn)


if __name__ == "__main__":
    write()
