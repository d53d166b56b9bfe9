"""Rows of single events whose columns change from event to event: few files and statements, and what each row says alone."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from test_values import create, read

from checkpoint.errors import HandlerError, RowsRefused, SinkMismatch
from dedup import Consumer
from dedup.pipeline.handlers import Event
from fixtures.variants import of_which
from kit.foreach_kit import bare
from kit.local_tasks import run_here, run_in_tasks
from kit.orders import batch, letters, orders
from kit.places import DeltaPlace, Place, PostgresPlace

NAMES = ["n", "i", "s"]
SETS = [("n", "i"), ("n", "s"), ("n", "s", "i")]
EVENTS = 1_000

Row = dict[str, Any]


def sink(place: Place, *, keys: bool = False) -> None:
    """A sink of a key, a number and a text; PostgreSQL counts the statements that insert into it."""
    if isinstance(place, PostgresPlace):
        create(place, "late", {"n": "bigint primary key" if keys else "bigint", "i": "integer", "s": "text"})
        place.execute("create table statements (rows bigint)")
        body = "begin insert into statements values (0); return null; end"
        place.execute(f"create function counted() returns trigger language plpgsql as '{body}'")
        place.execute("create trigger counted after insert on late for each statement execute function counted()")
    else:
        create(place, "late", {"n": pa.int64(), "i": pa.int32(), "s": pa.string()})


def pieces(place: Place, *, merged: bool = False) -> int:
    """Statements that inserted into the sink; files or merges of Delta."""
    if isinstance(place, PostgresPlace):
        return len(place.execute("select rows from statements"))
    from deltalake import DeltaTable

    assert isinstance(place, DeltaPlace)
    table = DeltaTable(place.path("late"))
    return table.version() if merged else len(table.file_uris())


def one_for_each(made: Consumer, rows: list[Row], how: str, **merge: Any) -> Consumer:
    """The consumer, whose handler writes, returns or merges the row with the number of its event."""

    @made.foreach(into="late" if how == "returned" else None)
    def book(event: Event, tx: Any) -> Any:
        row = rows[event.sequence_number]
        if how == "returned":
            return row
        return tx.merge(row, "late", **merge) if merge else tx.write(row, "late")

    return made


def alternating(number: int) -> Row:
    """A row whose columns change with its number."""
    values = {"n": number, "i": number % 7, "s": f"{number}"}
    return {name: values[name] for name in SETS[number % len(SETS)]}


def filled(row: Row) -> tuple[Any, ...]:
    """As the sink keeps it where nothing was before."""
    return tuple(row.get(name) for name in NAMES)


@pytest.mark.parametrize("how", ["written", "returned"])
def test_rows_with_changing_columns_make_few_files_and_statements(place: Place, how: str) -> None:
    """There are as many as sets of columns, not as changes from event to event; each row is stored as it is alone."""
    sink(place)
    rows = [alternating(number) for number in range(EVENTS)]
    assert one_for_each(bare(place.store()), rows, how)(batch(*orders(range(EVENTS))), 0).processed == EVENTS
    assert sorted(read(place, "late", NAMES)) == sorted(map(filled, rows), key=lambda row: row[0])
    assert pieces(place) <= len(SETS)


def test_merges_with_changing_columns_make_few_statements(place: Place) -> None:
    """Their number depends on the sets of columns, also where every key has rows of all of them, in any order."""
    sink(place, keys=True)
    dice = random.Random(1)
    rows = [{**alternating(number), "n": dice.randrange(50)} for number in range(EVENTS)]
    one_for_each(bare(place.store()), rows, "merged", keys="n")(batch(*orders(range(EVENTS))), 0)
    assert sorted(read(place, "late", NAMES)) == [filled(row) for _, row in sorted(in_order(rows).items())]
    assert pieces(place, merged=True) <= len(SETS) ** 2


def in_order(rows: list[Row], newer_by: str | None = None, before: dict[int, Row] | None = None) -> dict[int, Row]:
    """What a dictionary holds once these rows were merged into it one after the other."""
    state = {key: dict(row) for key, row in (before or {}).items()}
    for row in rows:
        old = state.get(row["n"])
        if newer_by and old is not None and (row[newer_by] is None or (old[newer_by] is not None and row[newer_by] <= old[newer_by])):
            continue
        if row.get("gone"):
            state.pop(row["n"], None)
        else:
            state[row["n"]] = {**(old or {}), **{name: value for name, value in row.items() if name != "gone"}}
    return state


def said(dice: random.Random, count: int, newer: bool, gone: bool) -> list[Row]:
    """Rows of few keys with different columns; some delete."""
    ages = dice.sample(range(1_000), count)
    rows = []
    for number in range(count):
        row: Row = {"n": dice.randrange(8)} | ({"gone": False} if gone else {}) | ({"i": ages[number]} if newer else {})
        others = dice.choice([["s"], ["u"], ["s", "u"], []] if newer else [["s"], ["i", "s"], ["i", "u"]])
        row |= {name: number if name == "i" else f"{number}" for name in others}
        if gone and dice.random() < 0.3:
            row = {"n": row["n"], "gone": True}
        rows.append(row)
    return rows


@pytest.mark.full
@pytest.mark.parametrize(
    ("newer", "of_events"),
    of_which(2, [(True, True), (False, False), (True, False), (False, True)]),
    ids=["newest of events", "last of a batch", "newest of a batch", "last of events"],
)
def test_merges_with_changing_columns_end_as_if_one_by_one(place: Place, newer: bool, of_events: bool) -> None:
    """The last row of a key counts, or the newest, a column that it lacks keeps its value, and what was deleted begins anew."""
    delta = isinstance(place, DeltaPlace)
    columns: Row = {"n": pa.int64() if delta else "bigint primary key", "i": pa.int32() if delta else "integer"}
    create(place, "late", columns | {name: pa.string() if delta else "text" for name in ("s", "u")})
    merge: Row = {"keys": "n"} | ({"newer_by": "i"} if newer else {"delete_when": "gone"})
    dice, state, store = random.Random(7), dict[int, Row](), place.store()
    for number in range(4):
        rows = said(dice, 60, newer, not newer)
        made = bare(store, name=f"c{number}")
        if of_events:
            one_for_each(made, rows, "merged", **merge)
        else:
            made.foreach_batch(lambda _, tx, rows=rows: tx.merge(rows, "late", **merge))
        made(batch(*orders(range(60))), 0)
        state = in_order(rows, "i" if newer else None, state)
        found = sorted(read(place, "late", ["n", "i", "s", "u"]))
        assert found == [tuple(row.get(name) for name in ("n", "i", "s", "u")) for _, row in sorted(state.items())]


@pytest.mark.parametrize("merge", of_which(1, [{}, {"keys": "n"}]), ids=["written", "merged"])
def test_bad_events_among_changing_columns_are_parked_alone(place: Place, merge: Row) -> None:
    """A value that does not fit, a key that is missing or null: those events are parked with what is wrong, and all others are stored."""
    sink(place, keys=bool(merge))
    rows = [alternating(number) for number in range(60)]
    rows[3] |= {"i": "three"}
    rows[10] |= {"s": b"ten"}
    rows[11] |= {"i": 2**31}
    if merge:
        rows[20] |= {"n": None}
        rows[33] = {"i": 1}
    bad = {number for number, row in enumerate(rows) if row != alternating(number)}
    one_for_each(bare(place.store()), rows, "merged" if merge else "written", **merge)(batch(*orders(range(60))), 0)
    found = {letter["sequence_number"]: letter["error_message"] for letter in letters(place.store())}
    assert found.keys() == bad
    assert "'three' (str)" in found[3] and "'s'" in found[10] and "out of range" in found[11]
    assert sorted(read(place, "late", NAMES)) == [filled(row) for number, row in enumerate(rows) if number not in bad]


def test_rows_for_two_tables_in_turn_make_few_files_and_statements(place: Place) -> None:
    """A handler that writes now to one table, now to another makes a file or a statement for each table, not for each change."""
    create(place, "late", {"n": pa.int64() if isinstance(place, DeltaPlace) else "bigint"})
    place.create_sink("audit")
    made = bare(place.store())

    @made.foreach
    def book(event: Event, tx: Any) -> None:
        tx.write({"n": event.sequence_number}, "late")
        tx.write({"id": f"{event.sequence_number}"}, "audit")

    made(batch(*orders(range(200))), 0)
    assert sorted(read(place, "late", ["n"])) == [(n,) for n in range(200)]
    assert len(place.read("audit")) == 200
    if isinstance(place, DeltaPlace):
        from deltalake import DeltaTable

        assert [len(DeltaTable(place.path(name)).file_uris()) for name in ("late", "audit")] == [1, 1]
    elif isinstance(place, PostgresPlace):
        assert place.execute("select count(distinct cmin::text) from late") == [(1,)]


@pytest.mark.postgres
def test_tables_that_depend_on_one_another_get_rows_in_the_order_of_events(postgres: str) -> None:
    """With a foreign key between the tables a row finds the one that an event before it has written."""
    place = PostgresPlace(postgres)
    place.execute("create table late (n bigint primary key)")
    place.execute("create table audit (n bigint references late)")
    place.execute("insert into late values (-1)")
    made = bare(place.store())

    @made.foreach
    def book(event: Event, tx: Any) -> None:
        number = event.sequence_number
        tx.write({"n": number - 1}, "audit")
        tx.write({"n": number}, "late")

    assert made(batch(*orders(range(20))), 0).processed == 20
    assert sorted(place.execute("select n from audit")) == [(n,) for n in range(-1, 19)]


MISTYPED = [({"keys": "nn"}, "'n'"), ({"keys": "n", "newer_by": "I"}, "'i'")]


@pytest.mark.parametrize("run", of_which(1, [run_here, run_in_tasks]))
@pytest.mark.parametrize(("merge", "meant"), MISTYPED, ids=["keys", "newer_by"])
def test_a_mistyped_column_of_a_merge_is_the_jobs_error_and_parks_nothing(place: Place, merge: Row, meant: str, run: Any) -> None:
    """A column that neither the rows nor the sink have stops the query: the message lists the sink's columns and says which was meant."""
    sink(place, keys=True)
    made = one_for_each(bare(place.store()), [{"n": n, "i": n, "s": "a"} for n in range(4)], "merged", **merge)
    with pytest.raises(SinkMismatch, match=rf"(?s)has no column.*Did you mean {meant}\?.*n, i, s") as caught:
        run(made, batch(*orders(range(4))), 0)
    assert not isinstance(caught.value, RowsRefused)
    assert letters(place.store()) == [] and read(place, "late", NAMES) == []


@pytest.mark.parametrize("run", of_which(1, [run_here, run_in_tasks]))
@pytest.mark.parametrize(
    ("merge", "rows"),
    of_which(
        2,
        [
            ({"keys": "n"}, [{"n": 0, "i": 0}, {"i": 1}, {"n": 2, "i": 2}]),
            ({"keys": "n", "newer_by": "i"}, [{"n": 0, "i": 0}, {"n": 1}, {"n": 2, "i": 2}]),
            ({"keys": "n", "delete_when": "gone"}, [{"n": 0, "gone": False}, {"n": 1}, {"n": 2, "gone": False}]),
        ],
    ),
    ids=["keys", "newer_by", "delete_when"],
)
def test_a_column_of_a_merge_that_one_row_lacks_is_the_fault_of_its_event(place: Place, merge: Row, rows: list[Row], run: Any) -> None:
    """The event becomes a dead letter that names the column; the others are merged."""
    sink(place, keys=True)
    report = run(one_for_each(bare(place.store()), rows, "merged", **merge), batch(*orders(range(3))), 0)
    assert (report.processed, report.dead_lettered) == (2, 1)
    (letter,) = letters(place.store())
    assert letter["sequence_number"] == 1 and f"{list(merge.values())[-1]!r}, which the row" in letter["error_message"]
    assert sorted(n for n, *_ in read(place, "late", NAMES)) == [0, 2]


@pytest.mark.parametrize("run", of_which(1, [run_here, run_in_tasks]))
def test_an_event_without_the_column_of_delete_when_stops_no_stream(place: Place, run: Any) -> None:
    """Its only row lacks the column, and so does the sink: the event becomes a letter, and the next batch goes on."""
    sink(place, keys=True)
    rows: list[Row] = [{"n": 0}, {"n": 1, "gone": False}]
    made = one_for_each(bare(place.store()), rows, "merged", keys="n", delete_when="gone")
    assert [run(made, batch(*orders([n])), n).dead_lettered for n in range(2)] == [1, 0]
    assert [n for n, *_ in read(place, "late", NAMES)] == [1]


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("rows", of_which(1, [{"n": 1, "su": "x"}, pa.table({"n": [1], "su": ["x"]})]), ids=["dict", "Arrow"])
def test_a_mistyped_column_of_rows_is_told_with_the_one_that_was_meant(place: Place, rows: Any) -> None:
    """The name comes before the advice to add a column, and a type that is guessed from a value says that it is guessed."""
    sink(place)
    made = bare(place.store())
    made._handler = lambda events, tx: tx.write(rows, "late")
    with pytest.raises(SinkMismatch, match=r"no column '?su'?.*Did you mean 's'\?.*ADD COLUMN") as caught:
        made(batch(*orders(range(1))), 0)
    assert ("guessed from the values" in str(caught.value)) == isinstance(rows, dict)


WRONG_CALLS = {
    "keyword": (lambda row, tx: tx.write(row, tabel="late"), r"unexpected keyword argument 'tabel'.*It takes: tx\.write\(rows.*, table"),
    "missing": (lambda row, tx: tx.merge(row, "late"), r"missing 1 required positional argument: 'keys'"),
    "name": (lambda row, tx: tx.wirte(row, "late"), r"tx has no wirte \(did you mean write\?\): it has write, merge, publish"),
    "keys": (lambda row, tx: tx.merge(row, "late", keys=7), "tx.merge needs keys=.* not 7"),
    "one of the keys": (lambda row, tx: tx.merge(row, "late", keys=["n", b"i"]), "tx.merge needs keys=.*b'i'"),
    "newer_by": (lambda row, tx: tx.merge(row, "late", "n", newer_by=["i"]), "newer_by= takes the name of a column.*list"),
    "delete_when": (lambda row, tx: tx.merge(row, "late", "n", delete_when=True), r"delete_when= takes .*True \(bool\)"),
    "key of a message": (lambda row, tx: tx.publish(row, "mails", key=7), "tx.publish: key= takes the name of a column"),
    "body of a message": (lambda row, tx: tx.publish(row, "mails", body=None), "tx.publish: body= takes the name of a column"),
    "no rows": (lambda row, tx: tx.dead_letter({"n": 1}, "no"), "tx.dead_letter take"),
    "a row": (lambda row, tx: tx.dead_letter((1, 2), "no"), "tx.dead_letter takes an event.*tuple has no source"),
}


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("kind", of_which(1, ["event", "batch", "async", "tasks"]))
@pytest.mark.parametrize(("call", "told"), of_which(4, WRONG_CALLS.values()), ids=WRONG_CALLS)
def test_a_wrong_call_of_tx_is_the_handlers_error_and_parks_nothing(place: Place, kind: str, call: Any, told: str) -> None:
    """An argument or a name that tx does not have stops the query with the right one; it is not the fault of one event after the other."""
    sink(place)
    made = bare(place.store())

    async def awaited(event: Event, tx: Any) -> None:
        call({"n": event.sequence_number}, tx)

    if kind == "batch":
        made._handler = lambda events, tx: call([{"n": 1}], tx)
    else:
        made.foreach(awaited if kind == "async" else lambda event, tx: call({"n": event.sequence_number}, tx))
    with pytest.raises(HandlerError, match=told):
        (run_in_tasks if kind == "tasks" else run_here)(made, batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("kind", of_which(1, ["event", "async", "tasks"]))
def test_an_attribute_that_no_event_has_is_the_handlers_error_and_parks_nothing(place: Place, kind: str) -> None:
    """The message names the attribute that was meant, and what an event has."""
    made = bare(place.store())

    async def awaited(event: Any, tx: Any) -> None:
        tx.write({"n": event.dta}, "late")

    made.foreach(awaited if kind == "async" else lambda event, tx: tx.write({"n": event.dta}, "late"))
    with pytest.raises(HandlerError, match=r"An event has no dta \(did you mean data\?\): it has source, .*others"):
        (run_in_tasks if kind == "tasks" else run_here)(made, batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


@pytest.mark.fast_on("delta")
def test_an_attribute_whose_name_comes_from_an_event_is_the_events_own(place: Place) -> None:
    """The code of the handler does not name it: another event may pass."""
    made = bare(place.store())
    made.foreach(lambda event, tx: getattr(event, "topic" if event.sequence_number else "late") and None)
    assert made(batch(*orders(range(3))), 0).dead_lettered == 1


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("kind", of_which(1, ["event", "async"]))
def test_a_single_event_cannot_be_rejected_by_a_condition(place: Place, kind: str) -> None:
    """The message says what to call for one event, and a coroutine is told the names that it has."""
    made = bare(place.store())

    async def awaited(event: Event, tx: Any) -> None:
        tx.skip(event, True)

    made.foreach(awaited if kind == "async" else lambda event, tx: tx.skip(event, True))
    told = {
        "async": r"tx has no skip: it has write, merge, publish and dead_letter\.",
        "event": r"not Event.*tx.dead_letter\(event, reason\)",
    }
    with pytest.raises(HandlerError, match=told[kind]):
        made(batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize(
    "condition",
    of_which(2, ["amount < 0", True, pa.array([True]), pa.array([1, 0, 1])]),
    ids=["text", "bool", "short", "numbers"],
)
def test_a_condition_that_is_no_mask_of_the_table_is_the_handlers_error(place: Place, condition: Any) -> None:
    """Without Spark a condition is an array with a value for each row, or an expression; nothing is parked for another one."""
    made = bare(place.store())
    made._handler = lambda events, tx: tx.reject(events, condition, "no")
    with pytest.raises(HandlerError, match=r"boolean array with a value for each of the 3 rows.*For example"):
        made(batch(*orders(range(3))), 0)
    assert letters(place.store()) == []


class Unreadable(dict[str, Any]):
    """A row whose values cannot be asked for."""

    def values(self) -> Any:
        """Fail."""
        raise TypeError("no values")


@pytest.mark.fast_on("delta")
def test_a_type_error_about_a_value_is_the_events_own(place: Place) -> None:
    """Whether the handler raises it or what it calls of tx does: only a wrong call is the handler's."""
    sink(place)
    made = bare(place.store())

    @made.foreach
    def book(event: Event, tx: Any) -> None:
        if event.sequence_number == 0:
            tx.write(Unreadable(n=0), "late")
        if event.sequence_number == 1:
            raise TypeError("Tx.write() got an unexpected keyword argument 'tabel'")
        tx.write({"n": event.sequence_number}, "late")

    assert made(batch(*orders(range(3))), 0).dead_lettered == 2
