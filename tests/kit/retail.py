"""Online Retail as a topic: 541,909 real order lines, one event each, and the consumer that tells the good ones from the bad.

Its key is the whole row, so a repeated order line is a duplicate. `python -m kit.retail FOLDER STORE` is the same stream as a
program of its own, to be killed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Collection
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from dedup import Consumer, decode
from dedup.core.store import Store

CONSUMER = SINK = "order_lines"
COLUMNS = ("InvoiceNo", "StockCode", "Description", "Quantity", "InvoiceDate", "UnitPrice", "CustomerID", "Country")
ROW = pa.schema([pa.field(name, pa.string()) for name in COLUMNS])
PARTITIONS, FILES = 4, 16
ENVELOPE_DDL = "source string, topic string, partition int, sequence_number bigint, body binary"

CHECKS = {
    "no description": "data.Description is null",
    "negative quantity": "cast(data.Quantity as int) < 0 and data.InvoiceNo not like 'C%'",
    "no order": "data.InvoiceNo like 'A%'",
    "negative price": "cast(data.UnitPrice as double) < 0",
}
"""Reason -> condition, in the order in which they are asked."""


def read(data: Path) -> list[pa.Table]:
    """One table of strings per day, in the order of the days; an empty field is null."""
    return list(read_named(data).values())


def read_named(data: Path, days: Collection[str] = ()) -> dict[str, pa.Table]:
    """Day (2011-01-28) -> its rows, in order; all days, or only these."""
    options = csv.ConvertOptions(column_types=ROW, strings_can_be_null=True, null_values=[""], quoted_strings_can_be_null=True)
    with tarfile.open(data / "online-retail-by-day.tar.xz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers() if member.name.endswith(".csv")}
        raw = {name: file.read() for name, file in files.items() if file is not None}
    chosen = [name for name in sorted(raw) if not days or Path(name).stem in days]
    return {Path(name).stem: csv.read_csv(io.BytesIO(raw[name]), convert_options=options) for name in chosen}


def expected(days: list[pa.Table]) -> pa.Table:
    """The distinct good rows, by pyarrow alone."""
    rows = pa.concat_tables(days).group_by(list(COLUMNS)).aggregate([])
    letter = pc.utf8_slice_codeunits(rows["InvoiceNo"], 0, 1)
    bad = [
        pc.is_null(rows["Description"]),
        pc.and_(pc.less(rows["Quantity"].cast(pa.int32()), 0), pc.not_equal(letter, "C")),
        pc.equal(letter, "A"),
        pc.less(rows["UnitPrice"].cast(pa.float64()), 0),
    ]
    return rows.filter(pc.invert(reduce(pc.or_, bad))).cast(ROW)


def deliver(days: list[pa.Table], landing: Path) -> None:
    """Write the topic as Parquet files, one second of modification time apart: day n is in partition n mod 4."""
    landing.mkdir(parents=True)
    following = [0] * PARTITIONS
    files: list[list[pa.Table]] = [[] for _ in range(FILES)]
    for day, rows in enumerate(days):
        partition = day % PARTITIONS
        first, following[partition] = following[partition], following[partition] + rows.num_rows
        files[day * FILES // len(days)].append(envelope(rows, partition, first))
    for number, parts in enumerate(files):
        path = landing / f"{number:03}.parquet"
        pq.write_table(pa.concat_tables(parts), path)
        os.utime(path, (1_700_000_000 + number,) * 2)


def envelope(rows: pa.Table, partition: int, first: int) -> pa.Table:
    columns = {
        "source": pa.repeat("uci", rows.num_rows),
        "topic": pa.repeat("online-retail", rows.num_rows),
        "partition": pa.repeat(pa.scalar(partition, pa.int32()), rows.num_rows),
        "sequence_number": pa.array(range(first, first + rows.num_rows), pa.int64()),
        "body": pa.array([json.dumps(row).encode() for row in rows.to_pylist()], pa.binary()),
    }
    return pa.table(columns)


def stream(spark: Any, landing: Path, checkpoint: Path, store: Store, sink: str = SINK) -> None:
    """Stream the landing folder to its end; continue where the Spark checkpoint stands."""
    consumer = Consumer(CONSUMER, store=store, idempotence_key=[f"data.{name}" for name in COLUMNS], decode=decode.json(ROW))

    @consumer.foreach_batch
    def load(lines: Any, tx: Any) -> None:
        for reason, condition in CHECKS.items():
            lines = tx.reject(lines, condition, reason)
        tx.write(lines.select("data.*"), sink)

    events = spark.readStream.schema(ENVELOPE_DDL).option("maxFilesPerTrigger", 2).parquet(str(landing))
    writer = events.writeStream.foreachBatch(consumer).option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def main(landing: Path, folder: Path) -> None:
    """The stream into Delta as a program of its own."""
    from dedup import DeltaStore
    from dedup.spark.session import local_session

    store = DeltaStore(str(folder / "dedup"), tables={SINK: str(folder / SINK)})
    stream(local_session("online retail"), landing, folder / "checkpoint", store)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
