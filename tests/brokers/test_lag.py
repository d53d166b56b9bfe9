"""`dedup consumer lag`: what lies between the checkpoints and the end of the log, of a real Kafka broker and of Event Hubs."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from checkpoint.errors import ConfigError
from checkpoint.head import Checkpoint, Head
from checkpoint.position import Partition
from checkpoint.start import End, Lag, lags
from checkpoint.start import Place as Where
from dedup import kafka as dk
from kit import kafka_server
from kit.kafka_kit import Topic
from kit.orders import batch, consumer
from kit.places import DeltaPlace, Place

Run = Callable[..., tuple[int, str, str]]

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def one(checkpoint: int | None, first: int, end: int, *, seconds: float | None = None) -> Lag:
    """A partition whose newest event came so many seconds after the one at the checkpoint."""
    newest = None if seconds is None else NOON + dt.timedelta(seconds=seconds)
    return Lag("shop", Partition("s", "t", 0), checkpoint, End(first, end, newest), NOON if checkpoint is not None else None)


@pytest.mark.parametrize(
    ("lag", "events", "seconds", "lost", "another"),
    [
        (one(9, 0, 15, seconds=3.5), 5, 3.5, 0, False),
        (one(14, 0, 15, seconds=0), 0, 0.0, 0, False),
        (one(14, 0, 15), 0, 0.0, 0, False),
        (one(None, 4, 15, seconds=1), 11, None, 0, False),
        (one(9, 12, 15, seconds=-1), 3, 0.0, 2, False),
        (one(9, 20, 20), 0, 0.0, 10, False),
        (one(9, 0, 3), 0, 0.0, 0, True),
    ],
)
def test_lag_of_a_partition(lag: Lag, events: int, seconds: float | None, lost: int, another: bool) -> None:
    """Behind, caught up, never read, passed by retention (in part, wholly), and a log that is shorter than our checkpoint."""
    assert (lag.events, lag.seconds, lag.lost, lag.another) == (events, seconds, lost, another)


@dataclass
class Asked:
    """A broker with one partition of whatever is asked for."""

    def ends(self, topics: Sequence[str]) -> Mapping[Where, End]:
        """Two events each."""
        return {(topic, 0): End(0, 2) for topic in topics}


def test_the_state_says_which_topics_and_which_source_are_meant() -> None:
    """One known source needs no name; several do, and a consumer that has read nothing needs its topics named."""
    head = Head("shop", checkpoints={Partition("a", "t", 0): Checkpoint(0), Partition("a", "u", 0): Checkpoint(1)})
    assert [(x.partition, x.events) for x in lags(head, Asked())] == [(Partition("a", "t", 0), 1), (Partition("a", "u", 0), 0)]
    two = Head("shop", checkpoints={**head.checkpoints, Partition("b", "t", 0): Checkpoint(0)})
    with pytest.raises(ConfigError, match="--source"):
        lags(two, Asked())
    assert [x.partition.source for x in lags(two, Asked(), source="b")] == ["b"]
    with pytest.raises(ConfigError, match="--topic"):
        lags(Head("new"), Asked())
    assert lags(Head("new"), Asked(), ["t"])[0].checkpoint is None


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A Delta store with the sink `orders`."""
    made = DeltaPlace(tmp_path)
    made.create_sink()
    return made


@pytest.mark.delta
def test_lag_behind_a_real_broker(kafka: kafka_server.Broker, topic: Topic, place: Place, dedup: Run, tmp_path: Path) -> None:
    """Checkpoint, end, events and time per partition, as a table and as JSON; logins come from a file."""
    topic.send_orders(*((f"k{n}", n) for n in range(5)))
    read = dk.log_reader(kafka.servers).read(topic.name, 0, 0, 2)
    consumer(place.store())(read, 0)
    code, out, err = dedup(f"consumer lag shop --kafka {kafka.servers} --json", place)
    assert (code, err) == (0, "")
    first, second = json.loads(out)
    assert (first["checkpoint"], first["first"], first["end"], first["events"]) == (2, 0, 5, 2)
    assert first["seconds"] >= 0 and first["newest_time"] >= first["checkpoint_time"]
    assert (second["checkpoint"], second["events"], second["seconds"]) == (None, 0, None)
    limits = {"1": 1, "2": 0, "0s": int(first["seconds"] > 0), "1000d": 0}
    lines = {limit: f"consumer lag shop --kafka {kafka.servers} --fail-above {limit}" for limit in limits}
    assert {limit: dedup(line, place)[0] for limit, line in lines.items()} == limits
    assert f"Run `dedup consumer lag shop --kafka {kafka.servers}`." in dedup(f"status --kafka {kafka.servers} --fail-above 1", place)[1]
    broker = dk.EventHubs.connection_string(kafka.connection_string).broker()
    names = ("security.protocol", "sasl.mechanism", "sasl.username", "sasl.password")
    login = "# a login\n" + "\n".join(f"{name} = {broker.settings()[name]}" for name in names)
    (tmp_path / "login").write_text(login)
    code, out, _ = dedup(f"consumer lag --kafka {broker.servers} --kafka-settings {tmp_path}/login", place)
    assert code == 0 and kafka_server.KEY not in out and out.count(topic.name) == 2


@pytest.mark.delta
def test_the_lag_of_all_leaves_out_who_has_no_checkpoint(place: Place, dedup: Run) -> None:
    """A consumer that knows events by their keys alone has no position: the others are shown all the same."""
    run = consumer(place.store(), positions=None, idempotence_key="message_id")
    run(pa.table({"message_id": ["a"], "body": [b"{}"]}), 0)
    assert dedup("consumer lag --kafka localhost:1", place)[:2] == (0, "no consumers yet\n")


def test_lag_refuses_a_secret_among_its_arguments(place: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection string belongs into a variable, whose name is the argument; it is not repeated."""
    consumer(place.store())(batch(), 0)
    for line, told in {
        "consumer lag --eventhubs Endpoint=sb://h/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0": "name of an environment variable",
        "consumer lag --eventhubs NOT_SET": "NOT_SET is not set",
        "consumer lag": "--kafka host:9092",
        "consumer lag --kafka h:1 --eventhubs X": "--kafka host:9092",
        "consumer lag --kafka h:1 --kafka-settings /no/such/file": "cannot be read",
    }.items():
        code, out, err = dedup(line.replace(";", r"\;"), place)
        assert (code, out, err.count("\n")) == (2, "", 1), line
        assert told in err and "c2VjcmV0" not in err
