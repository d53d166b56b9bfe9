"""The decision: one commit of the ledger, and the rule by which its outcome is told.

Promises that a decision is tried only against the snapshot that everything it rests on was read from, that it follows exactly the decision
it was planned on, and that what became of it is read back from the ledger. Called by the transaction, the takeover and the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
from deltalake import DeltaTable

from checkpoint.errors import CommitConflict, CommitUnknown, StoreUnavailable
from dedup.delta import tables
from dedup.delta.files import Add
from dedup.delta.header import Header
from dedup.delta.ledger import BATCH, HEADER, HELD, KEYS, LOG, ORDER, SUMMARY, LogRow, freed_rows, log_rows, reservations
from dedup.delta.lineage import ID_BITS, seq_of
from dedup.delta.records import batch_docs
from dedup.delta.sequences import LASTS, ledger_rows
from dedup.delta.state import ConsumerState
from dedup.store import KEYS as KEYS_SCHEMA

MAINTENANCE_RACES = 20
"""How often a decision is tried again because a commit that decides nothing (compaction) came first."""

_OF_AN_EPOCH = ("batch", "epoch", "join", "leave", "claim")
"""Decisions of copies that hold the epoch; what people decide is planned again under the next one."""


@dataclass(frozen=True)
class Decision:
    """Everything that has to become true with one commit of the ledger."""

    header: Header
    batches: pa.Table | None = None
    keys: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)
    held: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)  # keys that a letter of this decision holds
    freed: pa.Table = field(default_factory=KEYS_SCHEMA.empty_table)  # keys that are new again; some may be reserved by this very decision
    lasts: pa.Table = field(default_factory=LASTS.empty_table)  # of the sequences whose letters change


def decide(state: ConsumerState, decision: Decision, on_step: Callable[[str], None]) -> None:
    """Commit the decision, or raise.

    Raises:
        Fenced, CommitConflict: another decision came first, of a newer epoch or of this one.
        CommitUnknown: the answer was lost, and the ledger cannot be read back.
        StoreUnavailable: the commit failed, and the ledger does not show it.
        StoreRestored: the ledger was restored or re-created.

    Crash: before the commit nothing is true; from then on everything is, and the next reader of the ledger sees it.
    """
    try:
        _decide(state, decision, on_step)
    finally:
        state.ledger.forget_written()


def _decide(state: ConsumerState, decision: Decision, on_step: Callable[[str], None]) -> None:
    header = decision.header
    state.require_sound_for(header)
    adds = write_files(state, decision)
    on_step("decide")
    for _ in range(MAINTENANCE_RACES):
        table = state.table_to_write()
        if not state.is_at(header):  # somebody decided since this was planned, even if the newest snapshot would take it
            return _judge(state, header)
        failure = _try(state, table, adds, header)
        on_step("read_back")
        _read_back(state, failure)
        if not state.is_at(header):
            return _judge(state, header)
        state.require_sound_for(header)
        if failure is None and state.sinks.engine.skips:
            raise state.skipped(header.seq)
        if failure is None:
            raise CommitUnknown(f"The ledger {state.ledger.uri} took decision {header.seq} and does not show it.")
        if not isinstance(failure, tables.COMMIT_REFUSED):
            raise StoreUnavailable(f"The ledger {state.ledger.uri} could not be written; nothing was committed: {failure}") from failure
    raise CommitConflict(
        f"The ledger {state.ledger.uri} is rewritten all the time (compaction?). Nothing was committed; run the batch again."
    )


def _try(state: ConsumerState, table: DeltaTable, adds: list[Add], header: Header) -> Exception | None:
    """One commit against the snapshot that was read; returns what delta-rs raised."""
    transactions = {state.ledger.app(table, header.head.generation): header.version}
    if header.head.generation != state.header.head.generation:
        # The old generation's number moves on, too: a restore to before this decision is then seen by comparing it.
        old = state.ledger.app(table, state.header.head.generation)
        shown = seq_of(tables.transaction_of(table, old) or 0)
        transactions[old] = max(shown, state.header.seq) + 1 << ID_BITS
    try:
        state.ledger.commit(table, adds, transactions)
    except tables.FAILED as error:
        return error
    return None


def _read_back(state: ConsumerState, failure: Exception | None) -> None:
    try:
        state.catch_up()
    except StoreUnavailable as error:
        raise CommitUnknown(f"{CommitUnknown.__doc__} ({failure or 'committed'}; then: {error})") from (failure or error)


def _judge(state: ConsumerState, header: Header) -> None:
    """Whose decision has this number?"""
    winner = state.decided.get(header.seq)
    if winner is not None and winner.attempt == header.attempt:
        return
    if header.kind in _OF_AN_EPOCH and state.header.head.epoch > header.head.epoch:
        raise state.fenced()
    by = f" ({winner.kind})" if winner else ""
    raise CommitConflict(f"Decision {header.seq} of consumer {state.ledger.consumer!r} was made by another commit{by} first. Plan again.")


def write_files(state: ConsumerState, decision: Decision) -> list[Add]:
    """The ledger's own files of a decision, invisible until the commit."""
    header, day = decision.header, decision.header.committed_at.date()
    rows: list[LogRow] = [(HEADER, None, None, None, header.to_json())]
    if header.summary == header.seq:
        rows.append((SUMMARY, None, None, None, state.summary()))
    rows.extend((BATCH, *doc) for doc in batch_docs(decision.batches) if decision.batches is not None)
    adds = state.ledger.write(LOG, day, log_rows(header.seq, rows))
    kept, held = (reservations(header.seq, keys["key"], keys["payload_hash"]) for keys in (decision.keys, decision.held))
    adds += state.ledger.write(KEYS, day, kept)
    adds += state.ledger.write(HELD, day, pa.concat_tables([held, freed_rows(header.seq, decision.freed["key"])]))
    return adds + state.ledger.write(ORDER, day, ledger_rows(decision.lasts, header.seq))
