"""The handler's side of a transaction: `Tx` records what the handler wants; the pipeline evaluates it once, afterwards (performance.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa

from checkpoint.errors import HandlerError, RowsMisfit, RowsRefused
from checkpoint.position import Ints
from deadletter.failure import MESSAGE_BYTES, clean
from dedup.core.envelope import POSITION
from dedup.core.index import Index
from dedup.core.near import like
from dedup.core.rows import Rows, named, own_rows
from dedup.core.steps import Merge
from dedup.core.store import Frames, Transaction
from dedup.outbox.recording import Names, of_event
from dedup.pipeline.performance import Performance, Recorded, RecordedPublication, RecordedWrite

Handler = Callable[[Any, "Tx"], None]
"""(frame of new events, tx) -> nothing."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _refusing_other_arguments(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Raise HandlerError for a call with arguments that the method does not take: the handler is wrong, and no event."""

    @wraps(method)
    def call(*given: _P.args, **named: _P.kwargs) -> _T:
        try:
            return method(*given, **named)
        except TypeError as error:
            trace = error.__traceback__
            if trace is None or trace.tb_next is not None:  # raised inside the method, maybe about a value of one event
                raise
            takes = str(inspect.signature(method)).replace("(self, ", "(", 1)
            raise HandlerError(f"{error}. It takes: tx.{method.__name__}{takes.split(' -> ')[0]}.") from error

    return call


_METHODS = ("write", "merge", "publish", "reject", "skip", "dead_letter", "connection")


def refuse_unknown_name(error: BaseException, tx: object, has: Sequence[str] = _METHODS) -> None:
    """Raise HandlerError where a handler has used a name that its tx does not have: the handler is wrong, and no event.

    Args:
        has: the names that it has.
    """
    if type(error) is AttributeError and error.obj is tx and error.name is not None:
        raise HandlerError(f"tx has no {error.name}{like(error.name, has)}: it has {', '.join(has[:-1])} and {has[-1]}.") from error


class Tx:
    """What a handler can do. All that it records is committed in one transaction, or nothing of it is.

    Only `connection` acts at once; what `write` recorded is not visible to it.
    """

    def __init__(self, frames: Frames, index: Index, given: Ints, transaction: Transaction, lanes: Ints | None = None) -> None:
        self._frames, self._index, self._transaction = frames, index, transaction
        self.lanes = np.full(len(given), -1) if lanes is None else lanes  # of each given row the number of its sequence; -1: none
        self._given = np.zeros(len(index), dtype=bool)
        self._given[given] = True
        self._closed = False
        self.lent = False  # whether the handler has had the connection: an error may have spoilt what it does next
        self._calls = Recorded()
        self._outcomes: dict[bool, dict[int, str]] = {True: {}, False: {}}  # rejected?, row -> reason
        self.position: tuple[Any, ...] | None = None  # of the event in hand, in a handler of single events: the values of POSITION
        self._published = 0  # messages of the event in hand
        self.of_events = False  # whether the handler is one of single events
        self.wrote = False  # whether the event in hand has written, merged or published
        self._asked = False  # whether it has had the connection

    @property
    def connection(self) -> Any:
        """The store's own connection, inside this transaction (PostgreSQL: psycopg). COMMIT and ROLLBACK are refused."""
        self._require_open()
        self.lent = self._asked = True
        try:
            return self._transaction.connection
        except AttributeError as error:  # this store has none
            raise HandlerError(str(error)) from error

    @_refusing_other_arguments
    def write(self, rows: Any, table: str) -> None:
        """Append rows to a sink table, matched by column name.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts.
            table: PostgreSQL: `table` or `schema.table`; Delta: a path, a catalog name or a name from the store's `tables`.
        """
        self._require_open()
        self._record(table, rows, None)

    @_refusing_other_arguments
    def merge(self, rows: Any, table: str, keys: str | Sequence[str], newer_by: str | None = None, delete_when: str | None = None) -> None:
        """Insert or update by key: afterwards the sink holds the last row of each key.

        Of two rows of one key in a batch the last by position counts, where the rows have their position columns, else the last in
        their order; with `newer_by` the first one with the greatest value. Position columns that the sink does not have are left out.
        A DataFrame that Spark joined, united or moved has no order of its own. In such a frame every key comes once, or its rows carry
        one of these; else the batch ends with a HandlerError.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts.
            table: as for `write`. PostgreSQL: it needs a unique index on exactly these keys.
            keys: columns that name a row of the sink; a null in one of them is an error of that event.
            newer_by: a column: a row whose value is not greater than the sink's changes nothing, also when it is reprocessed late.
            delete_when: a boolean column of `rows`: true deletes the sink's row. Nothing is left of it, not even its `newer_by`: an older
                event that is reprocessed later inserts it again. Mark rows as deleted in a column of your own where that matters.

        Raises HandlerError for a name of a column that is no text: the handler is wrong, and no event.
        """
        self._require_open()
        names = _key_names(keys)
        _require_names("merge", newer_by=newer_by, delete_when=delete_when)
        self._record(table, rows, Merge(names, newer_by, delete_when))

    @_refusing_other_arguments
    def publish(
        self,
        rows: Any,
        topic: str,
        *,
        key: str | None = None,
        id: str | None = None,
        body: str = "body",
        headers: str | None = None,
        order: str | None = None,
    ) -> None:
        """Store messages in this transaction. After the commit `dedup outbox dispatch`, or `consumer.dispatch_to`, sends them.

        Args:
            rows: DataFrame, Arrow table, dict or list of dicts; their order is the order of the messages of one key.
            topic: topic or event hub.
            key: column with the destination key (bytes or text): messages of one key keep their order. Without one no order is kept.
            id: column with the message id, by which the receiver recognises duplicates. Without one it is derived from the incoming key and
                `order` if the rows have their position columns and order= is given, and in a handler of events; else it is random.
            body: column with the message itself, bytes or text.
            headers: column with a list of {"key": text, "value": bytes}, as `properties`.
            order: column with whole numbers that distinguish the messages of one event.

        Raises RowsRefused for a topic that is none; the event is at fault, because topics may come from events. Raises HandlerError for a
        name that is no text.
        """
        self._require_open()
        if not isinstance(topic, str) or not topic or "\0" in topic:
            raise RowsRefused(f"tx.publish: a topic is a text without NUL, not {topic!r:.80}.")
        _require_names("publish", key=key, id=id, body=body, headers=headers, order=order)
        names = Names(key, id, body, headers, order)
        if self.position is not None:
            rows, names = of_event(rows, names, dict(zip(POSITION, self.position, strict=True)), self._published), names.own()
            self._published += len(rows)
            self.wrote |= bool(rows)
            self._calls.publish_of_event(RecordedPublication(topic, rows, names))
        elif not _is_empty(rows):
            self._calls.messages.append(RecordedPublication(topic, _own(rows), names))

    @_refusing_other_arguments
    def reject(self, rows: Any, condition: Any, reason: str | Exception) -> Any:
        """Park the events for which `condition` is true as dead letters; returns the rest. NULL counts as not rejected.

        The condition is evaluated once, here, and the decision is kept as data: a condition that would answer differently
        the next time cannot put an event on both sides or on neither.

        Args:
            rows: rows that still have their position columns.
            condition: Spark: SQL text or Column; Arrow: a boolean array or a pyarrow expression.
            reason: what the letter says; of an exception its type and text.
        """
        return self._mark_where(rows, condition, _text(reason), rejected=True)

    @_refusing_other_arguments
    def skip(self, rows: Any, condition: Any) -> Any:
        """Skip the events for which `condition` is true: they count as decided, without an effect. Returns the rest."""
        return self._mark_where(rows, condition, "", rejected=False)

    @_refusing_other_arguments
    def dead_letter(self, rows: Any, reason: str | Exception) -> None:
        """Park all events of `rows`, which must have their position columns; in a handler of single events: the event.

        Args:
            reason: what the letter says; of an exception its type and text.
        """
        self._mark(_position_of(rows) if isinstance(rows, tuple) else self._positions(rows, None), _text(reason), rejected=True)

    def _record(self, table: str, rows: Any, how: Merge | None) -> None:
        if not isinstance(table, str) or not table:
            raise HandlerError(f"tx.{'merge' if how else 'write'} takes the name of a table, not {table!r}.")
        if _is_empty(rows):
            return
        self.wrote = True
        given = _own(rows)
        if self.position is not None and isinstance(given, list):
            self._calls.write_of_event(RecordedWrite(table, given, how, [self.position] * len(given)))
        else:
            self._calls.writes.append(RecordedWrite(table, given, how))

    def _mark_where(self, rows: Any, condition: Any, reason: str, *, rejected: bool) -> Any:
        positions = self._positions(rows, condition)
        self._mark(positions, reason, rejected=rejected)
        return self._frames.without(rows, positions) if positions.num_rows else rows

    def _positions(self, rows: Any, condition: Any | None) -> pa.Table:
        self._require_open()
        missing = [c for c in POSITION if c not in self._frames.columns(rows)]
        if missing:
            raise HandlerError(
                f"tx.reject, tx.skip and tx.dead_letter need the position columns; missing: {', '.join(missing)}. "
                f"Call them before selecting `data.*`."
            )
        return self._frames.positions(rows, condition, list(POSITION))

    def _mark(self, positions: pa.Table, reason: str, *, rejected: bool) -> None:
        found = self._index.locate(positions)
        valid = (found >= 0) & self._given[np.maximum(found, 0)]
        if not valid.all():
            raise HandlerError("The handler rejected or skipped a position that it was not given.")
        chosen = self._outcomes[rejected]
        for row in found.tolist():
            chosen.setdefault(row, reason)

    def _require_open(self) -> None:
        if self._closed:
            raise HandlerError("The handler has returned, and its tx is closed: it can record nothing more.")

    # The pipeline's side.

    def close(self) -> None:
        """Refuse every call from now on: the handler has returned."""
        self._closed = True

    def take(self, frames: Frames) -> None:
        """Use frames of this kind for the handler, whatever kind the batch has."""
        self._frames = frames

    def at_event(self, position: tuple[Any, ...]) -> None:
        """From now on `publish`, `recorded` and `wrote` are about the event at this position (values of POSITION)."""
        self.position, self._published, self.of_events, self.wrote, self._asked = position, 0, True, False, False

    @property
    def recorded(self) -> bool:
        """Whether the event in hand has written, merged, published, or had the connection."""
        return self.wrote or self._asked

    def in_order(self, rows: pa.Table) -> pa.Table:
        """The handler's rows in the order of their positions, or as they came, where Spark may have kept none."""
        found = self._index.arrival(self._index.locate(rows.select(list(POSITION))))
        return rows if bool((found[1:] > found[:-1]).all()) else rows.take(pa.array(np.argsort(found, kind="stable")))

    def returns(self, rows: Any, table: str, authors: list[Any] | None = None) -> None:
        """Record what the handler returned, behind everything that it recorded before.

        Args:
            authors: of rows of single events, the `position` of each one's event.
        """
        self._calls.returned = RecordedWrite(table, rows, None, authors)

    def adopt_rows(self, table: str, rows: list[Any], how: Merge | None, authors: list[Any] | None) -> None:
        """Rows of Python objects that handlers have written in tasks."""
        self._calls.writes.append(RecordedWrite(table, rows, how, authors))

    @property
    def given(self) -> Ints:
        """Rows of the chunk that the handler was given, ascending."""
        return np.flatnonzero(self._given)

    def events(self) -> Index:
        """Positions and keys of those rows: what tasks need to handle them."""
        return self._index.travelling(self.given)

    def adopt(self, rejected: Mapping[int, str], skipped: Iterable[int]) -> None:
        """What tasks decided about rows of the chunk."""
        self._outcomes[True].update(rejected)
        self._outcomes[False].update(dict.fromkeys(skipped, ""))

    def adopt_files(self, table: str, files: Sequence[str]) -> None:
        """Files that tasks have written for this sink: they come behind everything that was recorded for it."""
        self._calls.files = (table, files)

    @property
    def transaction(self) -> Transaction:
        """For what is written while the handler runs."""
        self._require_open()
        return self._transaction

    def refuse_parked(self, positions: pa.Table) -> None:
        """Raise HandlerError where one of these positions was parked: what was said for it is about to become true."""
        if self.rejected and (both := [row for row in self._index.locate(positions).tolist() if row in self.rejected]):
            raise HandlerError(
                f"The handler has parked {self._index.describe(both[0])} and returned rows of it, written or published: it can have an "
                "effect or a letter, not both. Return None there, and call nothing else on tx."
            )

    def skip_positions(self, positions: pa.Table) -> None:
        """Skip the events at these positions (columns of POSITION)."""
        self._mark(positions, "", rejected=False)

    @property
    def rejected(self) -> dict[int, str]:
        """Row of the chunk -> reason, of what the handler parked."""
        return self._outcomes[True]

    @property
    def skipped(self) -> Ints:
        """Rows of the chunk that the handler skipped and did not park."""
        return np.array(sorted(set(self._outcomes[False]) - set(self.rejected)), dtype=np.int64)

    def perform_writes(self, returned: Callable[[str, Rows], Any] | None = None) -> None:
        """Evaluate and hand over what was recorded, each once, in the order of the calls.

        Args:
            returned: takes the rows that the handler returned; else they are written as others are.

        Raises:
            EventsFailed: values of rows that single events made do not fit their columns.
            SinkMismatch: rows do not fit a table, or break a rule of it.
        """
        parked = np.array(sorted(self.rejected), dtype=np.int64)
        performance = Performance(self._frames, self._index, self.given, parked, self._transaction, self.position is not None)
        try:
            performance.perform(self._calls, returned or self._transaction.write)
        except RowsMisfit as misfit:
            if self.of_events:  # columns and types are values of single events
                raise RowsRefused(str(misfit)) from misfit
            raise


def _text(reason: Any) -> str:
    """A letter's reason: whatever a handler says, in a form that every store takes, and cut as the text of an error is."""
    if isinstance(reason, str):
        return clean(reason, MESSAGE_BYTES)
    if isinstance(reason, Exception):
        return clean(f"{type(reason).__name__}: {reason}", MESSAGE_BYTES)
    raise HandlerError(f"The reason of a dead letter is a text or an exception, not {type(reason).__name__}.")


def _key_names(keys: object) -> tuple[str, ...]:
    """The columns that `tx.merge` is given as its keys. Raises HandlerError for anything else."""
    names = (keys,) if isinstance(keys, str) else tuple(keys) if isinstance(keys, list | tuple | Set) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise HandlerError(f"tx.merge needs keys=: the columns that name a row of the sink, as text or a list of texts, not {keys!r:.80}.")
    return names


def _require_names(method: str, **given: object) -> None:
    """Raise HandlerError where the name of a column is no text: it would fail every event."""
    for name, value in given.items():
        if not isinstance(value, str) and (value is not None or name == "body"):
            raise HandlerError(f"tx.{method}: {name}= takes the name of a column, a text, not {value!r:.80} ({type(value).__name__}).")


def _position_of(event: Any) -> pa.Table:
    if missing := [name for name in POSITION if not hasattr(event, name)]:
        raise HandlerError(
            f"tx.dead_letter takes an event, or rows with their position columns; a {type(event).__name__} has no {', '.join(missing)}."
        )
    return pa.table({name: [getattr(event, name)] for name in POSITION})


def _is_empty(rows: Any) -> bool:
    """No row at all, as of `pa.Table.from_pylist([])`. A dict without columns is one, and refused."""
    return (isinstance(rows, list) and not rows) or (isinstance(rows, pa.Table) and not rows.num_columns and not rows.num_rows)


def _own(rows: Any) -> Any:
    """Dicts as they are now; other rows, which nothing changes, themselves. Raises RowsRefused as `own` does."""
    if type(rows) is not dict:
        rows = named(rows)
    if type(rows) is dict or isinstance(rows, Mapping):
        return own_rows((rows,))
    rows = list(map(named, rows)) if isinstance(rows, list) else rows
    return own_rows(rows) if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows) else rows
