"""What a consumer tells of its batches: the report, `on_batch=`, and `process` of rows that are part of no stream."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from checkpoint.errors import ConfigError, Refused
from checkpoint.position import Partition
from dedup import Consumer, Report
from dedup.pipeline.member import Member
from fixtures.fix_places import Place
from fixtures.variants import of_which
from kit.orders import assert_proven, batch, consumer, event, ids, letters, orders

P0 = Partition("broker", "orders", 0)


def test_a_report_tells_what_became_of_a_batch(place: Place) -> None:
    """Counts, the batch, the checkpoints and the time; it cannot be changed, and it is told after the commit, to `on_batch` as well."""
    told: list[tuple[Report, list[str]]] = []
    run = consumer(place.store(), on_batch=lambda report: told.append((report, ids(place.read()))))
    run(batch(*orders(range(2))), 0)
    report = run(batch(*orders([1]), event(2, "p0-0", 0), event(3, "x", -1), event(4, "y")), 1)
    counts = Report(delivered=4, redelivered=1, processed=1, duplicates=1, dead_lettered=1)
    assert report == counts and str(report) == str(counts)
    assert (report.consumer, report.batch_id, dict(report.checkpoints)) == ("shop", 1, {P0: 4})
    assert report.seconds > 0
    assert told == [(Report(delivered=2, processed=2), ["p0-0", "p0-1"]), (counts, ["p0-0", "p0-1", "y"])]
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.processed = 5  # type: ignore[misc]


def test_an_error_of_on_batch_fails_nothing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """The batch is committed: what `on_batch` raises is logged with its stack, and the next batch goes on. Of a member of a runner, too."""

    def broken(report: Report) -> None:
        raise ZeroDivisionError("in a dashboard")

    run = consumer(place.store(), on_batch=broken, query=None)
    with caplog.at_level(logging.ERROR):
        assert run(batch(*orders(range(2))), 0).processed == 2
    (record,) = caplog.records
    assert "shop batch 0 is committed; on_batch= raised" in record.message and record.exc_info[0] is ZeroDivisionError  # type: ignore[index]
    assert run(batch(*orders([2])), 1).processed == 1
    caplog.clear()
    told: list[Report] = []
    member = Member(consumer(place.store(), on_batch=lambda report: told.append(report) or broken(report), query=None).job())  # type: ignore[func-returns-value]
    member.join()
    report = member.process(member.claim(P0), batch(*orders(range(3, 6))))
    assert told == [report] and (report.processed, report.consumer, dict(report.checkpoints)) == (3, "shop", {P0: 5})
    assert "ZeroDivisionError" in caplog.text
    member.leave()


@pytest.mark.parametrize("query", [None, "q"])
def test_rows_of_a_notebook_are_processed_without_a_batch_id(place: Place, query: str | None) -> None:
    """A list of dicts, a pandas frame and a table: each is the next batch, a repeated one is dropped, another consumer goes on behind."""
    run, rows = consumer(place.store(), query=query), [orders([n]) for n in range(4)]
    frame = batch(*rows[1]).to_pandas()
    found = [run.process(rows[0]), run.process(frame), run.process(batch(*rows[2])), run.process(rows[0])]
    assert [report.processed for report in found] == [1, 1, 1, 0] and found[3].redelivered == 1
    assert [report.batch_id for report in found] == [0, 1, 2, 3]
    again = consumer(place.store(), query=query)
    assert (again.process(rows[3]).processed, sorted(ids(place.read()))) == (1, ["p0-0", "p0-1", "p0-2", "p0-3"])


def test_a_column_that_the_first_dict_lacks_is_a_column(place: Place) -> None:
    """Message ids among them: what only later rows have is not dropped."""
    run, seen = consumer(place.store(), idempotence_key=None), list[Any]()
    run._handler = None
    run.foreach_batch(lambda rows, tx: seen.extend(rows["note"].to_pylist()))
    one, told = event(0, "a"), {"properties": [{"key": "message-id", "value": b"A"}], "note": "told"}
    del one["properties"]
    report = run.process([one, {**event(1, "b"), **told}, {**event(2, "b"), **told}])
    assert (report.processed, report.duplicates, seen) == (2, 1, [None, "told"])


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("bisect", of_which(1, [True, False]))
def test_texts_in_views_are_texts(place: Place, bisect: bool) -> None:
    """Duplicates, halves and letters need rows that can be picked, which Arrow's views do not allow."""
    run = consumer(place.store(), bisect=bisect, idempotence_key="k", decode=None, on_key_conflict="duplicate")
    run._handler = None
    seen: list[Any] = []
    run.foreach_batch(lambda rows, tx: seen.extend(tx.reject(rows, pc.equal(rows["k"], "c"), "no")["k"].to_pylist()))
    rows = batch(*orders(range(4))).append_column("k", pa.array(["a", "a", "b", "c"], pa.string_view()))
    report = run(rows, 0)
    assert (report.processed, report.duplicates, report.dead_lettered, seen) == (2, 1, 1, ["a", "b"])
    assert_proven(place.store())


@pytest.mark.parametrize("query", of_which(1, [None, "q"]))
def test_rows_by_hand_never_take_the_place_of_a_streams_batch(place: Place, query: str | None) -> None:
    """Where a stream has written the state they are refused, whoever asks; nothing changes, and the stream goes on."""
    run = consumer(place.store(), query=query)
    run(batch(*orders(range(2))), 0)
    for one in (run, consumer(place.store(), query=query)):
        before = place.store().head("shop")
        with pytest.raises(Refused, match="belongs to a stream"):
            one.process(orders([2]))
        assert place.store().head("shop") == before
    assert run(batch(*orders(range(2, 4))), 1).processed == 2


def test_letters_without_positions_are_those_of_their_batch(place: Place) -> None:
    """The same keyless event by hand and in a stream of the same name is two events, and two letters."""
    run = consumer(place.store(), positions=None, idempotence_key="message_id", query="q")
    keyless = pa.table({"message_id": pa.array([None], pa.string()), "body": [b"{}"]})
    assert run.process(keyless).dead_lettered == 1
    assert run(keyless, 0).dead_lettered == 1
    assert len(letters(place.store())) == 2


def test_a_coroutine_is_no_on_batch(place: Place) -> None:
    """Nobody would await it."""

    async def told(report: Report) -> None: ...

    with pytest.raises(ConfigError, match="on_batch is an `async def`"):
        consumer(place.store(), on_batch=told)


def test_process_begins_where_a_batch_was_not_ended(place: Place) -> None:
    """A batch that failed behind its first chunk is not over: what is processed next has its number, and nothing is taken for a replay."""
    run = consumer(place.store(), max_events_per_transaction=2)
    handler = run._handler
    assert handler is not None

    def fails_late(rows: Any, tx: Any) -> None:
        if rows["sequence_number"][0].as_py() >= 2:
            raise MemoryError
        handler(rows, tx)

    run._handler = fails_late
    with pytest.raises(MemoryError):
        run.process(batch(*orders(range(4))))
    run._handler = handler
    report = run.process(batch(*orders(range(6))))
    assert (report.batch_id, report.redelivered, report.processed) == (0, 2, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("orders.json", "pandas frame or a list of dicts as well, not str"),
        ([], "A list of rows holds dicts, at least one"),
        ([5], "A list of rows holds dicts, at least one"),
        ([{"body": b"x"}, {"body": 5}], "The rows cannot become columns"),
        (pd.DataFrame([[b"x", b"y"]], columns=["body", "body"]), "Give each column a name of its own"),
        ([{"body": b"x", "n": 2**70}], "Arrow holds whole numbers of 64 bits"),
        (pd.DataFrame({"n": [2**70]}), "Arrow holds whole numbers of 64 bits"),
        ([{"body": b"x", "text": "\ud800"}], "text that UTF-8 can write"),
    ],
)
def test_what_is_no_batch_is_refused(given: Any, said: str) -> None:
    """One sentence says what is wrong, and nothing was written."""

    class Unused:
        default_max_events = 10

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: pytest.fail(f"the store was asked for {name}")

    run = Consumer("shop", Unused())  # type: ignore[arg-type]
    run.foreach_batch(lambda rows, tx: None)
    with pytest.raises(ConfigError, match=said):
        run.process(given)
