"""A ledger that was taken back to an older state: what people are told, and what is true after they accepted it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from checkpoint import changes
from checkpoint.errors import CommitConflict, StoreRestored
from deadletter.selection import Selection
from deadletter.store import Commit
from dedup import Consumer, Takeover, decode
from dedup.core.envelope import ENVELOPE
from dedup.delta import DeltaStore
from dedup.delta.ledger import Header
from dedup.verify import verify
from kit import delta_kit as kit
from kit.delta_kit import ledger, open_store, show

pytestmark = pytest.mark.delta

ORDER = pa.schema([("id", pa.int64()), ("text", pa.string())])


def consumer(store: DeltaStore, query: str = "q") -> Consumer:
    """Writes orders with even ids to the sink, and rejects odd ones."""
    made = Consumer(kit.NAME, store, idempotence_key="data.id", decode=decode.json(ORDER), query=query, takeover=Takeover(after=1.0))

    def handler(rows: pa.Table, tx: Any) -> None:
        odd = pc.equal(pc.bit_wise_and(pc.struct_field(rows["data"], "id"), 1), 1)
        good = tx.reject(rows, odd, "odd")
        columns = [pc.struct_field(good["data"], n) for n in ORDER.names]
        tx.write(pa.Table.from_arrays(columns, names=ORDER.names), "orders")

    made.foreach_batch(handler)
    return made


def batch(ids: Iterable[int]) -> pa.Table:
    """One event per id, at the position of that number."""
    position = {"source": "broker", "topic": "orders", "partition": 0, "part": 0, "properties": []}
    rows = [{**position, "sequence_number": i, "offset": str(i), "body": json.dumps({"id": i, "text": ""}).encode()} for i in ids]
    return pa.Table.from_pylist(rows, schema=ENVELOPE)


def test_people_are_told_to_restore_the_sinks_first(folder: Path) -> None:
    """A restored ledger knows less than its sinks hold: what to restore with it is said before the command that accepts."""
    consumer(open_store(folder))(batch([0]), 0)
    before = ledger(folder).version()
    consumer(open_store(folder))(batch([1]), 1)
    ledger(folder).restore(before)
    with pytest.raises(StoreRestored) as told:
        consumer(open_store(folder))(batch([1]), 1)
    text = str(told.value)
    steps = ["the sinks", str(folder / "state" / "dead_letters" / kit.NAME), "twice", "accept-restore shop", "sink accept"]
    assert [text.find(step) for step in steps] == sorted(text.find(step) for step in steps) and -1 not in map(text.find, steps)


def test_letters_of_lost_decisions_do_not_count(folder: Path) -> None:
    """After an accepted restore the same events park their letter again: there is one letter, and the tables prove themselves."""
    consumer(open_store(folder))(batch([0, 1]), 0)
    before = ledger(folder).version()
    consumer(open_store(folder))(batch([2, 3]), 1)
    consumer(open_store(folder))(batch([3, 4, 5]), 2)  # a duplicate of a held key is noted, and a redelivery
    ledger(folder).restore(before)
    open_store(folder).amend(kit.NAME, changes.accept_restore, by="me", reason="backup")
    assert open_store(folder).letters(Selection())["sequence_number"].to_pylist() == [1]
    consumer(open_store(folder), "at the checkpoint")(batch([2, 3]), 0)
    letters = open_store(folder).letters(Selection()).select(["sequence_number", "generation", "duplicates"]).to_pylist()
    assert letters == [
        {"sequence_number": 1, "generation": 0, "duplicates": 0},
        {"sequence_number": 3, "generation": 1, "duplicates": 0},
    ]
    assert verify(open_store(folder), kit.NAME).contradictions == []


def test_sinks_restored_with_the_ledger_hold_each_row_once(folder: Path) -> None:
    """Ledger, sink and dead letters taken back to the same time, all accepted: the events come again, and nothing is doubled."""
    paths = [folder / "state" / "ledger" / kit.NAME, folder / "orders", folder / "state" / "dead_letters" / kit.NAME]
    consumer(open_store(folder))(batch([0, 1]), 0)
    before = [DeltaTable(str(path)).version() for path in paths]
    consumer(open_store(folder))(batch([2, 3]), 1)
    for path, version in zip(paths, before, strict=True):
        DeltaTable(str(path)).restore(version)
    store = open_store(folder)
    store.amend(kit.NAME, changes.accept_restore, by="me", reason="backup")
    for sink in ("orders", "dedup.dead_letters"):
        store.accept_sink(kit.NAME, sink, by="me", reason="backup")
    consumer(open_store(folder), "at the checkpoint")(batch([2, 3]), 0)
    assert show(folder) == [0, 2]
    assert open_store(folder).letters(Selection())["sequence_number"].to_pylist() == [1, 3]
    assert verify(open_store(folder), kit.NAME).contradictions == []


@pytest.mark.full
def test_of_the_log_letters_read_what_they_ask_for_and_that_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset the decisions of older letters are looked up, and no other ones, however long the log is."""
    for number in range(4):
        consumer(open_store(folder))(batch([2 * number, *([5] if number == 2 else [])]), number)
    store = open_store(folder)
    store.amend(kit.NAME, changes.reset, by="me", reason="again")
    consumer(store)(batch([100, 101]), 0)
    store.head(kit.NAME)
    parsed, real = list[int](), Header.from_json

    def noted(text: str) -> Header:
        parsed.append((found := real(text)).seq)
        return found

    monkeypatch.setattr(Header, "from_json", staticmethod(noted))
    assert store.letters(Selection())["sequence_number"].to_pylist() == [5, 101]
    assert len(parsed) == 1


def test_who_reads_letters_in_another_thread_does_not_move_the_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters of an older generation are read right before a batch commits, and somebody else has decided: no number has two decisions."""
    store = open_store(folder)
    consumer(store)(batch([0, 1]), 0)
    store.amend(kit.NAME, changes.reset, by="me", reason="again")
    number, (letters,) = kit.epoch(store), list(store._letters(Selection(kit.NAME)))
    ledger = store._states.of(kit.NAME).ledger
    real = ledger.commit

    def beside(*given: Any) -> None:
        with ThreadPoolExecutor(1) as reader:
            assert reader.submit(letters.select, Selection(), ["sequence_number"]).result().num_rows == 1
        real(*given)

    with store.begin(kit.NAME, number) as tx:
        open_store(folder).amend(kit.NAME, changes.accept_gap, by="ann", reason="known")
        monkeypatch.setattr(ledger, "commit", beside)
        with pytest.raises(CommitConflict):
            tx.execute(Commit())
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.full
@pytest.mark.parametrize("change", [changes.accept_restore, changes.reset])
def test_a_generation_is_never_used_twice(folder: Path, change: Any) -> None:
    """A ledger restored to before a change of generation gets one that no sink has met: the old transaction ids hide no new rows."""
    consumer(open_store(folder))(batch([0]), 0)
    before = ledger(folder).version()
    open_store(folder).amend(kit.NAME, changes.reset, by="me", reason="again")
    for i in range(4):
        consumer(open_store(folder))(batch([2 * i + 2]), i)
    ledger(folder).restore(before)
    head = open_store(folder).amend(kit.NAME, change, by="me", reason="backup")
    assert head.generation == 2 and head.keyspace == (2 if change is changes.reset else 0)
    consumer(open_store(folder), "at the checkpoint")(batch([1, 100]), 0)
    assert 100 in show(folder)
