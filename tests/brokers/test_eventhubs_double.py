"""The double of Event Hubs behaves like the service where it matters, asked by the unmodified azure-eventhub client."""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import Any

import pytest
from azure.eventhub import EventHubConsumerClient
from azure.eventhub.exceptions import AuthenticationError, ConnectError, ConnectionLostError, EventHubError

from fixtures.fix_eventhubs import MakeHub
from kit.eventhubs.ceiling import ceiling
from kit.eventhubs.clients import bodies, numbers, receive, receive_aio, send, send_aio
from kit.eventhubs.control import Double

pytestmark = pytest.mark.full


@pytest.fixture
def hub(new_hub: MakeHub) -> str:
    return new_hub(partitions=2, groups=("second",))


def client(double: Double, hub: str) -> EventHubConsumerClient:
    return EventHubConsumerClient.from_connection_string(double.connection_string, "$Default", eventhub_name=hub)


def until(question: Any) -> None:
    """Wait until it is true."""
    end = time.monotonic() + 20
    while not question():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_what_is_sent_is_received_in_order(eventhubs: Double, hub: str) -> None:
    """A batch for a partition comes back whole, with sequence numbers from 0, and nothing of it in another partition."""
    sent = [f"event {number}".encode() for number in range(5)]
    send(eventhubs.connection_string, hub, sent, partition="1")
    got = receive(eventhubs.connection_string, hub, "1", 5)
    assert bodies(got) == sent
    assert numbers(got) == [0, 1, 2, 3, 4]
    with client(eventhubs, hub) as asked:
        assert asked.get_partition_properties("0")["is_empty"] is True


def test_the_aio_client_sends_and_receives(eventhubs: Double, hub: str) -> None:
    """The asyncio client is accepted as well."""
    send_aio(eventhubs.connection_string, hub, [b"a", b"b"], "0")
    assert bodies(receive_aio(eventhubs.connection_string, hub, "0", 2)) == [b"a", b"b"]


def test_a_large_event_takes_several_frames(eventhubs: Double, hub: str) -> None:
    """A body above the frame size arrives whole."""
    large = bytes(range(256)) * 1_000
    send(eventhubs.connection_string, hub, [large, b"small"], partition="0")
    assert bodies(receive(eventhubs.connection_string, hub, "0", 2)) == [large, b"small"]


def test_a_partition_key_always_goes_to_one_partition(eventhubs: Double, hub: str) -> None:
    """Events of one key stay together and carry the key."""
    for body in (b"1", b"2", b"3"):
        send(eventhubs.connection_string, hub, [body], key="customer-7")
    with client(eventhubs, hub) as asked:
        where = [number for number in "01" if not asked.get_partition_properties(number)["is_empty"]]
    assert len(where) == 1
    assert {event.partition_key for event in receive(eventhubs.connection_string, hub, where[0], 3)} == {b"customer-7"}


@pytest.mark.parametrize(("inclusive", "first"), [(True, 4), (False, 5)])
def test_positions(eventhubs: Double, hub: str, inclusive: bool, first: int) -> None:
    """Sequence number, offset and time begin where they say, the event itself included or not."""
    begin = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for minute in range(8):
        eventhubs.fill(hub, 0, 1, enqueued=int((begin + dt.timedelta(minutes=minute)).timestamp() * 1000))
    offset = receive(eventhubs.connection_string, hub, "0", 5)[4].offset
    for position in (4, offset, begin + dt.timedelta(minutes=4)):
        got = receive(eventhubs.connection_string, hub, "0", 2, starting_position=position, starting_position_inclusive=inclusive)
        assert numbers(got) == [first, first + 1], position


def test_latest_gives_only_what_comes_later(eventhubs: Double, hub: str) -> None:
    """A reader at @latest gets the first event after it came."""
    eventhubs.fill(hub, 0, 5)
    sender = threading.Thread(target=lambda: (until(lambda: eventhubs.stats()["reading"][f"{hub}/0"]), eventhubs.fill(hub, 0, 1)))
    sender.start()
    assert numbers(receive(eventhubs.connection_string, hub, "0", 1, starting_position="@latest")) == [5]
    sender.join()


def test_management(eventhubs: Double, hub: str) -> None:
    """Hub and partition properties, before and after events came and went."""
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("expire", hub=hub, partition=0, before=4)
    with client(eventhubs, hub) as asked:
        properties, partition = asked.get_eventhub_properties(), asked.get_partition_properties("0")
    assert (properties["eventhub_name"], properties["partition_ids"]) == (hub, ["0", "1"])
    assert abs(properties["created_at"].timestamp() - time.time()) < 60
    assert (partition["beginning_sequence_number"], partition["last_enqueued_sequence_number"]) == (4, 9)
    assert partition["last_enqueued_offset"] != "-1"


def test_retention_moves_the_beginning(eventhubs: Double, hub: str) -> None:
    """A reader below the beginning gets the first event that is left, without an error, as from the service."""
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("expire", hub=hub, partition=0, before=7)
    assert numbers(receive(eventhubs.connection_string, hub, "0", 3, starting_position=2, starting_position_inclusive=True)) == [7, 8, 9]


def test_a_hole_is_skipped(eventhubs: Double, hub: str) -> None:
    """What compaction took out of the middle does not come, and the rest does."""
    eventhubs.fill(hub, 0, 6)
    eventhubs.order("hole", hub=hub, partition=0, first=2, last=3)
    assert numbers(receive(eventhubs.connection_string, hub, "0", 4)) == [0, 1, 4, 5]


def test_consumer_groups_read_for_themselves(eventhubs: Double, hub: str) -> None:
    """Each group gets all events; one that is not there is refused."""
    eventhubs.fill(hub, 0, 3)
    for group in ("$Default", "second"):
        assert numbers(receive(eventhubs.connection_string, hub, "0", 3, group=group)) == [0, 1, 2]
    with pytest.raises(EventHubError, match="no consumer group"):
        receive(eventhubs.connection_string, hub, "0", 1, group="third", retry_total=0)


def test_a_wrong_key_is_refused(eventhubs: Double, hub: str) -> None:
    """The signature of the token is checked."""
    wrong = eventhubs.connection_string.replace("SharedAccessKey=", "SharedAccessKey=AAAA")
    with pytest.raises(AuthenticationError):
        receive(wrong, hub, "0", 1, retry_total=0)


def test_a_higher_or_equal_owner_level_ends_the_reader(eventhubs: Double, hub: str) -> None:
    """The newcomer wins and the reader that was there is told; a lower one, and one without a level, is not let in."""
    errors = list[Exception]()

    def read() -> None:
        try:
            receive(eventhubs.connection_string, hub, "0", 1, owner_level=1, retry_total=0)
        except EventHubError as error:
            errors.append(error)

    first = threading.Thread(target=read)
    first.start()
    until(lambda: eventhubs.stats()["reading"][f"{hub}/0"])
    for level in (0, None):
        with pytest.raises(EventHubError, match=r"epoch of '1'"):
            receive(eventhubs.connection_string, hub, "0", 1, retry_total=0, **({} if level is None else {"owner_level": level}))
    eventhubs.order("steal", hub=hub, partition=0, level=1)
    first.join(20)
    assert isinstance(errors[0], ConnectionLostError)
    assert "higher epoch" in str(errors[0])


def test_more_than_five_readers_of_a_group_are_refused(eventhubs: Double, hub: str) -> None:
    """Without an owner level the service lets five in."""
    clients = [client(eventhubs, hub) for _ in range(5)]
    for each in clients:
        threading.Thread(target=each.receive_batch, args=(lambda *_: None,), kwargs={"partition_id": "0"}, daemon=True).start()
    until(lambda: eventhubs.stats()["reading"][f"{hub}/0"] == 5)
    with pytest.raises(EventHubError, match="maximum number of allowed receivers"):
        receive(eventhubs.connection_string, hub, "0", 1, retry_total=0)
    for each in clients:
        each.close()


@pytest.mark.parametrize("fault", ["detach", "reset", "reset inside a transfer", "slow"])
def test_the_client_survives_faults_of_the_link(eventhubs: Double, hub: str, fault: str) -> None:
    """Links and connections break in mid-stream; the client comes back, and every event comes at least once."""
    eventhubs.fill(hub, 0, 300, size=200)
    if fault == "reset inside a transfer":
        eventhubs.order("reset", hub=hub, partition=0, after=120)
    else:
        eventhubs.order("slow", bytes_per_second=200_000)
    if fault in ("detach", "reset"):
        threading.Timer(0.5, lambda: (until(lambda: eventhubs.order(fault, hub=hub, partition=0)), eventhubs.order("calm"))).start()
    got = receive(eventhubs.connection_string, hub, "0", 300)
    assert set(numbers(got)) >= set(range(len(set(numbers(got)))))
    assert len(set(numbers(got))) >= 290


def test_events_can_come_twice(eventhubs: Double, hub: str) -> None:
    """Duplicate delivery: the same sequence numbers again."""
    eventhubs.fill(hub, 0, 10)
    eventhubs.order("again", hub=hub, partition=0, count=4)
    assert numbers(receive(eventhubs.connection_string, hub, "0", 14)) == [*range(10), 6, 7, 8, 9]


def test_a_lost_answer_makes_the_producer_repeat(eventhubs: Double, hub: str) -> None:
    """A retry of the producer is a new event with a new sequence number."""
    eventhubs.order("lose_answers", count=1)
    send(eventhubs.connection_string, hub, [b"once"], partition="0", retry_backoff_factor=0.05)
    got = receive(eventhubs.connection_string, hub, "0", 2)
    assert bodies(got) == [b"once", b"once"]
    assert numbers(got) == [0, 1]


@pytest.mark.parametrize("what", ["send", "receive", "manage"])
def test_throttling(eventhubs: Double, hub: str, what: str) -> None:
    """The service is busy: told to a client that does not try again, got over by one that does."""
    act = {
        "send": lambda **options: send(eventhubs.connection_string, hub, [b"x"], partition="0", **options),
        "receive": lambda retry_total: receive(eventhubs.connection_string, hub, "0", 1, retry_total=retry_total),
        "manage": lambda **options: EventHubConsumerClient.from_connection_string(
            eventhubs.connection_string, "$Default", eventhub_name=hub, **options
        ).get_eventhub_properties(),
    }[what]
    eventhubs.fill(hub, 0, 1)
    eventhubs.order("throttle", what=what, count=1)
    with pytest.raises(EventHubError, match=r"throttled|503"):  # of management, the client tells the number only
        act(retry_total=0)
    if what != "send":  # the client waits four seconds there
        eventhubs.order("throttle", what=what, count=1)
        act(retry_total=3)


def test_a_hub_that_was_made_anew_begins_at_zero(eventhubs: Double, hub: str) -> None:
    """Sequence numbers restart, created-at is another, and positions of before are refused."""
    eventhubs.fill(hub, 0, 10)
    with client(eventhubs, hub) as asked:
        before = asked.get_eventhub_properties()["created_at"]
        eventhubs.create(hub, 2)
        assert asked.get_eventhub_properties()["created_at"] > before
    with pytest.raises(ConnectError, match="sequence number '8' is invalid"):
        receive(eventhubs.connection_string, hub, "0", 1, starting_position=8, retry_total=0)


def test_it_knows_its_own_ceiling(eventhubs: Double, hub: str) -> None:
    """What takes bytes only gets every event of the partition."""
    eventhubs.fill(hub, 0, 5_000, size=200)
    assert ceiling(eventhubs, hub, 0, 5_000) > 0
