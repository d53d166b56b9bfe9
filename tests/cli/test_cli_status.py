"""`dedup status`: what each consumer does, what is wrong, and an exit code that a health check understands."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError, PublicationStuck
from checkpoint.head import Checkpoint, Head, Present
from checkpoint.position import Partition
from checkpoint.start import End, Lag
from deadletter import Status
from deadletter.selection import Selection
from dedup import DeadLetters
from dedup.cli.status import Thresholds, require_source, wrong_with
from dedup.core.messages import OutboxLag
from dedup.signals import standing
from dedup.signals.standing import Activity, Standing, rate
from fixtures.fix_places import BOTH, new_place
from kit.orders import batch, consumer, event, letters, orders
from kit.paths import ROOT, environment
from kit.places import DeltaPlace, Place

Run = Callable[..., tuple[int, str, str]]

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
HERE, GONE, ELSEWHERE = Present("here", 1, True), Present("here", 1, False), Present("there", 1, None)


def at(**given: Any) -> Standing:
    """A consumer that committed ten seconds ago, and lacks nothing."""
    usual = {"present": [HERE], "last_commit": NOW - dt.timedelta(seconds=10), "rate": 1.0, "letters": {}, "oldest": None, "lags": None}
    return Standing(Head("shop"), outbox=given.pop("outbox", OutboxLag(0, None, 0, 0)), now=NOW, **{**usual, **given})


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has decided one batch: three orders, and one that is rejected."""
    made = new_place(request, tmp_path)
    store = made.store()
    consumer(store)(batch(*orders(range(3)), event(3, "bad", -1)), 0)
    store.close()
    return made


def test_the_status_tells_who_runs_what_and_what_is_open(place: Place, dedup: Run) -> None:
    """One row per consumer, without a warning and with exit code 0: open letters are no fault until they are old."""
    code, out, err = dedup("status --json", place)
    (one,) = json.loads(out)
    assert (code, err, one["consumer"], one["open_letters"], one["dead"], one["warnings"]) == (0, "", "shop", 1, 0, [])
    assert dt.datetime.fromisoformat(one["last_commit"]).tzinfo and one["oldest_letter"]
    assert "shop" in dedup("status", place)[1]


def test_a_limit_that_is_exceeded_is_a_warning_with_its_command_and_exit_code_1(place: Place, dedup: Run) -> None:
    """A letter that is open for too long, and a consumer that is silent for too long."""
    code, out, _ = dedup("status --letters-older 0s --silent 0s", place)
    assert code == 1
    assert "shop: a dead letter is open since" in out and "Run `dedup dead-letter group --consumer shop --status OPEN`." in out
    assert "shop: nothing was committed since" in out and "Run `dedup consumer show shop`." in out


@pytest.mark.full
def test_a_process_that_was_killed_is_stopped_and_one_that_lives_is_not(place: Place) -> None:
    """The process of this host that holds the epoch is looked for by number and start; on PostgreSQL its session tells, too."""
    store = place.store()
    consumer(store, name="mine")(batch(*orders(range(3))), 0)
    (mine,) = store.present("mine")
    assert mine.alive
    program = (
        "from kit.orders import batch, consumer, orders; from kit.places import place_of; "
        f"consumer(place_of({place.kind!r}, {place.where!r}).store(), name='other')(batch(*orders(range(3))), 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), check=True)
    (other,) = store.present("other")
    assert other.pid != mine.pid and other.alive is False
    assert store.present("nobody") == []


class OneTopic:
    """A broker that has the topic `orders` alone, as `kafka.Broker` answers."""

    def ends(self, topics: Sequence[str]) -> dict[tuple[str, int], End]:
        """Five events in its partition."""
        if missing := set(topics) - {"orders"}:
            raise ConfigError(f"There is no topic {', '.join(missing)} at here:9092.")
        return {("orders", 0): End(0, 5)}


@pytest.mark.full
def test_a_topic_that_is_gone_hides_no_other_consumer(place: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer of a topic that was deleted is a warning in `status`, and a row with the problem in `consumer lag`; both end with 1."""
    store = place.store()
    consumer(store, name="old")(batch(event(0, "a", topic="retired")), 0)
    store.close()
    for module in ("status", "lag"):
        monkeypatch.setattr(f"dedup.cli.{module}.ends_of", lambda *_: OneTopic())
    code, out, err = dedup("status --kafka here:9092 --json", place)
    told = {one["consumer"]: (one["lag"], [each["text"] for each in one["warnings"]]) for one in json.loads(out)}
    assert (code, err) == (1, "")
    assert told == {"shop": (1, []), "old": (None, ["its lag is not known: There is no topic retired at here:9092"])}
    code, out, err = dedup("consumer lag --kafka here:9092 --json", place)
    rows = {one["consumer"]: (one["topic"], one["events"], one["problem"]) for one in json.loads(out)}
    assert (code, err) == (1, "")
    assert rows == {"shop": ("orders", 1, None), "old": (None, None, "There is no topic retired at here:9092.")}
    assert dedup("consumer lag --kafka here:9092", place)[1].count("There is no topic retired") == 1
    for line in ("consumer lag old", "consumer lag --topic retired"):
        code, out, err = dedup(f"{line} --kafka here:9092", place)
        assert (code, out) == (2, "") and "There is no topic retired" in err


def test_the_activity_follows_from_the_last_commit_and_the_processes() -> None:
    """Alive and busy, alive and waiting, gone, on another host, never run."""
    long_ago = NOW - dt.timedelta(hours=1)
    assert at().activity is Activity.RUNNING
    assert at(last_commit=long_ago).activity is Activity.WAITING
    assert at(present=[GONE]).activity is Activity.STOPPED
    assert at(present=[GONE, HERE]).activity is Activity.RUNNING
    assert at(present=[ELSEWHERE]).activity is Activity.RUNNING
    assert at(present=[ELSEWHERE], last_commit=long_ago).activity is Activity.UNKNOWN
    assert at(present=[], last_commit=None).activity is Activity.NEW


def test_every_fault_is_a_warning_that_names_a_command() -> None:
    """Restored tables, messages that cannot be sent, positions that the log has lost, a lag beyond the limit."""
    one = Lag("shop", Partition("kafka", "orders", 0), 10, End(first=20, end=50, newest=NOW), NOW - dt.timedelta(minutes=5))
    found = at(damage="tables were restored", outbox=OutboxLag(3, NOW, 2, 0), lags=[one])
    told = [(w.text, w.command) for w in wrong_with(found, Thresholds(lag=dt.timedelta(minutes=1), broker=("--kafka", "here:9092")))]
    assert told == [
        ("tables were restored", "`dedup verify shop`"),
        ("2 messages cannot be sent", "`dedup outbox list shop --state DEAD`"),
        ("the log no longer has 9 positions of kafka/orders/0", "`dedup consumer lag shop --kafka here:9092`"),
        ("it is 30 events behind", "`dedup consumer lag shop --kafka here:9092`"),
    ]
    assert not list(wrong_with(at(lags=[replace(one, checkpoint=49)]), Thresholds(lag=5)))


def test_a_limit_of_time_is_for_each_partition() -> None:
    """A partition that nobody has read is behind for too long, however young the lag of the others is; a number is for all together."""
    near = Lag("shop", Partition("kafka", "orders", 0), 10, End(first=0, end=12, newest=NOW), NOW - dt.timedelta(seconds=1))
    unread = Lag("shop", Partition("kafka", "orders", 1), None, End(first=0, end=50, newest=NOW))
    read = Lag("shop", Partition("kafka", "orders", 1), 49, End(first=0, end=50, newest=NOW))
    hour = Thresholds(lag=dt.timedelta(hours=1))
    assert [w.text for w in wrong_with(at(lags=[near, unread]), hour)] == ["it is 51 events behind"]
    assert not list(wrong_with(at(lags=[near, read]), hour)) and not list(wrong_with(at(), hour))
    assert [len(list(wrong_with(at(lags=[near, unread]), Thresholds(lag=most)))) for most in (50, 51)] == [1, 0]


def test_rows_that_do_not_show_in_their_sink_are_told(tmp_path: Path, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication that is stuck stops the stream: the status says so as soon as it lasts; the metrics say since when, and no damage."""
    place = DeltaPlace(tmp_path)
    place.create_sink()
    store = place.store()
    run = consumer(store)
    run(batch(*orders([0])), 0)
    place.drop_sink()
    place.create_sink()
    with pytest.raises(PublicationStuck):
        run(batch(*orders([1])), 1)
    assert dedup("status", place)[0] == 0, "it may only be slow"
    monkeypatch.setattr(standing, "SHOWN_WITHIN", dt.timedelta(0))
    code, told, _ = dedup("status", place)
    assert code == 1 and "do not show in their sinks yet" in told and "dedup sink sync shop" in told
    numbers = dedup("metrics", place)[1]
    assert 'dedup_damage{consumer="shop"} 0.0' in numbers and "dedup_oldest_unpublished_timestamp_seconds{" in numbers
    place.accept_sink()
    assert dedup("sink sync", place)[0] == dedup("status", place)[0] == 0


@pytest.mark.full
def test_a_store_whose_last_consumer_was_deleted_is_there(place: Place, dedup: Run) -> None:
    """It has no consumers: nothing says that the address is wrong, and a look that is made every minute goes on."""
    gone = "consumer delete shop --reason gone --although-waiting --although-running --yes"
    assert dedup(gone, place)[0] == 0
    for line in ("status", "consumer list", "verify", "outbox lag"):
        assert dedup(line, place)[:2] == (0, "no consumers yet\n")
    assert "dedup_up 1" in dedup("metrics", place)[1]
    assert "There is no consumer 'shop'" in dedup(gone, place)[2]


def test_the_rate_is_of_the_events_after_the_first_decision() -> None:
    """Three decisions in two seconds with ten events each: ten a second. One decision has no rate."""
    times = pa.array([NOW, NOW + dt.timedelta(seconds=1), NOW + dt.timedelta(seconds=2)], pa.timestamp("us", tz="UTC"))
    records = pa.table({"committed_at": times, "delivered": [10, 10, 10]})
    assert rate(records) == 10.0
    assert rate(records.slice(0, 1)) is None and rate(records.slice(0, 0)) is None


def test_a_broker_that_nobody_reads_is_an_error() -> None:
    """A misspelt --source would leave out every lag, and a limit of the lag would be kept by nobody."""
    head = Head("shop", checkpoints={Partition("kafka-eu", "orders", 0): Checkpoint(3)})
    require_source([replace(at(), head=head)], "kafka-eu")
    require_source([at()], "kafka-eu")  # nothing was read yet
    with pytest.raises(ConfigError, match=r"reads from 'kafka-us'\. They read from kafka-eu"):
        require_source([replace(at(), head=head)], "kafka-us")


@pytest.mark.full
def test_the_last_commit_is_that_of_the_last_batch(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many decisions about letters came after it."""
    monkeypatch.setattr(standing, "NEWEST", 2)
    letters_of = DeadLetters(place.store())
    for _ in range(4):
        letters_of.discard(Selection(), by="ann", reason="no")
        letters_of.reopen(Selection(statuses=(Status.DISCARDED,)), by="ann", reason="yes")
    found = standing.look(place.store(), "shop")
    assert found.last_commit is not None


def test_names_of_headers_are_shown_as_they_are(place: Place, dedup: Run) -> None:
    """Producers choose them: nothing of them is sent to the terminal as a command, and no character is another one."""
    named = [{"key": "evil\x1b]0;owned\x07", "value": b"1"}, {"key": "trace_id", "value": b"2"}]
    consumer(place.store())(batch(event(4, "worse", -1, properties=named)), 1)
    (letter,) = [one for one in letters(place.store()) if one["sequence_number"] == 4]
    code, out, _ = dedup(f"dead-letter show {letter['id']}", place)
    assert code == 0 and "\x1b" not in out and "\x07" not in out and "trace_id" in out
