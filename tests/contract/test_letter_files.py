"""Letters in files, on every store: what was exported comes back as it was, exactly, and never twice."""

from __future__ import annotations

import base64
import io
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from orders import assert_proven, batch, consumer, event, ids, letters, orders
from people import ALL, ANN, BODY, failing, statuses
from places import DeltaPlace, Place, PostgresPlace

from checkpoint.errors import ConfigError
from dedup import DeadLetters, Selection
from dedup.store import Store


def other_place(place: Place, tmp_path: Path) -> Place:
    """A second place like this one."""
    if isinstance(place, DeltaPlace):
        other: Place = type(place)(tmp_path / "other")
        other.create_sink()
        return other
    assert isinstance(place, PostgresPlace)
    name = f"other_{uuid.uuid4().hex}"
    place.execute(f'CREATE DATABASE "{name}"')
    other = PostgresPlace(_renamed(place.url, name))
    other.create_sink()
    return other


def _renamed(dsn: str, database: str) -> str:
    from psycopg.conninfo import make_conninfo

    return make_conninfo(dsn, dbname=database)


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


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_was_exported_comes_back_as_it_was(format: Any, place: Place, tmp_path: Path) -> None:
    """Into another store: the same ids, bytes, statuses, order and history; the keys are held, and the copies counted."""
    store, file = place.store(), tmp_path / f"letters.{format}"
    run = hostile(store)
    run(batch(event(8, "s", 1)), 1)  # a copy
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
    from dedup import letter_files, letter_work

    monkeypatch.setattr(letter_work, "PORTION", 2)
    monkeypatch.setattr(letter_files, "PORTION", 2)
    store = place.store()
    consumer(store)(batch(*orders(range(3)), *(event(n, f"x{n}", -1) for n in range(3, 10))), 0)
    sizes: list[int] = []
    whole = letter_files._whole
    monkeypatch.setattr(letter_files, "_whole", lambda store, ids: sizes.append(len(ids)) or whole(store, ids))
    for name in ("a.jsonl", "a.parquet"):
        assert DeadLetters(store).export(ALL, tmp_path / name) == 7
        assert [rows.num_rows for rows in letter_files._read(tmp_path / name)] == [2, 2, 2, 1]
    assert sizes == [2, 2, 2, 1] * 2


def test_an_import_that_ends_anywhere_is_gone_on_with(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped right before each of its steps: portions are there whole or not at all, and a second call brings the others."""
    from dedup import letter_files

    store, file = place.store(), tmp_path / "letters.jsonl"
    hostile(store)
    DeadLetters(store).export(ALL, file)
    monkeypatch.setattr(letter_files, "PORTION", 4)
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
