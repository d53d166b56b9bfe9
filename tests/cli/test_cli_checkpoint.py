"""`dedup checkpoint set`, `import-blob` and `mirror-blob`: nothing without --yes, its meaning said before, `verify` truthful after."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from azure.eventhub.extensions.checkpointstoreblob import BlobCheckpointStore
from azure.storage.blob import ContainerClient

from checkpoint import Partition, PostgresCheckpointStore, changes
from checkpoint.errors import ConfigError, Refused
from checkpoint.head import Checkpoint
from checkpoint.records import RecordFilter
from deadletter.selection import Selection
from dedup.reprocessing.from_log import coverage
from dedup.verify import verify
from fixtures.fix_places import BOTH, new_place
from fixtures.variants import of_which
from kit.checkpoint_kit import position
from kit.orders import batch, consumer, event, orders
from kit.places import DeltaPlace, Place, PostgresPlace

Run = Callable[..., tuple[int, str, str]]

GROUP = ("name.servicebus.windows.net", "orders", "$Default")
HUB = "--namespace name.servicebus.windows.net --hub orders"
FIRST = Partition("broker", "orders", 0)


@pytest.fixture(params=BOTH)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place where `shop` has decided positions 0 to 9 of one partition."""
    made = new_place(request, tmp_path)
    store = made.store()
    consumer(store)(batch(*orders(range(10))), 0)
    store.close()
    return made


@pytest.fixture
def theirs(blobs: ContainerClient, azurite: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobCheckpointStore]:
    """Azure's own store, whose container the commands can find."""
    monkeypatch.setenv("BLOBS", azurite)
    with BlobCheckpointStore.from_connection_string(azurite, blobs.container_name) as store:
        yield store


def checkpoints(dedup: Run, place: Place, name: str = "shop") -> dict[int, int]:
    rows = json.loads(dedup(f"checkpoint list {name} --json", place)[1])
    return {row["partition"]: row["sequence_number"] for row in rows}


def amounts(place: Place) -> int:
    return len(place.read())


def test_a_checkpoint_that_is_set_forward_is_an_accepted_gap(place: Place, dedup: Run) -> None:
    """Dry run first; then the consumer stands there, `verify` tells the gap and finds nothing wrong, then and later."""
    line = "checkpoint set shop --topic orders --partition 0 --to 19"
    code, out, _ = dedup(line, place)
    assert code == 0 and " 10-19 are passed over" in out and "--yes" in out and checkpoints(dedup, place) == {0: 9}
    code, out, _ = dedup(f"{line} --yes --by ann --reason 'lost by retention'", place)
    assert code == 0 and "done" in out and checkpoints(dedup, place) == {0: 19}
    store = place.store()
    report = verify(store, "shop")
    assert report.ok and "went on behind 19" in report.notes[0] and str(report.partitions[0].absent) == "[10-19]"
    again = consumer(store)
    again(batch(*orders(range(20, 25))), 1)
    assert amounts(place) == 15 and checkpoints(dedup, place) == {0: 24}
    report = verify(store, "shop")
    assert report.ok and report.notes == [] and str(report.partitions[0].absent) == "[10-19]"
    store.close()


def test_what_was_passed_over_and_comes_all_the_same_is_handled(place: Place, dedup: Run) -> None:
    """Late, never dropped; what was decided before stays a redelivery; the checkpoint and `verify` hold."""
    dedup("checkpoint set shop --topic orders --partition 0 --to 19 --yes", place)
    store = place.store()
    run = consumer(store)
    run(batch(*orders(range(5, 15))), 1)
    assert amounts(place) == 15 and checkpoints(dedup, place) == {0: 19}
    report = verify(store, "shop")
    assert report.ok and str(report.partitions[0].absent) == "[15-19]"
    assert str(coverage(store, store.head("shop"), FIRST, Selection("shop", topic="orders")).absent) == "[15-19]"
    store.close()


def test_a_checkpoint_set_too_far_can_be_set_back_to_what_was_decided(place: Place, dedup: Run) -> None:
    """Positions that no batch has seen are waited for again; the same place twice is nothing to do."""
    dedup("checkpoint set shop --topic orders --partition 0 --to 1000 --yes", place)
    code, out, _ = dedup("checkpoint set shop --topic orders --partition 0 --to 9 --yes", place)
    assert code == 0 and "10-1000 are waited for again" in out and checkpoints(dedup, place) == {0: 9}
    store = place.store()
    assert verify(store, "shop").ok and verify(store, "shop").notes == []
    store.close()
    assert "nothing to change" in dedup("checkpoint set shop --topic orders --partition 0 --to 9 --yes", place)[1]


def test_below_what_was_decided_the_command_names_the_one_that_repeats(place: Place, dedup: Run) -> None:
    """A lower checkpoint of a consumer would repeat nothing, and says so in place of pretending."""
    code, _, err = dedup("checkpoint set shop --topic orders --partition 0 --to 4 --yes", place)
    assert code == 3 and "would drop them as" in err
    assert "dedup consumer replay MODULE:CONSUMER --topic orders --partition 0 --from 5 --to 9" in err
    assert checkpoints(dedup, place) == {0: 9}


@pytest.mark.full
def test_what_was_decided_is_found_in_each_page_of_the_records(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of a year are read some at a time, for one partition and for several; what is highest may be in any of them."""
    monkeypatch.setattr("checkpoint.changes.PAGE", 2)
    store, other = place.store(), FIRST._replace(partition=1)
    run = consumer(store)
    for number, last in enumerate((30, 20, 25), start=1):
        run(batch(event(last, f"n{last}")), number)
    run(batch(event(7, "m7", partition=1)), 4)
    head, batches, asked = store.head("shop"), store.batches, list[RecordFilter]()

    def read(name: str, record_filter: RecordFilter) -> Any:
        asked.append(record_filter)
        return batches(name, record_filter)

    monkeypatch.setattr(store, "batches", read)
    for wanted in ({FIRST: Checkpoint(29)}, {other: Checkpoint(7), FIRST: Checkpoint(29)}):
        with pytest.raises(Refused, match="positions up to 30 are already decided"):
            changes.plan(store, head, wanted)
    assert len(asked) > 4 and all(one.until - one.after == 2 for one in asked if one.until < head.seq)
    ahead = {FIRST: Checkpoint(31), other: Checkpoint(8)}
    assert {move.partition: move.then for move in changes.plan(store, head, ahead)} == ahead
    with pytest.raises(Refused, match="positions up to 7 are"):
        changes.plan(store, head, {other: Checkpoint(-1)})
    changes.plan(store, head, {FIRST: Checkpoint(2**63 - 1)})
    store.close()


def test_a_checkpoint_that_moved_in_between_is_not_set(place: Place) -> None:
    """A decision is about what was looked at: a stream that has gone on since makes it void."""
    store = place.store()
    moves = changes.plan(store, store.head("shop"), {FIRST: Checkpoint(19)})
    consumer(store)(batch(*orders(range(10, 12))), 1)
    with pytest.raises(ConfigError, match="moved meanwhile"):
        changes.move(store, "shop", moves, by="ann", reason="")
    assert store.head("shop").checkpoints[FIRST].sequence_number == 11 and store.head("shop").passed == {}
    store.close()


@pytest.mark.full
def test_a_new_life_of_the_topic_forgets_what_was_passed_over(place: Place, dedup: Run) -> None:
    """So does a reset: neither has anything to do with the positions of before."""
    for command in ("consumer accept-incarnation shop --source broker --topic orders", "consumer reset shop"):
        dedup("checkpoint set shop --source broker --topic orders --partition 0 --to 19 --yes", place)
        assert dedup(f"{command} --yes", place)[0] == 0
        store = place.store()
        assert store.head("shop").passed == {}
        store.close()


@pytest.mark.parametrize(
    ("line", "told"),
    of_which(
        2,
        [
            (f"import-blob shop {HUB} --blob A_SECRET --container c", "connection string of the storage account"),
            ("set nobody --topic orders --partition 0 --to 1", "no consumer 'nobody'"),
            ("set shop --partition 0 --to 1", "give --topic"),
            ("set shop --topic none --partition 0 --to 1", "Name the --source"),
            ("set --partition 0 --to 1 --namespace n", "--namespace and --hub"),
            (f"import-blob {HUB} --blob NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE is empty"),
        ],
    ),
)
def test_what_is_missing_is_one_line(line: str, told: str, place: Place, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to give, and never what a variable with a secret holds."""
    monkeypatch.setenv("A_SECRET", "AccountKey=s3cret")
    if isinstance(place, DeltaPlace) and line.startswith(("set --partition", "import-blob --")):
        told = "Event processors keep their checkpoints in PostgreSQL"
    code, out, err = dedup(f"checkpoint {line}", place)
    assert (code, out, err.count("\n")) == (2, "", 1) and told in err and "s3cret" not in err


def test_a_new_consumer_begins_where_blob_has_left_off(
    place: Place, dedup: Run, theirs: BlobCheckpointStore, blobs: ContainerClient
) -> None:
    """Import into a consumer that has never run: it stands behind those positions, `verify` says so, and the stream goes on from there."""
    for partition, number in ((0, 99), (1, 5)):
        theirs.update_checkpoint(position(str(partition), number, GROUP))
    blobs.upload_blob("name.servicebus.windows.net/orders/$default/checkpoint/2", b"")
    line = f"checkpoint import-blob moved {HUB} --source broker --blob BLOBS --container {blobs.container_name}"
    code, out, _ = dedup(line, place)
    assert code == 0 and "begins behind 99" in out and "partition 2: its blob holds no sequence number" in out
    assert "moved" not in dedup("consumer list --json", place)[1]
    assert dedup(f"{line} --yes", place)[0] == 0 and checkpoints(dedup, place, "moved") == {0: 99, 1: 5}
    store = place.store()
    assert verify(store, "moved").ok and len(verify(store, "moved").notes) == 2
    consumer(store, name="moved")(batch(*orders(range(100, 103))), 0)
    assert amounts(place) == 13 and verify(store, "moved").ok
    asked = coverage(store, store.head("moved"), Partition("broker", "orders", 1), Selection("moved", topic="orders"))
    assert not asked.absent, "what lies before belongs to another system: --from-log does not run it"
    store.close()
    assert "nothing to change" in dedup(f"{line} --yes", place)[1] or checkpoints(dedup, place, "moved") == {0: 102, 1: 5}


@pytest.mark.full
def test_the_source_of_a_namespace_is_in_lower_case(place: Place, dedup: Run, theirs: BlobCheckpointStore, blobs: ContainerClient) -> None:
    """A checkpoint that is imported or set for a namespace is where streams of it look, however the namespace is spelled."""
    theirs.update_checkpoint(position("0", 99, GROUP))
    where = "--namespace Name.ServiceBus.windows.net --hub orders"
    dedup(f"checkpoint import-blob moved {where} --blob BLOBS --container {blobs.container_name} --yes", place)
    dedup(f"checkpoint set moved {where} --partition 1 --to 5 --yes", place)
    assert set(place.store().head("moved").checkpoints) == {Partition("name.servicebus.windows.net", "orders", n) for n in range(2)}


def test_a_consumer_is_mirrored_to_blob(place: Place, dedup: Run, theirs: BlobCheckpointStore, blobs: ContainerClient) -> None:
    """What KEDA reads is what the consumer has decided; a partition whose offset nobody knows is named and left alone."""
    dedup("checkpoint set shop --topic orders --partition 0 --to 19 --offset 1900 --yes", place)
    dedup("checkpoint set shop --source broker --topic orders --partition 1 --to 3 --yes", place)
    line = f"checkpoint mirror-blob shop {HUB} --source broker --blob BLOBS --container {blobs.container_name}"
    code, out, _ = dedup(line, place)
    assert code == 0 and "would be written: partitions 0" in out and "offset is not known" in out
    assert list(theirs.list_checkpoints(*GROUP)) == []
    assert "written: partitions 0" in dedup(f"{line} --yes", place)[1]
    assert list(theirs.list_checkpoints(*GROUP)) == [{**position("0", 19, GROUP), "offset": "1900"}]


@pytest.fixture
def server(postgres: str) -> Iterator[tuple[PostgresPlace, PostgresCheckpointStore]]:
    """A database with what two partitions of event processors keep."""
    with PostgresCheckpointStore(postgres) as store:
        for partition in "01":
            store.update_checkpoint(position(partition, 50, GROUP))
        yield PostgresPlace(postgres), store


def test_processors_can_be_set_forward_and_back(server: tuple[PostgresPlace, PostgresCheckpointStore], dedup: Run) -> None:
    """Here a lower checkpoint does repeat: the dry run says which positions, and that their effects come again."""
    place, store = server
    for partition, to, meaning in (("0", 80, "51-80 are skipped"), ("1", 20, "21-50 are handled again"), ("2", 7, "begins behind 7")):
        line = f"checkpoint set {HUB} --partition {partition} --to {to}"
        assert meaning in re.sub(r"\s+", " ", dedup(line, place)[1])
        assert partition == "2" or {c["partition_id"]: c["sequence_number"] for c in store.list_checkpoints(*GROUP)}[partition] == 50
        assert "done" in dedup(f"{line} --yes --by ann", place)[1]
        assert "nothing to change" in dedup(f"{line} --yes", place)[1]
    points = {c["partition_id"]: (c["sequence_number"], c["offset"]) for c in store.list_checkpoints(*GROUP)}
    assert points == {"0": (80, 80), "1": (20, 20), "2": (7, 7)}, "without --offset they resume by sequence number"


def test_processors_take_over_from_blob_and_are_mirrored_back(
    server: tuple[PostgresPlace, PostgresCheckpointStore], dedup: Run, theirs: BlobCheckpointStore, blobs: ContainerClient
) -> None:
    """Import moves forward only; the mirror leaves a blob alone that is further on, unless it is told --backwards."""
    place, store = server
    for partition, number in (("0", 40), ("1", 60), ("2", 0)):
        theirs.update_checkpoint(position(partition, number, GROUP))
    where = f"{HUB} --blob BLOBS --container {blobs.container_name}"
    for verb in ("import-blob", "mirror-blob"):
        code, _, err = dedup(f"checkpoint {verb} {where} --group other --yes", place)
        assert (code, "no checkpoint of" in err) == (2, True), "a mistyped group"
    assert "--yes" in dedup(f"checkpoint import-blob {where}", place)[1]
    assert "2 checkpoints imported" in dedup(f"checkpoint import-blob {where} --yes", place)[1]
    assert "nothing to import; 3 checkpoints are there" in dedup(f"checkpoint import-blob {where} --yes", place)[1]
    assert [c["sequence_number"] for c in store.list_checkpoints(*GROUP)] == [50, 60, 0]
    theirs.update_checkpoint(position("1", 70, GROUP))
    told = dedup(f"checkpoint mirror-blob {where} --yes", place)[1]
    assert "written: partitions 0" in told and "ahead of our checkpoint" in told
    dedup(f"checkpoint mirror-blob {where} --backwards --yes", place)
    assert list(theirs.list_checkpoints(*GROUP)) == list(store.list_checkpoints(*GROUP))


def test_a_mirror_that_goes_on_can_be_stopped(
    server: tuple[PostgresPlace, PostgresCheckpointStore], dedup: Run, theirs: BlobCheckpointStore, blobs: ContainerClient, monkeypatch: Any
) -> None:
    """--every goes on until Ctrl-C, and ends with a last look."""
    from checkpoint import BlobMirror

    place, store = server

    def interrupted(mirror: BlobMirror) -> None:
        store.update_checkpoint(position("0", 51, GROUP))
        raise KeyboardInterrupt

    monkeypatch.setattr(BlobMirror, "wait", interrupted)
    line = f"checkpoint mirror-blob {HUB} --blob BLOBS --container {blobs.container_name} --every 100s --yes"
    assert dedup(line, place)[0] == 0
    assert [c["sequence_number"] for c in theirs.list_checkpoints(*GROUP)] == [51, 50]


@pytest.mark.parametrize(
    "option",
    of_which(
        2, ["--partition 2147483648 --to 5", "--partition 0 --to -2", "--partition -1 --to 5", "--partition 0 --to 9223372036854775808"]
    ),
)
def test_a_position_that_cannot_be_is_a_wrong_call(option: str, place: Place, dedup: Run) -> None:
    """Neither store has room for it, and nothing is changed."""
    code, _, err = dedup(f"checkpoint set shop --source s --topic t {option} --yes", place)
    assert (code, "Invalid value for" in err) == (2, True), err
