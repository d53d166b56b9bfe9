"""What reprocess hands back to the handler of an event that was a dead letter: the columns that the event came with, as they were."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import LettersUnread, SourceUnavailable
from deadletter.letter import extras_of
from dedup import Columns, Consumer, DeadLetters, Encrypt, ReprocessOptions, Selection, decode, reprocess
from dedup.core.store import Store
from fixtures.variants import of_which
from kit.orders import ORDER, assert_proven, consumer, letters
from kit.people import ALL, statuses
from kit.places import Place, other_place
from kit.redacting import OLD

OWN: dict[str, Any] = {
    "positions": Columns(topic="topic", partition="partition", sequence_number="number"),
    "idempotence_key": "id",
    "decode": None,
    "budget": None,
}
"""An input of its own schema, decoded before it comes."""


def rows(first: int, **columns: Any) -> pa.Table:
    """Events from this position on, with these columns."""
    count = len(next(iter(columns.values())))
    numbers = list(range(first, first + count))
    place = {"topic": ["o"] * count, "partition": pa.array([0] * count, pa.int32()), "number": numbers}
    return pa.table({**place, "id": [f"k{n}" for n in numbers], **columns})


class Strict:
    """A consumer that rejects all while `rejects` is true, and keeps what its handler was given."""

    def __init__(self, store: Store, **settings: Any) -> None:
        self.rejects, self.given = True, list[pa.Table]()
        self.run: Consumer = consumer(store, **{**OWN, **settings})
        self.run._handler = self.handle

    def handle(self, events: pa.Table, tx: Any) -> None:
        """The handler."""
        if self.rejects:
            tx.reject(events, pc.is_valid(events["topic"]), "not yet")
        else:
            self.given.append(events)

    def values(self, name: str) -> list[Any]:
        """(type, value) of a column for each event that it was given since it rejects no more."""
        return [(str(table[name].type), value) for table in self.given for value in table[name].to_pylist()]


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("name", of_which(1, ["data", "Data"]))
def test_a_letter_keeps_the_inputs_own_column_data(place: Place, name: str) -> None:
    """Who decodes before the consumer has the payload in `data`: without decode= it is a column of the input, and comes back."""
    strict = Strict(place.store(), idempotence_key=f"{name}.id")
    strict.run(rows(0, **{name: [{"id": "a", "amount": 5}]}), 0)
    strict.rejects = False
    assert reprocess(Selection(), strict.run).reprocessed == 1
    assert [value for _, value in strict.values(name)] == [{"id": "a", "amount": 5}]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_letter_with_a_column_that_decode_makes_stops_no_others(place: Place) -> None:
    """It was parked before the consumer had decode=: it is named and left, the others run, and so does it without decode=."""
    before = Strict(place.store())
    before.run(rows(0, data=[{"amount": 5}]), 0)
    before.run(rows(1, v=[1]), 1)
    after = Strict(place.store(), decode=decode.json(ORDER))
    before.rejects = after.rejects = False
    with pytest.raises(LettersUnread, match=r"1 of 2 letters .* o/0 0 .* it has a column 'data' .* no decode=") as error:
        reprocess(Selection(), after.run)
    assert (error.value.report.reprocessed, statuses(place.store())) == (1, ["OPEN", "REPROCESSED"])
    assert reprocess(Selection(), before.run).reprocessed == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_no_value_of_a_letter_becomes_that_of_another(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other columns of two rows or of none, which somebody made, fit no event: these letters are named and left, the third one runs."""
    strict, kept = Strict(place.store()), iter([rows(0, v=[1, 2]), rows(1, v=[3]), rows(2, v=[4]).slice(1)])
    monkeypatch.setattr("dedup.core.letters.extras_of", lambda _: extras_of(next(kept).select(["id", "v"])))
    strict.run(rows(0, v=[1, 3, 4]), 0)
    strict.rejects = False
    with pytest.raises(LettersUnread, match=r"2 of 3 letters .* o/0 0 .* it has 2 rows .* o/0 2 .* it has 0 rows") as error:
        reprocess(Selection(), strict.run)
    assert (error.value.report.reprocessed, strict.values("v")) == (1, [("int64", 3)])
    assert statuses(place.store()) == ["OPEN", "REPROCESSED", "OPEN"]
    assert_proven(place.store())


@pytest.mark.full
def test_a_column_data_of_the_input_goes_through_files_and_masks(place: Place, tmp_path: Any) -> None:
    """It is exported and imported; where redact= masked it, the log gives it again."""
    store, events = place.store(), rows(0, data=[{"amount": 5}])
    strict = Strict(store, redact=lambda contents: replace(contents, columns={}))
    strict.run.register_log_reader(lambda *asked: events)
    strict.run(events, 0)
    DeadLetters(store).export(ALL, tmp_path / "letters.jsonl")
    other = Strict(other_place(place, tmp_path).store())
    other.run.register_log_reader(lambda *asked: events)
    other.run(events.slice(0, 0), 0)
    assert DeadLetters(other.run.store).import_(tmp_path / "letters.jsonl", by="ann").imported == 1
    for one in (strict, other):
        one.rejects = False
        assert reprocess(Selection(), one.run).reprocessed == 1
        assert [value for _, value in one.values("data")] == [{"amount": 5}]


DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

CHANGED: list[tuple[pa.Array, pa.Array]] = [
    (pa.array([7]), pa.array(["7-b"])),
    (pa.array([2**53 + 1]), pa.array([0.5])),
    (pa.array([{"a": 1}]), pa.array([{"a": 1, "b": 2}])),
    (pa.array([DAY], pa.timestamp("us", "UTC")), pa.array([DAY], pa.timestamp("us"))),
]
"""A column before its type changed, and after."""


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(("before", "after"), of_which(2, CHANGED))
def test_each_letter_is_run_with_its_columns_as_they_came(place: Place, before: pa.Array, after: pa.Array) -> None:
    """A column changes its type between two batches: the letters of both run, and no value becomes another one beside its neighbour."""
    strict = Strict(place.store())
    strict.run(pa.concat_tables([rows(0, v=before), rows(1, v=before)]), 0)
    strict.run(rows(2, v=after), 1)
    strict.rejects = False
    assert reprocess(Selection(), strict.run).reprocessed == 3
    assert strict.values("v") == [(str(v.type), v[0].as_py()) for v in (before, before, after)]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_sequence_whose_columns_change_their_type_stays_in_order(place: Place) -> None:
    """Each letter waits for the one before it, whichever of them fit into one table; those of other sequences go on."""
    strict = Strict(place.store(), sequence_key="s")
    for number, (value, sequence) in enumerate([(1, "a"), ("2", "a"), (3, "a"), ("4", "b"), (5, "a")]):
        strict.run(rows(number, v=[value], s=[sequence]), number)
    refused: set[Any] = {"2"}

    def handle(events: pa.Table, tx: Any) -> None:
        bad = pa.array([value in refused for value in events["v"].to_pylist()])
        strict.given.append(tx.reject(events, bad, "not yet"))

    strict.run._handler = handle
    done = reprocess(Selection(), strict.run)
    assert (done.reprocessed, done.failed, done.waiting) == (2, 1, 2)
    refused.clear()
    assert reprocess(Selection(), strict.run).reprocessed == 3
    assert [value for _, value in strict.values("v")] == [1, "4", "2", 3, 5]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_column_that_came_later_is_null_before(place: Place) -> None:
    """Letters that differ in nothing but columns that some lack are run at once."""
    strict = Strict(place.store())
    strict.run(rows(0, v=[1]), 0)
    strict.run(rows(1, v=[2], w=["x"]), 1)
    strict.rejects = False
    assert reprocess(Selection(), strict.run).reprocessed == 2
    assert len(strict.given) == 1 and strict.values("w") == [("string", None), ("string", "x")]


@pytest.mark.fast_on("postgres")
def test_only_what_became_lost_is_reported_as_lost(place: Place) -> None:
    """The log lost the event of a letter that waits behind another one, which nobody selected: it goes on to wait, and is reported so."""
    columns = Columns(topic="topic", partition="partition", sequence_number="number", body="raw")
    strict, skip = Strict(place.store(), sequence_key="s", positions=columns, max_body=10), ReprocessOptions(skip_missing=True)
    events = rows(0, s=["q", "q"], raw=[b"x", b"x" * 20])
    strict.run.register_log_reader(lambda *asked: events.slice(0, 0))
    strict.run(events, 0)
    strict.rejects = False
    done = reprocess(Selection(id=letters(place.store())[1]["id"]), strict.run, options=skip)
    assert (done.lost, done.waiting, statuses(place.store())) == (0, 1, ["OPEN", "BLOCKED"])
    done = reprocess(Selection(), strict.run, options=skip)
    assert (done.lost, done.reprocessed, statuses(place.store())) == (1, 1, ["REPROCESSED", "LOST"])
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_letters_that_cannot_be_read_keep_no_others_from_running(place: Place) -> None:
    """They stand first, more of them than a limit allows: those behind them are run, and a broker that is away is asked once."""
    columns = Columns(topic="topic", partition="partition", sequence_number="number", body="raw")
    strict, asked = Strict(place.store(), positions=columns, max_body=10), list[Any]()

    def away(*position: Any) -> pa.Table:
        asked.append(position)
        raise SourceUnavailable("the broker does not answer")

    strict.run.register_log_reader(away)
    strict.run(rows(0, raw=[b"x" * 20] * 12 + [b"x"] * 3), 0)
    strict.rejects = False
    with pytest.raises(LettersUnread, match="12 of 14 letters") as error:
        reprocess(Selection(), strict.run, options=ReprocessOptions(limit=2))
    report = error.value.report
    assert (report.reprocessed, len(report.unread), len(asked)) == (2, 12, 1)
    assert statuses(place.store()) == ["OPEN"] * 12 + ["REPROCESSED"] * 2 + ["OPEN"]
    assert_proven(place.store())


def away(*position: Any) -> pa.Table:
    """The log of a broker that does not answer."""
    raise SourceUnavailable("the broker does not answer")


def gone(*position: Any) -> pa.Table:
    """A log that has none of the events any more."""
    return rows(0, raw=[b"x"]).slice(1)


UNREAD: list[tuple[dict[str, Any], Any, str]] = [
    ({"max_body": 10}, None, "register_log_reader"),
    ({"max_body": 10}, away, "does not answer"),
    ({"max_body": 10}, gone, "any more"),
    ({"redact": Encrypt(OLD)}, None, "nothing opens it"),
]
"""Settings under which letters keep only a part of their events, what reads the log, and why they cannot be had."""


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(("settings", "reader", "why"), of_which(2, UNREAD))
def test_many_letters_that_cannot_be_read_take_few_steps(
    place: Place, settings: Any, reader: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small limit and rate are, which count those behind them alone; a run fetches no contents of letters outside a transaction."""
    at = Columns(topic="topic", partition="partition", sequence_number="number", body="raw")
    Strict(place.store(), positions=at, **settings).run(rows(0, raw=[b"x" * 20] * 60), 0)
    Strict(place.store(), positions=at).run(rows(60, raw=[b"y"] * 40), 1)
    store, pauses = place.store(), list[float]()
    strict = Strict(store, positions=at, max_body=10)
    strict.rejects, steps = False, counted(store, monkeypatch)
    if reader is not None:
        strict.run.register_log_reader(reader)
    options = ReprocessOptions(limit=3, rate=1, sleep=pauses.append)
    look = reprocess(Selection(), strict.run, dry_run=True, options=options)
    assert (look.selected, len(look.unread)) == ((63, 60) if reader is None else (3, 0))
    assert len(steps) <= 24
    steps.clear()
    with pytest.raises(LettersUnread, match=f"60 of 63 letters .* and 50 more: .*{why}") as error:
        reprocess(Selection(), strict.run, options=options)
    report = error.value.report
    assert (report.reprocessed, report.tried, [table.num_rows for table in strict.given]) == (3, 63, [1, 1, 1])
    assert "whole" not in steps and len(steps) <= 24 and max(pauses) <= 3
    assert statuses(place.store()) == ["OPEN"] * 60 + ["REPROCESSED"] * 3 + ["OPEN"] * 37
    assert_proven(place.store())


def counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this store is asked for from here on: the names of its functions; `whole` for letters with all their columns."""
    steps, letters_of, begin = list[str](), store.letters, store.begin_letters

    def ask(selection: Selection, columns: Any = None) -> pa.Table:
        steps.append("letters" if columns else "whole")
        return letters_of(selection, columns)

    def open_one(*given: Any, **named: Any) -> Any:
        steps.append("begin_letters")
        return begin(*given, **named)

    monkeypatch.setattr(store, "letters", ask)
    monkeypatch.setattr(store, "begin_letters", open_one)
    return steps


@pytest.mark.fast_on("postgres")
def test_letters_side_by_side_are_read_from_the_log_at_once(place: Place) -> None:
    """One read for a run of positions, and for no others; where one of them is another event, that one alone is not run."""
    columns = Columns(topic="topic", partition="partition", sequence_number="number", body="raw")
    strict, spans = Strict(place.store(), positions=columns, max_body=10), list[tuple[int, int]]()
    events = rows(0, raw=[str(n).encode() * (1 if n == 4 else 20) for n in range(6)])
    log = [events.set_column(4, "raw", [[b"other" if n == 1 else raw for n, raw in enumerate(events["raw"].to_pylist())]]), events]

    def read(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
        spans.append((first, last))
        return log[0].slice(first, last - first + 1)

    strict.run.register_log_reader(read)
    strict.run(events, 0)
    strict.rejects = False
    with pytest.raises(LettersUnread, match=r"another event at .* 1 than") as error:
        reprocess(Selection(), strict.run)
    assert (error.value.report.reprocessed, spans[0], spans[-1], len(spans)) == (5, (0, 3), (5, 5), 6)
    log.pop(0)
    assert reprocess(Selection(), strict.run).reprocessed == 1
    assert sorted(value for _, value in strict.values("body")) == sorted(events["raw"].to_pylist())
    assert_proven(place.store())
