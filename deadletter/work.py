"""Letters in portions: which a person means, and one transaction for each portion, planned again where another decision came first.

Called by reprocessing/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import CommitConflict
from checkpoint.head import Head
from deadletter.outage import with_replanning
from deadletter.plans import BUSY, NOT_THERE, Plan
from deadletter.selection import Selection
from deadletter.store import KEYS, Commit, LetterStore, LetterTransaction

LISTED = ["id", "consumer", "kind", "status", "body_size"]

PAGE = 20_000
"""Letters that are listed at once; a list of all that are meant, without their contents, is kept."""

PORTION, PORTION_BYTES = 1_000, 64 * 1024 * 1024
"""Letters, and bytes of bodies, of one transaction."""

Which = Selection | str | Sequence[str]
"""Letters: a selection, one id or several, whole."""

Progress = Callable[[int, int], None]
"""(done, all)"""


def no_progress(done: int, total: int) -> None:
    """Nobody watches."""


@dataclass
class Changed:
    """What became of the letters that were meant."""

    selected: int = 0
    changed: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)  # of those that changed
    skipped: dict[str, int] = field(default_factory=dict)  # why -> how many stayed as they were
    examples: dict[str, str] = field(default_factory=dict)  # why -> id of one of them
    dry_run: bool = False

    def add(self, plan: Plan) -> None:
        """Count what one transaction did."""
        for kind, count in plan.kinds.items():
            self.by_kind[kind] = self.by_kind.get(kind, 0) + count
            self.changed += count
        for why, ids in plan.skipped.items():
            self.skip(why, ids)

    def skip(self, why: str, ids: Sequence[str]) -> None:
        """Count letters that stay as they are."""
        if ids:
            self.skipped[why] = self.skipped.get(why, 0) + len(ids)
            self.examples.setdefault(why, ids[0])


@dataclass(frozen=True)
class Access:
    """Letters of one portion, as a plan sees them."""

    store: LetterStore
    consumer: str
    letters: pa.Table
    transaction: LetterTransaction | None  # None in a dry run

    @property
    def head(self) -> Head:
        """The consumer's state."""
        return self.transaction.head if self.transaction else self.store.head(self.consumer)

    def history(self, letters: pa.Table | None = None) -> pa.Table:
        """HISTORY of these letters, or of all of the portion."""
        return self.store.history(*(self.letters if letters is None else letters)["id"].to_pylist())

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys that are reserved or held."""
        return known(self.store, self.consumer, keys, self.transaction)


def known(store: LetterStore, consumer: str, keys: Iterable[bytes], transaction: LetterTransaction | None) -> list[bytes]:
    """Those of these keys that are reserved or held; without a transaction asked in one that changes nothing."""
    asked = sorted(set(keys))
    if not asked:
        return []
    table = pa.table([pa.array(asked, pa.binary(16)), pa.array([0] * len(asked), pa.int64())], schema=KEYS)
    if transaction is not None:
        return list(transaction.known(table)["key"].to_pylist())
    with store.begin_letters(consumer) as one:
        return list(one.known(table)["key"].to_pylist())


def listed(store: LetterStore, which: Which) -> pa.Table:
    """LISTED of the letters that are meant, in position order: fixed before anything changes, so that changes cannot add to it."""
    if not isinstance(which, Selection):
        ids = [which] if isinstance(which, str) else list(dict.fromkeys(which))
        found = [store.letters(Selection(ids=tuple(ids[i : i + PAGE]), limit=None), LISTED) for i in range(0, len(ids), PAGE)]
    else:
        found = list(_pages(store, which))
    empty = pa.schema([(n, pa.int64() if n == "body_size" else pa.string()) for n in LISTED]).empty_table()
    return pa.concat_tables([empty, *(page.cast(empty.schema) for page in found)])


def _pages(store: LetterStore, selection: Selection) -> Iterator[pa.Table]:
    after, left = selection.after, selection.limit
    while left is None or left > 0:
        many = PAGE if left is None else min(PAGE, left)
        page = store.letters(replace(selection, limit=many, after=after), LISTED)
        yield page
        if page.num_rows < many:
            return
        after = page["id"][-1].as_py()
        left = None if left is None else left - page.num_rows


def portions(letters: pa.Table) -> Iterator[tuple[str, list[str]]]:
    """(consumer, ids) of those LISTED letters that are changed together."""
    held: list[str] = []
    owner, size = "", 0
    for letter, consumer, body in zip(*(letters[n].to_pylist() for n in ("id", "consumer", "body_size")), strict=True):
        if held and (consumer != owner or len(held) == PORTION or size + (body or 0) > PORTION_BYTES):
            yield owner, held
            held, size = [], 0
        owner, size = consumer, size + (body or 0)
        held.append(letter)
    if held:
        yield owner, held


def change(
    store: LetterStore, which: Which, make: Callable[[Access], Plan], *, dry_run: bool, on_progress: Progress = no_progress
) -> Changed:
    """Change the letters that are meant, portion by portion.

    Args:
        make: what to do with a portion.

    Crash: each portion is changed or not; a second call goes on with the others.
    """
    letters = listed(store, which)
    done = Changed(letters.num_rows, dry_run=dry_run)
    if not isinstance(which, Selection):
        wanted = [which] if isinstance(which, str) else list(dict.fromkeys(which))
        done.skip(NOT_THERE, sorted(set(wanted) - set(letters["id"].to_pylist())))
    seen = 0
    for consumer, ids in portions(letters):
        done.add(_planned(store, consumer, ids, make) if dry_run else with_replanning(lambda: _transact(store, consumer, ids, make)))  # noqa: B023
        seen += len(ids)
        on_progress(seen, letters.num_rows)
    return done


def _planned(store: LetterStore, consumer: str, ids: Sequence[str], make: Callable[[Access], Plan]) -> Plan:
    letters = store.letters(Selection(ids=tuple(ids), limit=None))
    return make(Access(store, consumer, letters, None))


def _transact(store: LetterStore, consumer: str, ids: Sequence[str], make: Callable[[Access], Plan]) -> Plan:
    with store.begin_letters(consumer) as transaction:
        letters = transaction.lock(sorted(ids))
        plan = make(Access(store, consumer, letters, transaction))
        commit(store, transaction, plan)
    locked = pc.is_in(pa.array(ids, pa.string()), value_set=letters["id"].combine_chunks())
    busy = pa.array(ids, pa.string()).filter(pc.invert(locked)).to_pylist()
    return replace(plan, skipped={**plan.skipped, BUSY: busy}) if busy else plan


def commit(store: LetterStore, transaction: LetterTransaction, plan: Plan) -> None:
    """Execute a plan in an open transaction; one without steps changes nothing.

    Raises:
        CommitConflict: one of its keys was decided since it was planned; plan it again.

    Crash: before the commit step nothing of it is true; after it, all of it.
    """
    if plan.reserve.num_rows and transaction.reserve(plan.reserve).num_rows:
        raise CommitConflict("A key was decided by another event meanwhile.")
    for step in (*plan.steps, Commit()) if plan.steps else ():
        store.on_step(step.name)
        transaction.execute(step)
