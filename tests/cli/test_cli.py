"""The command line: help with an example for each command, JSON that parses, and nothing decided without --yes.

On both stores, real ones, with state that the consumer of the contract suite left there.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from psycopg.conninfo import conninfo_to_dict

from checkpoint.records import RecordFilter
from deadletter.selection import Selection
from dedup import PostgresStore
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.signals.standing import newest_records
from dedup.urls import open_store
from fixtures.fix_places import BOTH, kept_place, new_place
from fixtures.variants import of_which
from kit.orders import batch, consumer, event, orders
from kit.places import DeltaPlace, Place, PostgresPlace

Run = Callable[..., tuple[int, str, str]]

READING = [
    "consumer list",
    "consumer show shop",
    "checkpoint list",
    "checkpoint list shop",
    "batch list shop",
    "dead-letter list",
    "verify",
    "verify shop",
    "budget show shop",
]

BUDGET = {
    kind: {"decided": events, "lifted": 0}
    for kind, events in {"HANDLER_ERROR": 7, "KEY_CONFLICT": 8, "NO_KEY": 8, "REJECTED": 7, "UNDECODABLE": 9}.items()
}
"""Events that came to where they may fail: of nine the first one that does not decode leaves eight, and one of them is a duplicate."""

DECISIONS: dict[str, dict[str, Any]] = {
    "consumer accept-gap shop": {"gap_accepted": True},
    "consumer reset shop": {"generation": 1, "keyspace": 1, "checkpoints": [], "settings": None},
    "consumer accept-incarnation shop --source broker --topic orders": {"checkpoints": [], "incarnations": 1},
    "consumer accept-restore shop": {"generation": 1, "batch_id": None},
    "budget lift shop --kind NO_KEY --events 50": {"budget": {**BUDGET, "NO_KEY": {"decided": 8, "lifted": 58}}},
}
"""Command -> what it changes in `consumer show --json`."""

BODY = b'\x00{"id": "\xff'


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has decided two batches: seven orders, one of them rejected, and a body that does not decode."""
    made = new_place(request, tmp_path)
    decide_two_batches(made)
    return made


@pytest.fixture(params=BOTH, scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The same for tests that change nothing there: they share it."""
    with kept_place(request, tmp_path_factory) as made:
        decide_two_batches(made)
        yield made


def decide_two_batches(place: Place) -> None:
    """What every test finds."""
    store = place.store()
    run = consumer(store)
    run(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    run(batch(*orders(range(3), partition=1), event(4, "p0-0", 0), event(5, body=BODY, properties=[{"key": "h", "value": b"\xfe"}])), 1)
    store.close()


def document(run: Run, line: str, place: Place) -> Any:
    """The one JSON document of a command that succeeded."""
    code, out, err = run(f"{line} --json", place)
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("line", READING)
def test_each_reading_command_shows_a_table_and_one_json_document(line: str, kept: Place, dedup: Run) -> None:
    """The table is for people and tells the consumer's name or numbers; --json is one document and nothing else."""
    code, out, err = dedup(line, kept)
    assert (code, err) == (0, "")
    assert "─" in out
    assert document(dedup, line, kept)


def test_the_store_can_come_from_the_environment(kept: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEDUP_STORE is used where --store is not given."""
    monkeypatch.setenv("DEDUP_STORE", kept.url)
    code, out, _ = dedup("consumer list --json")
    assert (code, [c["consumer"] for c in json.loads(out)]) == (0, ["shop"])


def test_checkpoints_are_the_last_decided_positions(kept: Place, dedup: Run) -> None:
    """One row per partition, with source, topic and number."""
    rows = document(dedup, "checkpoint list shop", kept)
    assert [(r["consumer"], r["source"], r["topic"], r["partition"], r["sequence_number"]) for r in rows] == [
        ("shop", "broker", "orders", 0, 5),
        ("shop", "broker", "orders", 1, 2),
    ]
    assert document(dedup, "consumer show shop", kept)["checkpoints"] == [{k: v for k, v in r.items() if k != "consumer"} for r in rows]


def test_batches_count_every_row_and_name_ranges(kept: Place, dedup: Run) -> None:
    """The records add up to what was delivered; times are ISO; --limit keeps the newest."""
    rows = document(dedup, "batch list shop", kept)
    assert sum(r["delivered"] for r in rows) == 9
    assert sum(r["duplicate"] for r in rows) == 1
    assert {"first": 0, "last": 3} in [s for r in rows for s in r["seen"]]
    assert all(dt.datetime.fromisoformat(r["committed_at"]).tzinfo for r in rows)
    assert document(dedup, "batch list shop --limit 1", kept) == rows[-1:]
    assert "These are the newest 1; --limit shows more.\n" in dedup("batch list shop --limit 1", kept)[1]
    for limit in (0, 3):
        assert "newest" not in dedup(f"batch list shop --limit {limit}", kept)[1]
        assert document(dedup, f"batch list shop --limit {limit}", kept) == rows


@pytest.mark.full
def test_newest_batches_are_read_without_the_older_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of records fits in no memory: only the newest decisions are read, farther back where these are about letters."""
    store = place.store()
    letters, run = DeadLetters(store), consumer(store)
    for number in range(6):
        run(batch(event(10 + number, f"n{number}")), 2 + number)
    everything, asked = store.batches("shop"), list[RecordFilter]()
    batches = store.batches

    def read(name: str, record_filter: RecordFilter) -> Any:
        asked.append(record_filter)
        return batches(name, record_filter)

    monkeypatch.setattr(store, "batches", read)
    newest = store.head("shop").seq
    assert newest_records(store, store.head("shop"), 3, 2).num_rows > 2 and [one.after for one in asked] == [newest - 3]
    letters.discard(Selection(), by="ann", reason="no")
    letters.reopen(Selection(), by="ann", reason="yes")
    for wanted in (1, 3, everything.num_rows - 1, everything.num_rows, everything.num_rows + 1):
        asked.clear()
        found = newest_records(store, store.head("shop"), wanted + 1, wanted)
        assert found.num_rows == everything.num_rows if wanted >= everything.num_rows else found.num_rows > wanted
        assert found.equals(everything.slice(everything.num_rows - found.num_rows))
        assert [one.until for one in asked[1:]] == [one.after for one in asked[:-1]]


def test_dead_letters_can_be_filtered(kept: Place, dedup: Run) -> None:
    """Each filter narrows; all that are given must match; nothing found is an empty list and a sentence."""

    def kinds(options: str) -> list[str]:
        return [letter["kind"] for letter in document(dedup, f"dead-letter list {options}", kept)]

    assert sorted(kinds("")) == ["REJECTED", "UNDECODABLE"]
    assert kinds("--kind rejected --status OPEN --consumer shop --source broker --topic orders --partition 0") == ["REJECTED"]
    assert kinds("--from 4 --to 5") == ["UNDECODABLE"]
    assert len(kinds("--limit 1")) == 1
    assert kinds("--partition 1") == kinds("--fingerprint none") == kinds("--status DISCARDED") == []
    assert "no dead letters match" in dedup("dead-letter list --partition 1", kept)[1]


def test_one_dead_letter_is_shown_whole(kept: Place, dedup: Run) -> None:
    """By its id or the first digits: exact bytes as base64 in JSON, readable without harm to the terminal in the table."""
    (letter,) = document(dedup, "dead-letter list --kind UNDECODABLE", kept)
    whole = document(dedup, f"dead-letter show {letter['id'][:10]}", kept)
    assert [h["action"] for h in whole.pop("history")] == ["FAILED"]
    assert whole.pop("redaction") is None
    assert whole == letter
    assert base64.b64decode(whole["body_base64"]) == BODY
    assert [(p["key"], base64.b64decode(p["value_base64"])) for p in whole["properties"]] == [("h", b"\xfe")]
    assert whole["key_hex"] is None
    code, out, _ = dedup(f"dead-letter show {letter['id']}", kept)
    assert code == 0
    assert BODY.hex(" ") in out
    assert "\x00" not in out


@pytest.mark.full
def test_a_letter_that_is_not_there_or_not_one_is_an_error(place: Place, dedup: Run) -> None:
    """An unknown id, none, and a prefix of several ids say so, with the command that lists them."""
    store = place.store()
    consumer(store)(batch(*(event(n, f"bad{n}", -1) for n in range(10, 30))), 2)
    firsts = [letter["id"][0] for letter in DeadLetters(store).select(Selection()).to_pylist()]
    store.close()
    several = max(firsts, key=firsts.count)
    for wrong, words in (("zzzz", "no dead letter begins"), ("''", "no dead letter begins"), (several, "more than one dead letter begins")):
        code, out, err = dedup(f"dead-letter show {wrong}", place)
        assert (code, out, words in err, "dead-letter list" in err) == (2, "", True, True)


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("line", DECISIONS)
def test_nothing_is_decided_without_yes(line: str, kept: Place, dedup: Run) -> None:
    """Without --yes a decision is shown and not made, not even as a new entry in the consumer's history."""
    before = document(dedup, "consumer show shop", kept)
    code, out, err = dedup(line, kept)
    assert (code, err) == (0, "")
    assert "Nothing was changed" in out
    assert "--yes" in out
    assert document(dedup, "consumer show shop", kept) == before


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("line", of_which(2, sorted(DECISIONS, key=lambda line: "accept-restore" not in line)))
def test_a_decision_with_yes_is_what_was_shown(line: str, place: Place, dedup: Run) -> None:
    """With --yes it is made once, by somebody, for a reason; the tables still prove themselves."""
    before = document(dedup, "consumer show shop", place)
    shown = dedup(line, place)[1].partition("Nothing was changed")[0]
    code, out, err = dedup(f"{line} --yes --by ann --reason 'a test'", place)
    assert (code, err) == (0, "")
    assert out.startswith(shown)
    after = document(dedup, "consumer show shop", place)
    for key, value in DECISIONS[line].items():
        assert (len(after[key]) if key == "incarnations" else after[key]) == value
    assert after["decisions"] == before["decisions"] + 1
    assert dedup("verify shop", place)[0] == 0


@pytest.mark.full
def test_accepting_a_gap_twice_changes_nothing(place: Place, dedup: Run) -> None:
    """A decision that is already made is not made again."""
    dedup("consumer accept-gap shop --yes", place)
    before = document(dedup, "consumer show shop", place)
    assert "nothing to change" in dedup("consumer accept-gap shop --yes", place)[1]
    assert document(dedup, "consumer show shop", place) == before


def test_a_topic_that_the_consumer_does_not_read_cannot_be_reborn(place: Place, dedup: Run) -> None:
    """A mistyped topic is an error that lists the topics there are."""
    code, _, err = dedup("consumer accept-incarnation shop --source broker --topic order --yes", place)
    assert (code, "broker/orders" in err) == (2, True)


def test_verify_fails_on_a_contradiction_and_names_it(place: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, and the contradiction in words, in the table and in JSON."""
    kind = type(place.store())
    monkeypatch.setattr(kind, "problems", lambda self, consumer: [f"positions 7-9 of {consumer} are torn"])
    code, out, _ = dedup("verify shop", place)
    assert (code, "CONTRADICTION: positions 7-9 of shop are torn" in out) == (1, True)
    code, out, _ = dedup("verify --json", place)
    (report,) = json.loads(out)
    assert (code, report["ok"], report["contradictions"]) == (1, False, ["positions 7-9 of shop are torn"])


def test_a_path_that_is_no_store_is_not_up_to_date(tmp_path: Path, dedup: Run) -> None:
    """A deploy that checks a mistyped path is told so: a file and a Delta table are refused. JSON tells a new state."""
    (tmp_path / "file").touch()
    (tmp_path / "table/_delta_log").mkdir(parents=True)
    for wrong in ("file", "table"):
        code, _, err = dedup(f"migrate --check --store {tmp_path / wrong}")
        assert (code, "not the folder of a store" in err) == (2, True)
    code, out, _ = dedup(f"migrate --check --json --store {tmp_path / 'new'}")
    assert (code, json.loads(out)) == (0, {"up_to_date": True, "why": None, "begun": False})


def test_sql_is_printed_though_the_variable_names_a_delta_store(tmp_path: Path, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`migrate --sql` needs no store, so that of DEDUP_STORE does not matter."""
    monkeypatch.setenv("DEDUP_STORE", str(tmp_path))
    code, out, _ = dedup("migrate --sql")
    assert (code, "create table" in out) == (0, True)


@pytest.mark.parametrize(("password", "write"), [("TOP@SECRET", "%40"), ("TOP/SECRET", "%2F"), ("TOP/P@SECRET", "%2F")])
def test_no_part_of_a_password_that_ends_early_is_shown(password: str, write: str, dedup: Run) -> None:
    """libpq would take it for a host or a port, and tell it: such a URL is refused with what to write."""
    code, _, err = dedup(f"status --store postgresql://bob:{password}@127.0.0.1:1/shop")
    assert (code, write in err, "SECRET" in err, "TOP" in err) == (2, True, False, False)


@pytest.mark.postgres
@pytest.mark.parametrize("scheme", of_which(1, ["Postgresql", "POSTGRES"]))
def test_the_case_of_a_scheme_has_no_meaning(scheme: str, empty_postgres: str, dedup: Run) -> None:
    """RFC 3986: a URL of PostgreSQL in capitals is one, and no folder of Delta; commands, publishers' too, and Python callers reach it."""
    url = f"{scheme}://?{urlencode(conninfo_to_dict(empty_postgres))}"
    assert dedup(f"migrate --store '{url}'")[0] == 0
    assert dedup(f"publisher list --store '{url}'")[0] == 0
    opened = open_store(url)
    assert isinstance(opened, PostgresStore) and opened.consumers() == []


@pytest.mark.parametrize("line", of_which(1, ["status --fail-above 10", "status --kafka-settings /nowhere", "verify --full"]))
def test_an_option_that_would_do_nothing_is_refused(line: str, place: Place, dedup: Run) -> None:
    """A limit of the lag without a broker would never alarm."""
    assert dedup(line, place)[0] == 2


@pytest.mark.parametrize("proofs", of_which(1, ["absent/proofs.json", "."]))
def test_proofs_that_cannot_be_kept_are_told_at_once(proofs: str, place: Place, tmp_path: Path, dedup: Run) -> None:
    """One sentence that names the path, and not a stack trace after an hour of reading."""
    code, _, err = dedup(f"verify --proof {tmp_path / proofs}", place)
    assert (code, str(tmp_path) in err, "for the proofs" in err) == (2, True, True)


@pytest.mark.full
def test_publish_and_migrate_can_be_repeated(place: Place, dedup: Run) -> None:
    """Both say that there is nothing left to do, and change nothing."""
    before = document(dedup, "consumer show shop", place)
    assert dedup("sink sync", place) == (0, "shop: 0 batches made visible\n", "")
    assert dedup("sink sync shop", place) == (0, "shop: 0 batches made visible\n", "")
    assert dedup("migrate", place) == (0, "The state is up to date.\n", "")
    assert dedup("migrate --check", place) == (0, "The state is up to date.\n", "")
    assert document(dedup, "consumer show shop", place) == before


@pytest.mark.delta
def test_a_sink_that_was_replaced_is_accepted_with_yes_only(tmp_path: Path, dedup: Run) -> None:
    """A new table under a sink's name gets rows only after a person said so, and no row that the old one had."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    decide_two_batches(place)
    place.drop_sink()
    place.create_sink()
    before = document(dedup, "consumer show shop", place)
    assert dedup("sink accept orders --yes", place)[0] == 2
    for line in ("sink accept shop orders", "sink accept shop orders --yes"):
        code, _, err = dedup(line, place)
        assert (code, "sink accept shop orders --lost" in err) == (3, True)
    code, out, _ = dedup("sink accept shop orders --lost", place)
    assert (code, "Nothing was changed" in out) == (0, True)
    assert document(dedup, "consumer show shop", place) == before
    assert dedup("sink accept shop orders --lost --yes --reason 'a test'", place)[0] == 0
    consumer(place.store())(batch(*orders([9])), 2)
    assert [row["id"] for row in place.read()] == ["p0-9"]


@pytest.mark.full
@pytest.mark.postgres
def test_a_postgres_sink_that_was_replaced_is_accepted_with_yes_only(postgres: str, dedup: Run) -> None:
    """A new table under a sink's name gets rows only after a person said so; one that was never written to is none to accept."""
    place = PostgresPlace(postgres)
    place.create_sink()
    place.create_sink("other")
    decide_two_batches(place)
    place.drop_sink()
    place.create_sink()
    before = document(dedup, "consumer show shop", place)
    code, out, err = dedup("sink accept shop orders", place)
    assert (code, err, "Nothing was changed" in out) == (0, "", True)
    assert document(dedup, "consumer show shop", place) == before
    assert dedup("sink accept shop orders --yes --reason 'a test'", place)[0] == 0
    consumer(place.store())(batch(*orders([9])), 2)
    assert [row["id"] for row in place.read()] == ["p0-9"]


@pytest.mark.full
def test_a_sink_that_was_never_written_to_is_refused(place: Place, dedup: Run) -> None:
    """A mistyped sink reads neither as a preview nor as a decision: the error names the sinks that the consumer has written to."""
    place.create_sink("other")
    for sink in ("ordes", "other", "'no name'"):
        for yes in ("", " --yes"):
            code, out, err = dedup(f"sink accept shop {sink}{yes}", place)
            assert (code, out, "has never written to" in err) == (2, "", True), err
            assert re.search(r"It has written to: (public\.|dedup\.dead_letters, )?orders\.$", err), err


@pytest.mark.postgres
def test_a_sink_that_was_dropped_is_told_from_an_unknown_one(postgres: str, dedup: Run) -> None:
    """The consumer has written to it, and there is no table to accept: create it, then accept it."""
    place = PostgresPlace(postgres)
    place.create_sink()
    decide_two_batches(place)
    place.drop_sink()
    for sink in ("orders", "public.orders"):
        code, _, err = dedup(f"sink accept shop {sink}", place)
        assert (code, "There is no table" in err) == (3, True)


@pytest.mark.postgres
def test_the_schema_can_come_from_the_environment(empty_postgres: str, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEDUP_SCHEMA names the schema of the state, also in the SQL that is printed."""
    place = PostgresPlace(empty_postgres)
    monkeypatch.setenv("DEDUP_SCHEMA", "other")
    assert 'create table "other".consumer' in dedup("migrate --sql")[1]
    assert dedup("migrate", place)[0] == 0
    assert [row[0] for row in place.execute("select nspname from pg_namespace where nspname in ('dedup', 'other')")] == ["other"]


def test_an_unknown_consumer_is_one_line_with_the_names_there_are(place: Place, dedup: Run) -> None:
    """A mistyped name never reads as an empty, healthy consumer."""
    for line in ("consumer show", "checkpoint list", "batch list", "verify", "sink sync", "consumer reset"):
        code, out, err = dedup(f"{line} shoop", place)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "It has: shop" in err
