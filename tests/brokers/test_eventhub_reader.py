"""Ranges of a partition are read whole, once, in order and no further, whatever the link does; or an error names what is missing."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from azure.core.credentials import AccessToken
from azure.core.exceptions import ClientAuthenticationError
from azure.eventhub._pyamqp import error as amqp
from azure.eventhub._transport._pyamqp_transport import PyamqpTransport
from azure.eventhub.exceptions import AuthenticationError

from checkpoint.errors import ConfigError, IncarnationChanged, PositionsMissing, ReceiverStolen, SourceUnavailable
from dedup.eventhub import Connection, Namespace, Sender, log_reader
from dedup.eventhub.connection import made
from dedup.eventhub.namespace import explained
from dedup.eventhub.reader import PartitionReader, Receive, borrowed, close_all
from dedup.eventhub.rows import SCHEMA, numbers
from fixtures.fix_eventhubs import MakeHub
from fixtures.variants import of_which
from kit.eventhubs.control import Double
from kit.eventhubs.service import TOKEN

FAST = Receive(prefetch=100, timeout=20)
IMPATIENT = Receive(prefetch=100, timeout=6)  # a busy machine takes seconds to open a link
LOSSY = Receive(prefetch=100, timeout=20, fail_on_data_loss=False)


def batch(*wanted: int) -> pa.RecordBatch:
    """Events with these sequence numbers."""
    row = {"source": "s", "topic": "t", "partition": 0, "body": b""}
    return pa.RecordBatch.from_pylist([{**row, "sequence_number": number} for number in wanted], SCHEMA)


@pytest.fixture
def connection(eventhubs: Double, new_hub: MakeHub) -> Connection:
    return Connection.of(eventhubs.connection_string, new_hub())


def read(connection: Connection, first: int, last: int, options: Receive = FAST, created: str | None = None) -> list[int]:
    """Sequence numbers of the range."""
    reader = PartitionReader(connection, 0, options)
    try:
        return [number for events in reader.read(first, last, created) for number in numbers(events)]
    finally:
        reader.close()


def test_a_range_is_read_and_nothing_beyond_it(eventhubs: Double, connection: Connection) -> None:
    """Both ends included, although the service sends ahead."""
    eventhubs.fill(connection.hub, 0, 500)
    assert read(connection, 37, 311) == list(range(37, 312))


def test_the_link_stays_open_between_ranges_that_follow(eventhubs: Double, connection: Connection) -> None:
    """One link reads range after range; another begin opens another."""
    eventhubs.fill(connection.hub, 0, 300)
    reader = PartitionReader(connection, 0, FAST)
    before = eventhubs.stats().get("readers", 0)
    for first, last in ((0, 9), (10, 10), (11, 199)):
        assert [number for events in reader.read(first, last) for number in numbers(events)] == list(range(first, last + 1))
    assert eventhubs.stats()["readers"] == before + 1
    assert reader.next == 200
    assert [number for events in reader.read(5, 7) for number in numbers(events)] == [5, 6, 7]
    assert eventhubs.stats()["readers"] == before + 2
    reader.close()


@pytest.mark.parametrize("fault", of_which(2, ["slow and reset", "again", "throttle", "reset", "detach"]))
def test_faults_cost_nothing(eventhubs: Double, connection: Connection, fault: str) -> None:
    """Each event once and in order: connection broken inside a transfer, link detached, events twice, service busy."""
    hub = connection.hub
    eventhubs.fill(hub, 0, 600, size=300)
    if "reset" in fault:
        eventhubs.order("reset", hub=hub, partition=0, after=250)
    if "slow" in fault or fault == "detach":
        eventhubs.order("slow", bytes_per_second=300_000)
    if fault == "again":
        eventhubs.order("again", hub=hub, partition=0, count=60)
    if fault == "throttle":
        eventhubs.order("throttle", what="receive", count=2)
    if fault == "detach":
        threading.Timer(0.4, lambda: eventhubs.order("detach", hub=hub, partition=0)).start()
    assert read(connection, 0, 599) == list(range(600))


def test_a_stolen_partition_is_told(eventhubs: Double, connection: Connection) -> None:
    """A higher owner level ends the read with an error that says so; the partition is not taken back."""
    eventhubs.fill(connection.hub, 0, 10)
    reader = PartitionReader(connection, 0, Receive(level=1))
    reading = reader.read(0, 20)
    next(reading)
    eventhubs.order("steal", hub=connection.hub, partition=0, level=2)
    with pytest.raises(ReceiverStolen, match=r"partition 0, position 10: another receiver of consumer group '\$Default'"):
        list(reading)
    assert reader.next is None


def test_positions_past_the_retention_are_named(eventhubs: Double, connection: Connection) -> None:
    """Exactly the positions that are gone; with failOnDataLoss=false the rest is read and a warning names them."""
    eventhubs.fill(connection.hub, 0, 50)
    eventhubs.order("expire", hub=connection.hub, partition=0, before=20)
    with pytest.raises(PositionsMissing, match=r"partition 0, position 5: positions 5-19 are not in the log any more"):
        read(connection, 5, 30)


@pytest.mark.full
def test_a_loss_that_is_accepted_is_logged(eventhubs: Double, connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """Retention at the begin, and a whole range of it."""
    eventhubs.fill(connection.hub, 0, 50)
    eventhubs.order("expire", hub=connection.hub, partition=0, before=20)
    with caplog.at_level(logging.WARNING, "dedup"):
        assert read(connection, 5, 30, LOSSY) == list(range(20, 31))
        assert read(connection, 5, 10, LOSSY) == []
    assert "positions 5-19 are not in the log" in caplog.text
    assert "positions 5-10 are not in the log" in caplog.text


def test_a_hole_in_the_log_is_a_loss(eventhubs: Double, connection: Connection) -> None:
    """What compaction took is not silently left out; where that is accepted, everything else comes, also behind the end of the range."""
    eventhubs.fill(connection.hub, 0, 60)
    eventhubs.order("hole", hub=connection.hub, partition=0, first=30, last=34)
    with pytest.raises(PositionsMissing, match="positions 30-34"):
        read(connection, 0, 59)
    assert read(connection, 0, 59, LOSSY) == [*range(30), *range(35, 60)]
    assert read(connection, 0, 32, LOSSY) == list(range(30))


@pytest.mark.full
def test_a_new_hub_of_the_same_name_is_refused(eventhubs: Double, connection: Connection) -> None:
    """By when it was created, where it has so many events; by where it ends, where it has not."""
    eventhubs.fill(connection.hub, 0, 50)
    created = Namespace(connection).created()
    eventhubs.create(connection.hub)
    with pytest.raises(IncarnationChanged, match="deleted and created again: it was created"):
        read(connection, 40, 49, created=created)
    with pytest.raises(IncarnationChanged, match="the log ends before this position"):
        read(connection, 40, 49)


@pytest.mark.full
def test_a_hub_that_is_created_anew_while_it_is_read_is_refused(eventhubs: Double, connection: Connection) -> None:
    """Where the link breaks and opens again, as many events of the new hub as the old one had are not taken for the old ones."""
    eventhubs.fill(connection.hub, 0, 600, size=300)
    created = Namespace(connection).created()
    eventhubs.order("slow", bytes_per_second=100_000)
    reader = PartitionReader(connection, 0, FAST)
    reading = reader.read(0, 599, created)
    found = numbers(next(reading)).tolist()
    with pytest.raises(IncarnationChanged, match="deleted and created again: it was created"):
        eventhubs.order("replace", hub=connection.hub, more=0)
        while True:
            found += numbers(next(reading)).tolist()
    assert found == list(range(len(found))) and len(found) < 600
    reader.close()


@pytest.mark.full
def test_a_link_is_believed_only_once_its_hub_is_known(eventhubs: Double, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the service does not say which hub it is, nothing of a link counts; the range is read whole as soon as it does."""
    eventhubs.fill(connection.hub, 0, 50)
    created, asked = Namespace(connection).created(), list[str]()
    check = Namespace.check

    def away_at_first(self: Namespace, wanted: str) -> None:
        asked.append(wanted)
        if len(asked) < 3:
            raise SourceUnavailable("away")
        check(self, wanted)

    monkeypatch.setattr(Namespace, "check", away_at_first)
    assert read(connection, 0, 49, created=created) == list(range(50))
    assert len(asked) == 3


class Late:
    """A receiver whose first event comes after those behind it."""

    broken = False

    def __init__(self, *_: Any) -> None:
        self._said = [batch(1, 2, 3), None, batch(0), None, None]

    def get(self, seconds: float) -> Any:
        """What comes next."""
        return self._said.pop(0)

    def close(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("options", [FAST, LOSSY])
def test_an_event_that_comes_late_on_a_new_link_is_no_loss(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, options: Receive
) -> None:
    """Least of all where losses are left out: nobody would learn of it."""
    monkeypatch.setattr("dedup.eventhub.reader.Receiver", Late)
    assert read(connection, 0, 3, options) == [0, 1, 2, 3]


@pytest.mark.full
def test_it_never_waits_for_ever(eventhubs: Double, connection: Connection) -> None:
    """An end that the log does not reach, and a link on which nothing comes, are errors after the time-out."""
    eventhubs.fill(connection.hub, 0, 10)
    with pytest.raises(IncarnationChanged, match="position 10: the log ends before"):
        read(connection, 0, 15, IMPATIENT)
    eventhubs.order("throttle", what="receive", count=1_000)
    with pytest.raises(SourceUnavailable, match=r"position 0: no event came for 6 seconds, but the log goes on to 9: .*throttled"):
        read(connection, 0, 9, IMPATIENT)


@pytest.mark.full
def test_a_wrong_key_and_a_wrong_name_say_what_to_do(eventhubs: Double, connection: Connection) -> None:
    """At once, without the key."""
    wrong = Connection.of(eventhubs.connection_string.replace("SharedAccessKey=", "SharedAccessKey=QUFBQUFB"), connection.hub)
    for act in (lambda: read(wrong, 0, 1), lambda: Namespace(wrong).look()):
        with pytest.raises(ConfigError, match="refuses to read") as caught:
            act()
        assert "QUFBQUFB" not in str(caught.value)
    for lost in (
        Connection.of(eventhubs.connection_string, "nowhere"),
        Connection.of(eventhubs.connection_string, connection.hub, "nobody"),
    ):
        with pytest.raises(ConfigError, match="There is no event hub, partition or consumer group"):
            read(lost, 0, 1)


@pytest.mark.parametrize(
    ("raised", "final"),
    [
        (amqp.TokenAuthFailure(401, b"InvalidSignature"), True),
        (amqp.TokenAuthFailure(404, b"The messaging entity could not be found."), True),
        (amqp.TokenAuthFailure(503, b"ServerBusy"), False),
        (amqp.TokenAuthFailure(None, None), False),
        (amqp.AuthenticationException(amqp.ErrorCondition.UnauthorizedAccess, description="Status code: 401, Description: x"), True),
        (amqp.AuthenticationException(amqp.ErrorCondition.InternalError, description="Authorization timeout."), False),
        (amqp.TokenExpired(amqp.ErrorCondition.InternalError, description="CBS Authentication Expired."), False),
    ],
)
def test_only_a_login_that_is_refused_ends_what_reads(raised: Exception, final: bool) -> None:
    """The client has one class for that, for tokens that have expired, and for time-outs, which pass."""
    told = PyamqpTransport._create_eventhub_exception(raised)
    assert isinstance(told, AuthenticationError)
    assert isinstance(explained(told, Connection("ns", "hub")), ConfigError) == final


def test_what_is_received_ahead_is_bounded(eventhubs: Double, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nobody reads on, the client receives a bound of bytes and its prefetch, not the whole log; then nothing is missing."""
    monkeypatch.setattr("dedup.eventhub.reader.AHEAD", 500_000)
    eventhubs.fill(connection.hub, 0, 3_000, size=5_000)
    before = eventhubs.stats()["delivered"]
    reader = PartitionReader(connection, 0, FAST)
    reading = reader.read(0, 2_999)
    found = numbers(next(reading)).tolist()
    time.sleep(2)
    assert eventhubs.stats()["delivered"] - before < 1_000
    assert found + [number for events in reading for number in numbers(events)] == list(range(3_000))
    reader.close()


class Entra:
    """A token credential, as azure-identity has them."""

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        assert scopes == ("https://eventhubs.azure.net//.default",)
        return AccessToken(TOKEN, int(time.time()) + 600)


def test_entra_id(eventhubs: Double, connection: Connection) -> None:
    """A token credential by its name, made where it is needed."""
    eventhubs.fill(connection.hub, 0, 5)
    ours = Connection.entra(eventhubs.host, connection.hub, credential="test_eventhub_reader:Entra", tls=False)
    assert read(pickle.loads(pickle.dumps(ours)), 0, 4) == list(range(5))
    for name in ("azure.identity:NoSuch", "nowhere:Credential", "test_eventhub_reader:NoSuch"):
        with pytest.raises(ConfigError, match=r"[Cc]redential"):
            Connection.entra(eventhubs.host, connection.hub, credential=name, tls=False).client()


def test_a_name_stands_for_one_credential_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are kept, so Entra ID is not asked with every question; a fork makes its own."""
    name = "test_eventhub_reader:Entra"
    first = made(name)
    assert made(name) is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert made(name) is not first


class Refused:
    """A credential that gets no token."""

    def __init__(self, said: str) -> None:
        self._said = said

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        raise ClientAuthenticationError(self._said)


@pytest.mark.parametrize(
    ("said", "final"),
    [
        ("Authentication failed:\nAADSTS7000215: Invalid client secret provided.\nclient_secret=hunter2", True),
        (
            "DefaultAzureCredential failed.\n\tEnvironment: Failed to resolve 'login.microsoftonline.com'\n\tA CLI could not be found",
            False,
        ),
    ],
)
def test_a_credential_without_a_token_says_why(eventhubs: Double, connection: Connection, said: str, final: bool) -> None:
    """What Entra ID refuses is a matter of the settings, a network that is broken is not; all lines are told, without secrets."""
    ours = Connection.entra(eventhubs.host, connection.hub, credential=Refused(said), tls=False)
    with pytest.raises(ConfigError if final else SourceUnavailable) as caught:
        Namespace(ours, retry_total=0).created()
    assert ("AADSTS7000215" if final else "login.microsoftonline.com") in str(caught.value) and "hunter2" not in str(caught.value)
    sender = Sender(ours, retry_total=0)
    with pytest.raises(ConfigError if final else SourceUnavailable, match="send to" if final else "sent to"):
        sender.partitions()
    sender.close()


def test_what_a_hub_says_of_itself(eventhubs: Double, new_hub: MakeHub) -> None:
    """Every partition's span, also of empty ones and of those that retention emptied."""
    hub = new_hub(partitions=3)
    connection = Connection.of(eventhubs.connection_string, hub)
    eventhubs.fill(hub, 0, 10)
    eventhubs.fill(hub, 1, 4)
    eventhubs.order("expire", hub=hub, partition=0, before=3)
    eventhubs.order("expire", hub=hub, partition=1, before=4)
    said = Namespace(connection).look(known=[0])
    assert {number: (span.first, span.end) for number, span in said.spans.items()} == {0: (3, 10), 1: (4, 4), 2: (0, 0)}
    assert said.spans[2].newest is None
    assert Namespace(connection).topic_ids("s", [hub, "other"]) == {hub: said.created}


def test_the_log_reader_gives_what_is_left(eventhubs: Double, connection: Connection) -> None:
    """As an Arrow table without Spark; positions past the retention are simply not there, an end above the log is an error."""
    eventhubs.fill(connection.hub, 0, 30)
    eventhubs.order("expire", hub=connection.hub, partition=0, before=10)
    reader = log_reader(eventhubs.connection_string, "another name than the topic's", timeout=5)
    table = pickle.loads(pickle.dumps(reader)).read(connection.hub, 0, 5, 12)
    assert table["sequence_number"].to_pylist() == [10, 11, 12]
    assert set(table["topic"].to_pylist()) == {connection.hub}
    assert reader.read(connection.hub, 0, 2, 8).num_rows == 0
    assert reader.first_kept("", connection.hub, 0) == 10
    with pytest.raises(IncarnationChanged, match="ends before"):
        reader.read(connection.hub, 0, 25, 40)
    assert "SharedAccessKey" not in repr(reader)


@pytest.fixture
def empty_pool() -> Iterator[None]:
    close_all()
    yield
    close_all()


@pytest.mark.full
@pytest.mark.usefixtures("empty_pool")
def test_only_exclusive_readers_are_kept(eventhubs: Double, connection: Connection) -> None:
    """An exclusive reader goes on where it stood without a new link; one that reads beside others is closed after its range."""
    eventhubs.fill(connection.hub, 0, 40)
    before = eventhubs.stats().get("readers", 0)
    for options, links in ((Receive(level=0), 1), (Receive(level=None), 3)):
        eventhubs.order("release", hub=connection.hub, partition=0)
        for first in (0, 20):
            with borrowed(connection, 0, options) as reader:
                assert [n for events in reader.read(first, first + 19) for n in numbers(events)] == list(range(first, first + 20))
        assert eventhubs.stats()["readers"] - before == links
        close_all()
        _until_nobody_reads(eventhubs, connection.hub)


@pytest.mark.full
@pytest.mark.usefixtures("empty_pool")
def test_a_reader_that_lost_its_link_while_idle_opens_another(eventhubs: Double, connection: Connection) -> None:
    """Another task of the same stream may have taken the partition in the meantime."""
    eventhubs.fill(connection.hub, 0, 400)
    for first in (0, 20):
        with borrowed(connection, 0, Receive(level=0, prefetch=10)) as reader:
            assert [n for events in reader.read(first, first + 19) for n in numbers(events)] == list(range(first, first + 20))
        eventhubs.order("steal", hub=connection.hub, partition=0, level=0)
        eventhubs.order("release", hub=connection.hub, partition=0)
        _until_nobody_reads(eventhubs, connection.hub)
        time.sleep(0.5)  # the client hears of it


@pytest.mark.usefixtures("empty_pool")
def test_readers_are_not_shared_after_a_fork(eventhubs: Double, connection: Connection) -> None:
    """A child forgets its parent's readers and opens its own."""
    eventhubs.fill(connection.hub, 0, 40)
    with borrowed(connection, 0, Receive(level=0)) as reader:
        list(reader.read(0, 9))
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(connection, answers))
    child.start()
    assert answers.get(timeout=30) == (None, list(range(10, 20)))
    child.join(10)


def _in_child(connection: Connection, answers: Any) -> None:
    with borrowed(connection, 0, Receive(level=0)) as reader:
        answers.put((reader.next, [number for events in reader.read(10, 19) for number in numbers(events)]))


def _until_nobody_reads(double: Double, hub: str) -> None:
    end = time.monotonic() + 20
    while double.stats()["reading"][f"{hub}/0"]:
        assert time.monotonic() < end
        time.sleep(0.05)
