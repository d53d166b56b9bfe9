"""tx.merge on Delta: one row per key, in the order of the decisions, each once."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from checkpoint.errors import RowsMisfit, RowsRefused, SinkMismatch, StoreUnavailable
from checkpoint.head import Run
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.core.steps import Merge, Record
from dedup.delta import DeltaStore, tables
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit.delta_kit import open_store

pytestmark = pytest.mark.delta

SINK = pa.schema([pa.field("id x", pa.int64(), nullable=False), pa.field("at", pa.int64()), pa.field("Text", pa.string())])
NEWER = Merge(("id x",), "at", "gone")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an empty sink."""
    DeltaTable.create(str(tmp_path / "orders"), SINK)
    return tmp_path


Row = tuple[int, int | None, str | None, bool]
Write = tuple[Merge | None, list[Row]]


def rows_of(rows: list[Row], merge: Merge | None) -> ArrowRows:
    """Rows as a handler gives them."""
    names = [*SINK.names, "gone"]
    table = pa.Table.from_pylist([dict(zip(names, r, strict=True)) for r in rows], schema=SINK.append(pa.field("gone", pa.bool_())))
    return ArrowRows(table if merge and merge.delete_when else table.drop_columns(["gone"]))


def decide(store: DeltaStore, number: int, writes: list[Write], batch: int = 0) -> None:
    """One batch that does these writes."""
    with store.begin(kit.NAME, number) as tx:
        for merge, rows in writes:
            given = rows_of(rows, merge)
            assert (tx.write("orders", given) if merge is None else tx.merge("orders", given, merge)) == len(rows)
        tx.execute(Record(kit.records(tx.head, [], [], 0, batch), Run("q", batch), {}))
        tx.execute(Commit())


def shown(folder: Path) -> list[tuple[Any, ...]]:
    """The sink's rows, sorted."""
    return sorted((tuple(r.values()) for r in DeltaTable(str(folder / "orders")).to_pyarrow_table().to_pylist()), key=str)


def expected(decisions: list[list[Write]]) -> list[tuple[Any, ...]]:
    """The same by a dictionary."""
    state: dict[int, tuple[Any, ...]] = {}
    for writes in decisions:
        for merge, rows in writes:
            for key, at, text, gone in rows:
                old = state.get(key)
                newer = merge is None or merge.newer_by is None or old is None or (at is not None and (old[1] is None or old[1] < at))
                if newer and not (gone and merge and merge.delete_when):
                    state[key] = (key, at, text)
                elif newer:
                    state.pop(key, None)
    return sorted(state.values(), key=str)


def random_decisions(seed: int, count: int) -> list[list[Write]]:
    """Merges, and appends of keys that are met nowhere else, mixed within a decision and over decisions."""
    dice = random.Random(seed)
    found: list[list[Write]] = []
    for n in range(count):
        writes: list[Write] = []
        for part in range(dice.randrange(1, 7)):
            keys = dice.sample(range(dice.choice((8, 12, 60))), 4)  # some share a key with those before them, some do not
            rows = [(k, dice.choice([None, *range(20)]), f"{n}/{part}", dice.random() < 0.2) for k in keys]
            how = dice.choice([NEWER, Merge(("id x",)), None])
            writes.append((how, rows if how else [(1000 * n + 10 * part + 100, 1, "appended", False)]))
        found.append(writes)
    return found


@pytest.mark.parametrize("seed", of_which(1, range(6)))
def test_merges_and_appends_end_as_if_one_after_the_other(folder: Path, seed: int) -> None:
    """Whatever is merged and appended, within a decision and over decisions, the sink is what a dictionary would hold; nothing is left."""
    store, decisions = open_store(folder), random_decisions(seed, 8)
    number = kit.epoch(store)
    for batch, writes in enumerate(decisions):
        decide(store, number, writes, batch)
    assert shown(folder) == expected(decisions)
    assert open_store(folder).publish(kit.NAME) == 0 and open_store(folder).problems(kit.NAME) == []
    assert not [p for p in (folder / "state" / "staged").rglob("*") if p.is_file()]


def test_merges_of_a_decision_that_share_no_key_are_one_commit_of_the_sink(folder: Path) -> None:
    """A batch that is halved around bad events merges each part: the sink is not read and written again for each of them."""
    store = open_store(folder)
    number, plain = kit.epoch(store), Merge(("id x",))
    parts: list[Write] = [(NEWER, [(2 * n, n, "a", n == 3), (2 * n + 1, n, "b", False)]) for n in range(20)]
    decide(store, number, parts)
    assert DeltaTable(str(folder / "orders")).version() == 1 and shown(folder) == expected([parts])
    more: list[Write] = [(plain, [(1, 1, "c", False)]), (plain, [(2, 1, "c", False)]), (plain, [(1, 2, "d", False), (3, 1, "d", False)])]
    decide(store, number, more, 1)
    assert DeltaTable(str(folder / "orders")).version() == 3 and shown(folder) == expected([parts, more])
    assert open_store(folder).publish(kit.NAME) == 0 and open_store(folder).problems(kit.NAME) == []


def test_a_merge_that_changes_nothing_is_published_all_the_same(folder: Path) -> None:
    """delta-rs commits nothing where no row changes; the sink shows the decision nevertheless, and the next one is not held up."""
    store = open_store(folder)
    number = kit.epoch(store)
    for batch in range(3):
        decide(store, number, [(NEWER, [(1, 5, "a", False)]), (NEWER, [(2, 1, None, True)])], batch)
    assert shown(folder) == [(1, 5, "a")] and open_store(folder).problems(kit.NAME) == []
    assert open_store(folder).publish(kit.NAME) == 0


CHILD = """
import os, sys
sys.path.append(sys.argv[3])
import test_delta_merge as t
from kit import delta_kit as kit
from dedup.delta import tables
from pathlib import Path
folder, die = Path(sys.argv[1]), int(sys.argv[2])
real, count = tables.merge, [0]
def merge(*a):
    count[0] += 1
    if count[0] == die: os.kill(os.getpid(), 9)
    real(*a)
    if count[0] == -die: os.kill(os.getpid(), 9)
tables.merge = merge
store = t.open_store(folder)
t.decide(store, kit.epoch(store), t.PARTS)
"""

PARTS: list[Write] = [
    (NEWER, [(1, 5, "a", False), (2, 6, "b", False)]),
    (None, [(50, 1, "appended", False)]),
    (Merge(("id x",)), [(1, 9, "c", False), (50, 2, "merged", False)]),
]


@pytest.mark.parametrize("die", of_which(1, [-2, 1, -1, 2]))
def test_a_kill_between_decision_and_publication_loses_and_doubles_nothing(folder: Path, die: int) -> None:
    """kill -9 right before and right after each merge of a decided batch: the next process goes on there, each part once."""
    command = [sys.executable, "-c", CHILD, str(folder), str(die), str(Path(__file__).parent)]
    assert subprocess.run(command, check=False).returncode == -9
    store = open_store(folder)
    head = store.head(kit.NAME)
    assert head.batch_id == 0, "it died before the decision"
    store.publish(kit.NAME)
    assert shown(folder) == expected([PARTS]) and open_store(folder).problems(kit.NAME) == []
    decide(store, kit.epoch(store), [(NEWER, [(2, 7, "z", False)])], 1)
    assert shown(folder) == expected([PARTS, [(NEWER, [(2, 7, "z", False)])]])


def test_two_publishers_at_once_merge_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the decision unpublished and merge at the same time: one lands, the other sees it."""
    store = open_store(folder)
    number = kit.epoch(store)
    decide(store, number, [(None, [(1, 1, "old", False)])])
    real = tables.merge

    def stuck(*_: Any) -> None:
        raise OSError("not now")

    monkeypatch.setattr(tables, "merge", stuck)
    with pytest.raises(Exception, match="does not take it now"):
        decide(store, number, [(Merge(("id x",)), [(1, 2, "new", False), (2, 2, "new", False)])], 1)
    both = threading.Barrier(2, timeout=20)

    def together(*given: Any) -> None:
        if not both.broken and not getattr(local, "met", False):
            local.met = True
            both.wait()
        real(*given)

    local = threading.local()
    monkeypatch.setattr(tables, "merge", together)
    stores = [open_store(folder), open_store(folder)]
    counts: list[int] = []
    threads = [threading.Thread(target=lambda s=s: counts.append(s.publish(kit.NAME))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 2 and shown(folder) == [(1, 2, "new"), (2, 2, "new")]
    versions = [e for e in DeltaTable(str(folder / "orders")).history() if e["operation"] == "MERGE"]
    assert len(versions) == 1 and open_store(folder).problems(kit.NAME) == []


def test_a_commit_of_somebody_else_in_between_is_taken_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that another writer adds while a merge is computed is met by the merge, not doubled by it."""
    store = open_store(folder)
    number = kit.epoch(store)
    real, once = tables.merge, [True]

    def late(*given: Any) -> None:
        if once:
            once.clear()
            rows = pa.table({"id x": [7], "at": [1], "Text": ["theirs"]}).cast(SINK)
            write_deltalake(
                str(folder / "orders"), rows, mode="append", commit_properties=CommitProperties(app_transactions=[Transaction("x", 1)])
            )
        real(*given)

    monkeypatch.setattr(tables, "merge", late)
    decide(store, number, [(NEWER, [(7, 2, "ours", False)])])
    assert shown(folder) == [(7, 2, "ours")] and not once


def test_what_events_are_to_blame_for_is_told_apart(folder: Path) -> None:
    """NULL where it is forbidden, and keys that are null, are the fault of rows; missing columns and other types are the table's."""
    store = open_store(folder)
    number = kit.epoch(store)
    good = {"id x": [1], "at": [1], "Text": ["a"]}
    with store.begin(kit.NAME, number) as tx:
        for kind, columns in {
            RowsRefused: {**good, "id x": pa.nulls(1, pa.int64())},
            RowsMisfit: {**good, "id x": ["one"]},
        }.items():
            for act in (lambda rows: tx.write("orders", rows), lambda rows: tx.merge("orders", rows, Merge(("id x",), "at"))):
                with pytest.raises(SinkMismatch) as told:
                    act(ArrowRows(pa.table(columns)))
                assert type(told.value) is kind, columns
        for columns, how in (({**good, "more": [1]}, Merge(("id x",))), ({"at": [1]}, Merge(("id x",))), (good, Merge(("id x",), "when"))):
            with pytest.raises(SinkMismatch) as told:
                tx.merge("orders", ArrowRows(pa.table(columns)), how)
            assert not isinstance(told.value, RowsRefused)
        places = {"source": ["b"], "topic": ["t"], "partition": [0], "sequence_number": [1]}
        assert tx.merge("orders", ArrowRows(pa.table({**good, **places})), Merge(("id x",))) == 1
        tx.execute(Commit())
    assert shown(folder) == [(1, 1, "a")]


def busy(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Somebody else appends to the sink while each of the next merges runs."""
    merge, left = tables.merge, iter(range(times))

    def beside(table: DeltaTable, *given: Any) -> None:
        if next(left, None) is not None:
            write_deltalake(str(folder / "orders"), pa.Table.from_pylist([{"id x": 99, "at": 1, "Text": "z"}], schema=SINK), mode="append")
        merge(table, *given)

    monkeypatch.setattr(tables, "merge", beside)
    monkeypatch.setattr("dedup.delta.commit.FIRST_PAUSE", 0.0)


@pytest.mark.full
@pytest.mark.parametrize("times", of_which(1, [60, 6]))
def test_a_merge_beside_other_writers_is_an_outage_and_needs_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """It gives way to each commit of theirs, and tries again; where they never pause the decision stands, and is published later."""
    store, plain = open_store(folder), Merge(("id x",))
    number = kit.epoch(store)
    decide(store, number, [(plain, [(1, 1, "a", False)])])
    busy(folder, monkeypatch, times)
    if times > 20:
        with pytest.raises(StoreUnavailable, match="is made; others commit to the sink 'orders'"):
            decide(store, number, [(plain, [(1, 2, "b", False)])], 1)
        monkeypatch.undo()
        assert open_store(folder).publish(kit.NAME) == 1
    else:
        decide(store, number, [(plain, [(1, 2, "b", False)])], 1)
    assert [row for row in shown(folder) if row[0] == 1] == [(1, 2, "b")]
    assert open_store(folder).problems(kit.NAME) == []


def test_a_merge_into_an_append_only_table_is_refused_before_the_decision(folder: Path) -> None:
    """It could never be published: the error names the property, and nothing waits for a person."""
    DeltaTable(str(folder / "orders")).alter.set_table_properties({"delta.appendOnly": "true"})
    store = open_store(folder)
    number = kit.epoch(store)
    with pytest.raises(SinkMismatch, match=r"append-only .*SET TBLPROPERTIES"):
        decide(store, number, [(Merge(("id x",)), [(1, 1, "a", False)])])
    decide(store, number, [(None, [(1, 1, "a", False)])])
    assert shown(folder) == [(1, 1, "a")] and open_store(folder).problems(kit.NAME) == []


def test_an_empty_text_is_no_key_where_it_is_a_partition(tmp_path: Path) -> None:
    """Delta takes it for NULL there, which no key equals: such a row would be inserted again by each merge."""
    uri, how = str(tmp_path / "sold"), Merge(("id", "country"))
    schema = pa.schema([("id", pa.int64()), ("country", pa.string()), pa.field("kind", pa.string(), nullable=False)])
    DeltaTable.create(uri, schema, partition_by=["country", "kind"])
    rows = pa.table([[1, 1, 1], ["DE", "", "FR"], ["a", "a", ""]], schema=schema)
    store = open_store(tmp_path)
    with store.begin(kit.NAME, kit.epoch(store)) as tx:
        with pytest.raises(RowsRefused, match=r"empty 'country'.*key of tx\.merge"):
            tx.merge(uri, ArrowRows(rows.slice(0, 2)), how)
        with pytest.raises(RowsRefused, match=r"empty 'kind'.*NOT NULL"):
            tx.merge(uri, ArrowRows(rows.slice(2)), how)
        tx.merge(uri, ArrowRows(rows.slice(0, 1)), how)
        tx.execute(Commit())
    assert DeltaTable(uri).to_pyarrow_table().to_pylist() == rows.slice(0, 1).to_pylist()


def test_a_merge_that_failed_in_an_attempt_is_no_part_of_the_decision(folder: Path) -> None:
    """What an attempt merged before it raised is not listed, and what was written before it stays."""
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        tx.merge("orders", rows_of([(1, 1, "a", False)], NEWER), NEWER)
        with pytest.raises(ZeroDivisionError), tx.attempt():
            tx.merge("orders", rows_of([(2, 1, "b", False)], NEWER), NEWER)
            raise ZeroDivisionError
        tx.execute(Commit())
    assert shown(folder) == [(1, 1, "a")]


def test_a_task_tells_whose_fault_it_is(folder: Path) -> None:
    """What a task reports crosses to the driver as the same kind of error."""
    from dedup.delta.files import Add, FileWriter

    writer = FileWriter(str(folder / "orders"), None, SINK, "orders")
    for columns, kind in (({"id x": pa.nulls(1, pa.int64())}, RowsRefused), ({"id x": [{"a": 1}]}, SinkMismatch)):
        (line,) = writer(pa.table(columns).to_batches())
        with pytest.raises(SinkMismatch) as told:
            Add.from_json(line)
        assert type(told.value) is kind


def test_a_publisher_that_was_overtaken_takes_no_files_for_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen that nothing is published, the other one publishes and removes the staged files: then there is nothing left to do."""
    from dedup.delta.commit import SinkPublisher

    sink, made = str(tmp_path / "sink"), DeltaStore(str(tmp_path / "state"))
    kit.create(sink)

    def on_step(name: str) -> None:
        if name == "publish":
            raise RuntimeError("died")

    made.on_step = on_step
    with contextlib.suppress(RuntimeError), made.begin(kit.NAME, kit.epoch(made)) as tx:
        tx.merge(sink, ArrowRows(pa.table({"id": [1, 2]})), Merge(("id",)))
        tx.execute(Commit())
    first, real = DeltaStore(made.path), SinkPublisher.missing

    def other_first(self: SinkPublisher, *given: Any) -> list[str]:
        monkeypatch.setattr(SinkPublisher, "missing", real)
        assert DeltaStore(made.path).publish(kit.NAME) == 1
        return real(self, *given)

    monkeypatch.setattr(SinkPublisher, "missing", other_first)
    assert first.publish(kit.NAME) == 0
    assert kit.ids(sink) == [1, 2] and DeltaStore(made.path).problems(kit.NAME) == []
