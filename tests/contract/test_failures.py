"""When messages fail, on every store: what the stream does by itself, and what a person does afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.changes import accept_gap, accept_incarnation
from checkpoint.errors import (
    BatchTooLarge,
    BudgetExceeded,
    ConfigError,
    IncarnationChanged,
    LettersUnread,
    PositionsMissing,
    ReprocessStopped,
    SettingsChanged,
    SourceUnavailable,
)
from deadletter.letter import Kind
from deadletter.policy import lift_budget
from deadletter.selection import Selection
from deadletter.store import Change
from dedup.core.store import Store
from dedup.reprocessing.from_log import fill
from dedup.reprocessing.letters import losing, reprocess
from dedup.reprocessing.options import ReprocessOptions
from dedup.reprocessing.replay import replay
from fixtures.variants import of_which
from kit.orders import BadOrder, assert_proven, batch, consumer, event, flatten, ids, letters, orders, raising, recorded
from kit.places import Place


def failing(store: Store, bad: Callable[[str], bool], runs: list[int] | None = None, **settings: Any) -> Any:
    """A consumer whose handler raises."""
    run = consumer(store, **settings)
    run._handler = raising(bad, runs)
    return run


def test_only_the_guilty_events_are_parked(place: Place) -> None:
    """A handler that raises for two of forty parks these two with error, stack and fingerprint; the others are written once."""
    runs: list[int] = []
    run = failing(place.store(), lambda i: i in ("p0-7", "p0-31"), runs)
    report = run(batch(*orders(range(40))), 0)
    assert (report.processed, report.dead_lettered) == (38, 2)
    assert len(runs) <= 2 * 2 * 6 + 1
    parked = letters(place.store())
    assert [x["idempotence_key"] for x in parked] == ["p0-7", "p0-31"]
    assert {x["kind"] for x in parked} == {"HANDLER_ERROR"} and {x["status"] for x in parked} == {"OPEN"}
    assert parked[0]["error_type"].endswith("BadOrder") and "cannot book order p0-7" in parked[0]["error_message"]
    assert "raising" in parked[0]["stack"] or "handler" in parked[0]["stack"]
    assert parked[0]["fingerprint"] == parked[1]["fingerprint"]
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(40) if n not in (7, 31))
    assert_proven(place.store())


def test_a_parked_event_keeps_its_key_until_it_is_reprocessed(place: Place) -> None:
    """What comes again is a duplicate; after the fix reprocess writes it once, and what comes then is a duplicate still."""
    store = place.store()
    failing(store, lambda i: i == "p0-1")(batch(*orders(range(3))), 0)
    fixed = consumer(place.store())
    assert fixed(batch(event(3, "p0-1", 1)), 1).duplicates == 1
    report = reprocess(Selection(topic="orders", partition=0, first=0, last=3), fixed)
    assert (report.selected, report.reprocessed, report.failed) == (1, 1, 0)
    assert sorted(ids(place.read())) == ["p0-0", "p0-1", "p0-2"]
    (letter,) = letters(place.store())
    assert letter["status"] == "REPROCESSED" and not letter["holds_key"]
    actions = place.store().history(letter["id"])["action"].to_pylist()
    assert actions == ["FAILED", "REPROCESSED"]
    assert fixed(batch(event(4, "p0-1", 1)), 2).duplicates == 1
    assert reprocess(Selection(), fixed).selected == 0
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_letter_that_fails_again_is_the_same_letter(place: Place) -> None:
    """One more attempt, both failures in its history, nothing written, still open."""
    failing(place.store(), lambda i: i == "p0-1")(batch(*orders(range(3))), 0)
    again = failing(place.store(), lambda i: True)
    report = reprocess(Selection(), again)
    assert (report.reprocessed, report.failed) == (0, 1)
    (letter,) = letters(place.store())
    assert (letter["status"], letter["attempts"], letter["holds_key"]) == ("OPEN", 2, True)
    past = place.store().history(letter["id"]).to_pylist()
    assert [x["action"] for x in past] == ["FAILED", "FAILED"] and past[1]["by"]
    assert sorted(ids(place.read())) == ["p0-0", "p0-2"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_reprocess_stops_after_so_many_failures_in_a_row(place: Place) -> None:
    """A fix that is none is noticed early; what failed again is counted, the rest untouched."""
    failing(place.store(), lambda i: True, budget=None)(batch(*orders(range(40))), 0)
    with pytest.raises(ReprocessStopped):
        reprocess(Selection(), failing(place.store(), lambda i: True), options=ReprocessOptions(stop_after=5))
    tried = [x["attempts"] for x in letters(place.store())]
    assert 5 <= tried.count(2) <= 10 and tried.count(1) == 40 - tried.count(2)


@pytest.mark.fast_on("postgres")
def test_over_budget_nothing_is_parked(place: Place) -> None:
    """A bug that fails everything stops the query; lifted, its events are parked; fixed, they are reprocessed."""
    consumer(place.store())(batch(*orders(range(120))), 0)
    broken = failing(place.store(), lambda i: True)
    with pytest.raises(BudgetExceeded, match="budget lift"):
        broken(batch(*orders(range(120, 240))), 1)
    assert letters(place.store()) == []
    place.store().amend("shop", lambda head: lift_budget(head, 120, Kind.HANDLER_ERROR), by="test", reason="known")
    assert broken(batch(*orders(range(120, 240))), 1).dead_lettered == 120
    report = reprocess(Selection(), consumer(place.store()))
    assert report.reprocessed == 120
    assert len(place.read()) == 240
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_a_poison_event_on_a_quiet_topic_is_parked(place: Place) -> None:
    """One event, and it fails: the stream goes on."""
    run = failing(place.store(), lambda i: i == "p0-0")
    assert run(batch(*orders([0])), 0).dead_lettered == 1
    assert run(batch(*orders([1])), 1).processed == 1


def sequenced(store: Store, bad: Callable[[str], bool], **settings: Any) -> Any:
    """A consumer that keeps the order of amounts."""
    return failing(store, bad, sequence_key="data.amount", **settings)


def test_events_wait_behind_a_dead_letter_of_their_sequence(place: Place) -> None:
    """In its batch and in later ones; other sequences go on; reprocess runs them in order."""
    first = [event(0, "a1", 1), event(1, "b1", 2), event(2, "a2", 1), event(3, "b2", 2)]
    broken = sequenced(place.store(), lambda i: i == "a1")
    assert broken(batch(*first), 0).dead_lettered == 2
    assert broken(batch(event(4, "a3", 1), event(5, "b3", 2)), 1).dead_lettered == 1
    parked = letters(place.store())
    assert [(x["idempotence_key"], x["status"]) for x in parked] == [("a1", "OPEN"), ("a2", "BLOCKED"), ("a3", "BLOCKED")]
    assert [x["blocked_by"] for x in parked] == [None, parked[0]["id"], parked[1]["id"]]
    assert sorted(ids(place.read())) == ["b1", "b2", "b3"]
    order: list[str] = []
    fixed = sequenced(place.store(), lambda i: bool(order.append(i)))
    assert waiting_behind(fixed, id=parked[0]["id"]) == (1, 2)
    report = reprocess(Selection(id=parked[0]["id"]), fixed)
    assert report.reprocessed == 3 and order == ["a1", "a2", "a3"]
    assert sorted(ids(place.read())) == ["a1", "a2", "a3", "b1", "b2", "b3"]
    assert fixed(batch(event(6, "a4", 1)), 2).processed == 1
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_a_letter_that_only_waited_tells_of_no_failure_from_before_it_was_run(place: Place) -> None:
    """Its history has the one failure that it had, whether it passes, or is lost, afterwards."""
    store = place.store()
    sequenced(store, lambda i: i == "a1")(batch(event(0, "a1", 1), event(1, "a2", 1)), 0)
    second = letters(store)[1]["id"]
    assert reprocess(Selection(), sequenced(store, lambda i: i == "a2")).failed == 1
    change, _ = losing(store.letters(Selection(id=second)), {}, ReprocessOptions())
    assert isinstance(change, Change) and change.history["action"].to_pylist() == ["LOST"]
    assert reprocess(Selection(), sequenced(store, lambda i: False)).reprocessed == 1
    assert store.history(second)["action"].to_pylist() == ["FAILED", "REPROCESSED"]
    assert_proven(store)


def waiting_behind(run: Any, limit: int | None = None, **selected: Any) -> tuple[int, int]:
    """How many letters a dry run finds, and how many more that wait behind them."""
    found = reprocess(Selection(**selected), run, dry_run=True, options=ReprocessOptions(limit=limit))
    return found.selected, found.behind


@pytest.mark.fast_on("delta")
def test_a_dry_run_says_how_many_letters_wait_behind_those_that_it_counts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are run as well: none is told twice, none beyond a limit, and none behind a letter that is not run itself."""
    monkeypatch.setattr("dedup.reprocessing.behind.SEQUENCES", 1)
    run = sequenced(place.store(), lambda i: i in ("a0", "b0"))
    run(batch(*(event(n, f"{'ab'[n % 2]}{n // 2}", n % 2) for n in range(8))), 0)
    a0, b0, a1, *_ = (row["id"] for row in letters(place.store()))
    assert waiting_behind(run) == (8, 0)
    assert waiting_behind(run, ids=(a0,)) == (1, 3) and waiting_behind(run, ids=(a0, b0)) == (2, 6)
    assert waiting_behind(run, ids=(a0, a1)) == (2, 2) and waiting_behind(run, ids=(a1,)) == (1, 0)
    assert waiting_behind(run, 2, ids=(a0,)) == (1, 1) and waiting_behind(run, 1, ids=(a0, b0)) == (1, 0)
    assert reprocess(Selection(ids=(a0,)), sequenced(place.store(), lambda i: False)).behind == 0


@pytest.mark.full
@pytest.mark.parametrize("other", ["fails again", "passes"])
def test_followers_are_run_beside_a_longer_sequence(place: Place, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another sequence of the page has more letters than one look takes: those behind a letter that passed have their turn as well."""
    monkeypatch.setattr("dedup.reprocessing.letters.LARGEST_PAGE", 3)
    long = [event(n, f"a{n}", 1) for n in range(2, 10)]
    events = batch(event(0, "a0", 1), event(1, "b0", 2), *long, event(10, "b1", 2))
    sequenced(place.store(), lambda i: i in ("a0", "b0"))(events, 0)
    heads = tuple(row["id"] for row in letters(place.store(), last=1))
    run = sequenced(place.store(), lambda i: i == "a0" and other == "fails again")
    assert reprocess(Selection(ids=heads), run).reprocessed == (2 if other == "fails again" else 11)
    assert {"b0", "b1"} <= set(ids(place.read()))
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_limit_and_a_rate_hold_for_letters_that_waited_too(place: Place) -> None:
    """No more letters are run than asked for, and none earlier than the rate allows; a second call goes on, in order."""
    sequenced(place.store(), lambda i: i == "a0")(batch(*(event(n, f"a{n}", 1) for n in range(6))), 0)
    order: list[str] = []
    pauses: list[int] = []
    fixed = sequenced(place.store(), lambda i: bool(order.append(i)))
    assert reprocess(Selection(), fixed, options=ReprocessOptions(limit=2)).reprocessed == 2
    assert order == ["a0", "a1"]
    slow = ReprocessOptions(rate=2, sleep=lambda _: pauses.append(len(order)))
    assert reprocess(Selection(), fixed, options=slow).reprocessed == 4
    assert (order, pauses) == ([f"a{n}" for n in range(6)], [4, 6])
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_rejected_event_blocks_what_was_processed_with_it(place: Place) -> None:
    """The handler rejects one event and accepts the next of its sequence: the next one waits."""

    def handler(rows: pa.Table, tx: Any) -> None:
        good = tx.reject(rows, pc.equal(pc.struct_field(rows["data"], "id"), "a1"), "no")
        tx.write(flatten(good), "orders")

    run = consumer(place.store(), sequence_key="data.amount")
    run._handler = handler
    report = run(batch(event(0, "a1", 1), event(1, "a2", 1), event(2, "b1", 2)), 0)
    assert (report.processed, report.dead_lettered) == (1, 2)
    assert ids(place.read()) == ["b1"]
    assert [(x["kind"], x["status"]) for x in letters(place.store())] == [("REJECTED", "OPEN"), ("REJECTED", "BLOCKED")]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_an_accepted_gap_is_filled_from_the_log(place: Place) -> None:
    """Positions that were never delivered are run once, as late events; a second call finds nothing to do."""
    consumer(place.store(), query="one")(batch(*orders([0])), 0)
    place.store().amend("shop", accept_gap, by="test", reason="known")
    run = consumer(place.store(), query="two")
    run(batch(*orders([9])), 0)
    run.register_log_reader(recorded(*orders(range(10))))
    asked = Selection(topic="orders", partition=0, first=0, last=20)
    assert fill(asked, run, dry_run=True).absent == 8
    assert fill(asked, run).ran.processed == 8
    assert fill(asked, run).absent == 0
    assert sorted(ids(place.read())) == sorted(f"p0-{n}" for n in range(10))
    assert run(batch(*orders([10])), 1).processed == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("other", of_which(1, [0, 9]))
def test_a_gap_is_not_filled_from_a_topic_that_was_created_again(place: Place, other: int) -> None:
    """Of absent positions nothing is known, but the events beside them were decided: where one of those is another, nothing is run."""
    consumer(place.store(), query="one")(batch(*orders([0])), 0)
    place.store().amend("shop", accept_gap, by="test", reason="known")
    run = consumer(place.store(), query="two")
    run(batch(*orders([9])), 0)
    run.register_log_reader(recorded(*(event(n, "other") if n == other else event(n, f"p0-{n}", n) for n in range(10))))
    with pytest.raises(IncarnationChanged, match=f"orders/0 {other}"):
        fill(Selection(topic="orders", first=1, last=8), run)
    assert ids(place.read()) == ["p0-0", "p0-9"]
    assert_proven(place.store())


@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        ({"kind": "REJECTED"}, {}, "have no kind"),
        pytest.param({"key": "a", "text": "b"}, {}, "have no key, text", marks=pytest.mark.full),
        pytest.param({"first": 5, "last": 4}, {}, "no position from 5 to 4", marks=pytest.mark.full),
        ({"first": 10, "last": 20}, {}, "from 10 on were not decided yet.*broker/orders/0 at 9"),
        ({}, {"limit": 5}, "are for letters"),
        pytest.param({}, {"rate": 5.0}, "are for letters", marks=pytest.mark.full),
    ],
)
def test_what_positions_do_not_have_is_refused(place: Place, asked: dict[str, Any], options: dict[str, Any], words: str) -> None:
    """A filter that would not be looked at, or a range in which nothing can be, is an error before anything runs."""
    run = consumer(place.store())
    run(batch(*orders(range(10))), 0)
    run.register_log_reader(recorded(*orders(range(10))))
    with pytest.raises(ConfigError, match=words):
        fill(Selection(topic="orders", **asked), run, options=ReprocessOptions(**options))
    if asked:
        with pytest.raises(ConfigError, match=words):
            replay(Selection(topic="orders", **asked), run, accept_double=True)
    assert len(place.read()) == 10


@pytest.mark.fast_on("postgres")
def test_positions_above_the_checkpoint_are_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A range that ends above the checkpoint is run up to it, and what was left out is said."""
    run = consumer(place.store())
    run(batch(*orders(range(10))), 0)
    run.register_log_reader(recorded(*orders(range(10))))
    with caplog.at_level("WARNING", "dedup"):
        assert fill(Selection(topic="orders", first=0, last=9), run).absent == 0
        assert "not decided" not in caplog.text
        fill(Selection(topic="orders", first=0, last=15), run)
    assert "positions 10 to 15 were not decided yet and are left out" in caplog.text


@pytest.mark.fast_on("postgres")
def test_positions_that_the_log_lost_are_named(place: Place) -> None:
    """What is neither delivered nor in the log is an error that names it; skipped, it is recorded as LOST and the rest is run."""
    consumer(place.store(), query="one")(batch(*orders([0])), 0)
    place.store().amend("shop", accept_gap, by="test", reason="known")
    run = consumer(place.store(), query="two")
    run(batch(*orders([9])), 0)
    run.register_log_reader(recorded(*orders([3, 4])))
    with pytest.raises(PositionsMissing, match=r"1-2.*5-8"):
        fill(Selection(topic="orders", first=0), run)
    assert ids(place.read()) == ["p0-0", "p0-9"]
    filled = fill(Selection(topic="orders", first=0), run, options=ReprocessOptions(skip_missing=True))
    assert (filled.ran.processed, len(filled.lost)) == (2, 6)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_letters_older_than_the_horizon_are_not_run(place: Place) -> None:
    """Their reservation may be purged, and a later event had the effect: they are counted and left; longer than retention is refused."""
    failing(place.store(), lambda i: True)(batch(*orders(range(2))), 0)
    old = reprocess(Selection(), consumer(place.store(), retention=timedelta(0)))
    assert (old.expired, old.reprocessed) == (2, 0)
    assert place.read() == []
    with pytest.raises(ConfigError, match=r"30 days.*7 days"):
        consumer(place.store(), retention=timedelta(days=7), reprocess_within=timedelta(days=30))


@pytest.mark.fast_on("postgres")
def test_other_key_settings_are_refused_for_letters_too(place: Place) -> None:
    """Keys of another kind would not recognise what was decided: reprocess, fill and replay say so and change nothing."""
    failing(place.store(), lambda i: i == "p0-1")(batch(*orders(range(3))), 0)
    other = consumer(place.store(), idempotence_key="data.amount")
    other.register_log_reader(recorded(*orders(range(3))))
    for call in (reprocess, fill, replay):
        with pytest.raises(SettingsChanged, match="amount"):
            call(Selection(topic="orders", first=0, last=2), other)
    assert [x["attempts"] for x in letters(place.store())] == [1] and len(place.read()) == 2


def test_a_letter_brings_back_everything_the_handler_saw(place: Place) -> None:
    """Headers, offset, times, the broker's key and the input's own other columns are there again, exactly, when it is reprocessed."""
    seen: list[dict[str, Any]] = []

    def handler(rows: pa.Table, tx: Any) -> None:
        seen.extend(rows.to_pylist())
        if len(seen) <= 2:
            raise BadOrder("not yet")
        tx.write(flatten(rows), "orders")

    when = datetime(2026, 3, 4, 5, 6, 7, 8, tzinfo=UTC)
    headers = [{"key": "h", "value": b"\x00\xff"}, {"key": "h", "value": None}, {"key": "", "value": b""}]
    given = batch(event(3, "a", 1, key=b"k\x00", enqueued_time=when, properties=headers))
    tenants = given.append_column("tenant", pa.array(["blue"])).append_column("price", pa.array([Decimal("1.50")]))
    run = consumer(place.store())
    run._handler = handler
    run(tenants, 0)
    assert reprocess(Selection(), run).failed == 1
    assert reprocess(Selection(), run).reprocessed == 1
    assert seen[0] == seen[1] == seen[2]
    assert (seen[2]["tenant"], seen[2]["price"], seen[2]["offset"], seen[2]["properties"]) == ("blue", Decimal("1.50"), "@3", headers)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_body_that_was_too_large_is_read_from_the_log(place: Place) -> None:
    """Only its beginning is kept; reprocess reads the event again, and without it says which position is missing."""
    large = event(1, "a", 1, body=b'{"id":"big","amount":1,"note":"' + b"x" * 100_000 + b'"}')
    run = failing(place.store(), lambda i: i == "big", max_body=1_000)
    run(batch(event(0, "small", 1), large), 0)
    (letter,) = letters(place.store())
    assert (letter["kind"], len(letter["body"]), letter["body_size"]) == ("TOO_LARGE", 64 * 1024, len(large["body"]))
    fixed = consumer(place.store(), max_body=1_000)
    fixed.register_log_reader(recorded())
    with pytest.raises(LettersUnread, match=r"orders/0 1 \(letter .*log does not have.*--skip-missing"):
        reprocess(Selection(), fixed)
    fixed.register_log_reader(recorded(large))
    assert reprocess(Selection(), fixed).reprocessed == 1
    assert ids(place.read()) == ["big", "small"]
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_letters_with_more_bytes_than_a_transaction_keeps_stop_the_batch_in_words(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the batch is true; with smaller transactions, as the error says, all of it is parked."""
    monkeypatch.setattr("dedup.core.letters.MOST_BODIES", 150)
    bad = batch(*(event(n, body=b"%d" % n * 60) for n in range(3)))
    with pytest.raises(BatchTooLarge, match=r"3 dead letters .* 180 bytes .*Lower max_events_per_transaction"):
        consumer(place.store())(bad, 0)
    assert letters(place.store()) == []
    assert consumer(place.store(), max_events_per_transaction=2)(bad, 0).dead_lettered == 3
    assert_proven(place.store())


@pytest.mark.full
def test_a_large_body_is_not_taken_from_another_event(place: Place) -> None:
    """Where the log holds another event at a letter's position, it is refused, and the letter is not given up as LOST."""
    large = event(0, "a", 1, body=b'{"id":"big","amount":1,"note":"' + b"x" * 2_000 + b'"}')
    failing(place.store(), lambda i: i == "big", max_body=1_000)(batch(large), 0)
    run = consumer(place.store(), max_body=1_000)
    for body in (large["body"].replace(b"x", b"y"), b'{"id":"big"}', None):
        run.register_log_reader(recorded({**large, "body": body}))
        with pytest.raises(LettersUnread, match=r"orders/0 0.*accept-incarnation"):
            reprocess(Selection(), run, options=ReprocessOptions(skip_missing=True))
    assert [x["status"] for x in letters(place.store())] == ["OPEN"] and place.read() == []
    place.store().amend("shop", lambda head: accept_incarnation(head, "broker", "orders"), by="test", reason="created again")
    assert reprocess(Selection(), run, options=ReprocessOptions(skip_missing=True)).lost == 1
    assert_proven(place.store())


@pytest.mark.fast_on("delta")
def test_a_module_that_a_handler_lacks_parks_nothing(place: Place) -> None:
    """An instance without a package stops, and makes no good event a letter; one that has it goes on."""

    def lacking(rows: pa.Table, tx: Any) -> None:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401

    run = consumer(place.store())
    run._handler = lacking
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        run(batch(*orders(range(3))), 0)
    assert letters(place.store()) == []
    assert consumer(place.store())(batch(*orders(range(3))), 0).processed == 3


def unreadable(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
    """A log reader with a mistake."""
    raise KeyError("no such folder")


def unreachable(source: str, topic: str, partition: int, first: int, last: int) -> pa.Table:
    """The log of a broker that does not answer."""
    raise SourceUnavailable("broker-1 does not answer")


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize(
    ("reader", "why"),
    of_which(1, [(None, "register_log_reader"), (unreadable, "KeyError: 'no such folder'"), (unreachable, "does not answer")]),
)
def test_a_letter_that_cannot_be_read_does_not_stop_the_others(reader: Any, why: str, place: Place) -> None:
    """The others are run, also those behind it; the error at the end names each that was not and why, and has the report."""
    large = [event(n, "a", 1, body=f'{{"id":"big{n}","amount":1,"note":"{"x" * 2_000}"}}'.encode()) for n in (1, 2)]
    small = [event(n, f"small{n}", 1) for n in (0, 3)]
    failing(place.store(), lambda i: True, max_body=1_000)(batch(small[0], *large, small[1]), 0)
    run = consumer(place.store(), max_body=1_000)
    if reader is not None:
        run.register_log_reader(reader)
    with pytest.raises(LettersUnread, match=rf"2 of 4 letters.*orders/0 1 \(letter .*, orders/0 2 \(letter .*{why}") as error:
        reprocess(Selection(), run)
    report = pickle.loads(pickle.dumps(error.value)).report
    assert (report.selected, report.reprocessed, report.tried) == (4, 2, 4)
    assert [(u.topic, u.partition, u.sequence_number, why in u.why) for u in report.unread] == [("orders", 0, n, True) for n in (1, 2)]
    assert [x["status"] for x in letters(place.store())] == ["REPROCESSED", "OPEN", "OPEN", "REPROCESSED"]
    assert ids(place.read()) == ["small0", "small3"]
    assert len(reprocess(Selection(), run, dry_run=True).unread) == (2 if reader is None else 0)
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
def test_a_large_body_that_is_gone_is_recorded_as_lost(place: Place) -> None:
    """With skip_missing its letter is LOST and holds its key no longer: the message counts as new when it comes again."""
    large = event(0, "a", 1, body=b'{"id":"big","amount":1,"note":"' + b"x" * 2_000 + b'"}')
    failing(place.store(), lambda i: i == "big", max_body=1_000)(batch(large), 0)
    run = consumer(place.store(), max_body=1_000)
    run.register_log_reader(recorded())
    assert reprocess(Selection(), run, options=ReprocessOptions(skip_missing=True)).lost == 1
    assert [(x["status"], x["holds_key"]) for x in letters(place.store())] == [("LOST", False)]
    assert run(batch(event(1, "big", 1)), 1).processed == 1
    assert_proven(place.store())


@pytest.mark.fast_on("postgres")
@pytest.mark.parametrize("missing", of_which(1, ["handler", "log reader"]))
def test_a_dry_run_refuses_what_the_run_refuses(place: Place, missing: str) -> None:
    """Without a handler, or without what reads the log again, both end with one message."""
    store = place.store()
    consumer(store, query="one")(batch(event(0, "a"), event(1, "b", -1)), 0)
    store.amend("shop", accept_gap, by="test", reason="known")
    run, asked = consumer(store, query="two"), Selection(topic="orders")
    run(batch(event(9, "e")), 0)
    calls = [partial(replay, asked, run), partial(reprocess, asked, run, from_log=True)]
    if missing == "handler":
        run._handler = None
        calls.append(partial(reprocess, asked, run))
    for call in calls:
        said = []
        for dry_run in (True, False):
            with pytest.raises(ConfigError) as refused:
                call(dry_run=dry_run)
            said.append(str(refused.value))
        assert said[0] == said[1] and ("no handler" if missing == "handler" else "register_log_reader") in said[0]
