"""A deterministic world in which the real flow and planning code run against model stores.

Copies of a consumer are threads that run one at a time; at every `on_step` a seeded scheduler decides who goes on, who
crashes, who sleeps while another copy takes over. Beside the copies people reprocess and discard letters, and crash as well. Two model
stores: `transactional` (one database transaction, row locks, takeover ends older backends) and `ledger` (compare-and-swap on a sequence
of commits, sinks published afterwards).
The model stores are doubles: what they promise is shown for the real ones by the contract, kill and race tests.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa

from checkpoint.errors import CommitConflict, DedupError, Fenced, PositionGap, StoreUnavailable
from checkpoint.position import Partition, Ranges
from deadletter.letter import HISTORY, LETTERS
from dedup import DeadLetters, planning
from dedup.consumer import Consumer
from dedup.feed import ArrowMaterial
from dedup.keys import LETTER
from dedup.pages import ReprocessOptions
from dedup.reprocessing import reprocess
from dedup.steps import Advance, Change, Commit, Free, Note, Park, Record
from dedup.store import BATCHES, KEYS, SEQUENCES, Head, Holder, Rows, Selection
from dedup.wanted import ALL, Wanted

NAME = "simulated"
TOPIC = ("broker", "topic")


class Crash(BaseException):
    """The process of one copy died."""


class Boom(Exception):
    """The handler failed."""


# The log


@dataclass(frozen=True)
class Event:
    """One event of the simulated log."""

    partition: int
    number: int
    key: int | None
    undecodable: bool
    sequence: bytes | None = None


def make_log(rng: random.Random, partitions: int = 2, length: int = 8) -> list[list[Event]]:
    """A few partitions with repeated keys, null keys, undecodable bodies and missing positions."""
    log: list[list[Event]] = []
    for p in range(partitions):
        number, events = 0, []
        for _ in range(length):
            number += rng.choice([1, 1, 1, 3])
            junk, key = rng.random() < 0.05, None if rng.random() < 0.05 else rng.randrange(10)
            events.append(Event(p, number, key, junk, None if junk or rng.random() < 0.2 else bytes([p, rng.randrange(2)]) * 8))
        log.append(events)
    return log


def prepared(events: list[Event]) -> pa.Table:
    """What `prepare` would make of these events."""
    rows = [
        {
            "source": TOPIC[0],
            "topic": TOPIC[1],
            "partition": e.partition,
            "sequence_number": e.number,
            "part": 0,
            "offset": f"o{e.number}",
            "enqueued_time": None,
            "key": None,
            "body": str(e.key).encode(),
            "properties": [],
            "_key": None if e.key is None or e.undecodable else int(e.key).to_bytes(16, "big"),
            "_key_text": str(e.key),
            "_payload_hash": -1 if e.key is None else e.key,
            "_undecodable": e.undecodable,
            "_sequence": e.sequence,
            "_sequence_text": e.sequence and e.sequence.hex(),
        }
        for e in events
    ]
    return pa.Table.from_pylist(rows, schema=PREPARED)


PREPARED = pa.schema(
    [LETTERS.field(n) for n in ("source", "topic", "partition", "sequence_number", "part", "offset", "enqueued_time")]
    + [pa.field("key", pa.binary()), LETTERS.field("body"), LETTERS.field("properties")]
    + [
        pa.field("_key", pa.binary()),
        pa.field("_key_text", pa.string()),
        pa.field("_payload_hash", pa.int64()),
        pa.field("_undecodable", pa.bool_()),
        pa.field("_sequence", pa.binary(16)),
        pa.field("_sequence_text", pa.string()),
    ]
)


@dataclass
class SimFeed:
    """A batch of the simulated query."""

    events: list[Event]
    run_key: str
    query_id: str | None

    def check(self, prepare: Any) -> None:
        """Nothing to check."""

    @contextmanager
    def materialise(self, prepare: Any) -> Iterator[ArrowMaterial]:
        """Already prepared."""
        yield ArrowMaterial(prepared(self.events))


@dataclass
class LetterFeed:
    """Letters on their way through the door again: the events that they were parked from."""

    letters: pa.Table
    log: list[list[Event]]

    @contextmanager
    def materialise(self, prepare: Any) -> Iterator[ArrowMaterial]:
        """Prepared as they were."""
        events = {(e.partition, e.number): e for part in self.log for e in part}
        places = zip(self.letters["partition"].to_pylist(), self.letters["sequence_number"].to_pylist(), strict=True)
        yield ArrowMaterial(prepared([events[place] for place in places]).append_column(LETTER, self.letters[LETTER]))


# The scheduler


class Copy(threading.Thread):
    """One process that runs the consumer; it moves only when the scheduler says so."""

    def __init__(self, body: Callable[[Copy], None]) -> None:
        super().__init__(daemon=True)
        self.body, self.go, self.stopped = body, threading.Semaphore(0), threading.Semaphore(0)
        self.done, self.die, self.error, self.sleeping = False, False, None, 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Thread body."""
        self.go.acquire()
        try:
            self.body(self)
        except (Crash, Boom, DedupError):
            pass
        except BaseException as e:  # noqa: BLE001 - a defect of the code under test: the schedule fails with it
            self.failure = e
        self.done = True
        self.stopped.release()

    def pause(self, _name: str = "") -> None:
        """Called by the copy: give the turn back; die if told so."""
        self.stopped.release()
        self.go.acquire()
        if self.die:
            raise Crash

    def step(self, *, die: bool = False) -> None:
        """Called by the scheduler: let this copy run to its next pause."""
        self.die = die
        self.go.release()
        self.stopped.acquire()
        if self.failure is not None:
            raise self.failure


# The stores


@dataclass
class Shared:
    """What outlives every process."""

    head: Head = field(default_factory=lambda: Head(NAME))
    reserved: dict[bytes, int] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    letters: dict[str, dict[str, Any]] = field(default_factory=dict)
    sink: list[dict[str, Any]] = field(default_factory=list)
    decided: list[list[dict[str, Any]]] = field(default_factory=list)  # ledger: sink rows by seq
    published: int = 0
    trial: str | None = None
    open: list[SimTransaction] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    freed: set[bytes] = field(default_factory=set)  # keys that a person let go

    def waiting(self, sequence: bytes | None) -> list[dict[str, Any]]:
        """Open and blocked letters of a sequence, in position order."""
        mine = [x for x in self.letters.values() if sequence is not None and x["sequence"] == sequence and x["status"] in WAITING]
        return sorted(mine, key=place)


WAITING = ("OPEN", "BLOCKED")


def place(letter: Mapping[str, Any]) -> tuple[int, int]:
    """Where a letter stands."""
    return letter["partition"], letter["sequence_number"]


class SimStore:
    """A model of one store; `ledger` chooses which protocol it follows."""

    steps: ClassVar[Mapping[str, str]] = {}
    default_max_events: ClassVar[int] = 1000

    def __init__(self, shared: Shared, pause: Callable[[str], None], rng: random.Random, *, ledger: bool) -> None:
        self.shared, self.on_step, self.rng, self.ledger = shared, pause, rng, ledger

    def take_epoch(self, consumer: str, holder: Holder, **_: Any) -> Head:
        """A new epoch; in the transactional model older backends are ended."""
        self.on_step("epoch")
        shared = self.shared
        shared.head = replace(shared.head, epoch=shared.head.epoch + 1, seq=shared.head.seq + 1)
        shared.decided.append([])
        if not self.ledger:
            for transaction in shared.open:
                transaction.ended |= not transaction.letters_only
        return shared.head

    def head(self, consumer: str) -> Head:
        """The state now."""
        return self.shared.head

    @contextmanager
    def begin(self, consumer: str, epoch: int) -> Iterator[SimTransaction]:
        """Fence and open."""
        self.on_step("fence")
        if self.ledger:
            self.publish(consumer)
        if self.shared.head.epoch != epoch:
            raise Fenced
        transaction = SimTransaction(self, self.shared.head)
        self.shared.open.append(transaction)
        try:
            yield transaction
        finally:
            self.shared.open.remove(transaction)

    @contextmanager
    def begin_letters(self, consumer: str, *, positions: bool = False) -> Iterator[SimTransaction]:
        """Under the epoch that there is; a takeover does not concern it."""
        self.on_step("fence")
        if self.ledger:
            self.publish(consumer)
        transaction = SimTransaction(self, self.shared.head, letters_only=True)
        self.shared.open.append(transaction)
        try:
            yield transaction
        finally:
            self.shared.open.remove(transaction)

    @contextmanager
    def heartbeat(self, consumer: str, epoch: int, every: float) -> Iterator[None]:
        """Time does not exist here."""
        yield

    def trial(self, consumer: str) -> str | None:
        """The marker."""
        return self.shared.trial

    def set_trial(self, consumer: str, trial: str | None) -> None:
        """Kept at once, outside any transaction."""
        self.on_step("trial")
        self.shared.trial = trial

    def publish(self, consumer: str) -> int:
        """Bring decided rows to the sink, each seq once: the mark and the rows are one commit of the sink."""
        done = 0
        while self.shared.published < self.shared.head.seq:
            seq = self.shared.published + 1
            self.on_step("publish")
            if self.shared.published + 1 != seq:
                continue  # another copy was faster: the sink's txn id is past
            self.shared.sink.extend(self.shared.decided[seq - 1])
            self.shared.published, done = seq, done + 1
        return done

    def consumers(self) -> list[str]:
        """The one."""
        return [NAME]

    def batches(self, consumer: str, wanted: Wanted = ALL) -> pa.Table:
        """Batch records."""
        schema = BATCHES
        for name in ("generation", "epoch", "seq"):
            schema = schema.append(pa.field(name, pa.int64()))
        found = pa.Table.from_pylist(self.shared.batches, schema=schema)
        return found.filter(wanted.decided(found["seq"]))

    def letters(self, selection: Selection, columns: Any = None) -> pa.Table:
        """Those that are asked for, in position order."""
        asked, rows = selection, sorted(self.shared.letters.values(), key=place)
        if asked.after is not None:
            rows = [x for x in rows if place(x) > place(self.shared.letters[asked.after])]
        for name, chosen in (("id", asked.ids), ("status", asked.statuses), ("sequence", asked.sequences)):
            rows = [x for x in rows if chosen is None or x[name] in chosen]
        rows = [x for x in rows if asked.partition in (None, x["partition"])][: asked.limit]
        table = pa.Table.from_pylist(rows, schema=LETTERS).append_column("duplicates", pa.array([0] * len(rows), pa.int64()))
        return table.select(columns) if columns else table

    def history(self, *letter_ids: str) -> pa.Table:
        """Of these letters."""
        return pa.Table.from_pylist([x for x in self.shared.history if x["letter_id"] in letter_ids], schema=HISTORY)

    def reserved(self, consumer: str) -> int:
        """How many, but for what reprocesses reserved and people freed."""
        return len(self.shared.reserved) - sum(x["reserved"] for x in self.shared.history)

    def problems(self, consumer: str) -> list[str]:
        """None of its own."""
        return []


class SimTransaction:
    """Collects, and applies everything at Commit."""

    def __init__(self, store: SimStore, head: Head, *, letters_only: bool = False) -> None:
        self.store, self.head, self.ended, self.letters_only = store, head, False, letters_only
        self.locks: set[object] = set()  # ids of letters and sequences; in a ledger the commit is the judge
        self.new: list[tuple[bytes, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.todo: list[Any] = []

    @property
    def connection(self) -> Any:
        """None here."""
        raise AttributeError

    def _alive(self) -> None:
        if self.ended:
            raise StoreUnavailable

    def seen(self, spans: Mapping[Partition, tuple[int, int]]) -> dict[Partition, Ranges]:
        """From the batch records."""
        self._alive()
        found: dict[Partition, Ranges] = {}
        for batch in self.store.shared.batches:
            p = Partition(batch["source"], batch["topic"], batch["partition"])
            if p in spans:
                found[p] = found.get(p, Ranges()) | Ranges.of((r["first"], r["last"]) for r in batch["seen"])
        return found

    def known(self, keys: pa.Table) -> pa.Table:
        """Those that are reserved."""
        self._alive()
        reserved = self.store.shared.reserved
        rows = [{"key": k, "payload_hash": reserved[k]} for k in keys["key"].to_pylist() if k in reserved]
        return pa.Table.from_pylist(rows, schema=KEYS)

    def ask(self, keys: pa.Array) -> None:
        """Nothing to begin."""

    def reserve(self, keys: pa.Table, meanwhile: Any = None) -> pa.Table:
        """Remember the new ones for the commit."""
        known = self.known(keys)
        have = set(known["key"].to_pylist())
        self.new = [(r["key"], r["payload_hash"]) for r in keys.to_pylist() if r["key"] not in have]
        return known

    def _free(self, lock: object) -> bool:
        return not any(lock in other.locks for other in self.store.shared.open if other is not self and not other.ended)

    def _wait_for(self, lock: object) -> None:
        """A row lock: waits for whoever has it. Who waits for ever is in a deadlock, and the database ends one."""
        for _ in range(0 if self.store.ledger else 200):
            self._alive()
            if self._free(lock):
                return self.locks.add(lock)
            self.store.on_step("wait")
        if not self.store.ledger:
            raise CommitConflict("deadlock")

    def lock(self, ids: Any) -> pa.Table:
        """Those that nobody else is at work on, as they are now."""
        self.store.on_step("lock")
        mine = [i for i in ids if self.store.ledger or self._free(i)]
        self.locks.update(mine)
        return self.store.letters(Selection(ids=tuple(mine), limit=None))

    def blocked(self, sequences: pa.Array) -> pa.Table:
        """Those with a letter that waits; none of them is released meanwhile."""
        self.store.on_step("blocked")
        rows = []
        for sequence in sequences.to_pylist():
            if self.store.shared.waiting(sequence):
                self._wait_for(sequence)
            if waiting := self.store.shared.waiting(sequence):
                rows.append({"sequence": sequence, "letter": waiting[-1]["id"], "kind": waiting[-1]["kind"]})
        return pa.Table.from_pylist(rows, schema=SEQUENCES)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A savepoint."""
        before = len(self.rows)
        try:
            yield
        except Exception:
            del self.rows[before:]
            raise

    def write(self, table: str, rows: Rows) -> int:
        """Keep the rows."""
        self.store.on_step("write")
        self._alive()
        self.rows.extend(rows.arrow().to_pylist())
        return len(self.rows)

    def execute(self, step: Any) -> None:
        """Collect, or commit."""
        self._alive()
        if isinstance(step, Commit):
            self._commit()
            self.store.on_step("committed")
            if self.store.ledger:
                self.store.publish(NAME)
        else:
            if isinstance(step, Park | Change):
                self._lock_sequences(step.letters["id"].to_pylist(), step.letters)
            self.todo.append(step)

    def _lock_sequences(self, ids: list[str], letters: pa.Table) -> None:
        known = [self.store.shared.letters[i]["sequence"] for i in ids if i in self.store.shared.letters]
        given = letters["sequence"].to_pylist() if "sequence" in letters.column_names else []
        for sequence in sorted({q for q in (*known, *given) if q is not None}):
            self._wait_for(sequence)

    def _commit(self) -> None:
        shared = self.store.shared
        if self.store.ledger and shared.head.seq != self.head.seq:  # somebody else decided this seq
            raise Fenced if shared.head.epoch != self.head.epoch else CommitConflict
        head = replace(shared.head, seq=shared.head.seq + 1)
        for step in self.todo:
            head = self._apply(step, head)
        for key, payload in self.new:
            assert key not in shared.reserved, "unique index"
            shared.reserved[key] = payload
        shared.decided.append(self.rows)
        if not self.store.ledger:
            shared.sink.extend(self.rows)
        shared.head = head
        self._check_order()

    def _check_order(self) -> None:
        """The promise of sequence keys, at every commit: chains are whole, and no effect overtakes a letter that waits."""
        shared = self.store.shared
        for sequence in {x["sequence"] for x in shared.letters.values()} - {None}:
            waiting = shared.waiting(sequence)
            chain = [(x["status"], x["blocked_by"]) for x in waiting]
            wanted = [("BLOCKED" if before else "OPEN", before) for before in (None, *(x["id"] for x in waiting[:-1]))]
            assert chain == wanted[: len(chain)], f"sequence {sequence!r}: {chain}"
        for row in self.rows:
            overtaken = [x for x in shared.waiting(row.get("sequence")) if place(x) < place(row)]
            assert not overtaken, f"{place(row)} overtook {[place(x) for x in overtaken]}"

    def _apply(self, step: Any, head: Head) -> Head:
        shared = self.store.shared
        match step:
            case Park(letters):
                for letter in letters.to_pylist():
                    shared.letters.setdefault(letter["id"], letter)
            case Change(letters, history):
                shared.history.extend(history.to_pylist())
                for letter in letters.to_pylist():
                    shared.letters[letter["id"]].update(letter)
                    self._link(shared.letters[letter["id"]]["sequence"])
            case Free(keys):
                for key in keys["key"].to_pylist():
                    del shared.reserved[key]
                    shared.freed.add(key)
            case Note(_):
                pass
            case Record(batches, run, settings):
                extra = {"generation": head.generation, "epoch": head.epoch, "seq": head.seq}
                shared.batches.extend({**b, **extra} for b in batches.to_pylist())
                head = replace(head, settings=settings, query_id=run.query_id, batch_id=run.batch_id, gap_accepted=False)
            case Advance(checkpoints):
                head = replace(head, checkpoints={**head.checkpoints, **checkpoints})
        return head

    def _link(self, sequence: bytes | None) -> None:
        before = None
        for letter in self.store.shared.waiting(sequence):
            letter.update(status="BLOCKED" if before else "OPEN", blocked_by=before)
            before = letter["id"]


# The query


@dataclass
class SparkCheckpoint:
    """Spark's own directory: planned and finished batches of one query id."""

    query_id: str
    planned: list[list[tuple[int, int]]] = field(default_factory=list)  # per batch and partition: [from, to) in the log
    finished: int = 0


class World:
    """One schedule: a log, a store, a number of copies, and faults."""

    def __init__(self, seed: int, *, ledger: bool) -> None:
        self.rng, self.ledger = random.Random(seed), ledger
        self.log, self.shared = make_log(self.rng), Shared()
        self.checkpoint = SparkCheckpoint("q0")
        self.copies: list[Copy] = []
        self.starts, self.crashes, self.calm = 0, 0, False
        self.bad = {key for key in range(10) if self.rng.random() < 0.15}  # the stream's handler raises for these
        self.people = self.rng.random() < 0.7

    def sink_rows(self, rows: pa.Table) -> pa.Table:
        """Rows that say where they came from and in which sequence they stand."""
        events = {(e.partition, e.number): e.sequence for part in self.log for e in part}
        places = zip(rows["partition"].to_pylist(), rows["sequence_number"].to_pylist(), strict=True)
        sequences = pa.array([events[at] for at in places], pa.binary())
        return rows.select(["body", "partition", "sequence_number"]).append_column("sequence", sequences)

    def consumer(self, copy: Copy, bad: set[int], *, repaired: bool = False) -> Consumer:
        """The real Consumer over the model store, with a handler that never answers the same twice."""
        store = SimStore(self.shared, copy.pause, self.rng, ledger=self.ledger)
        options = {"max_events_per_transaction": self.rng.choice([2, 3, 1000]), "bisect": self.rng.random() < 0.7, "budget": None}
        consumer = Consumer(NAME, store, idempotence_key="k", sequence_key="s", **options)  # type: ignore[arg-type]

        @consumer.foreach_batch
        def handle(rows: pa.Table, tx: Any) -> None:
            coins = [self.rng.random() for _ in range(rows.num_rows)]
            rest = tx.reject(rows, pa.array([c < 0.2 and not repaired for c in coins]), "coin")
            tx.write(self.sink_rows(rest), "sink")
            keys = {int(body) for body in rows["body"].to_pylist()}
            if (not self.calm and self.rng.random() < 0.1) or (bad & keys and consumer.care.bisect):
                raise Boom

        return consumer

    def query(self, checkpoint: SparkCheckpoint, run_key: str) -> Callable[[Copy], None]:
        """A Structured Streaming query: plan a batch, call back, mark it finished; replay what was planned but not finished."""

        def body(copy: Copy) -> None:
            consumer, batch = self.consumer(copy, self.bad), checkpoint.finished
            while True:
                copy.pause("plan")
                if batch >= len(checkpoint.planned) and not self._plan(checkpoint, batch):
                    return
                events = [e for p, (a, b) in enumerate(checkpoint.planned[batch]) for e in self.log[p][a:b]]
                try:
                    consumer._with_replanning(SimFeed(events, run_key, checkpoint.query_id), batch)
                except PositionGap:  # queries took turns, and positions are missing between them: a person looks, and accepts
                    self._accept_gap(events)
                    continue
                copy.pause("finish")
                checkpoint.finished = max(checkpoint.finished, batch + 1)
                batch += 1

        return body

    def person(self, copy: Copy) -> None:
        """Somebody reprocesses everything, or gives a few letters up, with their keys or without."""
        if self.calm or self.rng.random() < 0.7:
            asked = ReprocessOptions(by="somebody", stop_after=10**6, sleep=lambda _: copy.pause())
            reprocess(Selection(limit=None), self.consumer(copy, set(), repaired=self.calm), options=asked)
            return
        store = SimStore(self.shared, copy.pause, self.rng, ledger=self.ledger)
        ids = sorted(self.shared.letters)
        chosen = self.rng.sample(ids, min(len(ids), 2))
        DeadLetters(store).discard(chosen, release_key=self.rng.random() < 0.5, by="somebody", reason="given up")  # type: ignore[arg-type]

    def _accept_gap(self, events: list[Event]) -> None:
        for p, part in enumerate(self.log):
            point = self.shared.head.checkpoints.get(Partition(*TOPIC, p))
            first = min((e.number for e in events if e.partition == p), default=None)
            missing = [e for e in part if point and first is not None and point.sequence_number < e.number < first]
            assert not missing, f"refused with reason: {missing} would be lost"
        self.shared.head = planning.accept_gap(self.shared.head)

    def _plan(self, checkpoint: SparkCheckpoint, batch: int) -> bool:
        ends = [b for _, b in checkpoint.planned[batch - 1]] if batch else [0] * len(self.log)
        if all(end >= len(part) for end, part in zip(ends, self.log, strict=True)):
            return False
        checkpoint.planned.append([(a, min(len(part), a + self.rng.randrange(1, 4))) for a, part in zip(ends, self.log, strict=True)])
        return True

    def start(self) -> None:
        """One more copy, sometimes on a new Spark checkpoint that begins at the earliest position."""
        if self.starts and self.rng.random() < 0.15:
            self.checkpoint = SparkCheckpoint(f"q{self.starts}")
        self.starts += 1
        self._go(self.query(self.checkpoint, f"run{self.starts}"))

    def _go(self, body: Callable[[Copy], None]) -> None:
        copy = Copy(body)
        copy.start()
        self.copies.append(copy)

    def run(self) -> None:
        """Chaos for a while, then peace until the log is done."""
        feed = mock.patch("dedup.reprocessing.open_feed", lambda table, _: LetterFeed(table, self.log))
        with feed, mock.patch("dedup.letter_work.PAUSE_SECONDS", 0):
            self._run()

    def _run(self) -> None:
        for _ in range(150):
            self._tick()
        self.calm = True
        for copy in self.copies:
            copy.sleeping = 0
        while self.copies:
            self._turn(self.rng.choice(self.copies))
        for body in (self.start, self.start, self.start, lambda: self._go(self.person)):
            body()
            while self.copies:
                self._turn(self.copies[0])

    def _tick(self) -> None:
        if not self.copies or (len(self.copies) < 3 and self.rng.random() < 0.03):
            self.start()
        if self.people and self.shared.letters and len(self.copies) < 4 and self.rng.random() < 0.06:
            self._go(self.person)
        awake = [c for c in self.copies if c.sleeping <= 0]
        for copy in self.copies:
            copy.sleeping -= 1
        if not awake:
            return
        copy, dice = self.rng.choice(awake), self.rng.random()
        if dice < 0.04:
            self.crashes += 1
            self._turn(copy, die=True)
        elif dice < 0.08:
            copy.sleeping = self.rng.randrange(5, 60)  # a zombie, if another copy takes over meanwhile
        else:
            self._turn(copy)

    def _turn(self, copy: Copy, *, die: bool = False) -> None:
        copy.step(die=die)
        if copy.done:
            self.copies.remove(copy)
            copy.join()


def effects(world: World) -> tuple[dict[int, int], dict[int, int]]:
    """For each key: rows in the sink, and letters that hold it."""
    rows: dict[int, int] = {}
    held: dict[int, int] = {}
    for row in world.shared.sink:
        rows[int(row["body"])] = rows.get(int(row["body"]), 0) + 1
    for letter in world.shared.letters.values():
        if letter["holds_key"]:
            held[int(letter["body"])] = held.get(int(letter["body"]), 0) + 1
    return rows, held
