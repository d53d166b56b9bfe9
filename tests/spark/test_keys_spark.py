"""SQL expressions mean the same in every session: a message has its key whatever the time zone and the mode of ANSI are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from checkpoint.errors import ConfigError
from dedup import Columns, Consumer, DeltaStore, Limits, decode
from dedup.spark.features import create, setting
from kit.orders import batch, consumer, event, ids, letters
from kit.places import Place

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ZONE, ANSI = "spark.sql.session.timeZone", "spark.sql.ansi.enabled"
NEW_YORK = {ZONE: "America/New_York", ANSI: "true"}


@pytest.fixture
def elsewhere(spark: SparkSession) -> Iterator[SparkSession]:
    """A session with other settings, which are the same afterwards."""
    with setting(spark, NEW_YORK):
        yield spark
        assert {name: spark.conf.get(name) for name in NEW_YORK} == NEW_YORK


def said(number: int, **body: Any) -> dict[str, Any]:
    """An event with this body."""
    return event(number, body=json.dumps(body).encode())


def write_ids(rows: Any, tx: Any) -> None:
    """The handler of these tests."""
    tx.write(rows.selectExpr("data.id", "1L amount"), "orders")


def run(made: Consumer) -> Consumer:
    """The consumer with that handler."""
    made._handler = write_ids
    return made


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("collect", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_key_is_the_same_in_every_time_zone(elsewhere: SparkSession, place: Place, collect: bool) -> None:
    """A message that comes again while the session is elsewhere is a duplicate."""
    key = ["data.id", "to_date(data.at)"]
    schema = decode.json("id string, at timestamp")
    for number, zone in enumerate(("UTC", "America/New_York")):
        with setting(elsewhere, {ZONE: zone}):
            made = run(consumer(place.store(), idempotence_key=key, decode=schema, limits=Limits(collect=collect)))
            made(create(elsewhere, batch(said(number, id="a", at="2026-03-08T02:30:00Z"))), number)
    assert ids(place.read()) == ["a"] and not letters(place.store())


@pytest.mark.fast_on("delta")
@pytest.mark.parametrize("collect", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("key", ["CAST(data.id AS BIGINT)", "split(data.id, '-')[1]"])
def test_a_value_that_cannot_be_converted_is_no_key(elsewhere: SparkSession, place: Place, key: str, collect: bool) -> None:
    """The event is a dead letter, and does not stop the stream for ever: Spark 4 raises there unless the mode of ANSI is off."""
    made = run(consumer(place.store(), idempotence_key=key, limits=Limits(collect=collect)))
    good = "7" if "CAST" in key else "7-1"
    made(create(elsewhere, batch(event(0, good), event(1, "x"))), 0)
    assert ids(place.read()) == [good] and Counter(x["kind"] for x in letters(place.store())) == {"NO_KEY": 1}


def test_a_payload_that_cannot_be_converted_is_null(elsewhere: SparkSession, tmp_path: Path) -> None:
    """A number that its decimal has no room for is a value like any other."""
    made = Consumer(
        "shop",
        DeltaStore(str(tmp_path)),
        idempotence_key="data.id",
        payload="CAST(data.amount AS DECIMAL(10,2))",
        decode=decode.json("id string, amount double"),
        query="q",
    )
    seen: list[str] = []
    made.foreach_batch(lambda rows, tx: seen.extend(row[0] for row in rows.select("data.id").collect()))
    made(create(elsewhere, batch(said(0, id="a", amount=1e30), said(1, id="a", amount=1e31))), 0)
    assert seen == ["a"]


def test_columns_and_parts_are_the_same_in_every_session(elsewhere: SparkSession, tmp_path: Path) -> None:
    """What Columns(...), sequence_key= and part= compute is null where it cannot be converted, and in UTC."""
    rows = elsewhere.sql("select 5L n, timestamp'2026-03-08 22:30:00' at, 'x' line, cast('{}' as binary) body")
    made = Consumer(
        "shop",
        DeltaStore(str(tmp_path)),
        positions=Columns(topic="CAST(to_date(at) AS STRING)", partition="0", sequence_number="n", body="body"),
        part="coalesce(CAST(line AS BIGINT), 3)",
        sequence_key="hour(at)",
        idempotence_key="coalesce(CAST(line AS INT), sequence_number)",
        query="q",
        source="files",
    )
    seen: list[tuple[Any, ...]] = []
    made.foreach_batch(lambda new, tx: seen.extend(map(tuple, new.select("topic", "part").collect())))
    made(rows, 0)
    assert seen == [("2026-03-09", 3)]


def test_the_functions_of_the_user_see_the_settings_of_the_session(elsewhere: SparkSession, tmp_path: Path) -> None:
    """decode= and the handler are the user's own code: on classic Spark the zone of their times is the session's."""
    from pyspark.sql import functions as F

    if not hasattr(elsewhere, "_jsparkSession"):
        pytest.skip("Spark Connect analyses all of a frame at once")

    def day(body: Any) -> Any:
        return F.struct(F.to_date(F.timestamp_seconds(body.cast("string").cast("bigint"))).cast("string").alias("day"))

    made = Consumer("shop", DeltaStore(str(tmp_path)), idempotence_key="upper(data.day)", decode=day, query="q")
    seen: list[tuple[Any, ...]] = []
    made.foreach_batch(lambda new, tx: seen.extend(map(tuple, new.selectExpr("data.day", "current_timezone()").collect())))
    made(create(elsewhere, batch(event(0, body=b"1772936999"))), 0)
    assert seen == [("2026-03-07", "America/New_York")]


def test_settings_are_back_after_an_expression_that_does_not_resolve(elsewhere: SparkSession, tmp_path: Path) -> None:
    """What raises leaves the session as it was, and names that the user has not set stay without a value of their own."""
    made = Consumer("shop", DeltaStore(str(tmp_path)), idempotence_key="nothing(data.id)", decode=decode.json("id string"), query="q")
    made.foreach_batch(lambda new, tx: None)
    elsewhere.conf.unset(ANSI)
    with pytest.raises(ConfigError, match="does not resolve"):
        made(create(elsewhere, batch(event(0, "a"))), 0)
    assert elsewhere.conf.get(ANSI, None) is None  # type: ignore[call-overload]
    elsewhere.conf.set(ANSI, "true")


@pytest.mark.full
def test_a_frame_of_a_session_that_is_not_active_has_the_same_keys(elsewhere: SparkSession, tmp_path: Path) -> None:
    """Classic Spark parses under the settings of the thread's active session, which stays the active one."""
    if not hasattr(elsewhere, "_jsparkSession"):
        pytest.skip("Spark Connect has no active session beside that of the frame")
    other = elsewhere.newSession()
    other.conf.set(ANSI, "true")
    create(elsewhere, batch(event(0)))  # makes this the active one
    made = Consumer("shop", DeltaStore(str(tmp_path)), idempotence_key="CAST(word AS BIGINT)", null_key="position", query="q")
    seen: list[int] = []
    made.foreach_batch(lambda new, tx: seen.append(new.count()))
    made(other.sql("select 's' source, 't' topic, 0 partition, id sequence_number, 'x' word, cast('b' as binary) body from range(2)"), 0)
    active: Any = elsewhere._jvm.org.apache.spark.sql.SparkSession.getActiveSession().get()  # type: ignore[union-attr]
    assert seen == [2] and active.conf().get(ANSI) == "true"
