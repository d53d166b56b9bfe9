"""Real bad rows: Online Retail with a handler that raises on them, then fixed and reprocessed by range, then a bug repaired by replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from deadletter.selection import Selection
from dedup import Consumer, decode
from dedup.core.store import Store
from dedup.reprocessing.letters import reprocess
from dedup.reprocessing.replay import replay
from dedup.verify import verify
from kit import retail
from kit.orders import assert_proven, letters
from kit.places import Place, PostgresPlace, SparkPlace

WORST_DAYS = ("2011-01-28", "2011-04-06", "2011-04-08")
DELIVERED, BAD, BAD_OF_A_FEW = 3_571, 149, 10
SINK_COLUMNS = ("line", *retail.COLUMNS)


class NoDescription(ValueError):
    """Raised."""


class NegativeQuantity(ValueError):
    """Raised."""


class NoOrder(ValueError):
    """Raised."""


def check_rows(rows: pa.Table) -> None:
    """The handler's own checks: raises for the first bad row."""
    data = pa.Table.from_struct_array(rows["data"])
    for line in data.to_pylist():
        check_line(line)


def check_line(line: dict[str, Any]) -> None:
    """One order line."""
    if line["Description"] is None:
        raise NoDescription(f"order line {line['InvoiceNo']} has no description")
    if int(line["Quantity"]) < 0 and not line["InvoiceNo"].startswith("C"):
        raise NegativeQuantity(f"order line {line['InvoiceNo']}: quantity {line['Quantity']}")
    if line["InvoiceNo"].startswith("A"):
        raise NoOrder(f"{line['InvoiceNo']} is no order")
    assert float(line["UnitPrice"]) >= 0


def lines_of(rows: pa.Table, price: Callable[[pa.Array], pa.Array]) -> pa.Table:
    """What the handler writes."""
    data = pa.Table.from_struct_array(rows["data"]).select(list(retail.COLUMNS))
    number = rows["sequence_number"].cast(pa.string())
    line = pc.binary_join_element_wise(rows["partition"].cast(pa.string()), number, "-")
    changed = data.set_column(data.column_names.index("UnitPrice"), "UnitPrice", price(data["UnitPrice"]))
    return changed.add_column(0, "line", line)


def make(store: Store, check: bool, price: Callable[[pa.Array], pa.Array] = lambda p: p) -> Consumer:
    """A consumer whose key is the whole row."""
    consumer = Consumer(
        "lines", store, idempotence_key=[f"data.{name}" for name in retail.COLUMNS], decode=decode.json(retail.ROW), query="q"
    )

    @consumer.foreach_batch
    def load(rows: pa.Table, tx: Any) -> None:
        tx.merge(lines_of(rows, price), "order_lines", "line")
        if check:
            check_rows(rows)

    return consumer


def expected(days: list[pa.Table]) -> set[tuple[str | None, ...]]:
    """The distinct rows, by pyarrow alone; the line is that of the first of equal rows."""
    found: dict[tuple[str | None, ...], str] = {}
    for partition, rows in enumerate(days):
        for number, row in enumerate(rows.to_pylist()):
            found.setdefault(tuple(row[c] for c in retail.COLUMNS), f"{partition}-{number}")
    return {(line, *row) for row, line in found.items()}


def rows_of(place: Place) -> set[tuple[str | None, ...]]:
    """The sink."""
    return {tuple(row[c] for c in SINK_COLUMNS) for row in place.read_text("order_lines", SINK_COLUMNS).to_pylist()}


@pytest.fixture(scope="module")
def worst(online_retail: Path) -> list[pa.Table]:
    return list(retail.read_named(online_retail, WORST_DAYS).values())


def test_real_bad_rows_are_parked_fixed_reprocessed_and_replayed(place: Place, worst: list[pa.Table]) -> None:
    """149 bad of 3,571 rows are parked, one fingerprint an error, the rest is written; fixed, they are reprocessed; a bug is replayed."""
    assert sum(rows.num_rows for rows in worst) == DELIVERED
    few = isinstance(place, SparkPlace)  # each letter that is reprocessed is three commits of Spark
    worst = [worst[2].slice(590, 130), worst[2].slice(1_300)] if few else worst
    place.create_text_sink("order_lines", SINK_COLUMNS)
    topic = pa.concat_tables([retail.envelope(rows, p, 0) for p, rows in enumerate(worst)])
    cents = make(place.store(), check=True, price=lambda p: pc.binary_join_element_wise(p, "00", ""))
    for number in range(0, topic.num_rows, 1_000):
        cents(topic.slice(number, 1_000), number // 1_000)
    parked = letters(place.store(), consumer="lines")
    assert len(parked) == (BAD_OF_A_FEW if few else BAD) and {x["kind"] for x in parked} == {"HANDLER_ERROR"}
    by_error = Counter((x["error_type"].rpartition(".")[2], x["fingerprint"]) for x in parked)
    assert sum(1 for _ in by_error) == len({name for name, _ in by_error}) == len({print_ for _, print_ in by_error})
    groups = {g["fingerprint"]: g["letters"] for g in place.store().groups(Selection(consumer="lines")).to_pylist()}
    assert groups == {print_: count for (_, print_), count in by_error.items()}
    good = {row for row in expected(worst) if not _is_bad(row)}
    assert len(rows_of(place)) == len(good)

    fixed = make(place.store(), check=False)
    for partition in range(len(worst)):
        selection = Selection(topic="online-retail", partition=partition, first=0, last=10_000)
        report = reprocess(selection, fixed)
        assert report.failed == 0 and report.reprocessed == report.selected
    assert len(rows_of(place)) == len(expected(worst))

    fixed.register_log_reader(lambda source, name, partition, first, last: _slice(topic, partition, first, last))
    processed = sum(replay(Selection(topic="online-retail", partition=p), fixed).replayed for p in range(len(worst)))
    assert processed == len(good)
    assert rows_of(place) == expected(worst)
    assert_proven(place.store(), "lines")


def _slice(topic: pa.Table, partition: int, first: int, last: int) -> pa.Table:
    number = pc.field("sequence_number")
    return topic.filter((pc.field("partition") == partition) & (number >= first) & (number <= last))


def _is_bad(row: tuple[str | None, ...]) -> bool:
    line = dict(zip(SINK_COLUMNS, row, strict=True))
    try:
        check_line(line)
    except ValueError:
        return True
    return False


@pytest.mark.postgres
def test_every_real_bad_row_is_parked(online_retail: Path, postgres: str) -> None:
    """All 541,909 order lines with the raising handler: 1,931 parked as 1,454 / 474 / 3, 534,710 written, 5,268 duplicates."""
    place = PostgresPlace(postgres)
    place.create_text_sink("order_lines", SINK_COLUMNS)
    consumer, following = make(place.store(), check=True), [0] * retail.PARTITIONS
    for day, rows in enumerate(retail.read(online_retail)):
        partition = day % retail.PARTITIONS
        consumer(retail.envelope(rows, partition, following[partition]), day)
        following[partition] += rows.num_rows
    errors = Counter(x["error_type"].rpartition(".")[2] for x in letters(place.store(), consumer="lines"))
    assert errors == {"NoDescription": 1_454, "NegativeQuantity": 474, "NoOrder": 3}
    report = verify(place.store(), "lines")
    assert report.contradictions == []
    assert (report.counts["processed"], report.counts["duplicate"]) == (534_710, 5_268)
    assert place.execute("SELECT count(*) FROM order_lines") == [(534_710,)]
