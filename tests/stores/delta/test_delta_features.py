"""Sinks with table features under which delta-rs makes no commit: what dedup puts keeps what the features promise."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from checkpoint.errors import ConfigError, SinkMismatch
from dedup.delta import features, sinks
from dedup.delta.engine import DeltaRs
from dedup.delta.files import Add
from dedup.delta.storage import absolute
from kit import delta_features as made
from kit import delta_kit as kit
from kit.delta_kit import open_store, show

pytestmark = pytest.mark.delta

TOLD = '{"rowIdHighWaterMark":%d,"domainName":"delta.rowTracking"}'


@pytest.fixture
def sink(tmp_path: Path) -> str:
    """An empty sink with the features of many tables on Databricks, whose checkpoint is due with each fifth version."""
    uri = str(tmp_path / "orders")
    made.create(uri, kit.SINK)
    return uri


def test_each_batch_is_put_with_ids_and_a_time_of_its_own(tmp_path: Path, sink: str) -> None:
    """Over checkpoints and restarts: row ids without a gap, times that rise, nothing left to a Spark that is not there."""
    number = kit.epoch(open_store(tmp_path))
    store = open_store(tmp_path)
    for i in range(12):
        store = open_store(tmp_path) if i % 4 == 3 else store
        kit.process(store, number, kit.events([3 * i, 3 * i + 1, 3 * i + 2], 3 * i), i)
    assert show(tmp_path) == list(range(36))
    assert made.row_ids(sink) == [(3 * i, 3 * i + 2) for i in range(12)]
    times = [json.loads(Path(sink, made.entry_of(v)).read_text().splitlines()[0])["commitInfo"]["inCommitTimestamp"] for v in range(13)]
    assert times == sorted(set(times))
    assert {p.name[:20].lstrip("0") for p in Path(sink).glob("_delta_log/*.checkpoint*.parquet")} == {"5", "10"}
    assert open_store(tmp_path).problems(kit.NAME) == []


def test_whoever_commits_between_is_gone_on_from(tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign commit takes the version that we have prepared, or comes before the next batch: ids and times go on after it."""
    from dedup.delta.snapshot import Snapshot

    real, later = Snapshot._entry, made.LONG_AGO * 2

    def overtaken(self: Snapshot, *args: object) -> bytes:
        prepared = real(self, *args)  # type: ignore[arg-type]
        if self.table_uri.rstrip("/").endswith("orders") and made.version_of(sink) == 0:
            told = {"domain": "delta.rowTracking", "configuration": TOLD % 99, "removed": False}
            made.write_entry(sink, 1, [{"commitInfo": {"inCommitTimestamp": later, "timestamp": 1}}, {"domainMetadata": told}])
        return prepared

    monkeypatch.setattr(Snapshot, "_entry", overtaken)
    store = open_store(tmp_path)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2]))
    assert show(tmp_path) == [1, 2] and made.row_ids(sink) == [(100, 101)]
    (info, *_) = Path(sink, made.entry_of(2)).read_text().splitlines()
    assert json.loads(info)["commitInfo"]["inCommitTimestamp"] == later + 1
    told = {"domain": "delta.rowTracking", "configuration": TOLD % 199, "removed": False}
    made.write_entry(sink, 3, [{"commitInfo": {"inCommitTimestamp": later + 2, "timestamp": 1}}, {"domainMetadata": told}])
    kit.process(store, number, kit.events([3], 2), 1)
    assert made.row_ids(sink) == [(100, 101), (200, 200)]


def test_a_decision_whose_process_died_is_published_with_ids_after_the_others(tmp_path: Path, sink: str) -> None:
    """Between the decision and its publication others wrote: nothing that was prepared counts."""
    store = open_store(tmp_path)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]))
    told = {"domain": "delta.rowTracking", "configuration": TOLD % 9, "removed": False}
    made.write_entry(sink, 1, [{"commitInfo": {"inCommitTimestamp": made.LONG_AGO + 1, "timestamp": 1}}, {"domainMetadata": told}])
    assert open_store(tmp_path).publish(kit.NAME) == 1
    assert made.row_ids(sink) == [(10, 11)] and show(tmp_path) == [1, 2]


def _checkpoint(folder: Path, name: str, highest: int | None) -> None:
    domain = pa.struct([("domain", pa.string()), ("configuration", pa.string()), ("removed", pa.bool_())])
    rows = [None, {"domain": "delta.clustering", "configuration": "{}", "removed": False}]
    rows += [] if highest is None else [{"domain": "delta.rowTracking", "configuration": TOLD % highest, "removed": False}]
    if name.endswith(".json"):
        (folder / name).write_text("\n".join(json.dumps({"domainMetadata": row}).replace(" ", "") for row in rows if row))
    else:
        pq.write_table(pa.table({"domainMetadata": pa.array(rows, domain)}), folder / name)


@pytest.mark.parametrize(
    ("checkpoints", "entries", "expected"),
    [
        ({}, {}, -1),
        ({}, {0: None, 3: 7, 4: None}, 7),
        ({"3.checkpoint.parquet": 7}, {}, 7),
        ({"4.checkpoint.parquet": 7}, {4: None}, 7),
        ({"3.checkpoint.parquet": 7}, {4: 8}, 8),
        ({"3.checkpoint.8e0c.json": 7, "2.checkpoint.parquet": 5}, {3: None, 4: None}, 7),
        ({"3.checkpoint.8e0c.parquet": 7}, {2: 5, 4: None}, 7),
        ({"3.checkpoint.0000000001.0000000002.parquet": None, "3.checkpoint.0000000002.0000000002.parquet": 7}, {4: None}, 7),
        ({"3.checkpoint.0000000001.0000000002.parquet": None}, {2: 5, 3: 6, 4: None}, 6),
        ({"5.checkpoint.parquet": 9}, {2: 5, 5: 9}, 5),
    ],
)
def test_the_highest_row_id_is_found_wherever_the_log_tells_it(
    tmp_path: Path, checkpoints: dict[str, int | None], entries: dict[int, int | None], expected: int
) -> None:
    """As of version 4: in entries, in checkpoints of each kind, where entries are gone, and never from a later version."""
    log = tmp_path / "_delta_log"
    log.mkdir()
    for name, highest in checkpoints.items():
        version, _, rest = name.partition(".")
        _checkpoint(log, f"{int(version):020}.{rest}", highest)
    for version, told in entries.items():
        domain = [] if told is None else [{"domain": "delta.rowTracking", "configuration": TOLD % told, "removed": False}]
        made.write_entry(str(tmp_path), version, [{"commitInfo": {}}, *({"domainMetadata": d} for d in domain)])
    assert features.standing(str(tmp_path), None, 4, rows=True, time=False) == (4, expected, None)


def test_no_file_of_a_commit_shares_a_row_id() -> None:
    """Files of many sizes in one commit: their ids follow each other, and the table says the last one."""
    owed = features.Owed(7, 41, 1_000)
    adds = [Add(f"part-{n}.parquet", 1, {}, 0, "{}", rows) for n, rows in enumerate((3, 1, 5))]
    assert [one["baseRowId"] for one in features.first_ids(adds, owed)] == [42, 45, 46]
    after = owed.after(adds, 900)
    assert after == (8, 50, 1_001) and '"rowIdHighWaterMark":50' in json.dumps(features.highest_told(after)).replace("\\", "")
    assert features.first_ids(adds, features.Owed(7, None, None)) == [{}, {}, {}]


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_written_loses_nothing(
    tmp_path: Path, sink: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit is done: it is said, and the next one may be written."""
    monkeypatch.setattr(DeltaTable, "create_checkpoint", lambda self: (_ for _ in ()).throw(OSError("disk full")))
    store = open_store(tmp_path)
    number = kit.epoch(store)
    for i in range(6):
        kit.process(store, number, kit.events([i], i), i)
    assert show(tmp_path) == list(range(6)) and "no checkpoint of version 5 could be written: disk full" in caplog.text


def test_a_table_that_its_catalog_manages_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A commit by the path could vanish there: nothing is written, and the message names the way out."""
    made.create(str(tmp_path / "orders"), kit.SINK, ("inCommitTimestamp",), readers=["catalogManaged"])
    before = os.listdir(tmp_path / "orders")
    store = open_store(tmp_path)
    with pytest.raises(SinkMismatch, match=r"managed by its catalog .*external table"):
        kit.process(store, kit.epoch(store), kit.events([1]))
    assert os.listdir(tmp_path / "orders") == before


@pytest.mark.full
def test_a_table_that_a_catalog_takes_over_keeps_the_decision(tmp_path: Path, sink: str) -> None:
    """Between the decision and its publication: the consumer stops and says why, and goes on once the table is back."""
    store = open_store(tmp_path)
    kit.die_before_publishing(store, kit.epoch(store), kit.events([1]))
    taken = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": ["catalogManaged"], "writerFeatures": ["catalogManaged"]}
    made.write_entry(sink, 1, [{"commitInfo": {"timestamp": 1}}, {"protocol": taken}])
    with pytest.raises(SinkMismatch, match="orders is managed by its catalog"):
        open_store(tmp_path).publish(kit.NAME)
    Path(sink, made.entry_of(1)).unlink()
    assert open_store(tmp_path).publish(kit.NAME) == 1 and show(tmp_path) == [1]


def test_a_time_is_put_however_the_property_is_spelled(tmp_path: Path) -> None:
    """Delta keeps TRUE as it was given and obeys it: our commits have their times, and readers of the log find no gap."""
    uri = str(tmp_path / "orders")
    made.create(uri, kit.SINK, ("inCommitTimestamp",), {"delta.enableInCommitTimestamps": "TRUE"})
    store = open_store(tmp_path)
    kit.process(store, kit.epoch(store), kit.events([1]))
    (info, *_) = Path(uri, made.entry_of(1)).read_text().splitlines()
    assert json.loads(info)["commitInfo"]["inCommitTimestamp"] > made.LONG_AGO


@pytest.mark.parametrize(
    ("value", "on"), [("TRUE", True), ("True", True), ("true", True), ("FALSE", False), ("false", False), (None, False)]
)
def test_a_property_counts_however_its_true_is_spelled(tmp_path: Path, value: str | None, on: bool) -> None:
    """Merges are left to Spark, or refused, under each property that Delta obeys; where it is off nothing is."""
    for name in ("delta.enableChangeDataFeed", "delta.enableDeletionVectors", "delta.appendOnly", "delta.enableRowTracking"):
        uri = str(tmp_path / name)
        made.create(uri, kit.SINK, (), {} if value is None else {name: value})
        sink = sinks.Sinks(DeltaRs(None)).open("orders", uri)
        if name == "delta.appendOnly":
            with pytest.raises(SinkMismatch, match="append-only") if on else contextlib.nullcontext():
                sinks.refuse_append_only(sink)
        else:
            assert sinks.needs_spark(sink) is on, name


def test_deletion_vectors_of_a_ledger_are_refused_however_they_are_switched_on(tmp_path: Path) -> None:
    """Rows that a vector hides would count as reservations: the store does not open such a ledger."""
    kit.epoch(open_store(tmp_path))
    uri = absolute(kit.ledger(tmp_path).table_uri)
    last = made.version_of(uri)
    entry = Path(uri, made.entry_of(0)).read_text().splitlines()
    (told,) = [json.loads(line)["metaData"] for line in entry if line.startswith('{"metaData"')]
    told["configuration"]["delta.enableDeletionVectors"] = "TRUE"
    made.write_entry(uri, last + 1, [{"commitInfo": {"timestamp": 1}}, {"metaData": told}])
    with pytest.raises(ConfigError, match="Deletion vectors are on"):
        open_store(tmp_path).head(kit.NAME)
