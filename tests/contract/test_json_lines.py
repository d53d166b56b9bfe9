"""What a running consumer logs as lines of JSON: which consumer, batch and epoch it was, and what became of the batch."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint.errors import DestinationUnavailable
from checkpoint.position import Partition
from dedup import logs
from dedup.pipeline.member import Member
from fixtures.fix_places import Place
from kit.orders import batch, consumer, event, flatten, orders
from kit.outgoing import dispatcher, publisher

P0 = Partition("broker", "orders", 0)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the records of all loggers go as lines."""
    written, root = io.StringIO(), logging.getLogger()
    handler = logs.json_lines(written)
    root.addHandler(handler)
    logging.getLogger("dedup").setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    logging.getLogger("dedup").setLevel(logging.NOTSET)


def told(stream: io.StringIO, words: str) -> list[dict[str, Any]]:
    """The lines with these words in their message."""
    return [line for line in map(json.loads, stream.getvalue().splitlines()) if words in line["message"]]


def test_a_batch_is_told_with_its_counts(place: Place, stream: io.StringIO) -> None:
    """The line of a committed batch has consumer, number, epoch, rows by outcome and seconds; so has what the user's handler logs."""
    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def write(rows: Any, tx: Any) -> None:
        logging.getLogger("shop.handler").warning("handling")
        tx.write(flatten(rows), "orders")

    report = run(batch(*orders(range(3)), event(3, "p0-0", 0)), 0)
    epoch = place.store().head("shop").epoch
    (took,) = told(stream, "shop: epoch")
    assert (took["consumer"], took["batch"], took["epoch"]) == ("shop", 0, epoch)
    (handled,) = told(stream, "handling")
    assert (handled["logger"], handled["consumer"], handled["batch"], handled["epoch"]) == ("shop.handler", "shop", 0, epoch)
    (done,) = told(stream, "delivered 4")
    assert (done["consumer"], done["batch"], done["epoch"], done["counts"]) == ("shop", 0, epoch, report.counts)
    assert done["counts"]["duplicates"] == 1 and done["seconds"] > 0


def test_a_member_is_told_with_its_epoch(place: Place, stream: io.StringIO) -> None:
    """A process of the runner names consumer, batch and epoch where it parks events."""
    member = Member(consumer(place.store(), query=None).job())
    member.join()
    member.process(member.claim(P0), batch(*orders(range(2)), event(2, "bad", -1)))
    member.leave()
    (parked,) = told(stream, "parked 1")
    assert (parked["consumer"], parked["batch"], parked["epoch"]) == ("shop", 0, member.epoch)


def test_a_dispatcher_is_told_with_its_consumer(place: Place, stream: io.StringIO) -> None:
    """A destination that is away is a line with the consumer whose messages wait, and with the type of the error."""
    publisher(place.store())(batch(*orders(range(2))), 0)

    def away(messages: Any) -> None:
        raise ConnectionRefusedError("no broker")

    with pytest.raises(DestinationUnavailable):
        dispatcher(place, away).once()
    (line,) = told(stream, "no broker")
    assert (line["consumer"], line["error_type"]) == ("shop", "dedup.DestinationUnavailable")
