"""The outbox on Delta where a person, or another process, commits beside the dispatcher."""

from __future__ import annotations

import datetime as dt
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from checkpoint.errors import StoreError, StoreRestored, StoreUnavailable
from dedup.core.messages import Asked, Chosen, Failed, Marks, State
from dedup.delta import engine as of_engine
from dedup.delta import erasure, tables, upkeep
from dedup.delta import messages as of_messages
from dedup.delta import outbox as of_outbox
from dedup.delta.commit import SinkPublisher
from dedup.delta.engine import DeltaRs
from dedup.delta.messages import OutboxSnapshot
from dedup.outbox import Call, Dispatcher
from dedup.signals.standing import look
from dedup.verify import verify
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event
from kit.outgoing import Receiver, dispatcher, made, publisher
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta


@pytest.fixture
def lake(tmp_path: Path) -> DeltaPlace:
    """Two messages that wait."""
    place = DeltaPlace(tmp_path)
    send(place, batch(event(0, "a"), event(1, "b")), 0)
    return place


def send(place: DeltaPlace, rows: pa.Table, number: int) -> None:
    """A batch with a message for each event."""
    run = consumer(place.store(), query=None)
    run._handler = None

    @run.foreach_batch
    def handle(rows: pa.Table, tx: Any) -> None:
        tx.publish(pa.table({"body": pc.struct_field(rows["data"], "id")}), "out")

    run(rows, number)


def states(place: DeltaPlace) -> list[str]:
    """Of the messages, ascending."""
    return [e.state.name for e in place.store().outbox("shop").entries(Chosen(limit=None))]


@contextmanager
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table takes what is published."""

    def refuse(*_: Any) -> None:
        raise OSError("403 Forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(SinkPublisher, "_add", refuse)
        yield


def test_messages_that_do_not_show_yet_are_read_without_publishing(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a table takes no commit, whoever looks for the cause sees each message once, with its body, and changes nothing."""
    dispatcher(lake, Receiver()).once()
    with away(monkeypatch):
        with pytest.raises(StoreUnavailable):
            send(lake, batch(event(2, "c"), event(3, "d")), 1)
        before, outbox = lake.files(), lake.store().outbox("shop")
        found = outbox.entries(Chosen(limit=None))
        assert [(e.state.name, e.size) for e in found] == [("SENT", 1)] * 2 + [("WAITING", 1)] * 2
        assert [outbox.message(e.number).body for e in found] == [b"a", b"b", b"c", b"d"]  # type: ignore[union-attr]
        assert (outbox.lag().waiting, outbox.topics(), outbox.count()) == (2, ["out"], 4)
        standing = look(lake.store(), "shop")
        assert standing.outbox.waiting == 2 and standing.unpublished_since is not None
    assert lake.files() == before
    assert lake.store().publish("shop") == 1
    assert outbox.count() == 4 and len(states(lake)) == 4


def test_messages_whose_files_are_gone_hide_no_others(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person has to decide about them: until then what is there is shown."""
    there = {*lake.folder.rglob("messages/*.parquet")}
    with away(monkeypatch), pytest.raises(StoreUnavailable):
        send(lake, batch(event(2, "c")), 1)
    (gone,) = {*lake.folder.rglob("messages/*.parquet")} - there
    gone.unlink()
    assert states(lake) == ["WAITING"] * 2


def test_what_a_person_decides_while_messages_are_sent_stays(lake: DeltaPlace) -> None:
    """A message that is discarded while it is in hand, and cannot be sent, is not waiting again afterwards."""
    mine = lake.store().outbox("shop")
    first, second = (e.number for e in mine.entries(Chosen()))
    with mine.turn(Asked()) as turn:
        assert lake.store().outbox("shop").discard([first]) == 1
        turn.mark(Marks(sent=(second,), tried=(Failed(first, "Away", "later"),)))
    assert states(lake) == ["DISCARDED", "SENT"]


@pytest.mark.full
def test_a_message_that_was_sent_meanwhile_is_not_let_go_again(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two people retry a dead message; one of them is slow, and it has been sent in between: it is not sent a second time."""
    mine, real = lake.store().outbox("shop"), DeltaRs.append
    first = mine.entries(Chosen())[0].number
    with mine.turn(Asked()) as turn:
        turn.mark(Marks(dead=(Failed(first, "No", "no"),)))

    def after_the_other(self: DeltaRs, *given: Any) -> None:
        monkeypatch.setattr(DeltaRs, "append", real)
        assert lake.store().outbox("shop").retry([first]) == 1
        with mine.turn(Asked()) as turn:
            turn.mark(Marks(sent=tuple(m.number for m in turn.messages)))
        real(self, *given)

    slow = lake.store().outbox("shop")
    monkeypatch.setattr(DeltaRs, "append", after_the_other)
    assert slow.retry([first]) == 0
    assert states(lake) == ["SENT", "SENT"]


def test_a_dispatcher_sees_what_is_decided_right_behind_its_mark(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody commits between its mark and its next look: a message that is let go again comes with its next turn."""
    mine, real = lake.store().outbox("shop"), DeltaRs.append
    first, second = (e.number for e in mine.entries(Chosen()))
    with mine.turn(Asked()) as turn:
        turn.mark(Marks(dead=(Failed(first, "No", "no"),)))

    def and_retried(self: DeltaRs, *given: Any) -> None:
        real(self, *given)
        monkeypatch.setattr(DeltaRs, "append", real)
        assert lake.store().outbox("shop").retry([first]) == 1

    with mine.turn(Asked()) as turn:
        monkeypatch.setattr(DeltaRs, "append", and_retried)
        turn.mark(Marks(sent=(second,)))
    with mine.turn(Asked()) as turn:
        assert [m.number for m in turn.messages] == [first]


@pytest.mark.full
def test_a_running_consumer_keeps_the_files_of_its_outbox_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a dispatcher that goes on: each message leaves once, in order, also of those whose files were written anew meanwhile."""
    monkeypatch.setattr(upkeep, "COMPACT_EVERY", 5)
    delta = DeltaPlace(tmp_path)
    delta.create_sink()
    run, receiver = publisher(delta.store()), Receiver()
    goes_on = dispatcher(delta, receiver, limit=3)
    for number in range(20):
        run(batch(event(number, f"o{number}", 0)), number)
        if number % 2:
            goes_on.once()
    goes_on.once()
    assert receiver.bodies() == [f"o{number}".encode() for number in range(20)] and set(states(delta)) == {"SENT"}
    both = [DeltaTable(log.parent) for log in (delta.folder / "state/outbox").rglob("_delta_log")]
    assert [len(table.file_uris()) < 8 for table in both] == [True, True]
    assert_proven(delta.store())


@pytest.mark.full
def test_a_turn_costs_the_same_however_many_messages_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are done are not in the dispatcher's memory, and neither table is opened or read as a whole again."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    run, receiver = publisher(place.store()), Receiver()
    outbox: Any = place.store().outbox("shop")
    goes_on = Dispatcher(outbox, Call(receiver), limit=4)
    for number in range(3):
        run(batch(*(event(10 * number + i, f"{number}-{i}", 0) for i in range(10))), number)
        goes_on.once()
    assert outbox._found._open.num_rows == 0 and len(receiver.got) == 30
    run(batch(event(30, "late", 0)), 3)
    read, real = list[Any](), of_messages.read_columns

    def noting(table: DeltaTable, columns: list[str], where: Any = None) -> pa.Table:
        read.append(where is not None)
        return real(table, columns, where)

    for module in (of_messages, of_outbox):
        monkeypatch.setattr(module, "read_columns", noting)
    monkeypatch.setattr(of_messages, "_latest", refused)
    monkeypatch.setattr(tables, "open_table", refused)
    goes_on.once()
    assert len(receiver.got) == 31 and read and all(read)
    monkeypatch.undo()
    assert set(states(place)) == {"SENT"} and outbox.count() == 31


def tables_of(folder: Path, seqs: Sequence[int], size: int) -> tuple[DeltaTable, DeltaTable]:
    """A table of messages, one of so many bytes for each of these decisions, and one of marks, which is empty."""
    engine, handles = DeltaRs(None), []
    for name, schema in (("messages", of_messages.MESSAGES_TABLE), ("marks", of_messages.MARKS)):
        of_outbox.create(engine, str(folder / name), schema, "shop")
        handles.append(engine.handle(str(folder / name)))
    messages, marks = handles
    for seq in seqs:
        rows = of_outbox.numbered(made(1, 1, size), seq, 0, dt.datetime.now(dt.UTC))
        engine.append(messages.look(), rows, {"shop": seq})
    return messages.look(), marks.look()


def found_in(snapshot: OutboxSnapshot) -> list[Any]:
    """All that a snapshot says."""
    rows = [table.sort_by("number").select(sorted(table.column_names)).to_pylist() for table in (snapshot._open, snapshot._all)]
    return [*rows, snapshot._ahead.sort_by("number").to_pylist(), snapshot._last, snapshot.turn, snapshot.dispatcher]


class Outside:
    """What others do to both tables."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.engine, self.dice, self.seq = DeltaRs(None), dice, 0
        tables_of(folder, (), 0)
        self.uris = [str(folder / name) for name in ("messages", "marks")]
        self.handles = self.opened()

    def opened(self) -> list[Any]:
        """Handles of somebody of his own."""
        return [self.engine.handle(uri) for uri in self.uris]

    def tables(self) -> list[DeltaTable]:
        """As of now."""
        return [handle.look() for handle in self.handles]

    def send(self) -> None:
        """Some messages of one decision."""
        self.seq += 1
        rows = of_outbox.numbered(made(self.dice.randrange(1, 4), 2), self.seq, 0, dt.datetime.now(dt.UTC))
        self.engine.append(self.tables()[0], rows, {"shop": self.seq})

    def mark(self) -> None:
        """Some messages that are not done are; or somebody begins to dispatch."""
        now = OutboxSnapshot(*self.tables())
        numbers = [n for n in now._open["number"].to_pylist() if self.dice.random() < 0.5]
        rows = [of_outbox._row(of_outbox.CLAIM, State.WAITING)] if self.dice.random() < 0.3 else []
        for number in numbers:
            state = self.dice.choice([State.SENT, State.DEAD, State.WAITING, State.DISCARDED])
            failed = Failed(number, "No", str(self.dice.random())) if state in (State.DEAD, State.WAITING) else None
            person = {"set_by": "ann"} if self.dice.random() < 0.3 else {}
            rows.append({**of_outbox._row(number, state, self.dice.randrange(3), failed), **person})
        if rows:
            turn = of_outbox._of_turn(rows, now.turn + 1, f"{self.dice.randrange(3)}/x")
            self.engine.append(now.marks, turn, {of_outbox.APP: now.turn + 1})

    def join(self) -> None:
        """Few large files."""
        self.engine.compact(self.dice.choice(self.tables()), 1 << 20, 10)

    def erase(self) -> None:
        """What is told of failures leaves the marks."""
        done = [row["number"] for row in OutboxSnapshot(*self.tables())._all.filter(pc.field("state") == State.SENT).to_pylist()]
        erasure.blanked(self.engine, self.uris[1], of_outbox._failures_of(done or [0]))

    def purge(self) -> None:
        """Old messages leave, with their marks."""
        found, last = OutboxSnapshot(*self.tables()), self.dice.randrange(self.seq + 1)
        self.engine.delete(found.table, f"seq <= {last}")
        self.engine.delete(found.marks, f"number >= 0 and number < {(last + 1) << of_messages.ROWS_BITS} and turn < {found.turn}")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_a_snapshot_that_follows_is_the_one_that_reading_anew_gives(tmp_path: Path, seed: int) -> None:
    """Whatever others commit to both tables between two looks, also where messages are looked at before their marks."""
    dice = random.Random(seed)
    world = Outside(tmp_path, dice)
    messages, marks = world.opened()
    mine, followed = OutboxSnapshot(messages.look(), marks.look()), 0
    for step in range(14):
        getattr(world, dice.choice(["send", "mark", "mark", "join", *(["erase", "purge"] if step > 9 else [])]))()
        table = messages.look()
        if dice.random() < 0.3:
            world.send()
            world.mark()
        follows, anew = mine.follow(table, marks.look()), OutboxSnapshot(table, marks.look())
        assert not follows or found_in(mine) == found_in(anew)
        mine, followed = mine if follows else anew, followed + follows
    assert followed >= 7


def test_a_turn_reads_the_bodies_of_its_own_messages_alone(tmp_path: Path) -> None:
    """An old message is let go again: those between it and the newest one were sent long ago, and are not read into memory."""
    found, size = OutboxSnapshot(*tables_of(tmp_path, range(1, 11), 1 << 20)), 1 << 20
    chosen = found.waiting(Asked()).take([0, 9])
    pool, usual = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        bodies = [m.body for m in found.messages(chosen)]
    finally:
        pa.set_memory_pool(usual)
    assert [len(body or b"") > size for body in bodies] == [True, True] and (pool.max_memory() or 0) < 8 * size


@pytest.mark.parametrize("step", [1, 7])
def test_spark_is_asked_for_the_bodies_of_many_messages_and_one_old_one_alone(step: int) -> None:
    """More messages than are named one by one are asked for by ranges: each is in one, and what lies behind the old one is not."""
    wanted = {3, *range(10**6, 10**6 + 6_000 * step, step)}
    asked = of_engine._among(pa.table({"seq": pa.array(sorted(wanted), pa.int64()), "id": ["x"] * len(wanted)}))
    ranges = [range(int(first), int(last) + 1) for first, last in re.findall(r"BETWEEN (\d+) AND (\d+)", asked)]
    assert wanted <= set(itertools.chain(*ranges)) and sum(map(len, ranges)) <= 6_000 * step + 1 and len(asked) < 4_000


@pytest.mark.full
def test_marks_that_are_joined_into_few_files_are_not_read_again(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running consumer compacts its tables: the dispatcher goes on from what it knows, and sees what a person has decided meanwhile."""
    outbox = lake.store().outbox("shop")
    first, second = (e.number for e in outbox.entries(Chosen()))
    with outbox.turn(Asked()) as turn:
        turn.mark(Marks(tried=(Failed(first, "Away", "later"), Failed(second, "Away", "later"))))
    assert lake.store().outbox("shop").discard([first]) == 1
    for log in (lake.folder / "state/outbox").rglob("_delta_log"):
        upkeep.compact(str(log.parent), DeltaRs(None))
    monkeypatch.setattr(of_messages, "_marks", refused)
    with outbox.turn(Asked()) as turn:
        assert [m.number for m in turn.messages] == [second]


@pytest.mark.full
def test_a_purge_goes_on_beside_a_compaction(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who joins files while they are purged takes them away from the deletion, which looks again: nobody has to run it a second time."""
    send(lake, batch(event(2, "c")), 1)
    Dispatcher(lake.store().outbox("shop"), Call(lambda _: None)).once()
    delete, outbox, joined = DeltaRs.delete, lake.store().outbox("shop"), list[str]()

    def beside(self: DeltaRs, table: DeltaTable, where: str) -> None:
        if table.table_uri not in joined:
            joined.append(table.table_uri)
            DeltaTable(table.table_uri).optimize.compact()
        delete(self, table, where)

    monkeypatch.setattr(DeltaRs, "delete", beside)
    assert outbox.purge(dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1)) == 3 and len(joined) == 2
    assert lake.store().outbox("shop").count() == 0 and states(lake) == []


@pytest.mark.full
def test_a_mark_is_looked_for_in_files_out_of_which_a_purge_took_some(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """delta-rs writes their texts as another type than ours; whoever looks there for its own commit finds it or not, and no batch fails."""
    Dispatcher(lake.store().outbox("shop"), Call(lambda _: None)).once()
    (path,) = (lake.folder / "state/outbox").glob("**/marks")
    marks = DeltaTable(path)
    marks.delete(f"number = {max(marks.to_pyarrow_table()['number'].to_pylist())}")
    send(lake, batch(event(2, "c")), 1)
    append, tried = DeltaRs.append, list[str]()

    def meets_another(self: DeltaRs, table: DeltaTable, *rest: Any, **options: Any) -> None:
        tried.append(table.table_uri)
        append(self, table, *rest, **options)
        raise CommitFailedError("concurrent transaction")

    monkeypatch.setattr(DeltaRs, "append", meets_another)
    assert Dispatcher(lake.store().outbox("shop"), Call(lambda _: None)).once().sent == 2  # the new one, and the one without its mark
    assert tried and states(lake) == ["SENT"] * 3


@pytest.mark.parametrize("error", of_which(1, [DeltaError("403 Forbidden"), OSError("disk full")]))
def test_a_purge_that_cannot_be_made_is_told_as_our_error(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Upkeep goes on with the next consumer where one cannot be purged: what a table refuses is an error of dedup."""
    Dispatcher(lake.store().outbox("shop"), Call(lambda _: None)).once()

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(DeltaRs, "delete", refuse)
    with pytest.raises(StoreError, match=f"The outbox of 'shop' was not purged whole: {error}. Run it again") as told:
        lake.store().outbox("shop").purge(dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1))
    assert not isinstance(told.value, StoreUnavailable)


def refused(*_: Any) -> Any:
    """Nobody asks for that."""
    raise AssertionError("a whole table")


def test_verify_finds_messages_that_are_there_twice(lake: DeltaPlace) -> None:
    """Whoever copies rows of the outbox would have them sent again: the contradiction names the numbers."""
    (log,) = (lake.folder / "state/outbox").rglob("messages/_delta_log")
    table = DeltaTable(log.parent)
    assert_proven(lake.store())
    numbers = table.to_pyarrow_table()["number"].to_pylist()
    write_deltalake(log.parent, table.to_pyarrow_table(), mode="append")
    found = verify(lake.store(), "shop").contradictions
    assert [f"{len(numbers)} messages are in the outbox" in one and str(min(numbers)) in one for one in found] == [True]


@pytest.mark.full
def test_a_purge_publishes_nothing(lake: DeltaPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent shows already; so a dry run changes nothing, and no sink that is stuck holds it up."""
    dispatcher(lake, Receiver()).once()
    monkeypatch.setattr("dedup.delta.commit.SinkPublisher.publish", lambda _: pytest.fail("it publishes"))
    later = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    assert [lake.store().outbox("shop").purge(later, dry_run=dry) for dry in (True, False, False)] == [2, 2, 0]
    assert lake.store().outbox("nobody").purge(later) == 0


def test_a_purge_deletes_nothing_beside_a_ledger_that_was_restored(lake: DeltaPlace) -> None:
    """The next life numbers its messages above those that are there."""
    dispatcher(lake, Receiver()).once()
    DeltaTable(lake.store().path + "/ledger/shop").restore(1)
    with pytest.raises(StoreRestored):
        lake.store().outbox("shop").purge(dt.datetime.now(dt.UTC) + dt.timedelta(days=1))
    assert lake.store().outbox("shop").count() == 2
