"""A model of one store: two protocols, one of them chosen by `ledger`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import pyarrow as pa

from checkpoint.errors import Fenced, PublicationStuck, StoreRestored
from checkpoint.head import Head, Holder
from checkpoint.records import ALL, BATCHES, RecordFilter
from deadletter.letter import HISTORY, LETTERS, table_of
from deadletter.selection import Selection
from simulation.invariants import place
from simulation.shared import NAME, Shared
from simulation.transaction import SimTransaction

_RECORDS = pa.schema([*BATCHES, *(pa.field(name, pa.int64()) for name in ("generation", "epoch", "seq"))])
_LISTED = LETTERS.append(pa.field("duplicates", pa.int64()))


@cache
def _listed(names: tuple[str, ...]) -> pa.StructType:
    return pa.struct([_LISTED.field(name) for name in names])


@cache
def _no_letters(names: tuple[str, ...]) -> pa.Table:
    return table_of([], _listed(names))


class SimStore:
    """Opened by one process; what it says to `pause` is where that process can be stopped."""

    steps: ClassVar[Mapping[str, str]] = {}
    default_max_events: ClassVar[int] = 1000

    def __init__(self, shared: Shared, pause: Callable[[str], None], *, ledger: bool) -> None:
        self.shared, self.on_step, self.ledger = shared, pause, ledger

    def take_epoch(self, consumer: str, holder: Holder, **_: Any) -> Head:
        """A new epoch, at any time, as if the clocks had allowed it; in the transactional model older backends are ended."""
        self.on_step("epoch")
        self.require_in_step()
        shared = self.shared
        shared.next(shared.head, [], epoch=shared.head.epoch + 1)
        if not self.ledger:
            for transaction in shared.open:
                transaction.ended |= not transaction.letters_only
        return shared.head

    def head(self, consumer: str) -> Head:
        """The state now."""
        return self.shared.head

    @contextmanager
    def begin(self, consumer: str, epoch: int, claim: Any = None) -> Iterator[SimTransaction]:
        """Fence and open."""
        self.on_step("fence")
        self.publish(consumer)
        if self.shared.head.epoch != epoch:
            raise Fenced
        with self._opened(SimTransaction(self, self.shared.head)) as transaction:
            transaction.lock_checkpoints(claim and claim.partition)
            yield transaction

    @contextmanager
    def begin_letters(self, consumer: str, *, positions: bool = False) -> Iterator[SimTransaction]:
        """Under the epoch that there is; a takeover does not concern it."""
        self.on_step("fence")
        self.publish(consumer)
        with self._opened(SimTransaction(self, self.shared.head, letters_only=True)) as transaction:
            yield transaction

    @contextmanager
    def _opened(self, transaction: SimTransaction) -> Iterator[SimTransaction]:
        self.shared.open.append(transaction)
        try:
            yield transaction
        finally:
            self.shared.open.remove(transaction)

    @contextmanager
    def heartbeat(self, consumer: str, epoch: int, every: float) -> Iterator[None]:
        """Nobody looks at it: a takeover may come at any time."""
        yield

    def tell_retention(self, consumer: str, retention: Any, *, upkeep: bool) -> None:
        """No consumer shares its ledger."""

    def crash_marker(self, consumer: str, scope: str = "") -> str | None:
        """The marker."""
        return self.shared.crash_markers.get(scope)

    def set_crash_marker(self, consumer: str, marker: str | None, scope: str = "") -> None:
        """Kept at once, outside any transaction."""
        self.on_step("crash marker")
        self.shared.crash_markers[scope] = marker

    def amend(self, consumer: str, change: Callable[[Head], Head], **_: Any) -> Head:
        """A person's decision."""
        head = change(self.shared.head)
        if head.generation == self.shared.head.generation:  # else a person accepts what is there
            self.require_in_step()
        self.shared.next(head, [])
        return self.shared.head

    def require_in_step(self) -> None:
        """The mark of the sink against the ledger: before anything is decided."""
        if self.ledger and self.shared.ahead:
            raise StoreRestored

    def publish(self, consumer: str) -> int:
        """Bring decided rows to the sink, each seq once: the mark and the rows are one commit of the sink."""
        shared, done = self.shared, 0
        self.require_in_step()
        if self.ledger and shared.behind:
            raise PublicationStuck
        while self.ledger and (seq := shared.next_to_publish) <= shared.head.seq:
            if shared.decided[seq - 1]:  # a decision without rows leaves nothing to be interrupted at
                self.on_step("publish")
            self.require_in_step()
            if shared.behind:  # the sink was copied back meanwhile: a publication would hide what it lacks
                raise PublicationStuck
            if shared.next_to_publish != seq or seq > shared.head.seq:
                continue  # another instance was faster, and the sink's txn id is past; or the tables were restored meanwhile
            shared.sink.extend(shared.decided[seq - 1])
            shared.published, shared.published_id, done = seq, shared.ids[seq - 1], done + 1
        return done

    def consumers(self) -> list[str]:
        """The one."""
        return [NAME]

    def batches(self, consumer: str, record_filter: RecordFilter = ALL) -> pa.Table:
        """Batch records."""
        found = table_of(self.shared.batches, pa.struct(list(_RECORDS)))
        return found.filter(record_filter.decided(found["seq"]))

    def letters(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Those that are asked for, in position order."""
        asked, rows = selection, sorted(self.shared.letters.values(), key=place)
        if asked.after is not None:
            after = self.shared.letters.get(asked.after)  # a restore may have taken it away
            rows = [x for x in rows if after is not None and place(x) > place(after)]
        for name, chosen in (("id", asked.ids), ("status", asked.statuses), ("sequence", asked.sequences)):
            rows = [x for x in rows if chosen is None or x[name] in chosen]
        rows = [x for x in rows if asked.partition in (None, x["partition"])][: asked.limit]
        names = tuple(columns or _LISTED.names)
        return table_of([{"duplicates": 0, **x} for x in rows], _listed(names)) if rows else _no_letters(names)

    def history(self, *letter_ids: str) -> pa.Table:
        """Of these letters."""
        return table_of([x for x in self.shared.history if x["letter_id"] in letter_ids], pa.struct(list(HISTORY)))

    def reserved(self, consumer: str) -> int:
        """How many, but for what reprocesses reserved and people freed."""
        return len(self.shared.reserved) - sum(x["reserved"] for x in self.shared.history)

    def outbox(self, consumer: str) -> SimStore:
        """Nothing is sent here: no letter is UNSENT."""
        return self

    def entries(self, chosen: Any) -> list[Any]:
        """Of the outbox."""
        return []

    def problems(self, consumer: str) -> list[str]:
        """None of its own."""
        return []
