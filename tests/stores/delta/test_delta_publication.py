"""What was decided is published once and in order, whoever publishes; a sink that was replaced or lost its files is told."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint import changes
from checkpoint.errors import CommitConflict, PublicationStuck, SinkMismatch
from deadletter.selection import Selection
from deadletter.store import Commit
from dedup.core.rows import ArrowRows
from dedup.delta import verify
from dedup.delta.commit import SinkPublisher
from dedup.delta.state import Agreement, ConsumerState
from kit import delta_kit as kit
from kit.delta_kit import open_store, show

pytestmark = pytest.mark.delta


def forget_transactions(folder: Path, name: str = "orders") -> None:
    """Set the property under which Delta drops old transaction ids at a checkpoint."""
    DeltaTable(str(folder / name)).alter.set_table_properties({"delta.setTransactionRetentionDuration": "interval 7 days"})


def create_again(folder: Path) -> None:
    """Another table under the old name of the sink, which is gone with its files."""
    shutil.rmtree(folder / "orders")
    kit.create(str(folder / "orders"))


def test_what_was_decided_is_published_by_the_next_transaction(folder: Path) -> None:
    """An instance that died after the decision left it to the next one, in both sinks, in order."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]), sinks=("orders", "audit"), text="x")
    assert show(folder) == show(folder, "audit") == []
    assert any("not published" in line for line in open_store(folder).problems(kit.NAME))
    kit.process(open_store(folder), number, kit.events([3], 2), 1, sinks=("orders", "audit"), text="y")
    assert show(folder) == show(folder, "audit") == [1, 2, 3]
    assert open_store(folder).problems(kit.NAME) == []


def test_publish_brings_what_is_decided_and_counts_it_once(folder: Path) -> None:
    """`publish` returns how many decisions it brought; again, and from another process, there is nothing left."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1]))
    assert (open_store(folder).publish(kit.NAME), open_store(folder).publish(kit.NAME), store.publish(kit.NAME)) == (1, 0, 0)
    assert show(folder) == [1]


def test_the_age_of_what_waits_to_be_published_is_known(folder: Path) -> None:
    """It is that of the first decision that a sink does not show, also to a process that looks again, and ends with its publication."""
    store = open_store(folder)
    number, watcher = kit.epoch(store), open_store(folder)
    kit.process(store, number, kit.events([9]))
    assert watcher.unpublished_since(kit.NAME) is None
    before = dt.datetime.now(dt.UTC)
    kit.die_before_publishing(store, number, kit.events([1], 1), 1)
    since = watcher.unpublished_since(kit.NAME)
    assert since is not None and before <= since <= dt.datetime.now(dt.UTC)
    assert open_store(folder).unpublished_since(kit.NAME) == since
    assert open_store(folder).publish(kit.NAME) == 1
    assert watcher.unpublished_since(kit.NAME) is open_store(folder).unpublished_since(kit.NAME) is None


@pytest.mark.full
def test_a_process_that_runs_hears_of_an_acceptance(folder: Path) -> None:
    """It knows a later publication than the person did, and goes on with the table that was accepted; its next decision says so, too."""
    running = open_store(folder)
    number = kit.epoch(running)
    kit.process(running, number, kit.events([1]))
    create_again(folder)
    with pytest.raises(PublicationStuck, match="not the table that was written to before"):
        kit.process(running, number, kit.events([2], 1), 1)
    open_store(folder).accept_sink(kit.NAME, "orders", lost=True, by="me", reason="re-created")
    kit.process(running, number, kit.events([3], 2), 2, reject=lambda key: True)
    kit.process(open_store(folder), number, kit.events([4], 3), 3)
    kit.process(running, number, kit.events([5], 4), 4)
    assert show(folder) == [4, 5]
    assert open_store(folder).problems(kit.NAME) == []


def test_letters_show_before_they_are_published(folder: Path) -> None:
    """A decided letter is a letter, whether or not its table shows it already."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([9]), reject=lambda key: True)
    kit.die_before_publishing(store, number, kit.events([1], 1), 1, reject=lambda key: True)
    assert open_store(folder).letters(Selection()).num_rows == 2
    store.publish(kit.NAME)
    assert open_store(folder).letters(Selection()).num_rows == 2


def test_two_publishers_at_once_publish_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher that is overtaken between its look and its commit finds the transaction id, does nothing, and counts nothing."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]))
    real, met = SinkPublisher._add, []

    def overtaken(self: SinkPublisher, *args: Any) -> bool:
        if not met:
            met.append(1)
            assert open_store(folder).publish(kit.NAME) == 1
        return real(self, *args)

    monkeypatch.setattr(SinkPublisher, "_add", overtaken)
    assert open_store(folder).publish(kit.NAME) == 0
    assert show(folder) == [1, 2] and DeltaTable(str(folder / "orders")).version() == 1


def test_a_sink_with_other_writers_and_compaction_shows_each_row_once(folder: Path) -> None:
    """Foreign appends and OPTIMIZE between our publications disturb neither side."""
    store = open_store(folder)
    number = kit.epoch(store)
    for i in range(4):
        kit.process(store, number, kit.events([i], i), i)
        other = DeltaTable(str(folder / "orders"))
        other.optimize.compact()
        write_deltalake(other, pa.table({"id": [100 + i], "text": ["foreign"]}, schema=kit.SINK), mode="append")
    assert show(folder) == [0, 1, 2, 3, 100, 101, 102, 103]
    assert store.problems(kit.NAME) == []


def test_a_sink_that_was_dropped_and_created_again_is_told_and_accepted(folder: Path) -> None:
    """Another table under the old name stops the consumer with the command to go on; accepted, only new rows go there."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    kit.process(store, number, kit.events([2], 1), 1)
    create_again(folder)
    for who in (store, open_store(folder)):
        with pytest.raises(PublicationStuck, match="sink accept shop orders"):
            kit.process(who, number, kit.events([3], 2), 2)
    assert any("dropped and created again" in line for line in open_store(folder).problems(kit.NAME))
    fresh = open_store(folder)
    with pytest.raises(PublicationStuck, match="--lost"):  # nothing tells a new process that decision 3 was published before the drop
        fresh.accept_sink(kit.NAME, "orders", by="me", reason="re-created")
    fresh.accept_sink(kit.NAME, "orders", lost=True, by="me", reason="re-created")
    assert fresh.publish(kit.NAME) == 0
    assert kit.process(fresh, number, kit.events([3], 2), 2).written == [3]
    assert show(folder) == [3]
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.full
def test_the_running_instance_accepts_without_losing_anything(folder: Path) -> None:
    """Where it is known that everything was published, nothing has to be given up."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    create_again(folder)
    store.accept_sink(kit.NAME, "orders", by="me", reason="re-created")
    kit.process(store, number, kit.events([2], 1), 1)
    assert show(folder) == [2]


def test_decided_rows_follow_an_accepted_sink(folder: Path) -> None:
    """Files that are still in the folder are published to the table that a person accepted there."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1]))
    shutil.rmtree(folder / "orders" / "_delta_log")
    kit.create(str(folder / "orders"))
    fresh = open_store(folder)
    with pytest.raises(PublicationStuck):
        fresh.publish(kit.NAME)
    fresh.accept_sink(kit.NAME, "orders", by="me", reason="log lost")
    assert fresh.publish(kit.NAME) == 1 and show(folder) == [1]


def test_a_sink_that_vanished_is_told(folder: Path) -> None:
    """Decided rows without a table: which decision, how many rows, and what to do."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]))
    shutil.rmtree(folder / "orders")
    with pytest.raises(PublicationStuck, match=r"Decision 2 \(2 rows\).*sink accept shop orders"):
        open_store(folder).publish(kit.NAME)


def test_vacuumed_files_of_an_unpublished_decision_are_told(folder: Path) -> None:
    """The files of a decision were deleted before it was published: an error, not a table that cannot be read."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]))
    for file in (folder / "orders").glob("*.parquet"):
        os.remove(file)
    with pytest.raises(PublicationStuck, match=r"1 of 1 files.*are gone.*--lost"):
        open_store(folder).publish(kit.NAME)
    fresh = open_store(folder)
    fresh.accept_sink(kit.NAME, "orders", lost=True, by="me", reason="vacuumed")
    assert open_store(folder).problems(kit.NAME) == []
    kit.process(fresh, number, kit.events([3], 2), 1)
    assert show(folder) == [3]


def test_a_column_added_between_decision_and_publication_is_no_obstacle(folder: Path) -> None:
    """The rows were checked against fewer columns; they still fit."""
    from deltalake.schema import Field, PrimitiveType

    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1]))
    DeltaTable(str(folder / "orders")).alter.add_columns([Field("more", PrimitiveType("long"))])
    assert open_store(folder).publish(kit.NAME) == 1
    assert DeltaTable(str(folder / "orders")).to_pyarrow_table().to_pylist() == [{"id": 1, "text": "", "more": None}]


def test_a_constraint_added_between_decision_and_publication_stops_it(folder: Path) -> None:
    """Files are never added behind the back of a CHECK constraint."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1]))
    DeltaTable(str(folder / "orders")).alter.add_constraint({"big": "id > 5"})
    with pytest.raises(PublicationStuck, match="CHECK constraint big"):
        open_store(folder).publish(kit.NAME)
    assert show(folder) == []


def test_a_sink_added_later_gets_what_is_written_from_then_on(folder: Path) -> None:
    """A new name in the handler needs no ceremony."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.process(store, number, kit.events([1]))
    kit.create(str(folder / "late"))
    kit.process(store, number, kit.events([2], 1), 1, sinks=("orders", "late"))
    assert (show(folder), show(folder, "late")) == ([1, 2], [2])


def test_after_a_reset_nothing_old_comes_up_in_new_sinks(folder: Path) -> None:
    """Decided and unpublished rows of the old life are dropped where their sink is gone; the keys are new again."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2]))
    shutil.rmtree(folder / "orders")
    open_store(folder).amend(kit.NAME, changes.reset, by="me", reason="again")
    kit.create(str(folder / "orders"))
    fresh = open_store(folder)
    assert kit.process(fresh, number, kit.events([1, 2])).written == [1, 2]
    assert show(folder) == [1, 2] and open_store(folder).problems(kit.NAME) == []


def test_a_transaction_of_a_fenced_instance_publishes_nothing_of_its_own(folder: Path) -> None:
    """Its files lie in the sink's folder and no commit names them."""
    old, new = open_store(folder), open_store(folder)
    number = kit.epoch(old)
    with pytest.raises(CommitConflict), old.begin(kit.NAME, number) as tx:
        tx.write("orders", ArrowRows(pa.table({"id": [1]})))
        kit.process(new, number, kit.events([2]))
        tx.execute(Commit())
    assert show(folder) == [2] and len(list((folder / "orders").glob("*.parquet"))) == 2


def test_several_decisions_are_published_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink's transaction id says that everything up to it is there: the older decision comes first."""
    store = open_store(folder)
    number = kit.epoch(store)
    with monkeypatch.context() as patch:
        patch.setattr(SinkPublisher, "publish", lambda self, fresh=None: 0)
        for i in range(3):
            kit.process(store, number, kit.events([i], i), i)
    assert show(folder) == []
    assert open_store(folder).publish(kit.NAME) == 3
    assert show(folder) == [0, 1, 2]


def test_staged_rows_of_dead_attempts_are_cleared_in_time(folder: Path) -> None:
    """A week old and named by no pending decision: gone; anything younger stays."""
    store = open_store(folder)
    kit.epoch(store)
    old, young = (folder / "state" / "staged" / kit.NAME / n / "part.parquet" for n in ("old", "young"))
    for file in (old, young):
        file.parent.mkdir(parents=True)
        file.touch()
    os.utime(old, (0, 0))
    store.maintain(kit.NAME)
    assert not old.exists() and young.exists()


def test_files_that_a_waiting_decision_lists_survive_maintenance(folder: Path) -> None:
    """Their table does not name them yet, and however old they are they are the only ones with those letters."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1, 2, 3]), reject=lambda key: key == 3)
    letters = Path(store._states.of(kit.NAME).letters_uri)
    (waiting,) = letters.rglob("*.parquet")
    os.utime(waiting, (0, 0))
    store.maintain(kit.NAME)
    assert waiting.exists()
    fresh = open_store(folder)
    assert fresh.publish(kit.NAME) == 1 and fresh.letters(Selection()).num_rows == 1 and show(folder) == [1, 2]


def test_a_sink_that_forgets_transactions_is_refused(folder: Path) -> None:
    """delta.setTransactionRetentionDuration on a sink stops the first write, with the statement that takes it off."""
    store = open_store(folder)
    number = kit.epoch(store)
    forget_transactions(folder)
    with pytest.raises(SinkMismatch, match=r"ALTER TABLE delta.`.*orders` UNSET TBLPROPERTIES \('delta.setTransactionRetentionDuration'\)"):
        kit.process(store, number, kit.events([1]))
    assert show(folder) == [] and store.batches(kit.NAME).num_rows == 0


def test_nothing_is_published_to_a_sink_that_may_have_forgotten(folder: Path) -> None:
    """A sink that got the property after the decision stops the next publisher: it cannot tell whether the rows are there already."""
    store = open_store(folder)
    number = kit.epoch(store)
    kit.die_before_publishing(store, number, kit.events([1]))
    forget_transactions(folder)
    with pytest.raises(PublicationStuck, match="UNSET TBLPROPERTIES") as told:
        open_store(folder).publish(kit.NAME)
    assert "Decision 2 (1 rows)" in str(told.value) and "sink accept" not in str(told.value)
    assert any("UNSET TBLPROPERTIES" in line for line in open_store(folder).problems(kit.NAME))
    assert show(folder) == []


def test_transaction_ids_say_when_they_were_written(folder: Path) -> None:
    """Delta drops ids without a time at once where they may expire: those in a sink have the time of their publication."""
    store = open_store(folder)
    kit.process(store, kit.epoch(store), kit.events([1]))
    entry = (folder / "orders" / "_delta_log" / f"{1:020}.json").read_text().splitlines()
    (txn,) = [json.loads(line)["txn"] for line in entry if "txn" in json.loads(line)]
    written = DeltaTable(str(folder / "orders")).history(1)[0]["timestamp"]
    assert abs(txn["lastUpdated"] - written) < 60_000


def test_a_header_without_the_version_of_its_sinks_is_read(folder: Path) -> None:
    """Ledgers of the time before headers told the sink's version go on: nothing is checked that was not written down."""
    from dedup.delta.ledger import Header

    store = open_store(folder)
    kit.process(store, kit.epoch(store), kit.events([1]))
    header = store._states.of(kit.NAME).header
    assert header.sinks[0].version == 0
    told = json.loads(header.to_json())
    del told["sinks"][0]["version"]
    assert Header.from_json(json.dumps(told)).sinks[0].version is None


def beside(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """While `verify` reads the log, right after it has looked at the sink of the first decision that has one, somebody does this."""
    add, done = verify._Sinks.add, list[object]()

    def added(self: Any, header: Any) -> None:
        add(self, header)
        if self._tables and not done:
            done.append(None)
            done.append(act())

    monkeypatch.setattr(verify._Sinks, "add", added)


def test_verify_beside_a_publication_misses_no_decision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another process publishes while the log is read is looked for in the sink as it is in the end."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in range(3):
        kit.process(store, number, kit.events([key], key), key)
    DeltaTable(str(folder / "orders")).optimize.compact()
    kit.die_before_publishing(store, number, kit.events([9], 9))
    beside(monkeypatch, lambda: open_store(folder).publish(kit.NAME))
    assert open_store(folder).problems(kit.NAME) == []
    assert show(folder) == [0, 1, 2, 9]


@pytest.mark.full
def test_verify_beside_a_vacuum_misses_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that leave the sink while the log is read are no loss."""
    store = open_store(folder)
    number = kit.epoch(store)
    for key in range(3):
        kit.process(store, number, kit.events([key], key), key)

    def cleaned() -> None:
        DeltaTable(str(folder / "orders")).optimize.compact()
        DeltaTable(str(folder / "orders")).vacuum(0, dry_run=False, enforce_retention_duration=False)

    beside(monkeypatch, cleaned)
    assert open_store(folder).problems(kit.NAME) == []


@pytest.mark.full
def test_a_look_beside_batches_takes_no_sink_for_an_older_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a sink and that at the ledger others may publish again: what is learned then was not to be seen before."""
    store = open_store(folder)
    number, keys = kit.epoch(store), itertools.count()

    def decide(count: int) -> None:
        for key in itertools.islice(keys, count):
            kit.process(store, number, kit.events([key], key), key)

    decide(2)
    unknown, met = Agreement._unknown, list[str]()

    def decided_meanwhile(self: Agreement, *about: Any, **options: Any) -> str | None:
        found = unknown(self, *about, **options)
        if found is not None and not met:
            met.append(found)
            decide(3)
        return found

    monkeypatch.setattr(Agreement, "_unknown", decided_meanwhile)
    beside(monkeypatch, lambda: decide(1))
    assert open_store(folder).problems(kit.NAME) == []
    assert met, "the look at the sink has met no decision that it did not know"


def test_what_others_publish_between_two_looks_is_no_restore(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide and publish after the ledger was read and before the sink is looked at again: that is no ledger of an older time."""
    store, undamaged = open_store(folder), ConsumerState.require_undamaged
    number, keys = kit.epoch(store), itertools.count()

    def decide() -> None:
        key = next(keys)
        kit.process(store, number, kit.events([key], key), key)

    decide()
    with open_store(folder)._states.caught_up(kit.NAME) as state:
        left = [decide]

        def meanwhile(self: ConsumerState) -> None:
            undamaged(self)
            if self is state and left:
                left.pop()()

        decide()
        monkeypatch.setattr(ConsumerState, "require_undamaged", meanwhile)
        sink = state.sinks.table(str(folder / "orders"))
        assert sink is not None
        state.require_in_step("orders", sink)
        decide()
        state.require_in_step("orders", sink)
    assert not left, "nothing came between the two looks"
    assert open_store(folder).problems(kit.NAME) == []
