"""Letters in files, on every store: what was exported comes back as it was, exactly, and never twice."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.changes import reset
from checkpoint.errors import ConfigError, StoreUnavailable
from dedup import DeadLetters, Selection, reprocess
from dedup.core.store import Store
from dedup.reprocessing.events import events_of
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders
from kit.people import ALL, ANN, BODY, failing, statuses
from kit.places import Place, other_place


def hostile(store: Store) -> Any:
    """Letters of all sorts: bytes that are no text, long and empty bodies, headers twice, a sequence, an edit, a discard."""
    run = consumer(store, sequence_key="data.id", idempotence_key=["data.id", "data.amount"], max_body=100_000)
    headers = [{"key": "h", "value": b"\xfe\x00"}, {"key": "h", "value": None}]
    rows = [event(0, "s", -1), event(1, "s", 1), event(2, body=BODY, properties=headers), event(3, body=b""), event(4, body=None)]
    run(batch(*rows, event(5, "t", -5), event(6, body=b'"' + b"x" * 200_000), event(7, "u", -7)), 0)
    found = letters(store)
    DeadLetters(store).edit(found[-1]["id"], key=("v", "-7"), **ANN)
    DeadLetters(store).discard(letters(store, key="t|-5")[0]["id"], **ANN, release_key=True)
    return run


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_was_exported_comes_back_as_it_was(format: Any, place: Place, tmp_path: Path) -> None:
    """Into another store: the same ids, bytes, statuses, order and history; the keys are held, and the duplicates counted."""
    store, file = place.store(), tmp_path / f"letters.{format}"
    run = hostile(store)
    run(batch(event(8, "s", 1)), 1)  # a duplicate
    assert DeadLetters(store).export(ALL, file) == len(letters(store))
    other = other_place(place, tmp_path).store()
    again = consumer(other, sequence_key="data.id", idempotence_key=["data.id", "data.amount"])
    again(batch(), 0)
    would = DeadLetters(other).import_(file, by="ann", dry_run=True)
    assert letters(other) == []
    done = DeadLetters(other).import_(file, by="ann")
    assert (would.imported, done.imported, done.duplicates, done.existing) == (*[len(letters(store))] * 2, 0, 0)
    assert letters(other) == letters(store)
    for letter in ids(letters(store)):
        past = store.history(letter).drop_columns(["reserved"]).to_pylist()
        assert other.history(letter).drop_columns(["reserved"]).to_pylist()[:-1] == past
    report = again(batch(event(8, "s", 1), event(9, "u", -7), event(10, "v", -7)), 1)
    assert (report.duplicates, [row["idempotence_key"] for row in letters(other, kind="KEY_CONFLICT")]) == (2, ["v|-7"])
    assert again(batch(event(11, "s", 2)), 2).dead_lettered == 1  # behind the letters of its sequence
    assert other.problems("shop") == []
    twice = DeadLetters(other).import_(file, by="ann")
    assert (twice.imported, twice.existing) == (0, done.imported)


def test_a_letter_whose_key_is_decided_comes_in_as_a_duplicate(place: Place, tmp_path: Path) -> None:
    """There is an effect of its message already: it is settled, and holds nothing."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    run = consumer(other)
    run(batch(event(0, "b", 1)), 0)
    would = DeadLetters(other).import_(file, by="ann", dry_run=True)
    done = DeadLetters(other).import_(file, by="ann")
    assert (would.duplicates, done.imported, done.duplicates) == (1, 3, 1)
    assert [(r["status"], r["holds_key"]) for r in letters(other)] == [("DUPLICATE", False), ("OPEN", True), ("OPEN", False)]
    assert other.problems("shop") == []


def test_letters_that_are_there_are_left_alone(place: Place, tmp_path: Path) -> None:
    """Nothing of them changes: neither what was done since the export, nor a key."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)
    DeadLetters(store).export(ALL, file)
    DeadLetters(store).discard(ALL, **ANN, release_key=True)
    before = letters(store)
    done = DeadLetters(store).import_(file, by="ann")
    assert (done.read, done.imported, done.existing) == (3, 0, 3)
    assert letters(store) == before
    assert_proven(store)


def test_an_export_is_whole_or_not_there(place: Place, tmp_path: Path) -> None:
    """A file that is there is never written over, and one that breaks off is not there under its name."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)

    def broken(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DeadLetters(store).export(ALL, file, on_progress=broken)
    assert not file.exists()
    DeadLetters(store).export(ALL, file)
    with pytest.raises(ConfigError, match="there already"):
        DeadLetters(store).export(ALL, file)
    into = io.BytesIO()
    DeadLetters(store).export(Selection(kind="UNDECODABLE"), into)
    (line,) = map(json.loads, into.getvalue().splitlines())
    assert base64.b64decode(line["body_base64"]) == BODY


def test_a_file_that_is_no_export_is_told_with_the_line(place: Place, tmp_path: Path) -> None:
    """Junk, half a line, a value of another type, a column that is missing: an error that names the place, and no letter."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)
    DeadLetters(store).export(ALL, file)
    good = file.read_bytes().splitlines()
    no_key = json.loads(good[0])
    del no_key["consumer"]
    strange = (
        {"body_base64": "%"}, {"status": "open"}, {"kind": "FOO"}, {"id": "x"}, {"key_hex": None}, {"sequence_number": 2**70},
        {"history": [{"at": "2026-01-01", "action": "FOO"}]},
    )  # fmt: skip
    wrong = [json.dumps({**json.loads(good[0]), **values}).encode() for values in strange]
    for bad in (b"junk", good[1][:50], b"[]", b"[" * 100_000, json.dumps(no_key).encode(), *wrong):
        file.write_bytes(b"\n".join([good[0], bad, good[2]]))
        with pytest.raises(ConfigError, match="line 2"):
            DeadLetters(store).import_(file, by="ann")
    whole = tmp_path / "letters.parquet"
    DeadLetters(store).export(ALL, whole)
    data = whole.read_bytes()
    for bad in (
        b"PAR1junk",
        data[:-9],
        data[:20] + bytes(40) + data[60:],
        data[: len(data) // 2] + bytes(99) + data[len(data) // 2 + 99 :],
    ):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match="not an export"):
            DeadLetters(store).import_(file, by="ann")
    with pytest.raises(ConfigError, match="no file"):
        DeadLetters(store).import_(tmp_path / "none", by="ann")


def ipc(*names: str, rows: int = 1) -> bytes:
    """Other columns of an event as a letter keeps them."""
    sink = pa.BufferOutputStream()
    table = pa.Table.from_arrays([pa.array(["x"] * rows)] * len(names), names=list(names))
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


FORGED: dict[str, list[dict[str, Any]]] = {
    # column -> what is put into a line that was good
    "extras": [
        {"extras_base64": base64.b64encode(extras).decode()}
        for extras in (
            ipc("body"), ipc("tenant", "sequence_number"), ipc("Topic"), ipc("_key"), ipc("_letter"), ipc("a", "A"),
            ipc("tenant", rows=2), ipc("tenant", rows=0), ipc("tenant")[:60], b"junk", ipc("tenant").replace(b"tenant", b"te\xffant"),
        )
    ],
    "key": [{"key_hex": "00" * 16}, {"idempotence_key": "b"}, {"idempotence_key": None}],
    "history.key": [{"history": [{"at": "2026-01-01T00:00:00+00:00", "action": "EDITED", "key_hex": "00" * 16}]}],
    "sequence": [{"sequence_hex": "00" * 16}, {"sequence_key": "b"}],
    "id": [{"sequence_number": 7}, {"topic": "other"}, {"generation": 5}, {"id": "0" * 32}],
    "body_size": [{"body_size": 3}, {"body_base64": None}],
    "holds_key": [{"status": "REPROCESSED"}, {"status": "LOST"}],
    "kind": [{"kind": "UNSENT"}],
}  # fmt: skip


def test_a_forged_file_is_refused_before_anything_of_it_comes_in(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that would replace those of the event, keys that nobody can see, other positions: an error that names letter and column."""
    from dedup.reprocessing import files

    settings: dict[str, Any] = {"sequence_key": "data.id", "idempotence_key": ["data.id", "data.amount"]}
    store, file = place.store(), tmp_path / "letters.jsonl"
    consumer(store, **settings)(batch(*(event(n, f"s{n}", -n) for n in range(1, 4))), 0)
    DeadLetters(store).export(ALL, file)
    lines = file.read_bytes().splitlines()
    monkeypatch.setattr(files, "PORTION", 1)
    other = other_place(place, tmp_path).store()
    consumer(other, **settings)(batch(), 0)
    before = letters(other)
    for column, forgeries in FORGED.items():
        for forged in forgeries:
            line = json.dumps({**json.loads(lines[2]), **forged}).encode()
            file.write_bytes(b"\n".join([*lines[:2], line]))
            with pytest.raises(ConfigError, match=rf"(?s)letter [0-9a-f]{{32}}, column {column}: "):
                DeadLetters(other).import_(file, by="ann")
    assert letters(other) == before == []
    assert consumer(other, **settings)(batch(event(9, "b", 0)), 1).processed == 1


def test_a_key_that_cannot_be_checked_comes_in_where_that_is_asked_for(place: Place, tmp_path: Path) -> None:
    """The readable key is cut: whoever trusts the file says so, and then the key is held."""
    store, file, long = place.store(), tmp_path / "letters.jsonl", "x" * 300
    consumer(store)(batch(event(0, long, -1)), 0)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    run = consumer(other)
    run(batch(), 0)
    with pytest.raises(ConfigError, match=r"column key: .* is cut.*--accept-keys"):
        DeadLetters(other).import_(file, by="ann")
    assert DeadLetters(other).import_(file, by="ann", accept_keys=True).imported == 1
    assert run(batch(event(1, long, -1)), 1).duplicates == 1


@pytest.mark.full
def test_the_key_of_a_replaced_body_comes_in_where_that_is_asked_for(place: Place, tmp_path: Path) -> None:
    """Its text is not kept, and the error says that; whoever trusts the file has the letter hold both of its keys elsewhere, too."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    run = consumer(store)
    run(batch(event(0, "b", -1)), 0)
    DeadLetters(store).edit(letters(store)[0]["id"], body=b'{"id": "z", "amount": -9}', **ANN)
    assert reprocess(ALL, run).failed == 1
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    run = consumer(other)
    run(batch(), 0)
    with pytest.raises(ConfigError, match=r"column history.key: .* a body that an edit replaced.*--accept-keys"):
        DeadLetters(other).import_(file, by="ann")
    assert DeadLetters(other).import_(file, by="ann", accept_keys=True).imported == 1
    assert run(batch(event(1, "b", 1), event(2, "z", 9)), 1).processed == 0


HEADERS = [{"key": "other", "value": b"y"}, {"key": "message-id", "value": b"m" * 300}]


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "one"),
    [
        ({"idempotence_key": None}, {}),
        ({"idempotence_key": None, "key_scope": "consumer"}, {}),
        ({"idempotence_key": None}, {"properties": HEADERS}),
        ({"idempotence_key": ["data.id", "key", "partition"]}, {"key": b"\xff\x00"}),
        ({"idempotence_key": ["data.id", "key", "enqueued_time"]}, {"enqueued_time": dt.datetime(2026, 1, 1, tzinfo=dt.UTC)}),
        ({"idempotence_key": ["key", "data.id"], "key_scope": "consumer"}, {"key": b"a|b|"}),
        ({"idempotence_key": "key", "null_key": "position"}, {}),
    ],
)
def test_keys_of_every_kind_are_recognised(place: Place, tmp_path: Path, settings: dict[str, Any], one: dict[str, Any]) -> None:
    """Positions, message ids, several columns, nulls, bytes, times, a bar inside of a part, also after a reset: no letter is refused."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    store_of_before = consumer(store, **settings)
    store_of_before(batch(event(0, "a|", -1, **one)), 0)
    store.amend("shop", reset, **ANN)
    consumer(store, **settings)(batch(event(1, "b", -1, **one)), 0)
    assert DeadLetters(store).export(ALL, file) == 2
    other = other_place(place, tmp_path).store()
    consumer(other, **settings)(batch(), 0)
    assert DeadLetters(other).import_(file, by="ann").imported == 2


@pytest.mark.full
def test_an_import_that_fails_in_the_middle_says_what_came_in(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store goes away between two portions: the error carries how many letters are there already."""
    from dedup.reprocessing import files

    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)
    DeadLetters(store).export(ALL, file)
    monkeypatch.setattr(files, "PORTION", 1)
    other = other_place(place, tmp_path).store()
    consumer(other)(batch(), 0)
    portions = iter(range(9))

    def away(step: str) -> None:
        if step == "commit" and next(portions) == 2:
            raise StoreUnavailable

    other.on_step = away
    with pytest.raises(StoreUnavailable) as failed:
        DeadLetters(other).import_(file, by="ann")
    assert "2 letters of" in failed.value.__notes__[0] and len(letters(other)) == 2


def test_columns_of_a_letter_never_stand_in_for_those_of_its_event(place: Place) -> None:
    """Also where a letter was changed in its table: the event is not run with a body that somebody slipped in."""
    failing(place.store())
    found = place.store().letters(Selection(kind="REJECTED", limit=1))
    for name, why in (("body", ".*body"), ("data", " it has a column 'data' .* decode="), ("Data", " it has a column 'Data' ")):
        forged = found.set_column(found.schema.get_field_index("extras"), "extras", pa.array([ipc(name)], pa.binary()))
        with pytest.raises(ConfigError, match=f"Letter [0-9a-f]{{32}}, column extras:{why}"):
            events_of(forged, positions=True)


def test_letters_of_a_consumer_that_is_not_there_are_not_imported(place: Place, tmp_path: Path) -> None:
    """The error says which consumer has to be started first."""
    store, file = place.store(), tmp_path / "letters.jsonl"
    failing(store)
    DeadLetters(store).export(ALL, file)
    other = other_place(place, tmp_path).store()
    other.migrate()
    with pytest.raises(ConfigError, match="'shop'"):
        DeadLetters(other).import_(file, by="ann")


def test_export_reads_no_more_letters_than_a_portion(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are read portion by portion, and the file is read so, too."""
    from deadletter import work
    from dedup.reprocessing import files

    monkeypatch.setattr(work, "PORTION", 2)
    monkeypatch.setattr(files, "PORTION", 2)
    store = place.store()
    consumer(store)(batch(*orders(range(3)), *(event(n, f"x{n}", -1) for n in range(3, 10))), 0)
    sizes: list[int] = []
    whole = files._whole
    monkeypatch.setattr(files, "_whole", lambda store, ids: sizes.append(len(ids)) or whole(store, ids))
    for name in ("a.jsonl", "a.parquet"):
        assert DeadLetters(store).export(ALL, tmp_path / name) == 7
        assert [rows.num_rows for rows in files._read(tmp_path / name)] == [2, 2, 2, 1]
    assert sizes == [2, 2, 2, 1] * 2


@pytest.mark.fast_on("postgres")
def test_an_import_that_ends_anywhere_is_gone_on_with(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped right before each of its steps: portions are there whole or not at all, and a second call brings the others."""
    from dedup.reprocessing import files

    store, file = place.store(), tmp_path / "letters.jsonl"
    hostile(store)
    DeadLetters(store).export(ALL, file)
    monkeypatch.setattr(files, "PORTION", 4)
    other = other_place(place, tmp_path)
    consumer(other.store(), sequence_key="data.id", idempotence_key=["data.id", "data.amount"])(batch(), 0)
    stopped = 0
    for number in range(30):
        one, steps = other.store(), iter(range(number + 1))

        def stop(step: str, steps: Any = steps, number: int = number) -> None:
            if next(steps) == number:
                raise KeyboardInterrupt

        one.on_step = stop
        try:
            DeadLetters(one).import_(file, by="ann")
            break
        except KeyboardInterrupt:
            stopped += 1
        assert len(letters(other.store())) in (0, 4, 8)
    assert stopped > 3
    DeadLetters(other.store()).import_(file, by="ann")
    assert letters(other.store()) == letters(store)
    assert other.store().problems("shop") == []


@pytest.mark.fast_on("postgres")
def test_letters_of_a_sequence_come_in_in_their_place(place: Place, tmp_path: Path) -> None:
    """In any order, some before others: each waits behind the one before it, and without one before it, it is open."""
    settings: dict[str, Any] = {"sequence_key": "data.id", "idempotence_key": ["data.id", "data.amount"]}
    store, file = place.store(), tmp_path / "letters.jsonl"
    consumer(store, **settings)(batch(event(0, "s", -1), event(1, "s", 1), event(2, "s", 2), event(3, "s", 3)), 0)
    whole = letters(store)
    DeadLetters(store).export(ALL, file)
    lines = file.read_bytes().splitlines(keepends=True)
    other = other_place(place, tmp_path)
    consumer(other.store(), **settings)(batch(), 0)
    for chosen, blockers in (((3, 1, 3), [None, 1]), ((2,), [None, 1, 2]), ((0, 3), [None, 0, 1, 2])):
        file.write_bytes(b"".join(lines[n] for n in chosen))
        done = DeadLetters(other.store()).import_(file, by="ann")
        assert done.imported + done.existing == len(chosen)
        assert [r["blocked_by"] for r in letters(other.store())] == [None if b is None else whole[b]["id"] for b in blockers]
        assert statuses(other.store()) == ["OPEN"] + ["BLOCKED"] * (len(blockers) - 1)
        assert other.store().problems("shop") == []
    assert letters(other.store()) == whole


@pytest.mark.fast_on("delta")
def test_a_name_of_another_format_is_refused_before_anything_is_written(place: Place, tmp_path: Path) -> None:
    """JSON lines in a .csv file would be read as something else; who names the format decides."""
    letters = DeadLetters(place.store())
    with pytest.raises(ConfigError, match=r"does not end in \.jsonl or \.parquet.*--format jsonl"):
        letters.export(Selection(), tmp_path / "letters.CSV")
    assert not list(tmp_path.glob("letters*"))
    assert letters.export(Selection(), tmp_path / "letters.csv", "jsonl") == 0
