"""The commands for dead letters: filters, a dry run first, nothing changed without --yes, and the user's handler found and run."""

from __future__ import annotations

import base64
import getpass
import json
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dedup import DeadLetters, Selection
from fixtures.fix_places import BOTH, kept_place, new_place
from fixtures.variants import of_which
from kit.orders import batch, consumer, event
from kit.people import BODY, failing
from kit.places import DeltaPlace, Place, PostgresPlace
from kit.redacting import SECRET, WAYS, job, noted, said

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has two rejected orders, b and c, and a body that does not decode."""
    made = new_place(request, tmp_path)
    fail(made)
    return made


@pytest.fixture(params=BOTH, scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The same for tests that change nothing there: they share it."""
    with kept_place(request, tmp_path_factory) as made:
        fail(made)
        yield made


def fail(place: Place) -> None:
    """What every test finds."""
    store = place.store()
    failing(store)
    store.close()


def document(run: Run, line: str, place: Place) -> Any:
    """The one JSON document of a command that succeeded."""
    code, out, err = run(f"{line} --json", place)
    assert (code, err) == (0, ""), (out, err)
    return json.loads(out)


def listed(run: Run, place: Place, options: str = "") -> list[dict[str, Any]]:
    """Letters as `list --json` gives them."""
    found: list[dict[str, Any]] = document(run, f"dead-letter list {options}", place)
    return found


FILTERS = {
    "--consumer shop": 3,
    "--source broker --topic orders --partition 0": 3,
    "--partition 1": 0,
    "--from 2": 2,
    "--to 1": 1,
    "--from 2 --to 2": 1,
    "--since 2000-01-01": 3,
    "--since 2000-01-01T00:00 --until 2000-01-02T00:00+02:00": 0,
    "--kind rejected": 2,
    "--status discarded": 0,
    "--status OPEN --kind UNDECODABLE": 1,
    "--fingerprint none": 0,
    "--key b": 1,
    "--sequence-key b": 0,
    "--text 'NEGATIVE Amount'": 2,
    "--limit 1": 1,
    "--limit 0": 3,
}
"""Options -> letters that match."""


@pytest.mark.full
@pytest.mark.parametrize("command", of_which(2, ["list", "discard", "group", "export"]))
def test_every_filter_means_the_same_for_each_command(command: str, place: Place, dedup: Run, tmp_path: Path) -> None:
    """A filter that is given must match, whatever the command does with the letters."""
    for number, (options, count) in enumerate(FILTERS.items()):
        if command == "export":
            out = dedup(f"dead-letter export {tmp_path}/{number}.jsonl {options}", place)[1]
            assert out == f"{count} letters exported\n", options
        elif command == "discard":
            if not options.startswith("--limit"):
                assert document(dedup, f"dead-letter discard --reason no {options}", place)["changed"] == count, options
        elif command == "group":
            if not options.startswith("--limit"):
                assert sum(g["letters"] for g in document(dedup, f"dead-letter group {options}", place)) == count, options
        else:
            assert len(listed(dedup, place, options)) == count, options


@pytest.mark.full
def test_a_limit_also_holds_for_ids(place: Place, dedup: Run) -> None:
    """Of the ids beside --limit the first ones are meant, and no other letter changes."""
    first, *others = (letter["id"] for letter in listed(dedup, place))
    ids = " ".join([first, *others])
    for line in ("discard --reason no", "reopen"):
        assert document(dedup, f"dead-letter {line} {ids} --limit 1", place)["selected"] == 1
        assert document(dedup, f"dead-letter {line} {ids} --limit 1 --yes", place)["changed"] == 1
        status = {"discard": "DISCARDED", "reopen": "OPEN"}[line.split()[0]]
        found = {letter["id"]: letter["status"] for letter in listed(dedup, place)}
        assert found == {first: status, **dict.fromkeys(others, "OPEN")}
        assert document(dedup, f"dead-letter discard {ids} --reason no", place)["selected"] == 3


def test_groups_lead_to_an_example_that_can_be_shown(kept: Place, dedup: Run) -> None:
    """From the largest group to one letter, as a person goes."""
    code, out, _ = dedup("dead-letter group --consumer shop", kept)
    assert (code, "negative amount" in out) == (0, True)
    example = document(dedup, "dead-letter group", kept)[0]["example"]
    assert example[:12] in out
    code, out, err = dedup(f"dead-letter show {example[:12]}", kept)
    assert (code, err) == (0, "")
    assert '"amount": -2' in out and "FAILED" in out
    assert document(dedup, f"dead-letter show {example}", kept)["history"][0]["action"] == "FAILED"


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(
    "line",
    of_which(
        2,
        [
            "dead-letter discard {id} --reason wrong",
            "dead-letter edit {id} --body {{}} --key y",
            "dead-letter discard --consumer shop --reason wrong --release-key",
            "dead-letter reopen {gone}",
            "dead-letter import {file}",
        ],
    ),
)
def test_nothing_is_changed_without_yes(line: str, place: Place, dedup: Run, tmp_path: Path) -> None:
    """The first call tells, and is done with --yes by somebody, for a reason, who are kept; twice it does nothing more."""
    file = tmp_path / "letters.jsonl"
    letters = listed(dedup, place)
    dedup(f"dead-letter export {file}", place)
    if "import" in line:
        other = DeltaPlace(tmp_path / "elsewhere") if isinstance(place, DeltaPlace) else place
        if isinstance(place, PostgresPlace):
            place.execute("delete from dedup.letter_history; delete from dedup.dead_letter; delete from dedup.letter_count")
        else:
            other.create_sink()
            failing_nothing(other)
        place = other
    if "reopen" in line:
        dedup(f"dead-letter discard {letters[1]['id']} --reason wrong --yes", place)
    line = line.format(id=letters[0]["id"][:12], gone=letters[1]["id"], file=file)
    before = listed(dedup, place)
    code, out, err = dedup(line, place)
    assert (code, err, "Nothing was changed" in out, "--yes" in out) == (0, "", True, True)
    assert listed(dedup, place) == before
    reason = "" if "--reason" in line else "--reason wrong"
    code, out, err = dedup(f"{line} --yes --by ann {reason}", place)
    assert (code, err, "Nothing was changed" in out) == (0, "", False), (out, err)
    assert listed(dedup, place) != before
    changed = next(row["id"] for row in listed(dedup, place) if row not in before)
    entry = document(dedup, f"dead-letter show {changed}", place)["history"][-1]
    assert (entry["by"], entry["reason"]) == ("ann", "wrong")


def failing_nothing(place: Place) -> None:
    """The consumer is known, and has no letters."""
    from kit.orders import batch, consumer

    consumer(place.store())(batch(), 0)


def test_who_decides_is_the_login_name_if_nobody_is_named(place: Place, dedup: Run) -> None:
    """Nobody has to think of it, and it is never empty."""
    letter = listed(dedup, place)[0]["id"]
    dedup(f"dead-letter discard {letter} --reason wrong --yes", place)
    assert document(dedup, f"dead-letter show {letter}", place)["history"][-1]["by"] == getpass.getuser()


@pytest.mark.full
def test_a_body_is_edited_from_a_file_exactly(place: Place, dedup: Run, tmp_path: Path) -> None:
    """@FILE gives its bytes; a file that is not there is an error in one line."""
    letter = listed(dedup, place)[0]["id"]
    (tmp_path / "body").write_bytes(BODY)
    assert dedup(f"dead-letter edit {letter[:8]} --body @{tmp_path}/body --accept-any-body --yes", place)[0] == 0
    assert base64.b64decode(document(dedup, f"dead-letter show {letter}", place)["body_base64"]) == BODY
    code, _, err = dedup(f"dead-letter edit {letter} --body @{tmp_path}/none --yes", place)
    assert (code, err.count("\n"), "No such file" in err) == (2, 1, True)


def test_an_edit_of_a_body_says_where_the_key_comes_from(place: Place, dedup: Run) -> None:
    """From the new body, unless a person gave the letter a key, now or before."""
    line = f"dead-letter edit {listed(dedup, place)[0]['id']}"
    body = f"{line} --body '{{}}'"
    assert "The key comes from the new body." in dedup(body, place)[1]
    for edit in (f"{body} --key y", f"{line} --key y --yes", body):
        out = dedup(edit, place)[1]
        assert "comes from the new body" not in out
        assert ("keeps the key that it was given" in out) is ("--body" in edit)


@pytest.mark.full
def test_an_edit_says_what_it_changes(place: Place, dedup: Run) -> None:
    """With --json too, before and after --yes: the sizes of a body, and both keys."""
    letter = listed(dedup, place)[0]
    line = f"dead-letter edit {letter['id']} --body '{{}}' --key y"
    size = {"what": "body_size", "now": letter["body_size"], "then": 2}
    for edit in (line, f"{line} --yes"):
        told = document(dedup, edit, place)
        assert told["changes"] == [size, {"what": "idempotence_key", "now": "b", "then": "y"}]
        assert told["done"] is edit.endswith("--yes")
    assert document(dedup, f"dead-letter edit {letter['id']} --key z", place)["changes"] == [
        {"what": "idempotence_key", "now": "y", "then": "z"}
    ]
    assert "body size    2     2" in dedup(f"dead-letter edit {letter['id']} --body '{{}}'", place)[1]


@pytest.mark.full
def test_keys_are_shown_as_text_with_hex_beside_it(place: Place, dedup: Run) -> None:
    """The idempotence key stands before its hash; the broker's key is text with its hex, or hex alone where it is no text."""
    store = place.store()
    consumer(store)(batch(event(4, "r", -1, key="o-ä".encode()), event(5, "s", -1, key=b"\xff\x00")), 1)
    store.close()
    text, numbers = (letter["id"] for letter in listed(dedup, place, "--from 4"))
    (letter,) = listed(dedup, place, "--from 4 --limit 1")
    shown = dedup(f"dead-letter show {text}", place)[1].splitlines()
    hashed = f"idempotence key hash  {letter['key_hex']}"
    assert shown[shown.index(hashed) - 1].split() == ["idempotence", "key", "r"]
    assert "event key             o-ä (hex 6f 2d c3 a4)" in shown
    assert "event key             ff 00" in dedup(f"dead-letter show {numbers}", place)[1].splitlines()


@pytest.mark.fast_on("postgres")
def test_a_json_body_is_not_edited_into_one_that_is_cut_off(place: Place, dedup: Run) -> None:
    """Exit code 2 and the character at which it is wrong, also without --yes; --accept-any-body takes it."""
    before = listed(dedup, place)
    edit = f'dead-letter edit {before[0]["id"]} --body \'{{"id": "b", "amou\''
    for line in (edit, f"{edit} --yes"):
        code, _, err = dedup(line, place)
        assert (code, "The new body is not JSON" in err, "at character 12 of 17" in err, "--accept-any-body" in err) == (
            2,
            True,
            True,
            True,
        )
        assert listed(dedup, place) == before
    assert dedup(f"{edit} --accept-any-body --yes", place)[0] == 0


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(
    ("line", "words"),
    of_which(
        6,
        [
            ("dead-letter discard --reason x --yes", "Say which letters"),
            ("dead-letter discard '' --reason x --yes", "no dead letter begins"),
            ("dead-letter reopen {id} --yes", "None of these letters can be reopened: it is OPEN"),
            ("dead-letter edit {id} --key a --yes", "decided already"),
            ("dead-letter discard {id} --kind REJECTED --reason x --yes", "You gave ids and filters"),
            ("dead-letter discard --consumer shop --reason ' ' --yes", "Give a reason"),
            ("dead-letter discard {id} --consumer shop --reason x --yes", "Say which letters"),
            ("dead-letter discard zzzz --reason x --yes", "no dead letter begins"),
            ("dead-letter edit {id} --yes", "Give a new body"),
            ("dead-letter import /nowhere --yes", "There is no file"),
            ("dead-letter import /tmp --yes", "/tmp cannot be read: Is a directory"),
            ("dead-letter export /nowhere/letters.jsonl", "/nowhere/letters.jsonl cannot be written: No such file or directory"),
            ("dead-letter discard --text '' --reason x --yes", "The text to search for is empty"),
            ("dead-letter discard --from 99999999999999999999 --reason x --yes", "64 bits"),
            ("dead-letter list --limit 99999999999999999999", "64 bits"),
            ("dead-letter edit {id} --key '' --yes", "--key is empty"),
            ("dead-letter list --text '\udcff'", "is not valid UTF-8"),
            ("budget lift shop --kind NO_KEY --events 99999999999999999999 --yes", "no flood that anybody knows"),
        ],
    ),
)
def test_what_cannot_be_done_is_one_line(line: str, words: str, kept: Place, dedup: Run) -> None:
    """Exit code 2 for a wrong call and 3 for what the state refuses, one sentence that says why, and no letter changed."""
    before = listed(dedup, kept)
    code, _, err = dedup(line.format(id=before[0]["id"]), kept)
    refused = "can be reopened" in words or "decided already" in words
    assert (code, err.count("\n"), words in err) == (3 if refused else 2, 1, True), err
    assert listed(dedup, kept) == before


def test_a_range_the_wrong_way_round_is_told(kept: Place, dedup: Run) -> None:
    """It would match nothing, and look as if nothing were there."""
    code, _, err = dedup("dead-letter list --from 3 --to 1", kept)
    assert (code, "--from 3 is above --to 1" in err) == (2, True)


def test_a_wrong_time_is_told_with_the_form_it_has(place: Place, dedup: Run) -> None:
    """Before anything is asked of the store."""
    code, _, err = dedup("dead-letter list --since yesterday", place)
    assert (code, "2026-01-31T14:00" in err) == (2, True)


@pytest.mark.full
def test_times_the_wrong_way_round_are_told(place: Place, dedup: Run) -> None:
    """They would match nothing, and look as if nothing were there."""
    code, _, err = dedup("dead-letter list --since 2027-01-01 --until 2026-01-01", place)
    assert (code, "is not before --until" in err) == (2, True)


@pytest.mark.full
def test_an_export_to_standard_output_is_the_letters_alone(place: Place) -> None:
    """A pipe gets JSON lines and nothing else."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "dedup", "dead-letter", "export", "-", "--store", place.url], capture_output=True, check=True, timeout=60
    )
    assert len([json.loads(line) for line in done.stdout.splitlines()]) == 3
    assert b"3 letters exported" in done.stderr


PROGRAM = """
import pyarrow as pa
import pyarrow.compute as pc
from kit.orders import batch, event, consumer as made, flatten
from kit.people import BODY
from kit.places import DeltaPlace, PostgresPlace
from pathlib import Path

{place}
LOG = {{n: event(n, f"x{{n}}", n) for n in range(4, 7)}}
LOG |= {{0: event(0, "a"), 1: event(1, "b", -1), 2: event(2, "c", -2), 3: event(3, body=BODY), 7: event(7, "h", 7)}}  # as they came

class App:
    consumer = made(place.store())
    consumer._handler = None

    @consumer.foreach_batch
    def store(rows, tx):
        tx.write(flatten(rows), "orders")

    @consumer.register_log_reader
    def read(source, topic, partition, first, last):
        return batch(*(e for n, e in LOG.items() if first <= n <= last))

other = 3
"""


@pytest.fixture
def program(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the working directory, whose handler takes what was rejected before."""
    made = f"DeltaPlace(Path({str(place.folder)!r}))" if isinstance(place, DeltaPlace) else f"PostgresPlace({place.url!r})"
    name = f"shop_{uuid.uuid4().hex}"  # folders of tests have the names of earlier ones
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(PROGRAM).format(place=f"place = {made}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{name}:App.consumer"


def test_reprocess_runs_the_handler_that_is_named(program: str, place: Place, dedup: Run) -> None:
    """First told, then done with --yes: the effects are there once, and the letters say so."""
    line = f"dead-letter reprocess {program} --topic orders --from 1 --to 3 --frames arrow"
    for look in (line,):
        code, out, err = dedup(look)
        assert (code, err, "Nothing was changed" in out, "REJECTED" in out) == (0, "", True, True)
    assert [row["id"] for row in place.read()] == ["a"]
    code, out, _ = dedup(f"{line} --yes --by ann --reason fixed --json")
    done = json.loads(out)
    assert code == 1, "a letter failed again"
    assert (done["selected"], done["reprocessed"], done["failed"]) == (3, 2, 1)
    assert [row["id"] for row in place.read()] == ["a", "b", "c"]
    assert [row["status"] for row in listed(dedup, place)] == ["REPROCESSED", "REPROCESSED", "OPEN"]
    code, out, _ = dedup(f"{line} --yes --kind rejected --json")
    again = json.loads(out)
    assert (code, again["selected"], len(place.read())) == (0, 0, 3)
    history = document(dedup, f"dead-letter show {listed(dedup, place)[0]['id']}", place)["history"]
    assert [(h["action"], h["by"], h["reason"]) for h in history][1:] == [("REPROCESSED", "ann", "fixed")]


def test_reprocess_runs_the_letters_that_are_named(program: str, place: Place, dedup: Run) -> None:
    """One letter can be run by the first digits of its id, as every other command takes them; filters beside it are refused."""
    second = listed(dedup, place)[1]["id"]
    line = f"dead-letter reprocess {program} {second[:10]} --frames arrow"
    code, out, _ = dedup(f"{line} --yes --json")
    assert (code, json.loads(out)["reprocessed"]) == (0, 1)
    assert [row["status"] for row in listed(dedup, place)] == ["OPEN", "REPROCESSED", "OPEN"]
    code, _, err = dedup(f"{line} --kind rejected")
    assert (code, "You gave ids and filters" in err, "either ids, or filters" in err) == (2, True, True)
    code, _, err = dedup(f"{line} --from-log")
    assert (code, "You gave ids and --from-log" in err, "filters" in err) == (2, True, False)


LARGE_BODIES = """
from dedup.settings import Limits
from kit.orders import consumer as made, flatten
from kit.places import DeltaPlace
from pathlib import Path

consumer = made(DeltaPlace(Path({folder!r})).store(), max_body=40)
consumer._handler = lambda rows, tx: tx.write(flatten(rows), "orders")
"""


@pytest.mark.full
@pytest.mark.delta
def test_a_letter_that_cannot_be_read_is_named(tmp_path: Path, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are run, a table and JSON name it and say why, and the exit code says that something is wrong."""
    from kit.orders import batch, consumer, event

    place = DeltaPlace(tmp_path / "store")
    place.create_sink()
    run = consumer(place.store(), max_body=40)
    run(batch(event(0, "b", -1), event(1, "b" * 40, -1), event(2, "c", -1)), 0)
    name = f"shop_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(LARGE_BODIES.format(folder=str(place.folder)))
    monkeypatch.chdir(tmp_path)
    line = f"dead-letter reprocess {name}:consumer --frames arrow"
    code, out, _ = dedup(line)
    assert (code, "register_log_reader" in out, "Nothing was changed" in out) == (0, True, True), out
    code, out, err = dedup(f"{line} --yes --json")
    assert (code, err) == (1, "")
    done = json.loads(out)
    assert (done["reprocessed"], [(u["topic"], u["partition"], u["sequence_number"]) for u in done["unread"]]) == (2, [("orders", 0, 1)])
    code, out, err = dedup(f"{line} --yes")
    assert (code, err, "register_log_reader" in out) == (1, "", True), out
    assert [row["status"] for row in listed(dedup, place)] == ["REPROCESSED", "OPEN", "REPROCESSED"]


def test_replay_repeats_positions_on_purpose_only(program: str, place: Place, dedup: Run) -> None:
    """Without compensate, merge or --accept-double it is refused; the dry run tells how many positions there are."""
    line = f"consumer replay {program} --topic orders --from 0 --to 0 --frames arrow"
    code, out, _ = dedup(line)
    assert (code, "Nothing was changed" in out, "is refused, and changes nothing, if the handler calls tx.write" in out) == (0, True, True)
    assert {"missing", "replayed"}.isdisjoint(line.split()[0] for line in out.splitlines()), "a dry run does not know them"
    looked = json.loads(dedup(f"{line} --json")[1])
    assert (looked["processed"], "tx.write" in looked["refused"]) == (1, True)
    code, _, err = dedup(f"{line} --yes")
    assert (code, "accept" in err) == (3, True), err
    code, out, _ = dedup(f"{line} --accept-double")
    assert (code, "are there twice afterwards" in out, "is refused" in out) == (0, True, False)
    assert dedup(f"{line} --yes --accept-double")[0] == 0
    assert [row["id"] for row in place.read()] == ["a", "a"]


def test_absent_positions_are_run_from_the_log(program: str, place: Place, dedup: Run) -> None:
    """What a gap left out comes in late, once; a second call finds nothing to do."""
    from kit.orders import batch, consumer, event

    consumer(place.store())(batch(event(7, "h", 7)), 1)
    line = f"dead-letter reprocess {program} --from-log --topic orders --frames arrow --json"
    assert json.loads(dedup(line)[1])["absent"] == 3
    assert dedup(f"{line} --yes")[0] == 0
    assert [row["id"] for row in place.read()] == ["a", "h", "x4", "x5", "x6"]
    assert json.loads(dedup(line)[1])["absent"] == 0
    assert dedup("verify shop", place)[0] == 0


@pytest.mark.parametrize(
    ("target", "words"),
    of_which(
        2,
        [
            ("shop", "Give module:attribute"),
            ("no_such_module:consumer", "There is no module 'no_such_module'"),
            ("json:nothing", "has no 'nothing'"),
            ("json:dumps", "is of type function, not a Consumer"),
        ],
    ),
)
def test_a_consumer_that_is_not_found_is_one_line(target: str, words: str, dedup: Run) -> None:
    """It says what was looked for, and where."""
    for command in ("dead-letter reprocess", "consumer replay"):
        code, _, err = dedup(f"{command} {target}")
        assert (code, err.count("\n"), words in err) == (2, 1, True), err


@pytest.mark.parametrize(
    ("text", "iso"), [("2026-01-31", "2026-01-31T00:00:00+00:00"), ("2026-01-31T14:00+02:00", "2026-01-31T14:00:00+02:00")]
)
def test_a_time_without_a_zone_is_utc(text: str, iso: str) -> None:
    """Whatever zone the machine or the database is in."""
    from dedup.cli.options import moment

    assert moment(text).isoformat() == iso


def test_the_budget_is_shown_and_lifted(place: Place, dedup: Run) -> None:
    """How many of the last events failed; a lifted budget counts none of those, and says how many are admitted from now on."""
    from kit.orders import batch, consumer, orders

    store = place.store()
    run = consumer(store, name="frail")
    run._handler = lambda rows, tx: [1 // 0 for n in rows["sequence_number"].to_pylist() if n % 2]
    run(batch(*orders(range(5))), 0)
    store.close()
    shown = document(dedup, "budget show frail", place)["kinds"]["HANDLER_ERROR"]
    assert (shown["decided_events"], shown["failed_of_the_last_100"], shown["admitted_from_now_on"]) == (5, 2, 0)
    assert dedup("budget lift frail --kind handler_error --events 10 --reason known --yes", place)[0] == 0
    kinds = document(dedup, "budget show frail", place)["kinds"]
    shown = kinds["HANDLER_ERROR"]
    assert {kind for kind, one in kinds.items() if one["admitted_from_now_on"]} == {"HANDLER_ERROR"}
    assert (shown["failed_of_the_last_100"], shown["admitted_from_now_on"]) == (0, 10)


@pytest.mark.postgres
def test_command_api_and_plain_sql_give_the_same_letters(postgres: str, dedup: Run) -> None:
    """What a DBA selects, what Python gets and what the command prints are the same letters, states and groups."""
    place = PostgresPlace(postgres)
    place.create_sink()
    failing(place.store())
    api, columns = DeadLetters(place.store()), ["id", "kind", "status", "reason", "attempts"]
    sql = place.execute(f"SELECT {', '.join(columns)} FROM dedup.dead_letter ORDER BY partition, sequence_number")
    assert len(sql) == 3
    assert [tuple(row[c] for c in columns) for row in listed(dedup, place)] == sql
    assert [tuple(row[c] for c in columns) for row in api.select(Selection(limit=None)).to_pylist()] == sql
    counted = sorted(place.execute("SELECT fingerprint, count(*) FROM dedup.dead_letter GROUP BY 1"))
    assert sorted((g["fingerprint"], g["letters"]) for g in document(dedup, "dead-letter group", place)) == counted
    assert sorted((g["fingerprint"], g["letters"]) for g in api.groups(Selection()).to_pylist()) == counted


def test_forget_asks_first_and_says_what_to_type(dedup: Run, place: Place) -> None:
    """An open letter is not erased: the command names what to type. Without --yes nothing changes; with it the report says what remains."""
    forget = "consumer forget shop --key b --reason 'request 17'"
    code, out, err = dedup(f"{forget} --yes", place)
    assert (code, out) == (3, "") and "1 letters wait" in err and "dedup dead-letter discard" in err
    code, out, err = dedup(forget, place)
    assert code == 3 and "left: they wait" in out and "1 letters wait" in err
    assert dedup("dead-letter discard --key b --reason test --yes", place)[0] == 0
    code, out, err = dedup(forget, place)
    assert (code, err) == (0, "") and "would be erased" in out and "Nothing was changed" in out
    assert document(dedup, forget, place)["done"] is False
    done = document(dedup, f"{forget} --yes --by clerk", place)
    assert (done["letters"], done["messages"], done["done"]) == (1, 0, True) and done["remains"] and done["elsewhere"]
    (letter,) = listed(dedup, place, "--text 'erased by dedup'")
    assert {letter.get(name) for name in letter if name.startswith(("body", "idempotence"))} == {None} and letter["status"] == "DISCARDED"
    code, out, err = dedup(f"dead-letter reopen {letter['id']} --yes", place)
    assert code == 3 and "its contents were erased" in err
    code, out, _ = dedup(f"consumer forget shop --letter {letter['id'][:12]} --reason again --yes", place)
    assert code == 0 and "erased before" in out
    shown = document(dedup, f"dead-letter show {letter['id']}", place)
    assert [(h["action"], h["by"], h["reason"]) for h in shown["history"]][-1] == ("FORGOTTEN", "clerk", "request 17")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    of_which(
        3,
        [
            ("--reason x", 2, "Say what to forget"),
            ("--key b", 2, "--reason"),
            ("--key b --key c --reason x", 2, "has 1 part"),
            ("--key b --reason ' '", 2, "Give a reason"),
            ("--letter 0000 --reason x", 2, "no dead letter begins"),
            ("--message 7 --reason x", 2, "has no message 7"),
        ],
    ),
)
def test_forget_refuses_what_it_cannot_mean(dedup: Run, kept: Place, options: str, code: int, said: str) -> None:
    """A wrong call says what is wrong, and changes nothing."""
    before = listed(dedup, kept)
    done, _, err = dedup(f"consumer forget shop {options} --yes", kept)
    assert (done, said in " ".join(err.split())) == (code, True), err
    assert dedup("consumer forget ship --key b --reason x", kept)[0] == 2
    assert listed(dedup, kept) == before


@pytest.mark.parametrize(
    ("way", "told"), of_which(1, [("encrypt", "sealed: --open shows it"), ("fields", "masked: body, headers, columns.note")])
)
def test_what_a_letter_hides_is_told(way: str, told: str, place: Place, dedup: Run) -> None:
    """`show` says that the letter is masked, with the parts, or sealed; neither cipher text nor a person stands in the table."""
    store = place.store()
    run, _ = job(store, WAYS[way], bad={"x7"})
    run(noted(said(4, "x7")), 1)
    letter = store.letters(Selection(first=4))["id"][0].as_py()
    store.close()
    assert document(dedup, f"dead-letter show {letter}", place)["redaction"] == told
    code, out, _ = dedup(f"dead-letter show {letter}", place)
    assert (code, told in out, SECRET in out) == (0, True, False)
    assert ("body: sealed" in out, "(sealed)" in out) == ((True, True) if way == "encrypt" else (False, False))
    code, out, err = dedup(f"dead-letter edit {letter} --body {{}} --yes", place)
    assert code != 0 and "stored for all to read" in err
