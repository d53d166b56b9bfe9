"""Reading the log again by position, through what the user registered as `consumer.log`. Called by reprocessing.py and replaying.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.advice import command
from checkpoint.errors import ConfigError, IncarnationChanged
from checkpoint.position import Partition, Range, Ranges
from dedup import incarnation
from dedup.consumer import open_batch
from dedup.envelope import check_positions
from dedup.index import Index
from dedup.pipeline.batch import EvaluatedBatch
from dedup.pipeline.commit import Job
from dedup.store import Head

WINDOW = 10_000
"""Positions that are read, and decided, at once."""


def read(job: Job, partition: Partition, span: Range) -> Any:
    """Whatever `consumer.log` gives for these positions. Raises ConfigError where nothing is registered."""
    if job.read_log is None:
        raise ConfigError(
            f"Consumer {job.name!r} cannot read the log again. Register a function (source, topic, partition, first, last) -> "
            "DataFrame with @consumer.log."
        )
    return job.read_log(*partition, span.first, span.last)


@contextmanager
def read_again(job: Job, partition: Partition, span: Range, head: Head) -> Iterator[tuple[EvaluatedBatch, Index]]:
    """The events of these positions that the log still has, prepared like a batch of the stream, and their index."""
    with open_batch(read(job, partition, span), job.scratch).evaluate(job.prepare(head)) as rows:
        incarnation.refuse_others(head, job.topic_ids([partition]))
        check_positions(rows.index)
        index = Index.of(rows.index, rows.payload_hashes)
        place = index.partitions.index(partition) if partition in index.partitions else -1
        inside = (index.place == place) & (index.numbers >= span.first) & (index.numbers <= span.last)
        yield rows, index.only(np.flatnonzero(inside))


def lost(job: Job, partition: Partition, missing: Ranges) -> Ranges:
    """Those of these positions, which the log did not give, that are lost.

    A reader that says where its log begins (`first_kept`) tells them from what never was an event: markers, aborted messages, what was
    compacted. Of any other reader all count as lost.
    """
    first_kept = getattr(job.read_log, "first_kept", None)
    if first_kept is None or not missing:
        return missing
    border = first_kept(*partition)
    return missing & Ranges.of([(missing.items[0].first, border - 1)]) if border > missing.items[0].first else Ranges()


def windows(ranges: Ranges) -> Iterator[Range]:
    """The ranges in pieces that fit into memory."""
    for span in ranges.items:
        for first in range(span.first, span.last + 1, WINDOW):
            yield Range(first, min(first + WINDOW - 1, span.last))


def read_bodies(job: Job, letters: pa.Table) -> dict[str, bytes]:
    """Letter id -> whole body, of those letters whose event the log still has; compared by length and SHA-256.

    Args:
        letters: LETTERS that keep only the beginning of their bodies.

    Raises:
        IncarnationChanged: the log has another event at a letter's position, although the topic counts as the one it was parked from.
    """
    found: dict[str, bytes] = {}
    head = job.store.head(job.name)
    for letter in letters.drop_columns(["body", "properties", "extras"]).to_pylist():
        partition, number = Partition(letter["source"], letter["topic"], letter["partition"]), letter["sequence_number"]
        with read_again(job, partition, Range(number, number), head) as (rows, index):
            mine = index.order[index.parts == letter["part"]]
            bodies = rows.content(mine)["body"].to_pylist() if len(mine) else []
        if bodies and _is_of(letter, bodies[0]):
            found[letter["id"]] = bodies[0]
        elif bodies and letter["incarnation"] == head.incarnations.get((letter["source"], letter["topic"]), 0):
            raise IncarnationChanged(_other_body(job.name, letter, bodies[0]))
    return found


def _is_of(letter: Mapping[str, Any], body: bytes | None) -> bool:
    return body is not None and len(body) == letter["body_size"] and hashlib.sha256(body).digest() == letter["body_sha256"]


def _other_body(consumer: str, letter: Mapping[str, Any], body: bytes | None) -> str:
    source, topic = letter["source"], letter["topic"]
    there = "no body" if body is None else f"a body of {len(body)} bytes"
    return (
        f"Consumer {consumer!r}: the log holds another event at {source}/{topic}/{letter['partition']} {letter['sequence_number']} than "
        f"dead letter {letter['id'][:12]}, whose body has {letter['body_size']} bytes: there is {there}, with another SHA-256. Nothing was "
        f"changed. Correct what `consumer.log` reads; or, if topic {topic!r} was deleted and created again: "
        f"{command('consumer', 'accept-incarnation', consumer, '--source', source, '--topic', topic)}."
    )
