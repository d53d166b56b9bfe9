"""Compactions of our own tables leave each row once, beside each other and beside whoever else commits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from dedup.core.messages import Asked, Marks
from dedup.delta import tables, upkeep
from dedup.delta.engine import DeltaRs
from dedup.delta.files import FileWriter
from kit.orders import assert_proven, batch, event, ids, letters
from kit.outgoing import Receiver, dispatcher, publisher, states
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

ENGINE = DeltaRs(None)
ROWS = pa.schema([pa.field("day", pa.string()), pa.field("seq", pa.int64(), nullable=False), ("doc", pa.string()), ("more", pa.string())])


@pytest.fixture
def delta(tmp_path: Path) -> DeltaPlace:
    """Four orders, of which one is a letter and three have sent a message each, in files of their own."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run = publisher(place.store(), budget=None)
    for number in range(4):
        run(batch(event(number, f"o{number}", -1 if number == 2 else number)), number)
    return place


def own_tables(place: DeltaPlace, name: str) -> list[str]:
    """The tables of the state below this folder."""
    return [str(log.parent) for log in sorted((place.folder / "state" / name).rglob("_delta_log"))]


def compact_at_once(uri: str) -> None:
    """Two compactions, both of which have looked at the table before either begins."""
    together = threading.Barrier(2)

    def one(table: DeltaTable) -> None:
        together.wait()
        ENGINE.compact(table, upkeep.TARGET_BYTES, 20_000)

    with ThreadPoolExecutor(2) as both:
        for done in [both.submit(one, tables.open_table(uri, None)) for _ in range(2)]:
            done.result()


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """An empty table of ROWS, by day, with bounds of one column."""
    there = str(tmp_path / "table")
    ENGINE.create(there, ROWS, "rows", {"delta.dataSkippingNumIndexedCols": "1"}, ["day"])
    return there


def append(uri: str, *seqs: int, day: str = "monday", doc: str = "") -> str:
    """One more file; returns its path."""
    table = tables.open_table(uri, None)
    assert table is not None
    columns = {"day": [day] * len(seqs), "seq": list(seqs), "doc": [doc] * len(seqs), "more": [doc] * len(seqs)}
    adds = FileWriter(uri, None, ROWS, uri, ("day",)).write(pa.table(columns, ROWS))
    tables.commit(table, adds, {f"file{seqs[0]}": 1}, exact=True)
    return adds[0].path


def compact(uri: str, target: int = upkeep.TARGET_BYTES, row_group: int = 20_000) -> None:
    """As the upkeep does."""
    table = tables.open_table(uri, None)
    assert table is not None
    ENGINE.compact(table, target, row_group)


def files(uri: str) -> dict[str, tuple[str, list[int]]]:
    """Path -> day and rows in their order, of the files of the table."""
    actions = pa.table(DeltaTable(uri).get_add_actions(flatten=True))
    rows = zip(actions["path"].to_pylist(), actions["partition.day"].to_pylist(), strict=True)
    return {path: (day, pq.ParquetFile(f"{uri}/{path}").read()["seq"].to_pylist()) for path, day in rows}


def before_the_first(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Somebody does this between the moment at which a compaction has looked for the last time, and its commit."""
    real = tables.commit

    def commit(table: DeltaTable, *given: Any, **how: Any) -> int:
        monkeypatch.setattr(tables, "commit", real)
        act()
        return real(table, *given, **how)

    monkeypatch.setattr(tables, "commit", commit)


@pytest.mark.full
def test_two_compactions_of_a_ledger_at_once_leave_each_row_once(delta: DeltaPlace) -> None:
    """Beside each other, as those of a stream and of `dedup upkeep`: the state proves itself, and a new process goes on."""
    for uri in own_tables(delta, "ledger") + own_tables(delta, "dead_letters"):
        compact_at_once(uri)
    assert_proven(delta.store())
    publisher(delta.store(), budget=None)(batch(event(1, "o1", 1), event(4, "o4", 4)), 4)
    assert sorted(ids(delta.read())) == ["o0", "o1", "o3", "o4"] and len(letters(delta.store())) == 1
    assert_proven(delta.store())


def test_two_compactions_of_an_outbox_at_once_send_each_message_once(delta: DeltaPlace) -> None:
    """Neither messages nor what became of them is there twice."""
    receiver, began = Receiver(), delta.store().outbox("shop")
    with began.turn(Asked(limit=1)) as turn:
        turn.mark(Marks(sent=tuple(m.number for m in turn.messages)))
    for uri in own_tables(delta, "outbox"):
        compact_at_once(uri)
    dispatcher(delta, receiver).once()
    assert receiver.bodies() == [b"o1", b"o3"] and states(delta) == {"SENT": 3}
    assert_proven(delta.store())


def test_a_commit_in_between_does_not_stop_a_compaction(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream appends whenever it wants: each row is there once, and the files that the compaction began with are one."""
    old = [append(uri, 2 * n, 2 * n + 1) for n in range(3)]
    before_the_first(monkeypatch, lambda: append(uri, 50))
    compact(uri)
    assert sorted(rows for _, rows in files(uri).values()) == [[0, 1, 2, 3, 4, 5], [50]]
    assert not files(uri).keys() & set(old)


def test_a_compaction_brings_no_row_back(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge between its last look and its commit: what was deleted is gone, and the rest is there once."""
    for n in range(3):
        append(uri, 2 * n, 2 * n + 1)
    before_the_first(monkeypatch, lambda: DeltaTable(uri).delete("seq <= 2"))
    compact(uri)
    assert sorted(seq for _, rows in files(uri).values() for seq in rows) == [3, 4, 5]


@pytest.mark.parametrize("other", [compact, lambda uri: DeltaTable(uri).optimize.compact()], ids=["of ours", "of delta-rs"])
def test_a_compaction_leaves_it_to_another_one(uri: str, monkeypatch: pytest.MonkeyPatch, other: Callable[[str], object]) -> None:
    """Which comes between its last look and its commit: its own files stay out of the table."""
    for n in range(3):
        append(uri, 2 * n, 2 * n + 1)
    before_the_first(monkeypatch, lambda: other(uri))
    compact(uri)
    assert [sorted(rows) for _, rows in files(uri).values()] == [[0, 1, 2, 3, 4, 5]] and DeltaTable(uri).version() == 4


def test_one_of_delta_rs_that_comes_second_is_refused(uri: str) -> None:
    """By a person, or an older version of dedup: it looked before a compaction of ours, and would double all rows."""
    for n in range(3):
        append(uri, 2 * n, 2 * n + 1)
    late = DeltaTable(uri)
    compact(uri)
    with pytest.raises(tables.COMMIT_REFUSED):
        late.optimize.compact()
    assert [rows for _, rows in files(uri).values()] == [[0, 1, 2, 3, 4, 5]]


def test_files_of_the_target_are_left_alone(uri: str) -> None:
    """Only smaller ones are written anew, those of each partition as one; a single one stays."""
    large = append(uri, *range(100, 1100), doc="x" * 50)
    for n in range(3):
        append(uri, n)
        append(uri, 10 + n, day="tuesday")
    single = append(uri, 20, day="sunday")
    compact(uri, target=Path(uri, large).stat().st_size)
    found = files(uri)
    assert large in found and found.pop(single) == ("sunday", [20])
    del found[large]
    assert sorted(found.values()) == [("monday", [0, 1, 2]), ("tuesday", [10, 11, 12])]


def test_files_are_put_together_up_to_the_target(uri: str) -> None:
    """As many side by side as have room, in commits of about that size each; rows keep their order."""
    sizes = [Path(uri, append(uri, n, n + 100)).stat().st_size for n in range(5)]
    compact(uri, target=2 * max(sizes))
    assert sorted(rows for _, rows in files(uri).values()) == [[0, 100, 1, 101], [2, 102, 3, 103], [4, 104]]
    assert DeltaTable(uri).version() == 5 + 2


def test_a_compacted_file_is_laid_out_as_its_table_says(uri: str) -> None:
    """One row costs reading a group of rows, and only so many columns have bounds: what the others held is not in the log."""
    for n in range(3):
        append(uri, 2 * n, 2 * n + 1, doc="anna")
    compact(uri, row_group=4)
    (path,) = files(uri)
    assert pq.ParquetFile(f"{uri}/{path}").metadata.num_row_groups == 2
    entry = Path(uri, f"_delta_log/{DeltaTable(uri).version():020}.json").read_text()
    assert '\\"maxValues\\":{\\"seq\\":5}' in entry and "anna" not in entry


def test_a_damaged_file_fails_no_batch(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """The compaction says so and changes nothing: whoever needs the rows finds out."""
    append(uri, 1)
    damaged = append(uri, 2)
    Path(uri, damaged).write_bytes(b"PAR1 and nothing else")
    upkeep.compact(uri, ENGINE)
    assert "was not compacted this time" in caplog.text and DeltaTable(uri).version() == 2
