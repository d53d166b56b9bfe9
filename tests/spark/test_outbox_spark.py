"""Messages from DataFrames, on every store: each once, with made ids, in the order of the events although Spark has shuffled them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dedup.core.rows import frame_of
from kit.orders import batch, consumer, event
from kit.outgoing import Receiver, dispatcher
from kit.places import Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_dataframe_is_published_in_the_order_of_its_positions(place: Place, spark: SparkSession) -> None:
    """A shuffled frame with its positions, with two messages for each event: order per key and ids are those of the events."""
    from pyspark.sql import functions as F

    run = consumer(place.store())
    run._handler = None

    @run.foreach_batch
    def handle(rows: Any, tx: Any) -> None:
        kept = tx.reject(rows, "data.amount < 0", "negative")
        twice = kept.withColumn("n", F.explode(F.array(F.lit(0), F.lit(1)))).repartition(4, F.rand(3))
        body = F.concat_ws(".", "data.id", "n").alias("body")
        position = ("source", "topic", "partition", "sequence_number", "part")
        tx.publish(twice.select(*position, "n", body, (F.col("data.amount") % 3).cast("string").alias("to")), "out", key="to", order="n")

    events = [event(n, f"o{n}", n if n % 10 else -1) for n in range(60)]
    run(frame_of(spark, batch(*events)), 0)
    receiver = Receiver()
    assert dispatcher(place, receiver).once().sent == 2 * 54
    for key in range(3):
        wanted = [f"o{n}.{i}".encode() for n in range(60) if n % 10 and n % 3 == key for i in range(2)]
        assert receiver.bodies(b"%d" % key) == wanted
    assert len({m.id for m in receiver.got}) == 108 and all(m.id.endswith(("-0", "-1")) for m in receiver.got)
