"""A function as `decode=` that raises for one body stops the stream for ever: whoever reads the error learns what it has to do instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from checkpoint.errors import ConfigError
from dedup import Limits
from dedup.spark.features import create
from kit.orders import batch, consumer, event, ids, letters
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

ADVICE = r"'shop'.*decode=.*return null for a body that it cannot decode.*UNDECODABLE"


def by_udf(body: Column) -> Any:
    """Raises for what is no JSON."""
    from pyspark.sql import functions as F

    return F.udf(lambda said: json.loads(bytes(said)), "struct<id:string,amount:bigint>")(body)


def by_arrow(body: Column) -> Any:
    """The same in a task that Spark gives Arrow to."""
    from pyspark.sql import functions as F

    return F.udf(lambda said: json.loads(bytes(said)), "struct<id:string,amount:bigint>", useArrow=True)(body)


def failing_fast(body: Column) -> Any:
    """Raises for what is no JSON, too."""
    from pyspark.sql import functions as F

    return F.from_json(body.cast("string"), "id string, amount bigint", {"mode": "FAILFAST"})


def without_its_service(body: Column) -> Any:
    """Fails for every event, because of a machine."""
    from pyspark.sql import functions as F

    refused = ConnectionRefusedError(111, "Connection refused")
    return F.udf(lambda said: (_ for _ in ()).throw(refused), "struct<id:string,amount:bigint>")(body)


def run(spark: SparkSession, place: Place, function: Callable[[Column], Any], way: str) -> None:
    """A batch of two orders and a body that is none."""
    made = consumer(place.store(), decode=function, idempotence_key="data.id", limits=Limits(collect=way != "files"))
    made._handler = None
    if way == "tasks":
        made.foreach("orders")(lambda order, tx: {"id": order.data["id"], "amount": 1})
    else:
        made.foreach_batch(lambda rows, tx: tx.write(rows.select("data.*"), "orders"))
    made(create(spark, batch(event(0, "a"), event(1, body=b"no json"), event(2, "b"))), 0)


@pytest.mark.parametrize("way", ["memory", pytest.param("files", marks=pytest.mark.full), pytest.param("tasks", marks=pytest.mark.full)])
@pytest.mark.parametrize("function", [by_udf, pytest.param(by_arrow, marks=pytest.mark.full), failing_fast])
def test_a_function_that_raises_for_a_body_is_told_to_return_null(
    spark: SparkSession, place: Place, function: Callable[[Column], Any], way: str
) -> None:
    """The error names decode= and what to do, and is caused by Spark's; nothing is written and no event is parked."""
    with pytest.raises(ConfigError, match=ADVICE) as told:
        run(spark, place, function, way)
    assert told.value.__cause__ is not None
    assert not ids(place.read()) and not letters(place.store())


def test_a_function_whose_service_is_away_is_not_blamed(spark: SparkSession, place: Place) -> None:
    """What fails because of a cluster, a network or a storage stays what it is: waiting may help."""
    with pytest.raises(Exception, match="Connection refused") as told:
        run(spark, place, without_its_service, "memory")
    assert not isinstance(told.value, ConfigError)
