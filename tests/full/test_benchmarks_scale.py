"""`python -m benchmarks.scale`: its measures at tiny sizes, and its simulation beside the real thing. Times do not matter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kit.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.mark.objects
def test_requests_of_batches_and_of_a_start_are_counted(tmp_path: Path) -> None:
    """A batch writes seven objects, a start reads more than a batch, and only a start without files of keys reads what was compacted."""
    from benchmarks import scale_delta

    found = scale_delta.requests(tmp_path, scale_delta.Amounts(partitions=(3,), batches=4, events=40, reserved=40 * 101))
    assert {name: unit for name, (_, unit) in found.items()} == {
        **{f"delta/batch_{kind}s_3p": "requests" for kind in ("write", "read", "delete")},
        **{f"delta/restart_{kind}s_3p": "requests" for kind in ("write", "read")},
        "delta/compacted_reads_3p": "requests of a file",
    }
    value = {name: told for name, (told, _) in found.items()}
    assert value["delta/batch_writes_3p"] == pytest.approx(7, abs=1) and value["delta/batch_deletes_3p"] == 1
    assert value["delta/restart_reads_3p"] > value["delta/batch_reads_3p"] >= 5 and value["delta/compacted_reads_3p"] >= 1


def test_bytes_of_a_batch_on_delta_are_told_apart(tmp_path: Path) -> None:
    """Rows of the sink, keys and records: a batch has a file of each of the first two, and the log of each table has one commit more."""
    from benchmarks import scale_delta

    found = scale_delta.size(tmp_path, scale_delta.Amounts(partitions=(1, 3), large=2, events=2_000))
    value = {name: told for name, (told, _) in found.items()}
    assert value["delta/batch_files_1p"] == value["delta/batch_files_3p"] == 5
    assert 24 < value["delta/key_bytes_1p"] < 40 and value["delta/sink_bytes_3p"] > 80 and value["delta/record_bytes_1p"] > 1_000


def test_memory_of_a_start_on_delta_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with files, one that reads the newest keys, and one that reads all of them: each knows all keys."""
    from benchmarks import scale_delta

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(scale_delta, "FLUSH_ROWS", 60_000)
    amounts = scale_delta.Amounts(starts=1, ledger=60_000, reserved=60_000)
    found = scale_delta.start(tmp_path / "start", amounts) | scale_delta.ledger(tmp_path / "ledger", amounts)
    assert set(found) == {f"delta/{name}_mb" for name in ("process", "newest", "ledger_start", "ledger_start_used")}
    assert 50 < found["delta/process_mb"][0] < 1_000
    assert 0.0001 < scale_delta.filtered(amounts)["delta/filter_lets_through"][0] < 0.003


def test_calls_and_bytes_on_postgres_are_measured(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition more is a record more; the log and the index are those of reservations that are there."""
    from benchmarks import scale_postgres
    from benchmarks.scale_delta import Amounts

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    amounts = Amounts(partitions=(1, 3), batches=2, events=200, reserved=60_000, starts=1, large_index=20_000)
    found = scale_postgres.calls(postgres, amounts) | scale_postgres.log(postgres, amounts) | scale_postgres.process(postgres, amounts)
    large = scale_postgres.log_of_large_index(postgres, amounts)
    assert large["postgres/large_index_keys"][0] == 20_800 and large["postgres/large_index_wal_bytes"][0] > 10_000
    value = {name: told for name, (told, _) in found.items()}
    assert (value["postgres/record_rows_1p"], value["postgres/record_rows_3p"]) == (1, 3)
    assert value["postgres/calls_3p"] > value["postgres/calls_1p"] > 10 and value["postgres/restart_calls_1p"] > 0
    assert value["postgres/wal_bytes"] > 100 and 100 < value["postgres/keys_of_index_page"] < 400 and value["postgres/process_mb"] > 50


def test_the_simulated_files_are_those_of_real_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits a thousand times smaller an index of real keys has exactly the files that the simulation says, after each amount."""
    from benchmarks import scale_keys
    from benchmarks.reserved import keys
    from dedup.delta import keys as delta_keys
    from dedup.delta.key_files import KeyFolder

    for name, rows in (("SLICE_ROWS", 1_000), ("FLUSH_ROWS", 1_000), ("RUN_ROWS", 1 << 14)):
        monkeypatch.setattr(delta_keys, name, rows)
    index = delta_keys.KeyIndex(KeyFolder(tmp_path))
    for done in range(0, 60_000, 50):
        some = keys(50, done)
        index.add(some["key"], some["payload_hash"].to_numpy(), 1)
        index.keep("ledger", 0, done, "attempt")
        if done % 5_000 == 4_950:
            found = scale_keys.reserved(done + 50, 50)
            assert found.sizes == tuple(sorted((len(run) for run in index._stored), reverse=True))
            assert found.rest == sum(map(len, index._tail))
    assert len(found.sizes) > 5 and found.sizes[0] > 10_000


def test_measured_constants_take_the_place_of_older_ones(tmp_path: Path) -> None:
    """A part that is measured again replaces its own lines, each with its benchmark and day; the others stay."""
    from benchmarks import scale
    from benchmarks.scale_model import Constant

    file, old = tmp_path / "scale.json", [Constant(name, 1.0, "x", "scale/old", "2026-01-01") for name in ("b", "a")]
    scale.keep(old, file)
    scale.keep([Constant("b", 2.0, "x", "scale/new", "2026-01-02")], file)
    assert [(line["constant"], line["value"], line["benchmark"]) for line in json.loads(file.read_text())] == [
        ("a", 1.0, "scale/old"),
        ("b", 2.0, "scale/new"),
    ]


def test_orders_are_new_and_in_all_partitions() -> None:
    """Bodies of 200 bytes, each order once, offsets without holes in each partition."""
    from benchmarks.scale_events import Orders

    orders = Orders(3)
    rows = [row for _ in range(2) for row in orders.batch(10).to_pylist()]
    assert {len(row["value"]) for row in rows} == {200} and len({row["value"][13:45] for row in rows}) == 20
    for partition, count in ((0, 8), (1, 6), (2, 6)):
        assert [row["offset"] for row in rows if row["partition"] == partition] == list(range(count))
    assert (orders.facts.orders, orders.facts.customers) == (20, int(np.arange(20).sum()))
