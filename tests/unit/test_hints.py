"""What a consumer is told before its first batch: settings that work, and do less than their user may think."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpoint.head import Checkpoint, Head
from checkpoint.position import Partition
from dedup.core.envelope import ENVELOPE, KAFKA, Columns
from dedup.core.keys import KeySettings
from dedup.decode.prepare import Prepare
from dedup.settings import hints
from dedup.spark.prepare import reads_files

NEW = Head("shop")
BEGUN = replace(NEW, checkpoints={Partition("kafka", "orders", 0): Checkpoint(5, None, None, "q")})
SPEC = Prepare("shop")
BY_ID = KeySettings(("data.id",))
MAPPED = Columns("topic", "partition", "offset", body="value", key="key")


@pytest.mark.parametrize(
    ("names", "spec", "head", "knows_topic_ids", "told"),
    [
        (KAFKA, SPEC, NEW, False, ["includeHeaders", "source=:", "incarnation=:"]),
        ((*KAFKA, "headers"), SPEC, NEW, False, ["source=:", "incarnation=:"]),
        (KAFKA, replace(SPEC, keys=BY_ID), NEW, False, ["source=:", "incarnation=:"]),
        (KAFKA, replace(SPEC, keys=BY_ID, source="eu"), NEW, False, ["incarnation=:"]),
        (KAFKA, replace(SPEC, keys=BY_ID), NEW, True, ["source=:"]),
        (KAFKA, replace(SPEC, keys=BY_ID), BEGUN, True, []),  # it cannot be changed any more
        (KAFKA, replace(SPEC, keys=BY_ID, source="eu"), NEW, True, []),
        (KAFKA, replace(SPEC, columns=MAPPED), NEW, False, ["includeHeaders", "source=:", "incarnation=:"]),
        (KAFKA, replace(SPEC, columns=replace(MAPPED, source="'eu'", properties="key")), NEW, True, []),
        (ENVELOPE.names, SPEC, NEW, False, []),
        ([n for n in ENVELOPE.names if n != "properties"], SPEC, NEW, False, ["includeHeaders"]),
        (["value"], replace(SPEC, positions=False, keys=BY_ID), NEW, False, []),
    ],
)
def test_a_consumer_is_told_what_cannot_be_added_later(
    names: Any, spec: Prepare, head: Head, knows_topic_ids: bool, told: list[str]
) -> None:
    """Without headers and key nothing but redeliveries is dropped; without source and incarnation a Kafka stream knows no other cluster."""
    found = hints(names, spec, head, knows_topic_ids=knows_topic_ids)
    assert [any(word in sentence for word in told) for sentence in found] == [True] * len(told)
    assert [word for word in told if not any(word in sentence for sentence in found)] == []


def test_a_stream_of_files_is_not_asked_for_ids_of_topics() -> None:
    """Files with the columns of Spark's Kafka source have no broker; where that is not known, the hint says what to do."""
    spec = replace(SPEC, keys=BY_ID, source="eu")
    assert hints(KAFKA, spec, NEW, knows_topic_ids=False, reads_files=True) == []
    assert "not from a broker, you need not do anything" in hints(KAFKA, spec, NEW, knows_topic_ids=False)[0]


@pytest.mark.parametrize(
    ("plan", "files"),
    [
        ("~Project [kafka AS topic#3]\n+- StreamingRelation FileSource[/tmp/in], [offset#0L], name=<Unassigned>\n", True),
        ("~WriteToMicroBatchDataSourceV1\n+- ~Project\n   +- ~StreamingExecutionRelation FileStreamSource[file:/tmp/in], [a#0L]\n", True),
        ("~Project\n+- ~StreamingDataSourceV2Relation [key#0], org.apache.spark.sql.kafka010.KafkaSourceProvider$KafkaScan\n", False),
        ("~Union\n:- ~StreamingRelation FileSource[/in], [a]\n+- ~StreamingRelation DeltaSource[/lake], [a]\n", False),
        ("~Project [FileSource[ AS a]\n+- kafka\n", False),
        ("", False),
    ],
)
def test_a_plan_tells_whether_all_that_streams_are_files(plan: str, files: bool) -> None:
    """As Spark 4.2 prints it; what is not known reads no files."""
    assert reads_files(plan) == files
