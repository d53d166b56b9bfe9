"""Dead letters on Delta: kept, changed, ordered and found, also in tables that an older version made."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import delta_kit as kit
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from deadletter.letter import HISTORY, LETTERS
from dedup.delta import DeltaStore, events, header
from dedup.steps import Commit, Park, Record
from dedup.store import Run, Selection

pytestmark = pytest.mark.delta


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an empty sink."""
    kit.create(str(tmp_path / "orders"))
    return tmp_path


def open_store(place: Path) -> DeltaStore:
    """A process's own view of the store."""
    return DeltaStore(str(place / "state"), tables={"orders": str(place / "orders")})


def history(ids: list[str], action: str = "FAILED", **values: Any) -> pa.Table:
    """HISTORY, one row for each letter."""
    row = {"at": dt.datetime.now(dt.UTC), "action": action, "reserved": 0, **values}
    return pa.Table.from_pylist([{"letter_id": i, **row} for i in ids], schema=HISTORY)


def write_as_version_1(patch: pytest.MonkeyPatch) -> None:
    """Make tables and headers as the version before letters could change."""
    names = ["event", "seq", "count", *(n for n in LETTERS.names if n not in ("sequence", "extras"))]
    patch.setattr(events, "EVENTS", pa.schema([events.EVENTS.field(n) for n in names]))
    patch.setattr(header, "STATE_VERSION", 1)
    encode = header._encode_head
    patch.setattr(
        header, "_encode_head", lambda head: {k: v for k, v in encode(head).items() if k not in ("decided", "failures", "lifted")}
    )


def test_state_of_the_version_before_goes_on(place: Path) -> None:
    """A ledger and dead letters without the new columns are read, and extended by the next decision, without losing anything."""
    with pytest.MonkeyPatch.context() as patch:
        write_as_version_1(patch)
        store = open_store(place)
        kit.process(store, kit.epoch(store), kit.events([1, 2]), reject=lambda key: key == 1)
    columns = DeltaTable(str(place / "state" / "dead_letters" / kit.NAME)).schema().to_arrow().names
    assert "sequence" not in columns and "reserved" not in columns
    store = open_store(place)
    assert store.letters(Selection())["payload_hash"].to_pylist() == [1]
    assert store.head(kit.NAME).failures == ()
    kit.process(store, kit.epoch(store), kit.events([2, 3, 1], 2), 1, reject=lambda key: key == 3)
    found = open_store(place).letters(Selection()).select(["payload_hash", "sequence", "duplicates"]).to_pylist()
    assert found == [{"payload_hash": 1, "sequence": None, "duplicates": 1}, {"payload_hash": 3, "sequence": None, "duplicates": 0}]
    assert open_store(place).problems(kit.NAME) == []


def test_sequence_extras_and_history_are_kept(place: Path) -> None:
    """What is parked comes back as it was given, and its attempts are its history."""
    store = open_store(place)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        rows = kit.letters(tx.head, kit.events([7])).to_pylist()
        given = pa.Table.from_pylist([{**rows[0], "sequence": b"s" * 16, "extras": b"\x00ipc"}], schema=LETTERS)
        tx.execute(Park(given, history([rows[0]["id"]] * 2, error_type="ValueError", error_message="bad \u2603")))
        tx.execute(Commit())
    again = open_store(place)
    assert again.letters(Selection()).drop_columns("duplicates").equals(given)
    told = again.history(rows[0]["id"])
    assert told.schema == HISTORY and told["error_message"].to_pylist() == ["bad \u2603"] * 2
    assert again.history("0" * 32).num_rows == 0


def test_budget_state_is_written_by_batches_and_lifted_by_people(place: Path) -> None:
    """A batch of the stream keeps decided and failures, not `lifted`; positions that a person runs touch none of it, nor the settings."""
    store = open_store(place)
    number = kit.epoch(store)
    store.amend(kit.NAME, lambda head: type(head)(**{**vars(head), "lifted": 9, "gap_accepted": True}), by="me", reason="known")

    def record(decided: int, stream: bool) -> None:
        with store.begin(kit.NAME, number) as tx:
            batches = kit.records(tx.head, kit.events([1], decided), kit.events([1], decided), 0, decided)
            tx.execute(Record(batches, Run("q", decided), {"key": str(decided)}, decided, (decided,), stream=stream))
            tx.execute(Commit())

    record(5, stream=False)
    head = open_store(place).head(kit.NAME)
    assert (head.decided, head.failures, head.lifted, head.gap_accepted, head.query_id, head.settings) == (0, (), 9, True, None, None)
    record(6, stream=True)
    head = open_store(place).head(kit.NAME)
    assert (head.decided, head.failures, head.lifted, head.gap_accepted, head.batch_id) == (6, (6,), 9, False, 6)
    assert store.batches(kit.NAME).num_rows == 2
