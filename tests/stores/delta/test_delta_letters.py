"""Dead letters on Delta: kept, changed, ordered and found."""

from __future__ import annotations

import dataclasses
import datetime as dt
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint.errors import CommitConflict, ConfigError
from checkpoint.head import Run, Spent
from deadletter.letter import HISTORY, LETTERS, Kind
from deadletter.policy import Used
from deadletter.selection import Selection
from deadletter.store import KEYS, Change, Commit, Free, Park
from dedup.core.steps import Record
from dedup.delta import DeltaStore, state, tables, transaction, verify
from dedup.delta.ledger import ORDER, Ledger
from fixtures.variants import of_which
from kit import delta_kit as kit
from kit import orders
from kit.delta_kit import open_store
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta


def history(ids: list[str], action: str = "FAILED", **values: Any) -> pa.Table:
    """HISTORY, one row for each letter."""
    row = {"at": dt.datetime.now(dt.UTC), "action": action, "reserved": 0, **values}
    return pa.Table.from_pylist([{"letter_id": i, **row} for i in ids], schema=HISTORY)


def test_sequence_extras_and_history_are_kept(folder: Path) -> None:
    """What is parked comes back as it was given, and its attempts are its history."""
    store = open_store(folder)
    number = kit.epoch(store)
    with store.begin(kit.NAME, number) as tx:
        rows = kit.letters(tx.head, kit.events([7])).to_pylist()
        given = pa.Table.from_pylist([{**rows[0], "sequence": b"s" * 16, "extras": b"\x00ipc"}], schema=LETTERS)
        tx.execute(Park(given, history([rows[0]["id"]] * 2, error_type="ValueError", error_message="bad \u2603")))
        tx.execute(Commit())
    again = open_store(folder)
    assert again.letters(Selection()).drop_columns("duplicates").equals(given)
    told = again.history(rows[0]["id"])
    assert told.schema == HISTORY and told["error_message"].to_pylist() == ["bad \u2603"] * 2
    assert again.history("0" * 32).num_rows == 0


def test_budget_state_is_written_by_batches_and_lifted_by_people(folder: Path) -> None:
    """A batch of the stream keeps decided and failures, not `lifted`; positions that a person runs touch none of it, nor the settings."""
    store = open_store(folder)
    number = kit.epoch(store)
    lifted = {Kind.NO_KEY: Spent(lifted=2)}
    store.amend(kit.NAME, lambda head: dataclasses.replace(head, spent=lifted, gap_accepted=True), by="me", reason="known")

    def record(decided: int, stream: bool) -> None:
        with store.begin(kit.NAME, number) as tx:
            batches = kit.records(tx.head, kit.events([1], decided), kit.events([1], decided), 0, decided)
            tx.execute(Record(batches, Run("q", decided), {"key": str(decided)}, {Kind.NO_KEY: Used(decided, (decided,))}, stream=stream))
            tx.execute(Commit())

    record(5, stream=False)
    head = open_store(folder).head(kit.NAME)
    assert (head.spent, head.gap_accepted, head.query_id, head.settings) == (lifted, True, None, None)
    record(6, stream=True)
    head = open_store(folder).head(kit.NAME)
    assert (head.spent, head.gap_accepted, head.batch_id) == ({Kind.NO_KEY: Spent(6, (6,), 2)}, False, 6)
    assert store.batches(kit.NAME).num_rows == 2


SEQUENCE = b"s" * 16


def park(store: DeltaStore, number: int, positions: list[int], sequence: bytes | None = SEQUENCE, part: int = 0) -> list[str]:
    """Park events of these positions (their keys, too) as letters of one sequence, in a batch of the stream; their ids."""
    with store.begin(kit.NAME, number) as tx:
        batch = [kit.Event(part, p, p) for p in positions]
        keys = pa.table([pa.array([kit.key_bytes(p) for p in positions], pa.binary(16)), pa.array(positions, pa.int64())], schema=KEYS)
        assert tx.reserve(keys).num_rows == 0
        rows = kit.letters(tx.head, batch)
        sequences = pa.array([sequence] * len(positions), pa.binary(16))
        tx.execute(Park(rows.set_column(rows.schema.get_field_index("sequence"), LETTERS.field("sequence"), sequences)))
        number_of = (store.head(kit.NAME).batch_id or 0) + 1
        tx.execute(Record(kit.records(tx.head, batch, batch, len(positions), number_of), Run("q", number_of), {}))
        tx.execute(Commit())
    return list(rows["id"].to_pylist())


def change(store: DeltaStore, ids: list[str], *others: Any, action: str = "REPROCESSED", **columns: Any) -> None:
    """A person's decision about letters: these columns for all of them."""
    with store.begin_letters(kit.NAME) as tx:
        assert tx.lock(ids)["id"].to_pylist() == ids
        fields = [LETTERS.field("id"), *(LETTERS.field(n) for n in columns)]
        given = pa.Table.from_pylist([{"id": i, **columns} for i in ids], schema=pa.schema(fields))
        tx.execute(Change(given, history(ids, action, by="me", reserved=-len(others) if others else 0)))
        for step in others:
            tx.execute(step)
        tx.execute(Commit())


def chain(folder: Path) -> list[tuple[int, str, int | None]]:
    """(position, status, position of the one before) of all letters, as a fresh process sees them."""
    rows = open_store(folder).letters(Selection(limit=None), ["id", "sequence_number", "status", "blocked_by"]).to_pylist()
    at = {r["id"]: r["sequence_number"] for r in rows}
    return [(r["sequence_number"], r["status"], at.get(r["blocked_by"])) for r in rows]


def blocked(folder: Path) -> list[tuple[bytes, int]]:
    """(sequence, position of its last letter), as a fresh process plans with them."""
    store = open_store(folder)
    at = {r["id"]: r["sequence_number"] for r in store.letters(Selection(limit=None), ["id", "sequence_number"]).to_pylist()}
    with store.begin_letters(kit.NAME) as tx:
        found = tx.blocked(pa.array([SEQUENCE, b"t" * 16], pa.binary(16))).to_pylist()
    return [(row["sequence"], at[row["letter"]]) for row in found]


def free(*keys: int) -> Free:
    """The step."""
    return Free(pa.table({"key": pa.array([kit.key_bytes(k) for k in keys], pa.binary(16))}))


GONE = {"status": "REPROCESSED", "holds_key": False}


def test_a_sequence_stays_in_order_whatever_is_changed(folder: Path) -> None:
    """The first letter that waits is open, each other one blocked by the one before: parked, late, reprocessed, discarded, restored."""
    store = open_store(folder)
    number = kit.epoch(store)
    one, _, three = park(store, number, [1, 2, 3])
    (five,) = park(store, number, [5])
    assert chain(folder) == [(1, "OPEN", None), (2, "BLOCKED", 1), (3, "BLOCKED", 2), (5, "BLOCKED", 3)]
    assert blocked(folder) == [(SEQUENCE, 5)]
    change(open_store(folder), [one], **GONE)
    assert chain(folder) == [(1, "REPROCESSED", None), (2, "OPEN", None), (3, "BLOCKED", 2), (5, "BLOCKED", 3)]
    change(open_store(folder), [three, five], action="DISCARDED", status="DISCARDED")
    assert chain(folder)[1:] == [(2, "OPEN", None), (3, "DISCARDED", 2), (5, "DISCARDED", 3)]
    assert blocked(folder) == [(SEQUENCE, 2)]
    park(store, number, [0])
    assert chain(folder)[:3] == [(0, "OPEN", None), (1, "REPROCESSED", None), (2, "BLOCKED", 0)]
    change(open_store(folder), [five], action="REOPENED", status="OPEN")
    assert chain(folder)[2:] == [(2, "BLOCKED", 0), (3, "DISCARDED", 2), (5, "BLOCKED", 2)]
    rest = open_store(folder).letters(Selection(statuses=("OPEN", "BLOCKED")), ["id"])["id"].to_pylist()
    change(open_store(folder), rest, **GONE)
    assert blocked(folder) == []
    assert [s for _, s, _ in chain(folder)] == ["REPROCESSED"] * 3 + ["DISCARDED", "REPROCESSED"]
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.parametrize("most", [0, 10])
def test_a_start_reads_the_blocked_sequences_and_not_those_of_long_ago(folder: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A summary has all that are blocked: a fresh process reads from there, and all of it where too many were blocked for one."""
    monkeypatch.setattr(state, "SUMMARY_EVERY", 3)
    monkeypatch.setattr(transaction, "MOST_BLOCKED", most)
    reads, read = Ledger.read, list[int]()

    def noted(ledger: Ledger, files: Any, *rest: Any) -> Any:
        read.extend(file.first for file in files if file.section == ORDER)
        return reads(ledger, files, *rest)

    store = open_store(folder)
    number = kit.epoch(store)
    park(store, number, [1, 2])
    for position in range(3, 9):
        ids = park(store, number, [position], sequence=b"t" * 16)
        change(store, ids, action="DISCARDED", status="DISCARDED")
    monkeypatch.setattr(Ledger, "read", noted)
    assert blocked(folder) == [(SEQUENCE, 2)]
    written = [file.first for file in store._states.of(kit.NAME).ledger.files_now() if file.section == ORDER]
    assert {*read} == {*written} if most == 0 else {*read} == {*written[-len({*read}) :]} and len({*read}) <= 4
    park(store, number, [10], sequence=b"t" * 16)
    assert blocked(folder) == [(SEQUENCE, 2), (b"t" * 16, 10)]


def test_a_change_sets_its_columns_and_no_other(folder: Path) -> None:
    """Bodies, headers and all that a change does not name stay to the byte; an edit replaces what it names; duplicates stay counted."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([4, 5, 4]), reject=lambda key: key == 4)
    (before,) = store.letters(Selection()).to_pylist()
    change(store, [before["id"]], action="FAILED", attempts=2, reason="again")
    kit.process(store, number, kit.events([4], 3), 1)
    (after,) = open_store(folder).letters(Selection()).to_pylist()
    assert after == {**before, "attempts": 2, "reason": "again", "duplicates": 2}
    change(store, [before["id"]], action="EDITED", body=b"\x00new", body_size=4)
    change(store, [before["id"]], **GONE)
    kit.process(store, number, kit.events([4], 4), 2)
    (last,) = open_store(folder).letters(Selection()).to_pylist()
    assert last == {**after, "body": b"\x00new", "body_size": 4, **GONE}, "a letter that holds no key counts no duplicates"
    assert open_store(folder).history(before["id"])["action"].to_pylist() == ["FAILED", "EDITED", "REPROCESSED"]
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.parametrize("compact", of_which(1, [True, False]))
def test_a_freed_key_is_new_again_and_stays_so(folder: Path, compact: bool) -> None:
    """Freed in the index of every process, also one that starts later, after compaction and after a purge; then reserved again."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 1)
    other = open_store(folder)
    other.head(kit.NAME)
    (letter,) = store.letters(Selection())["id"].to_pylist()
    change(store, [letter], free(1), action="RELEASED", status="DISCARDED", holds_key=False)
    if compact:
        store.maintain(kit.NAME)
    for process in (store, other, open_store(folder)):
        assert process.reserved(kit.NAME) == 2
    assert kit.process(store, number, kit.events([1, 2], 3), 1).written == [1]
    if compact:
        store.maintain(kit.NAME)
        store.purge(kit.NAME, dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1), by="me", reason="old", although_behind=True)
        assert open_store(folder).reserved(kit.NAME) == 0, "a purge brought the letter's old key back"
    for process in (store, other, open_store(folder))[: 0 if compact else 3]:
        assert process.reserved(kit.NAME) == 3
        assert kit.process(process, number, kit.events([1], 100), 2).duplicates in ([1], [])
    assert open_store(folder).problems(kit.NAME) == []


def test_two_people_cannot_both_change_what_they_read(folder: Path) -> None:
    """Of two decisions about letters that were planned on one head, the second is told to plan again, and nothing of it is true."""
    store, other = open_store(folder), open_store(folder)
    number = kit.epoch(store)
    one, two = park(store, number, [1, 2], sequence=None)
    with store.begin_letters(kit.NAME) as tx:
        tx.lock([one])
        change(other, [two], **GONE)
        tx.execute(Change(pa.table({"id": [one], "status": ["DISCARDED"]}), history([one], "DISCARDED")))
        with pytest.raises(CommitConflict):
            tx.execute(Commit())
    assert [s for _, s, _ in chain(folder)] == ["OPEN", "REPROCESSED"]


def test_letters_take_no_epoch_and_leave_the_batch_alone(folder: Path) -> None:
    """A decision about letters keeps epoch, query, batch and checkpoints, and needs a consumer that exists."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1, 2]), 7, reject=lambda key: key == 1)
    before = store.head(kit.NAME)
    change(open_store(folder), store.letters(Selection())["id"].to_pylist(), **GONE)
    after = open_store(folder).head(kit.NAME)
    assert dataclasses.replace(after, seq=before.seq) == before and after.seq == before.seq + 1
    with pytest.raises(ConfigError, match="no consumer"), store.begin_letters("nobody"):
        pass


def test_the_crash_marker_outlives_its_process_and_ends_with_the_batch(folder: Path) -> None:
    """What is about to be tried is read by the next process; a committed batch takes it away, a decision about letters does not."""
    store = open_store(folder)
    number = kit.epoch(store)
    assert store.crash_marker(kit.NAME) is None
    store.set_crash_marker(kit.NAME, '{"chunk": "one"}')
    store.set_crash_marker(kit.NAME, '{"chunk": "two \u2603"}')
    assert open_store(folder).crash_marker(kit.NAME) == '{"chunk": "two \u2603"}'
    kit.process(store, number, kit.events([1]))
    assert open_store(folder).crash_marker(kit.NAME) is None
    store.set_crash_marker(kit.NAME, '{"chunk": "three"}')
    store.set_crash_marker(kit.NAME, None)
    assert open_store(folder).crash_marker(kit.NAME) is None


@pytest.mark.full
def test_every_condition_of_a_selection_counts(folder: Path) -> None:
    """Each field of a selection gives what a loop over all letters gives, also for letters that changed, by page and grouped."""
    store = open_store(folder)
    number = kit.epoch(store)
    for part in (0, 1):
        ids = park(store, number, [10 * part + p for p in range(6)], bytes([part]) * 16, part)
        change(store, ids[:2], **GONE)
        change(store, ids[2:4], action="FAILED", reason="Noch EINMAL", stack="line 3", fingerprint=f"g{part}", idempotence_key="k'1")
    rows = store.letters(Selection(limit=None)).to_pylist()
    assert len(rows) == 12
    moment = rows[5]["last_failed_at"]
    for asked, keep in {
        Selection(partition=1): lambda r: r["partition"] == 1,
        Selection(first=2, last=11): lambda r: 2 <= r["sequence_number"] <= 11,
        Selection(status="BLOCKED"): lambda r: r["status"] == "BLOCKED",
        Selection(statuses=("OPEN", "REPROCESSED")): lambda r: r["status"] != "BLOCKED",
        Selection(kind="CRASHED"): lambda r: False,
        Selection(fingerprint="g1"): lambda r: r["fingerprint"] == "g1",
        Selection(id=rows[3]["id"][:9]): lambda r: r["id"] == rows[3]["id"],
        Selection(ids=(rows[3]["id"], rows[9]["id"])): lambda r: r["id"] in (rows[3]["id"], rows[9]["id"]),
        Selection(since=moment): lambda r: r["last_failed_at"] >= moment,
        Selection(until=moment): lambda r: r["last_failed_at"] < moment,
        Selection(key="k'1"): lambda r: r["idempotence_key"] == "k'1",
        Selection(text="einmal"): lambda r: r["reason"] == "Noch EINMAL",
        Selection(text="LINE 3", status="OPEN"): lambda r: r["stack"] == "line 3" and r["status"] == "OPEN",
        Selection(sequences=(bytes([1]) * 16,)): lambda r: r["partition"] == 1,
        Selection(generation=1): lambda r: False,
        Selection(source="broker", topic="orders", consumer=kit.NAME): lambda r: True,
        Selection(topic="other"): lambda r: False,
        Selection(after=rows[4]["id"], limit=3): lambda r: r in rows[5:8],
        Selection(after=rows[4]["id"], status="BLOCKED"): lambda r: r in rows[5:] and r["status"] == "BLOCKED",
    }.items():
        assert store.letters(asked).to_pylist() == [r for r in rows if keep(r)], asked
    groups = store.groups(Selection()).to_pylist()
    assert [(g["fingerprint"], g["letters"]) for g in groups] == [("f", 8), ("g0", 2), ("g1", 2)]
    for g in groups:
        mine = [r for r in rows if r["fingerprint"] == g["fingerprint"]]
        newest = max(r["last_failed_at"] for r in mine)
        assert g["example"] == min(r["id"] for r in mine if r["last_failed_at"] == newest)
        assert (g["first_failed_at"], g["last_failed_at"]) == (min(r["first_failed_at"] for r in mine), newest)
        assert g["reason"] == next(r["reason"] for r in mine if r["id"] == g["example"])
    assert store.groups(Selection(limit=1)).num_rows == 1 and store.groups(Selection(kind="CRASHED")).num_rows == 0
    with pytest.raises(ConfigError, match="first page"):
        store.letters(Selection(after="0" * 32))


def work(folder: Path, seconds: float, handler: float, log: list[str]) -> None:
    """A stream: batch after batch, with a handler that takes its time; what came of each goes into the log."""
    store = open_store(folder)
    number = kit.epoch(store, takeover_after=0.2)
    end, at = time.monotonic() + seconds, 1000
    while time.monotonic() < end:
        try:
            with store.begin(kit.NAME, number) as tx:
                store.set_crash_marker(kit.NAME, "trying")
                time.sleep(handler)
                tx.execute(Record(kit.records(tx.head, kit.events([at], at), kit.events([at], at), 0, at), Run("q", at), {}))
                tx.execute(Commit())
            log.append("batch")
        except CommitConflict:
            log.append("batch again")
        at += 1


@pytest.mark.full
@pytest.mark.parametrize(("handler", "letter"), of_which(1, [(0.3, 0.0), (0.05, 0.4)]))
def test_stream_and_reprocess_take_turns(folder: Path, handler: float, letter: float) -> None:
    """Batches without a pause and a reprocess without a pause: each gets every other turn, and little is done twice."""
    store = open_store(folder)
    ids = park(store, kit.epoch(store), list(range(200)), sequence=None)
    log: list[str] = []
    stream = threading.Thread(target=work, args=(folder, 5.0, handler, log))
    stream.start()
    mine = open_store(folder)
    while stream.is_alive() and ids:
        try:
            with mine.begin_letters(kit.NAME) as tx:
                tx.lock(ids[:1])
                time.sleep(letter)
                tx.execute(Change(pa.table({"id": ids[:1], "status": ["REPROCESSED"]}), history(ids[:1], "REPROCESSED")))
                tx.execute(Commit())
            log.append("letter")
            ids.pop(0)
        except CommitConflict:
            log.append("letter again")
    stream.join()
    counts = {what: log.count(what) for what in ("batch", "batch again", "letter", "letter again")}
    assert counts["batch"] >= 4 and counts["letter"] >= 4, counts
    assert abs(counts["batch"] - counts["letter"]) <= 0.4 * counts["batch"] + 2, counts
    assert counts["batch again"] + counts["letter again"] <= 3, counts


def test_a_dead_reprocess_stalls_the_stream_once_at_most(folder: Path) -> None:
    """A request that a killed process left behind is not waited for; nor are letters stalled by what a killed stream left."""
    store = open_store(folder)
    number = kit.epoch(store)
    script = (
        "import sys, os; from kit import delta_kit as kit; from dedup.delta import DeltaStore\n"
        "s = DeltaStore(sys.argv[1]); t = s._states.turns(kit.NAME)\n"
        "from dedup.delta import epoch; t.letters_turn.write(epoch._sign()); t.batch_turn.write(epoch._sign()); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(folder / "state")]
    assert subprocess.run(command, check=False).returncode == -9
    started = time.monotonic()
    kit.process(store, number, kit.events([1]))
    with open_store(folder).begin_letters(kit.NAME):
        pass
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("damage", "says"),
    of_which(
        2,
        [
            ("status = 'OPEN' WHERE sequence_number = 2", "another status"),
            ("key = x'00000000000000000000000000000000' WHERE sequence_number = 1", "hold a key that is not reserved"),
            ("blocked_by = null WHERE sequence_number = 2", "another blocked_by"),
            ("status = 'LOST' WHERE sequence_number = 3", "another letter than the ledger says"),
        ],
    ),
)
def test_contradictions_between_letters_and_ledger_are_told(folder: Path, damage: str, says: str) -> None:
    """What somebody does to the table of letters behind our back is found by verify."""
    store = open_store(folder)
    park(store, kit.epoch(store), [1, 2, 3])
    assert store.problems(kit.NAME) == []
    table = DeltaTable(str(folder / "state" / "dead_letters" / kit.NAME))
    column, _, rest = damage.partition(" = ")
    value, _, where = rest.partition(" WHERE ")
    table.update(updates={column: value}, predicate=where)
    assert any(says in line for line in open_store(folder).problems(kit.NAME)), open_store(folder).problems(kit.NAME)


def test_a_decision_must_reserve_what_its_records_and_letters_say(folder: Path) -> None:
    """A freed key that no history tells of is a contradiction."""
    store = open_store(folder)
    (letter,) = park(store, kit.epoch(store), [1], sequence=None)
    with store.begin_letters(kit.NAME) as tx:
        tx.lock([letter])
        tx.execute(Change(pa.table({"id": [letter], "holds_key": [False]}), history([letter], "RELEASED")))
        tx.execute(free(1))
        tx.execute(Commit())
    assert any("decision 3 reserved -1 keys more than it freed" in line for line in open_store(folder).problems(kit.NAME))


@pytest.mark.parametrize("events", [pytest.param(1, id="the first letter"), pytest.param(2, id="another letter", marks=pytest.mark.full)])
def test_letters_that_come_while_verify_reads_are_no_contradiction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int) -> None:
    """A stream parks an event after the look at the ledger and before the look at the letters: each is compared as of one decision."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run, real = orders.consumer(place.store(), sequence_key="data.id", budget=None), verify.letters_now
    for number in range(events):
        run(orders.batch(orders.event(number, f"o{number}", 1 - 2 * number)), number)

    def beside(*given: Any) -> Any:
        monkeypatch.setattr(verify, "letters_now", real)
        run(orders.batch(orders.event(5, "late", -1)), events)
        return real(*given)

    monkeypatch.setattr(verify, "letters_now", beside)
    assert place.store().problems("shop") == []
    assert len(orders.letters(place.store())) == events
    orders.assert_proven(place.store())


@pytest.mark.parametrize("change", ["delete", "update", "merge"])
def test_texts_that_delta_rs_has_written_anew_are_found(tmp_path: Path, change: str) -> None:
    """Whatever a condition asks of them, the rows are those of Arrow's own filter, also beside files of ours."""
    rows = pa.table({"id": ["x" * 40] * 3, "told": ["sent", "sent", None], "n": [1, 2, 3], "body": [b"1", b"2", b"3"]})
    for part in (rows, rows.set_column(2, "n", pa.array([4, 5, 6]))):
        write_deltalake(tmp_path, part, mode="append")
    table = DeltaTable(tmp_path)
    if change == "delete":
        table.delete("n = 2")
    elif change == "update":
        table.update(predicate="n = 2", new_values={"n": 7})
    else:
        merge = table.merge(rows.slice(1, 1), "t.n = s.n", source_alias="s", target_alias="t")
        merge.when_matched_update({"n": "7"}).execute()
    whole, refused = tables.dataset(table).to_table(), 0
    for condition in (ds.field("id") == "x" * 40, ds.field("told") != "dead", ds.field("told").is_null() | (ds.field("told") == "sent")):
        found = tables.rows_where(tables.dataset(table), ["n", "body"], condition)
        expected = whole.filter(condition).select(["n", "body"])
        assert found.schema == expected.schema
        assert found.sort_by("n").to_pylist() == expected.sort_by("n").to_pylist()
        try:
            tables.dataset(table).to_table(filter=condition)
        except pa.ArrowNotImplementedError:
            refused += 1
    assert refused, "Arrow compares these texts now: rows_where is not needed any more"
