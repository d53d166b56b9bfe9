"""State that was taken back by copying files: nothing is decided on it, nothing is lost in silence, and a person gets on."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from checkpoint import changes
from checkpoint.errors import PublicationStuck, StoreRestored
from checkpoint.head import Holder
from checkpoint.holders import this_process
from checkpoint.position import Partition
from deadletter.selection import Selection
from dedup import Consumer, DeadLetters
from dedup.core.messages import Asked
from dedup.delta import DeltaStore, tables
from dedup.delta.commit import SinkPublisher
from dedup.outbox import Call, Dispatcher, Message
from dedup.reprocessing.letters import reprocess
from dedup.verify import verify
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, flatten, ids, letters, orders
from kit.places import SINK, DeltaPlace

pytestmark = pytest.mark.delta

LATE = [event(n, f"late-{n}", n) for n in range(2, 20)]
"""What comes where the lost batches were: more events than they had."""


class Lake(DeltaPlace):
    """A place whose tables can be copied aside and back."""

    def open(self) -> DeltaStore:
        """What a new process would open."""
        store = self.store()
        assert isinstance(store, DeltaStore)
        return store

    def table(self, name: str) -> Path:
        """Where a part of it lies."""
        (messages,) = [*(self.folder / "state/outbox").glob("*/*/messages"), None][:1]
        places = {"state": self.folder / "state", "ledger": self.folder / "state/ledger/shop", "sink": self.folder / "sinks/orders"}
        places["merged"] = self.folder / "sinks/balances"
        return {**places, "letters": self.folder / "state/dead_letters/shop", "outbox": messages or Path()}[name]

    def copy(self, *names: str) -> Callable[[], None]:
        """Keep these; the answer copies them back."""
        kept = {name: self.folder / f"kept-{name}" for name in names}
        for name, to in kept.items():
            shutil.copytree(self.table(name), to)

        def back() -> None:
            for name, to in kept.items():
                place = self.table(name)
                shutil.rmtree(place)
                shutil.copytree(to, place)

        return back

    def decisions(self) -> int:
        """As the log of the ledger has them, whatever anybody thinks of it."""
        return DeltaTable(str(self.table("ledger"))).version()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A sink, letters and messages, with one batch in each."""
    place = Lake(tmp_path)
    place.create_sink()
    run(place)(batch(event(0, "a"), event(1, "b", -1)), 0)
    return place


def run(place: DeltaPlace, query: str = "q", **settings: Any) -> Consumer:
    """Rejects negative amounts; writes and publishes the others."""
    made = consumer(place.store(), query=query, **settings)
    made._handler = None

    @made.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        good = tx.reject(rows, pc.less(pc.struct_field(rows["data"], "amount"), 0), "negative")
        tx.write(flatten(good), "orders")
        tx.publish(pa.table({"body": flatten(good)["id"]}), "out")

    return made


def two_more(place: Lake, query: str = "q", first: int = 1) -> None:
    """Two batches of two events each, with a letter and messages."""
    run(place, query)(batch(event(2, "c"), event(3, "d", -1)), first)
    run(place, query)(batch(event(4, "e"), event(5, "f", -1)), first + 1)


def lose_newest_log_files(place: Lake, version: int) -> None:
    """Those above this version."""
    for file in (place.table("ledger") / "_delta_log").glob("*.json"):
        if int(file.stem) > version:
            file.unlink()


@pytest.mark.parametrize("what", of_which(1, ["ledger", "state", "newest log files"]))
def test_nothing_is_decided_on_a_state_that_was_copied_back(lake: Lake, what: str) -> None:
    """Sinks that are ahead of the ledger: an error before anything is decided or written; once put right, no event is missing."""
    version, back = lake.decisions(), lake.copy("state" if what == "state" else "ledger")
    rows = lake.copy("sink")
    two_more(lake)
    back() if what != "newest log files" else lose_newest_log_files(lake, version)
    before, files = lake.decisions(), sorted(lake.folder.rglob("*.parquet"))
    for number in (1, 2):
        with pytest.raises(StoreRestored, match=r"ahead|older state"):
            run(lake)(batch(*LATE), number)
    assert lake.decisions() == before and sorted(lake.folder.rglob("*.parquet")) == files
    assert any("older state" in line for line in verify(lake.store(), "shop").contradictions)
    rows()
    if what != "state":
        lake.open().amend("shop", changes.accept_restore, by="me", reason="copied back")
        lake.open().accept_sink("shop", "orders", by="me", reason="copied back")
    run(lake, "anew" if what != "state" else "q")(batch(*LATE), 1 if what == "state" else 0)
    assert sorted(ids(lake.read())) == sorted(["a", *(f"late-{n}" for n in range(2, 20))])
    assert_proven(lake.store())


@pytest.mark.parametrize("meanwhile", of_which(1, [6, 0]))
def test_a_sink_that_the_old_ledger_never_wrote_to_is_told_before_the_decision(tmp_path: Path, meanwhile: int) -> None:
    """The ledger was copied back to before it knew the sink, also where it has as many decisions by now: the handler's write is refused."""
    place = Lake(tmp_path)
    place.create_sink()
    run(place)(batch(event(0, None, body=b"no json")), 0)
    back = place.copy("state")
    two_more(place)
    back()
    files, one = sorted((tmp_path / "sinks").rglob("*.parquet")), run(place)
    for number in range(1, meanwhile + 1):
        one(batch(event(number, None, body=b"no json")), number)
    with pytest.raises(StoreRestored, match="'orders'"):
        one(batch(event(9, "late")), meanwhile + 1)
    assert sorted((tmp_path / "sinks").rglob("*.parquet")) == files and place.open().head("shop").batch_id == meanwhile


@pytest.mark.parametrize("ahead", of_which(1, ["letters", "outbox"]))
def test_tables_of_our_own_that_are_ahead_are_told(lake: Lake, ahead: str) -> None:
    """Ledger and sink were copied back together, dead letters or messages were not: no decision goes under a number that they have."""
    two_more(lake)
    back = lake.copy("ledger", "sink", *({"letters", "outbox"} - {ahead}))
    run(lake)(batch(event(6, "g"), event(7, "h", -1)), 3)
    back()
    before = lake.decisions()
    with pytest.raises(StoreRestored, match="dedup.dead_letters" if ahead == "letters" else "dedup.outbox"):
        run(lake)(batch(event(6, "g"), event(7, "h", -1)), 3)
    assert lake.decisions() == before


DOORS: dict[str, Callable[[DeltaStore], Any]] = {
    "takeover": lambda s: s.take_epoch("shop", Holder(*this_process(), "r"), takeover_after=0.1),
    "join": lambda s: s.join("shop", Holder(*this_process(), "r"), takeover_after=0.1),
    "publish": lambda s: s.publish("shop"),
    "dispatch": lambda s: s.outbox("shop").turn(Asked()).__enter__(),
    "reprocess": lambda s: reprocess(Selection(limit=None), consumer(s)),
    "letters": lambda s: s.begin_letters("shop").__enter__(),
    "gap": lambda s: s.amend("shop", changes.accept_gap, by="me", reason=""),
    "claim": lambda s: s.claim("shop", s.head("shop").epoch, "r", Partition("broker", "orders", 0), takeover_after=0.1),
}


def test_every_way_in_is_closed(lake: Lake) -> None:
    """Takeover, join, claim, publication, dispatch, reprocessing and people's decisions: each is told, and decides nothing."""
    back = lake.copy("state")
    two_more(lake)
    back()
    before = lake.decisions()
    for name, enter in DOORS.items():
        with pytest.raises(StoreRestored, match="older state"):
            enter(lake.open())
        assert lake.decisions() == before, name


@pytest.mark.parametrize(("what", "foreign"), of_which(1, [("sink", 9), ("letters", 0), ("sink", 0), ("outbox", 0)]))
def test_one_table_that_was_copied_back_is_told_and_accepted(lake: Lake, what: str, foreign: int) -> None:
    """A table that lacks a known publication stops the consumer, also where others have committed since; the newer one put back is fine."""
    back, table = lake.copy(what), lake.table(what)
    two_more(lake)
    run(lake)(batch(event(6, "g"), event(7, "h", -1)), 3)  # its header says how far each table is
    newest = lake.folder / "newest"
    shutil.copytree(table, newest)
    back()
    for _ in range(foreign if what == "sink" else 0):
        write_deltalake(str(table), pa.Table.from_pylist([], schema=SINK), mode="append")
    name = {"sink": "orders", "letters": "dedup.dead_letters", "outbox": "dedup.outbox"}[what]
    with pytest.raises(PublicationStuck, match=f"(?s)taken back.*sink accept shop {name}|restored.*sink accept shop {name}"):
        run(lake)(batch(event(8, "i"), event(9, "j", -1)), 4)
    assert verify(lake.store(), "shop").contradictions != []
    shutil.rmtree(table)
    shutil.copytree(newest, table)
    run(lake)(batch(event(8, "i"), event(9, "j", -1)), 4)
    assert ids(lake.read()) == ["a", "c", "e", "g", "i"] and len(letters(lake.store())) == 5
    assert_proven(lake.store())


@pytest.mark.full
def test_a_person_may_go_on_without_the_rows_of_a_sink(lake: Lake) -> None:
    """A sink that was copied back and accepted gets what is decided from then on."""
    back = lake.copy("sink")
    two_more(lake)
    back()
    lake.accept_sink()
    run(lake)(batch(event(6, "g")), 3)
    assert ids(lake.read()) == ["a", "g"]
    assert_proven(lake.store())


@pytest.mark.parametrize("more", of_which(1, [1, 0, -1]))
def test_a_running_process_sees_that_its_ledger_was_copied_back(lake: Lake, more: int) -> None:
    """What it knows of decisions that are gone counts no longer, however many another process has made meanwhile."""
    back = lake.copy("ledger")
    mine = lake.open()
    two_more(lake)
    known = mine.head("shop").seq
    back()
    for name in ("sink", "letters", "outbox"):  # so that no table bears witness
        shutil.rmtree(lake.table(name))
    lake.create_sink()
    other = lake.open()
    while other.head("shop").seq < known + more:
        other._states.of("shop").agreement._began = True
        other.take_epoch("shop", Holder(*this_process(), "r"), takeover_after=0.1)
    with pytest.raises(StoreRestored, match="this process has seen another one"):
        mine.publish("shop")


@pytest.mark.full
@pytest.mark.parametrize("letters_meanwhile", of_which(1, [True, False]))
def test_letters_that_were_copied_back_alone_are_read_and_not_exported(lake: Lake, letters_meanwhile: bool) -> None:
    """A file looks whole, so there is none where letters may be missing; whoever looks for the cause sees what is there."""
    back = lake.copy("letters", "ledger") if not letters_meanwhile else lake.copy("letters")
    two_more(lake)
    run(lake)(batch(event(8, "x")), 3)
    run(lake)(batch(event(9, "y")), 4)
    back()
    dead = DeadLetters(lake.open())
    with pytest.raises((StoreRestored, PublicationStuck), match="older"):
        dead.export(Selection(), io.BytesIO(), "jsonl")
    (found,) = dead.select(Selection()).to_pylist()
    assert dead.groups(Selection())["letters"].to_pylist() == [1]
    assert dead.show(found["id"]).row["sequence_number"] == 1 and dead.store.history(found["id"]).num_rows == 0
    assert any("older" in line for line in verify(lake.open(), "shop").contradictions)


def test_after_an_accepted_restore_no_message_is_taken_for_a_sent_one(lake: Lake) -> None:
    """Only the ledger was copied back: messages of lost decisions were sent, and the new ones get numbers of their own."""
    sent: list[Message] = []

    def dispatch() -> None:
        Dispatcher(lake.store().outbox("shop"), Call(sent.extend)).once()

    back = lake.copy("ledger")
    two_more(lake)
    dispatch()
    assert sorted(m.body or b"" for m in sent) == [b"a", b"c", b"e"]
    back()
    lake.open().amend("shop", changes.accept_restore, by="me", reason="copied back")
    one = run(lake, "anew")
    for number, key in enumerate("xyz"):  # one of them is decided under the number of a lost message
        one(batch(event(2 + number, key)), number)
    dispatch()
    assert sorted(m.body or b"" for m in sent[3:]) == [b"x", b"y", b"z"]
    assert_proven(lake.store())


def test_messages_are_sent_again_where_it_was_forgotten_that_they_were(lake: Lake) -> None:
    """What became of messages is copied back alone: nobody can tell, and the receiver knows them by their ids."""
    sent: list[Message] = []
    Dispatcher(lake.store().outbox("shop"), Call(sent.extend)).once()
    shutil.rmtree(lake.table("outbox").parent / "marks")
    Dispatcher(lake.store().outbox("shop"), Call(sent.extend)).once()
    assert len(sent) == 2 and sent[0].id == sent[1].id


@pytest.mark.full
def test_a_generation_that_was_copied_away_is_not_used_twice(lake: Lake) -> None:
    """Copied back to before an accepted restore: the sink shows a later generation; the next one is above all that it has met."""
    back = lake.copy("state")
    lake.open().amend("shop", changes.accept_restore, by="me", reason="first")
    two_more(lake, "second", 0)
    back()
    with pytest.raises(StoreRestored, match="later one"):
        run(lake)(batch(*LATE), 1)
    assert lake.open().amend("shop", changes.accept_restore, by="me", reason="again").generation == 2


@pytest.fixture
def vanishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Delete files that no commit names yet, right before the step `publish`."""

    def on(pattern: str) -> None:
        real = SinkPublisher.publish

        def publish(self: SinkPublisher) -> int:
            if any(self.state.decided[seq].kind == "batch" for seq in self.state.pending):
                for file in Path(self.root).parent.glob(pattern):
                    os.remove(file)
            return real(self)

        monkeypatch.setattr(SinkPublisher, "publish", publish)

    return on


@pytest.mark.parametrize(
    "pattern",
    of_which(
        1, ["sinks/orders/*.parquet", "state/dead_letters/shop/*.parquet", "state/outbox/*/*/messages/*.parquet", "state/staged/shop/*/*"]
    ),
)
def test_files_that_vanish_right_after_the_decision_are_not_committed(
    tmp_path: Path, vanishing: Callable[[str], None], pattern: str
) -> None:
    """VACUUM with retention 0 between decide and publish: an error in the very process that decided, and the table can be read."""
    place = Lake(tmp_path)
    place.create_sink()
    place.create_merge_sink("balances")
    made = run(place)
    handle = made._handler
    assert handle is not None
    made._handler = lambda rows, tx: (handle(rows, tx), tx.merge(flatten(rows), "balances", ["id"]))[0]
    vanishing(pattern)
    with pytest.raises(PublicationStuck, match=r"1 of 1 files with its rows are gone"):
        made(batch(event(0, "a"), event(1, "b", -1)), 0)
    for log in tmp_path.rglob("_delta_log"):
        if "ledger" not in str(log):
            DeltaTable(str(log.parent)).to_pyarrow_table()


def test_verify_finds_a_decision_that_a_sink_never_got(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision that lists files for a sink has a commit of that sink, also where later ones were published."""
    real = SinkPublisher._publish_one
    monkeypatch.setattr(SinkPublisher, "_publish_one", lambda self, header, entry: entry.name == "orders" or real(self, header, entry))
    one = run(lake)
    one(batch(event(2, "c"), event(3, "d", -1)), 1)
    monkeypatch.undo()
    one(batch(event(4, "e")), 2)
    (told,) = verify(lake.store(), "shop").contradictions
    assert "never published to 'orders'" in told and "(1 rows)" in told


def test_verify_finds_files_that_a_sink_lists_and_does_not_have(lake: Lake) -> None:
    """A file that went between the look and the commit cannot be prevented; it is found."""
    for file in lake.table("sink").glob("*.parquet"):
        file.unlink()
    (told,) = verify(lake.store(), "shop").contradictions
    assert "1 files with 1 rows" in told and "cannot be read" in told


@pytest.mark.full
def test_an_ordinary_batch_asks_for_no_more_than_its_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tables show is looked up once a process: from then on a batch asks each table it writes to once, as its publication needs."""
    one = run(lake)
    one(batch(*orders([2, 3])), 1)
    asked: list[str] = []
    real = tables.transaction_of
    monkeypatch.setattr(tables, "transaction_of", lambda table, app: (asked.append(app), real(table, app))[1])
    one(batch(*orders([4, 5])), 2)
    sinks = [app.rpartition("/")[2] for app in asked if app.count("/") > 2]
    assert sorted(sinks) == ["dedup.outbox", "orders"], asked
