"""One batch from its rows to its commit: the whole protocol, and the one loop over the chunks of a batch.

The driver calls `commit_batch`, which guards the batch, cuts it into chunks and commits them one after the other. A process that shares the
epoch (member.py) and a task of Spark (spark/committing.py) bring chunks and claims of their own. All of them run `committed`, which runs
`decide_chunk` for each chunk: redeliveries, reserve, handler, write, then the steps that `decision.decide` returns.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint import guards, start
from checkpoint.errors import BatchTooLarge, BudgetExceeded, CommitConflict
from checkpoint.guards import TopicIdentity
from checkpoint.head import Checkpoint, Claim, Head, Run, Topic
from checkpoint.position import KEY_ONLY, Ints, Partition
from checkpoint.records import RecordFilter
from deadletter.crashes import CrashMarker, untried
from deadletter.failure import clean
from deadletter.letter import Action, Kind, Status
from deadletter.parked import ParkedGroup, groups_of, tell_parked
from deadletter.policy import OwnPolicy, Used
from deadletter.selection import Selection
from deadletter.store import KEYS, Park
from dedup.core import decision, planning
from dedup.core.envelope import POSITION, check_positions
from dedup.core.index import Index, check_repeats
from dedup.core.keys import LOG_TIME, SEQUENCE
from dedup.core.letter_messages import messages_of
from dedup.core.letters import Undecodable, Why, letter_rows, make_park
from dedup.core.planning import OnKeyConflict, Order, Settled, Sifted
from dedup.core.rows import picked
from dedup.core.steps import Record, Step
from dedup.core.store import Store, Transaction
from dedup.decode import Decoder
from dedup.decode.bodies import reasons
from dedup.decode.prepare import Prepare
from dedup.pipeline import company
from dedup.pipeline.attempts import Attempts
from dedup.pipeline.batch import EvaluatedBatch, Evaluating
from dedup.pipeline.report import OnBatch, Report
from dedup.pipeline.tx import Handler, Tx

SAMPLE = 1_000
"""Redeliveries of a partition whose times are looked at where a purge left nothing else to compare."""


_REASON_BYTES = 1_000
"""UTF-8 of the reason of a body that does not decode."""

Compensate = Callable[[pa.Table, Tx], None]
"""(positions and keys of events whose effect is taken back, tx) -> nothing."""

LogReader = Callable[[str, str, int, int, int], Any]
"""(source, topic, partition, first, last) -> DataFrame or Arrow table with those positions of the log."""


@dataclass(frozen=True)
class Policy:
    """What the consumer's settings say about a chunk. Travels to tasks."""

    handler: Handler
    settings: Mapping[str, str]
    on_key_conflict: OnKeyConflict
    max_body: int
    on_failure: OwnPolicy = field(default_factory=OwnPolicy)
    marker: CrashMarker = field(default_factory=untried)
    decoder: Decoder | None = None  # says why a body does not decode
    decodes: bool = False  # whether `data` is what decode= made of the body, by a decoder or by a function; else it is the input's own

    def undecoded(self, content: pa.Table) -> pa.Table:
        """These rows without what decode= made of their bodies: whoever has the body can have that again."""
        return content.drop_columns([name for name in content.column_names if name == "data"]) if self.decodes else content

    def unwatched(self) -> Policy:
        """The policy for rows that a person runs: failures do not count against the budget, and no crash marker is kept."""
        return replace(self, on_failure=replace(self.on_failure, budget=None), marker=untried())


def nothing() -> None:
    """What a consumer does where nothing is asked for."""


def known_head(store: Store, name: str, settings: Mapping[str, str]) -> Head:
    """The state now. Raises SettingsChanged where it was written with other key settings than this consumer has."""
    head = store.head(name)
    guards.guard(head, Run("", 0), settings, {})
    return head


@dataclass(frozen=True)
class Job:
    """A consumer, frozen, as the code below `Consumer` gets it. `Consumer.job` makes it, and makes sure that there is a handler."""

    name: str
    store: Store
    policy: Policy
    preparation: Prepare  # under an empty state
    max_events: int  # of one chunk
    max_outage: float = 300.0
    read_log: LogReader | None = None
    take_back: Compensate | None = None
    identify: TopicIdentity | None = None  # tells which life of its topics a broker serves
    takeover_after: float = 60.0
    takeover: bool = False
    reprocess_within: dt.timedelta | None = None
    scratch: str | None = None
    collect: bool = True  # whether rows that Spark reads may come to the driver
    send_messages: Callable[[], None] = nothing  # those that a batch has published, where there is a destination
    tell_retention: Callable[[], None] = nothing  # before the first batch
    after_batch: Callable[[], None] = nothing  # begins the upkeep that the consumer does by itself
    stop_upkeep: Callable[[], None] = nothing
    on_batch: OnBatch | None = None

    def prepare(self, head: Head) -> Prepare:
        """The preparation that turns an input into events with keys, under this head."""
        return replace(self.preparation, keyspace=head.keyspace, incarnations=dict(head.incarnations))

    def topic_ids(self, partitions: Iterable[Partition]) -> dict[Topic, str]:
        """Ask the broker for the ids of these partitions' topics, where it can be asked. Raises SourceUnavailable."""
        return guards.ask(self.identify, {(p.source, p.topic) for p in partitions})

    def known_head(self) -> Head:
        """The state now. Raises SettingsChanged where it was written with other key settings than this consumer has."""
        return known_head(self.store, self.name, self.policy.settings)


Culprits = dict[int, set[int]]
"""Chunk of a batch -> rows that failed alone when the chunk was tried before."""

RowStates = npt.NDArray[np.int8]
"""What became of each row: planning's states."""


class DecidedChunk(NamedTuple):
    """What a transaction has decided."""

    state: RowStates
    parked: tuple[ParkedGroup, ...] = ()  # new letters


@dataclass(frozen=True)
class Chunk:
    """Rows that commit together."""

    batch: EvaluatedBatch
    index: Index
    run: Run
    assumed: Head  # the head that the keys were computed with, and the checkpoints that earlier chunks have made
    culprits: set[int] = field(default_factory=set)  # rows that halves found when these rows were tried before
    stream: bool = True  # False: positions that a person runs from the log
    topic_ids: Mapping[Topic, str] = field(default_factory=dict)  # what the broker said of its topics after these rows were read

    @property
    def ident(self) -> str:
        """Equal for the same rows delivered again, in one life of the consumer and of its topics."""
        index, head = self.index, self.assumed
        spans = [[*p, *span] for p, span in index.spans.items()]
        keys = b"" if spans else index.high.tobytes() + index.low.tobytes()  # without positions they tell batches apart
        life = (len(index), spans, head.keyspace, sorted(head.incarnations.items()))
        return hashlib.sha256(repr(life).encode() + keys).hexdigest()[:32]


@dataclass(frozen=True)
class Part:
    """Rows of a batch that are to be one chunk."""

    batch: EvaluatedBatch
    index: Index
    topic_ids: Mapping[Topic, str]  # what the broker said of its topics after these rows were read
    last: bool = False  # of its batch


class Committed(NamedTuple):
    """A chunk that is true."""

    head: Head  # what the state cannot be behind
    state: RowStates
    parked: tuple[ParkedGroup, ...]


def commit_batch(job: Job, batch: Evaluating, head: Head, run: Run, culprits: Culprits) -> tuple[Report, Head]:
    """Commit a batch chunk by chunk, as the only instance under the epoch; returns the report and the least head that the state has now.

    Crash: chunks that were committed are true, the others are not; the batch is delivered again, and drops what is decided.
    """
    report = Report()
    with company.entered(job.name, batch.evaluate(job.prepare(head))) as rows:
        index = index_of(rows)
        topic_ids = job.topic_ids(index.spans)
        guard(job, head, run, {p: first for p, (first, _) in index.spans.items()})
        for done in committed(parts_of(job, rows, index, topic_ids), run, head, partial(commit_chunk, job=job), culprits):
            head = done.head
            report += Report.of(done.state)
            tell_parked(job.policy.on_failure.on_parked, done.parked)
    return report, head


def guard(job: Job, head: Head, run: Run, firsts: Mapping[Partition, int]) -> None:
    """Refuse a batch that the state contradicts, before anything of it is written. Raises what `guards.guard` does.

    Args:
        firsts: lowest sequence number of each partition in the batch; empty where no gap can be told yet.
    """
    guards.guard(head, run, job.policy.settings, start.without_absent(head, run, firsts, job.read_log))


def parts_of(job: Job, batch: EvaluatedBatch, index: Index, topic_ids: Mapping[Topic, str]) -> Iterator[Part]:
    """Cut a batch into chunks. Raises BatchTooLarge for more than one chunk if the handler needs the batch whole (bisect=False)."""
    parts = planning.chunks(index, job.max_events)
    if len(parts) > 1 and not job.policy.on_failure.bisect:
        refuse_parts(job.name, len(index), job.max_events)
    for rows in parts:
        yield Part(batch, index[rows], topic_ids, last=rows is parts[-1])


def refuse_parts(consumer: str, events: int, most: int, what: str = "batch") -> NoReturn:
    """Raise BatchTooLarge for a batch that would be cut although the handler needs it whole (bisect=False).

    Args:
        events: of the batch. most: that one transaction takes. what: that is cut, where it is not the whole batch.
    """
    raise BatchTooLarge(
        f"Consumer {consumer!r}: with bisect=False the handler gets a whole {what} in one transaction. This one has {events:,} events, and "
        f"max_events_per_transaction is {most:,}. Nothing of it was written. Raise max_events_per_transaction to {events:,} or more (Spark "
        "repeats a planned batch unchanged), and let the source bring smaller ones (maxOffsetsPerTrigger of Kafka, "
        f"maxEventsPerTrigger of Event Hubs). If the handler gives the same result on parts of a batch, set bisect=True."
    )


def committed(
    parts: Iterable[Part], run: Run, head: Head, commit: Callable[[Chunk], DecidedChunk], culprits: Culprits | None = None
) -> Iterator[Committed]:
    """The one loop: commit the chunks of a batch one after the other, each on the head of the one before; yields each.

    Args:
        parts: in the order of their positions; one is asked for when those before it are true.
        head: as the batch was planned.
        commit: makes the effect of one chunk true, in a transaction of whoever works here.
        culprits: kept by the caller for the next try of the batch.

    Crash: chunks that were yielded are true; the one in hand is or is not.
    """
    known = {} if culprits is None else culprits
    for number, part in enumerate(parts):
        ends = run.ends and (part.last or run.joined)  # who shares the epoch speaks of no batch but its own
        mine = known.setdefault(number, set())
        chunk = Chunk(part.batch, part.index, replace(run, chunk=number, ends=ends), head, mine, topic_ids=part.topic_ids)
        decided = commit(chunk)
        head = reached(chunk, decided)
        yield Committed(head, *decided)


def index_of(batch: EvaluatedBatch) -> Index:
    """The batch in position order. Raises ConfigError or AmbiguousPosition, naming rows."""
    check_positions(batch.index)
    return Index.of(batch.index, batch.payload_hashes)


def commit_chunk(chunk: Chunk, job: Job, claim: Claim | None = None) -> DecidedChunk:
    """Make the effect of one chunk true, once; returns what became of each of its rows, and which letters are new.

    Args:
        claim: of its partition, where the epoch is shared.

    Raises:
        CommitConflict: the state changed since the batch was prepared; plan the batch again.

    Crash: until the commit step has acted nothing of the chunk is true; from then on all of it is.
    """
    policy, epoch, what = job.policy, chunk.assumed.epoch, job.name if claim is None else f"{job.name} {claim.partition}"
    with (
        company.seat(policy.marker, lambda: chunk.ident, what, policy.on_failure.seconds_of_handler),
        job.store.begin(job.name, epoch, claim) as transaction,
    ):
        return decide_chunk(chunk, job.store, transaction, policy)


def reached(chunk: Chunk, decided: DecidedChunk) -> Head:
    """The least head that the state has after this chunk; `decided` is what `commit_chunk` returned."""
    return planning.reached(chunk.assumed, chunk.index, chunk.run, decided=bool((decided.state != planning.REDELIVERED).any()))


def decide_chunk(chunk: Chunk, store: Store, transaction: Transaction, policy: Policy) -> DecidedChunk:
    """Do what `commit_chunk` does, inside a transaction that is open; returns what that returns.

    Crash: until the commit step has acted nothing of the chunk is true; from then on all of it is.
    """
    head = transaction.head
    check_assumptions(chunk.assumed, head)
    guards.refuse_others(head, chunk.topic_ids)
    sifted = _sift(chunk, transaction, head, store.on_step)
    refuse_other_events(chunk, sifted, transaction, store, policy.on_key_conflict)
    if _nothing_to_record(chunk, sifted, head):
        if len(chunk.index):
            policy.marker.forget(chunk.ident)
        return DecidedChunk(sifted.state)
    store.on_step("reserve")
    transaction.ask(sifted.wanted)
    known = transaction.reserve(sifted.reserve, lambda known: _expect(chunk, sifted, known))
    settled = planning.settle(sifted, known, policy.on_key_conflict)
    used = decision.before_handler(settled)
    _require_budget(chunk, settled, used, head, policy)
    settled, why, handled = handle(chunk, settled, order_of(chunk, settled, transaction), transaction, policy, store.on_step)
    parked, spent = _parked(chunk, settled, why, {**handled, **used}, head, policy)
    if parked is not None and policy.on_failure.letters_to is not None:
        transaction.enqueue(messages_of(parked.letters, policy.on_failure.letters_to))
    for step in _steps(chunk, settled, parked, spent, head, policy):
        store.on_step(step.name)
        transaction.execute(step)
    return DecidedChunk(settled.state, () if parked is None else groups_of(parked.letters))


def _require_budget(chunk: Chunk, settled: Settled, used: Mapping[Kind, Used], head: Head, policy: Policy) -> None:
    """Raise BudgetExceeded, which then also says what is wrong with the first body that does not decode."""
    try:
        decision.require(head.consumer, policy.on_failure.budget, head.spent, used)
    except BudgetExceeded:
        why = why_undecodable(chunk, settled, policy, most=1)
        decision.require(head.consumer, policy.on_failure.budget, head.spent, decision.explained(used, settled, why))
        raise


def why_undecodable(chunk: Chunk, settled: Settled, policy: Policy, most: int | None = None) -> dict[int, Undecodable]:
    """Row -> why its body does not decode; of the first ones, where `most` says how many."""
    rows = np.flatnonzero(settled.state == planning.UNDECODABLE)[:most]
    if policy.decoder is None or not len(rows):
        return {}
    return _explained(rows, chunk.batch.content(settled.index.order[rows]), policy.decoder)


def _explained(rows: Ints, content: pa.Table, decoder: Decoder) -> dict[int, Undecodable]:
    """A second look at bodies that do not decode, one by one: there are no more of them than of letters."""
    whys = reasons(content["body"].combine_chunks(), content["properties"].combine_chunks(), decoder)
    found = (Undecodable(clean(why.text, _REASON_BYTES), clean(why.brief, _REASON_BYTES)) for why in whys)
    return dict(zip(rows.tolist(), found, strict=True))


def _expect(chunk: Chunk, sifted: Sifted, known: pa.Table) -> None:
    """The handler will be given these rows, unless another transaction commits one of their keys before us."""
    settled = planning.settle(sifted, known, "duplicate")
    chunk.batch.expect(settled.index.order[settled.index.arrived(settled.new)])


def check_assumptions(assumed: Head, head: Head) -> None:
    """Keys depend on the keyspace and on incarnations; a person may have changed them since they were computed.

    And nothing is committed on top of a state that lacks what came before: the database may have failed over since. Raises CommitConflict.
    """
    if (assumed.keyspace, dict(assumed.incarnations)) != (head.keyspace, dict(head.incarnations)):
        raise CommitConflict(f"Consumer {head.consumer!r}: its incarnations or its keyspace changed while the batch was prepared.")
    if guards.is_older(head, assumed):
        raise CommitConflict(f"Consumer {head.consumer!r}: the state is older than the one that this batch was planned on.")


def _sift(chunk: Chunk, transaction: Transaction, head: Head, on_step: Callable[[str], None]) -> Sifted:
    on_step("redeliveries")
    # Asked above the checkpoint, too: where that table alone was restored, batch records know more than it does.
    return planning.sift(chunk.index, head, transaction.seen(chunk.index.spans), repeats_in(chunk.index, chunk.batch))


def repeats_in(index: Index, batch: EvaluatedBatch) -> Ints:
    """Rows whose position an earlier row has. Raises AmbiguousPosition where they differ in content."""
    repeats = index.repeated()
    if len(repeats):
        pairs = np.stack([repeats - 1, repeats], axis=1).ravel()
        check_repeats(index, repeats, batch.content(index.order[pairs]))
    return repeats


def _nothing_to_record(chunk: Chunk, sifted: Sifted, head: Head) -> bool:
    """Whether this is a replay of what was recorded under this very query and batch: nothing would change."""
    if not chunk.stream:
        return bool((sifted.state == planning.REDELIVERED).all())
    run, ended = chunk.run, -1 if head.batch_id is None else head.batch_id - (chunk.run.ends and not head.batch_ended)
    replay = head.query_id == run.query_id and run.batch_id <= ended
    known_query = all(p in head.checkpoints and head.checkpoints[p].query_id == chunk.run.query_id for p in chunk.index.spans)
    return replay and known_query and bool((sifted.state == planning.REDELIVERED).all())


def refuse_other_events(chunk: Chunk, sifted: Sifted, transaction: Transaction, store: Store, on_conflict: OnKeyConflict) -> None:
    """Raise IncarnationChanged if a topic was created again: its positions were seen before, but with other events."""
    head = transaction.head
    if head.floors:
        _check_purged(chunk, sifted, head)
    if sifted.replayed.any():
        _check_redeliveries(chunk, sifted, transaction, store, on_conflict)


_OF_A_POSITION = ("id", "incarnation", "payload_hash", *POSITION)
"""What of a letter tells whether it explains an event at its position."""


def _check_redeliveries(chunk: Chunk, sifted: Sifted, transaction: Transaction, store: Store, on_conflict: OnKeyConflict) -> None:
    head, known = transaction.head, transaction.known(sifted.recheck)
    rows = planning.suspects(sifted, known, compare_payload=on_conflict != "duplicate")
    if len(rows):
        spans = [Selection(head.consumer, *p, first=first, last=last, limit=None) for p, first, last in _spans(sifted.index, rows)]
        letters = pa.concat_tables([store.letters(span, _OF_A_POSITION) for span in spans])  # bodies and stacks may be large
        rows = planning.unexplained(sifted.index, rows, letters, head, partial(_edited, store))
    if len(rows) and head.floors:
        rows = np.setdiff1d(rows, _purged_duplicates(chunk, sifted, rows, known, store, head))
    if len(rows):
        given_up = Selection(head.consumer, statuses=(Status.DISCARDED, Status.LOST), limit=None)
        freed = store.letters(given_up, ["key", "payload_hash", "holds_key"])
        freed = freed.filter(pc.and_(pc.and_(freed["key"].is_valid(), freed["payload_hash"].is_valid()), pc.invert(freed["holds_key"])))
        planning.check_redeliveries(sifted.index, rows, freed.select(KEYS.names).cast(KEYS), head)


def _spans(index: Index, rows: Ints) -> Iterator[tuple[Partition, int, int]]:
    """Each partition that has some of these rows, with the lowest and the highest position of them."""
    for partition, mine in index.by_partition():
        if len(here := np.intersect1d(mine, rows)):
            yield partition, int(index.numbers[here].min()), int(index.numbers[here].max())


def _edited(store: Store, ids: list[str]) -> set[str]:
    """Which of these letters have had another body, or another key."""
    history = store.history(*ids)  # of no letters: nothing
    return set(history.filter(pc.equal(history["action"], Action.EDITED.value))["letter_id"].to_pylist())


def _purged_duplicates(chunk: Chunk, sifted: Sifted, rows: Ints, known: pa.Table, store: Store, head: Head) -> Ints:
    """Those of the suspects that were duplicates of what a purge has taken. Raises IncarnationChanged where their time says otherwise."""
    filters = [RecordFilter(partition=partition, first=first, last=last) for partition, first, last in _spans(sifted.index, rows)]
    records = pa.concat_tables([store.batches(head.consumer, each) for each in filters])
    found = planning.purged_duplicates(sifted, rows, known, records, head)
    for partition, mine in sifted.index.by_partition():
        _refuse_younger(chunk, sifted.index, partition, np.intersect1d(mine, found), head)
    return found


def _check_purged(chunk: Chunk, sifted: Sifted, head: Head) -> None:
    """Below a purge nothing is left to compare a redelivery with but time."""
    index = sifted.index
    for partition, rows in index.by_partition():
        if (floor := head.floors.get(partition)) is not None:
            old = rows[(sifted.state[rows] == planning.REDELIVERED) & (index.numbers[rows] <= floor)]
            _refuse_younger(chunk, index, partition, old, head)


def _refuse_younger(chunk: Chunk, index: Index, partition: Partition, rows: Ints, head: Head) -> None:
    """Raise IncarnationChanged for rows of decided positions that came into the log behind the checkpoint, which is so in another life.

    The broker's clock alone tells: what producers say comes in any order, and proves nothing.
    """
    point, some = head.checkpoints.get(partition), rows[:SAMPLE]
    if point is None or not point.log_time or point.enqueued_time is None or not len(some):
        return
    oldest = pc.min(_log_times(chunk.batch.content(index.order[some]))).as_py()
    if oldest is not None and oldest > point.enqueued_time:
        planning.refuse_incarnation(index, some.tolist(), head)


def _log_times(content: pa.Table) -> pa.ChunkedArray:
    """When the broker took these events; null where it does not say."""
    known = content[LOG_TIME] if LOG_TIME in content.column_names else pa.scalar(False)
    return pc.if_else(known, content["enqueued_time"], None)


def handle(
    chunk: Chunk, settled: Settled, order: Order, transaction: Transaction, policy: Policy, on_step: Callable[[str], None]
) -> tuple[Settled, Why, dict[Kind, Used]]:
    """Run the handler on the new rows until each is decided. Without new rows the handler is not called.

    Returns what became of them, why, and what that uses of the budget.
    """
    if not len(settled.new):
        return settled, Why(tails=order.tails), {}
    policy.marker.begin(chunk.ident)
    attempts = Attempts(chunk.batch, settled, order, transaction, policy.handler, policy.on_failure, policy.marker, on_step, chunk.culprits)
    outcome = attempts.run()
    crashed = {row for row, failures in outcome.failed.items() if failures[-1].kind == Kind.CRASHED}
    states = {
        planning.SKIPPED: outcome.skipped,
        planning.REJECTED: outcome.rejected,
        planning.FAILED: outcome.failed,
        planning.CRASHED: crashed,
        planning.WAITING: outcome.waiting,
    }
    settled = planning.apply_outcomes(settled, {state: np.array(sorted(rows), dtype=np.int64) for state, rows in states.items()})
    return settled, Why(outcome.rejected, outcome.failed, order.tails), attempts.used


def order_of(chunk: Chunk, settled: Settled, transaction: Transaction) -> Order:
    """The sequences of the chunk. Existing letters block them, and so do rows that become letters before the handler runs."""
    order = sequences(chunk, settled)
    if not order.kept:
        return order
    lettered = letter_rows(settled)
    asked = order.asked(np.concatenate([settled.new, lettered]))
    if len(asked):
        order.block_behind_letters(transaction.blocked(asked))
    order.block_behind(lettered)
    return order


def sequences(chunk: Chunk, settled: Settled) -> Order:
    """Which rows belong to one sequence. Nothing is blocked yet."""
    index = chunk.batch.index
    if SEQUENCE[0] not in index.column_names:
        return Order(None, len(settled.index))
    return Order(picked(index.select(SEQUENCE[:1]), settled.index.order)[SEQUENCE[0]], len(settled.index))


def _parked(
    chunk: Chunk, settled: Settled, why: Why, used: Mapping[Kind, Used], head: Head, policy: Policy
) -> tuple[Park | None, Mapping[Kind, Used]]:
    """The letters of the chunk, None where it has none; and what is used of the budget, with their reasons."""
    rows = letter_rows(settled)
    if not len(rows):
        return None, used
    content = policy.undecoded(chunk.batch.content(settled.index.order[rows]))
    why, used = _with_reasons(settled, content, why, used, policy)
    now, redact = dt.datetime.now(dt.UTC), policy.on_failure.redact
    return make_park(settled, content, why, head, chunk.run, now, policy.max_body, redact), used


def _steps(chunk: Chunk, settled: Settled, parked: Park | None, used: Mapping[Kind, Used], head: Head, policy: Policy) -> tuple[Step, ...]:
    """The letters, the record and the checkpoints of the chunk, as the steps that `decision.decide` makes of them."""
    batches = decision.batch_record(settled, head, chunk.run)
    tried = len(chunk.index) > 0 and policy.marker.tries(chunk.ident)  # an empty one needs no look at the marker
    record = Record(batches, chunk.run, policy.settings, used, chunk.stream, policy.on_failure.budget, tried)
    marks = _marks(chunk, settled) if chunk.stream else {}
    return decision.decide(settled, parked, record, head, chunk.run, marks, guards.news(head, chunk.topic_ids))


def _with_reasons(
    settled: Settled, content: pa.Table, why: Why, used: Mapping[Kind, Used], policy: Policy
) -> tuple[Why, Mapping[Kind, Used]]:
    """With what is wrong with the bodies of letters that do not decode; `content` is that of all letters."""
    rows = letter_rows(settled)
    at = np.flatnonzero(settled.state[rows] == planning.UNDECODABLE)
    if policy.decoder is None or not len(at):
        return why, used
    found = _explained(rows[at], picked(content.select(["body", "properties"]), at), policy.decoder)
    return replace(why, undecodable=found), decision.explained(used, settled, found)


def _marks(chunk: Chunk, settled: Settled) -> dict[Partition, Checkpoint]:
    """The checkpoint that the highest row of each partition makes."""
    tops = {p: int(rows[-1]) for p, rows in settled.index.by_partition() if p != KEY_ONLY}
    if not tops:
        return {}
    content = chunk.batch.content(settled.index.order[list(tops.values())])
    said, known = content.select(["offset", "enqueued_time"]).to_pylist(), _log_times(content).is_valid().to_pylist()
    return {
        p: Checkpoint(int(settled.index.numbers[row]), seen["offset"], seen["enqueued_time"], chunk.run.query_id, by_broker)
        for (p, row), seen, by_broker in zip(tops.items(), said, known, strict=True)
    }
