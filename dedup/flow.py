"""One chunk from its rows to its commit: the whole protocol in one place.

The numbered order is fence, redeliveries, reserve, handler, write, then what `decision.decide` says. Every store runs it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import CommitConflict
from checkpoint.position import Partition
from deadletter.budget import Used
from deadletter.letter import Kind, Status
from dedup import budgets, company, decision, incarnation, planning, redeliveries
from dedup.attempts import Attempts
from dedup.care import Care
from dedup.envelope import check_positions
from dedup.feed import Material
from dedup.index import KEY_ONLY, Index, Ints, check_repeats
from dedup.keys import LOG_TIME, SEQUENCE
from dedup.letters import Why, letter_rows, make_history, make_letters
from dedup.order import Order
from dedup.planning import OnKeyConflict, Settled, Sifted
from dedup.rows import picked
from dedup.steps import Park, Record, Step
from dedup.store import KEYS, Checkpoint, Head, Run, Selection, Store, Topic, Transaction
from dedup.trial import Trials, untried
from dedup.tx import Handler

SAMPLE = 1_000
"""Redeliveries of a partition whose times are looked at where a purge left nothing else to compare."""


@dataclass(frozen=True)
class Policy:
    """What the consumer's settings say about a chunk."""

    handler: Handler
    settings: Mapping[str, str]
    on_key_conflict: OnKeyConflict
    max_body: int
    care: Care = field(default_factory=Care)
    trials: Trials = field(default_factory=untried)

    def unwatched(self) -> Policy:
        """For what a person runs: failures do not count against the budget, and no marker of a trial is kept."""
        return replace(self, care=replace(self.care, budget=None), trials=untried())


@dataclass(frozen=True)
class Chunk:
    """Rows that commit together."""

    material: Material
    index: Index
    run: Run
    assumed: Head  # the head that the keys were computed with, and the checkpoints that earlier chunks have made
    culprits: set[int] = field(default_factory=set)  # rows that halves found when these rows were tried before
    stream: bool = True  # False: positions that a person runs from the log
    incarnation_ids: Mapping[Topic, str] = field(default_factory=dict)  # what the broker said of its topics after these rows were read

    @property
    def ident(self) -> str:
        """Equal for the same rows delivered again, in one life of the consumer and of its topics."""
        index, head = self.index, self.assumed
        spans = [[*p, *span] for p, span in index.spans.items()]
        keys = b"" if spans else index.high.tobytes() + index.low.tobytes()  # without positions they tell batches apart
        life = (len(index), spans, head.keyspace, sorted(head.incarnations.items()))
        return hashlib.sha256(repr(life).encode() + keys).hexdigest()[:32]


def index_of(material: Material) -> Index:
    """The batch in position order. Raises ConfigError or AmbiguousPosition, naming rows."""
    check_positions(material.index)
    return Index.of(material.index, material.payload_hashes)


def commit_chunk(chunk: Chunk, store: Store, epoch: int, policy: Policy) -> npt.NDArray[np.int8]:
    """Make the effect of one chunk true, once; returns what became of each of its rows (planning's states).

    Raises:
        CommitConflict: the state changed since the batch was prepared; plan the batch again.

    Crash: until the commit step has acted nothing of the chunk is true; from then on all of it is.
    """
    name = chunk.assumed.consumer
    with company.seat(policy.trials, lambda: chunk.ident, name, policy.care.timeout), store.begin(name, epoch) as transaction:
        return decide_chunk(chunk, store, transaction, policy)


def reached(chunk: Chunk, state: npt.NDArray[np.int8]) -> Head:
    """What the state cannot be behind after this chunk; `state` is what `commit_chunk` returned."""
    return planning.reached(chunk.assumed, chunk.index, chunk.run, decided=bool((state != planning.REDELIVERED).any()))


def decide_chunk(chunk: Chunk, store: Store, transaction: Transaction, policy: Policy) -> npt.NDArray[np.int8]:
    """`commit_chunk` inside a transaction that is open."""
    head = transaction.head
    _check_assumptions(chunk.assumed, head)
    incarnation.refuse_others(head, chunk.incarnation_ids)
    sifted = _sift(chunk, transaction, head, store.on_step)
    refuse_other_events(chunk, sifted, transaction, store, policy.on_key_conflict)
    if _nothing_to_record(chunk, sifted, head):
        if len(chunk.index):
            policy.trials.forget(chunk.ident)
        return sifted.state
    store.on_step("reserve")
    transaction.ask(sifted.wanted)
    known = transaction.reserve(sifted.reserve, lambda known: _expect(chunk, sifted, known))
    settled = planning.settle(sifted, known, policy.on_key_conflict)
    used = budgets.before_handler(settled)
    budgets.require(head.consumer, policy.care.budget, head.spent, used)
    settled, why, handled = handle(chunk, settled, order_of(chunk, settled, transaction), transaction, policy, store.on_step)
    for step in _decide(chunk, settled, why, {**handled, **used}, head, policy):
        store.on_step(step.name)
        transaction.execute(step)
    return settled.state


def _expect(chunk: Chunk, sifted: Sifted, known: pa.Table) -> None:
    """The handler will be given these rows, unless another transaction commits one of their keys before us."""
    settled = planning.settle(sifted, known, "duplicate")
    chunk.material.expect(settled.index.order[settled.new])


def _check_assumptions(assumed: Head, head: Head) -> None:
    """Keys depend on the keyspace and on incarnations; a person may have changed them since they were computed.

    And nothing is committed on top of a state that lacks what came before: the database may have failed over since.
    """
    if (assumed.keyspace, dict(assumed.incarnations)) != (head.keyspace, dict(head.incarnations)):
        raise CommitConflict(f"Consumer {head.consumer!r}: its incarnations or its keyspace changed while the batch was prepared.")
    if planning.is_older(head, assumed):
        raise CommitConflict(f"Consumer {head.consumer!r}: the state is older than the one that this batch was planned on.")


def _sift(chunk: Chunk, transaction: Transaction, head: Head, on_step: Callable[[str], None]) -> Sifted:
    on_step("redeliveries")
    index = chunk.index
    old = {p: span for p, span in index.spans.items() if p in head.checkpoints and span[0] <= head.checkpoints[p].sequence_number}
    return planning.sift(index, head, transaction.seen(old) if old else {}, repeats_in(index, chunk.material))


def repeats_in(index: Index, material: Material) -> Ints:
    """Rows whose position an earlier row has. Raises AmbiguousPosition where they differ in content."""
    repeats = index.repeated()
    if len(repeats):
        pairs = np.stack([repeats - 1, repeats], axis=1).ravel()
        check_repeats(index, repeats, material.content(index.order[pairs]))
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
    """Raise IncarnationChanged for a topic that was created again: its positions were seen, its events were not."""
    head = transaction.head
    if head.floors:
        _check_purged(chunk, sifted, head)
    if sifted.replayed.any():
        _check_redeliveries(sifted, transaction, store, head, on_conflict)


def _check_redeliveries(sifted: Sifted, transaction: Transaction, store: Store, head: Head, on_conflict: OnKeyConflict) -> None:
    known = transaction.known(sifted.recheck)
    rows = redeliveries.suspects(sifted, known, compare_payload=on_conflict != "duplicate")
    if len(rows):
        parts = [(p, sifted.index.numbers[mine]) for p, r in sifted.index.by_partition() if len(mine := np.intersect1d(r, rows))]
        spans = [Selection(head.consumer, *p, first=int(n.min()), last=int(n.max()), limit=None) for p, n in parts]
        rows = redeliveries.unexplained(sifted.index, rows, pa.concat_tables([store.letters(s) for s in spans]), head)
    if len(rows):
        given_up = Selection(head.consumer, statuses=(Status.DISCARDED, Status.LOST), limit=None)
        freed = store.letters(given_up, ["key", "payload_hash", "holds_key"])
        freed = freed.filter(pc.and_(pc.and_(freed["key"].is_valid(), freed["payload_hash"].is_valid()), pc.invert(freed["holds_key"])))
        redeliveries.check_redeliveries(sifted.index, rows, freed.select(KEYS.names).cast(KEYS), head)


def _check_purged(chunk: Chunk, sifted: Sifted, head: Head) -> None:
    """Below a purge nothing is left to compare a redelivery with but time: in one incarnation it is not younger than the checkpoint.

    That is so of the broker's clock alone: what producers say comes in any order, and proves nothing.
    """
    index = sifted.index
    for partition, rows in index.by_partition():
        point, floor = head.checkpoints.get(partition), head.floors.get(partition)
        if point is None or not point.log_time or point.enqueued_time is None or floor is None:
            continue
        old = rows[(sifted.state[rows] == planning.REDELIVERED) & (index.numbers[rows] <= floor)][:SAMPLE]
        oldest = pc.min(_log_times(chunk.material.content(index.order[old]))).as_py() if len(old) else None
        if oldest is not None and oldest > point.enqueued_time:
            redeliveries.refuse_incarnation(index, old.tolist(), head)


def _log_times(content: pa.Table) -> pa.ChunkedArray:
    """When the broker took these events; null where it does not say."""
    known = content[LOG_TIME] if LOG_TIME in content.column_names else pa.scalar(False)
    return pc.if_else(known, content["enqueued_time"], None)


def handle(
    chunk: Chunk, settled: Settled, order: Order, transaction: Transaction, policy: Policy, on_step: Callable[[str], None]
) -> tuple[Settled, Why, dict[Kind, Used]]:
    """Run the handler on the new rows until each is decided. Without any it is not called.

    Returns what became of them, why, and what that uses of the budget.
    """
    if not len(settled.new):
        return settled, Why(tails=order.tails), {}
    policy.trials.begin(chunk.ident)
    attempts = Attempts(chunk.material, settled, order, transaction, policy.handler, policy.care, policy.trials, on_step, chunk.culprits)
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
    """The sequences of the chunk: blocked by letters that are there, and by rows that become letters before the handler."""
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
    index = chunk.material.index
    if SEQUENCE[0] not in index.column_names:
        return Order(None, len(settled.index))
    return Order(picked(index.select(SEQUENCE[:1]), settled.index.order)[SEQUENCE[0]], len(settled.index))


def _decide(chunk: Chunk, settled: Settled, why: Why, used: Mapping[Kind, Used], head: Head, policy: Policy) -> tuple[Step, ...]:
    rows = letter_rows(settled)
    content = chunk.material.content(settled.index.order[rows]) if len(rows) else None
    parked = None
    if content is not None:
        letters = make_letters(settled, content, why, head, chunk.run, dt.datetime.now(dt.UTC), policy.max_body)
        parked = Park(letters, make_history(settled, letters, why))
    batches = decision.batch_record(settled, head, chunk.run)
    tried = len(chunk.index) > 0 and policy.trials.tries(chunk.ident)  # an empty one needs no look at the marker
    record = Record(batches, chunk.run, policy.settings, used, chunk.stream, policy.care.budget, tried)
    marks = _marks(chunk, settled) if chunk.stream else {}
    return decision.decide(settled, parked, record, head, chunk.run, marks, incarnation.news(head, chunk.incarnation_ids))


def _marks(chunk: Chunk, settled: Settled) -> dict[Partition, Checkpoint]:
    """The checkpoint that the highest row of each partition makes."""
    tops = {p: int(rows[-1]) for p, rows in settled.index.by_partition() if p != KEY_ONLY}
    if not tops:
        return {}
    content = chunk.material.content(settled.index.order[list(tops.values())])
    said, known = content.select(["offset", "enqueued_time"]).to_pylist(), _log_times(content).is_valid().to_pylist()
    return {
        p: Checkpoint(int(settled.index.numbers[row]), seen["offset"], seen["enqueued_time"], chunk.run.query_id, by_broker)
        for (p, row), seen, by_broker in zip(tops.items(), said, known, strict=True)
    }
