"""One batch that the driver commits, from its guards to the commit of its last chunk. Called by the consumer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dedup import company, flow, planning, starting, too_large
from dedup.feed import Feed
from dedup.flow import Policy
from dedup.report import Report
from dedup.store import Head, Run

if TYPE_CHECKING:
    from dedup.consumer import Consumer

Culprits = dict[tuple[int, int], set[int]]
"""(batch, chunk) -> rows that failed alone when the chunk was tried before."""


def process(consumer: Consumer, feed: Feed, head: Head, run: Run, policy: Policy, culprits: Culprits) -> tuple[Report, Head]:
    """Commit the batch chunk by chunk; returns what became of its rows, and what the state cannot be behind.

    Crash: chunks that were committed are true, the others are not; the batch is delivered again, and drops what is decided.
    """
    report = Report()
    with company.entered(consumer.name, feed.materialise(consumer.prepare(head))) as material:
        index = flow.index_of(material)
        told = consumer.told(index.spans)
        firsts = starting.without_absent(head, run, {p: first for p, (first, _) in index.spans.items()}, consumer.read_log)
        planning.guard(head, run, consumer.settings, firsts)
        parts = planning.chunks(index, consumer.max_events)
        if len(parts) > 1 and not policy.care.bisect:
            too_large.refuse_parts(consumer.name, len(index), consumer.max_events)
        for number, rows in enumerate(parts):
            known = culprits.setdefault((run.batch_id, number), set())
            part = replace(run, chunk=number, ends=rows is parts[-1])
            chunk = flow.Chunk(material, index[rows], part, head, known, incarnation_ids=told)
            state = flow.commit_chunk(chunk, consumer.store, head.epoch, policy)
            head = flow.reached(chunk, state)
            report.add(state)
    return report, head
