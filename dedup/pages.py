"""The letters of a reprocess: which can be run, in which portions, and what counts of them.

Called by reprocessing.py.
"""

from __future__ import annotations

import datetime as dt
import getpass
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from checkpoint import given
from deadletter.letter import Action, Status
from deadletter.selection import Selection
from dedup import resolved
from dedup.letters import history
from dedup.pipeline.commit import Report
from dedup.planning import DUPLICATE, WAITING
from dedup.rows import picked
from dedup.settings import REPROCESS
from dedup.steps import Change, Free
from dedup.store import Store

RUNNABLE = (Status.OPEN.value, Status.BLOCKED.value)

LISTED = ["id", "generation", "source", "topic", "incarnation", "kind", "status", "sequence", "body_size", "body_sha256", "first_failed_at"]

FIRST_PAGE, LARGEST_PAGE, PAGE_BYTES = 10, 1_000, 64 * 1024 * 1024
"""Letters of the first page, which shows whether anything passes at all; letters and bytes of later ones."""


@dataclass
class Reprocessed:
    """What became of the selected letters."""

    selected: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    reprocessed: int = 0
    duplicates: int = 0  # their message turned out to be decided elsewhere
    failed: int = 0  # again; the same letters with one more attempt
    waiting: int = 0  # behind another letter of their sequence
    left: int = 0  # somebody else has them, or they changed meanwhile
    expired: int = 0  # older than the consumer's reprocess_within
    lost: int = 0  # neither kept whole nor in the log any more
    processed: int = 0  # positions of the selected range that need `replay`
    absent: int = 0  # positions of it that were never delivered: they need `from_log`
    filled: Report | None = None  # with from_log: what became of the absent positions' rows
    dry_run: bool = False

    @property
    def tried(self) -> int:
        """Letters that were dealt with."""
        return self.reprocessed + self.duplicates + self.failed + self.waiting + self.left + self.expired + self.lost


@dataclass(frozen=True)
class ReprocessOptions:
    """How letters are run.

    Raises:
        ConfigError: an option has another type or range than it takes.
    """

    by: str = field(default_factory=getpass.getuser)
    reason: str | None = None
    limit: int | None = None  # letters that are run at most, those that waited behind others included
    rate: float | None = None  # letters a second at most
    stop_after: int = 20  # failures in a row
    skip_missing: bool = False  # letters whose body is in the log no longer become LOST
    on_progress: Callable[[int, int], None] = lambda done, total: None
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        given.settle(REPROCESS, self, "ReprocessOptions")

    @property
    def at_once(self) -> int:
        """Letters that may be run before the first pause: those of one second."""
        return LARGEST_PAGE if self.rate is None else max(1, min(LARGEST_PAGE, int(self.rate)))


def pages(store: Store, selection: Selection, limit: int | None, size: Callable[[], int]) -> Iterator[pa.Table]:
    """The letters that can be run, in position order, a page at a time."""
    after, left = selection.after, limit
    while left is None or left > 0:
        many = size() if left is None else min(size(), left)
        page = store.letters(replace(selection, statuses=RUNNABLE, limit=many, after=after), LISTED)
        if not page.num_rows:
            return
        yield page
        after = page["id"][-1].as_py()
        left = None if left is None else left - page.num_rows


def count(store: Store, chosen: Selection, options: ReprocessOptions) -> dict[str, int]:
    """How many letters can be run, by kind."""
    kinds: Counter[str] = Counter()
    for page in pages(store, chosen, options.limit, lambda: LARGEST_PAGE):
        kinds.update(page["kind"].to_pylist())
    return dict(sorted(kinds.items()))


def outcome(state: int | None, status: str) -> str:
    """The field of the report that counts a letter."""
    if state is None:  # not tried: it waits behind a letter that was not selected, or somebody else has it
        return "waiting" if status == Status.BLOCKED else "left"
    if state == WAITING:
        return "waiting"
    if state == DUPLICATE:
        return "duplicates"
    return "reprocessed" if resolved.succeeded(state) else "failed"


def alike(page: pa.Table) -> Iterator[pa.Table]:
    """Parts of a page whose letters are of one life of one topic, and together not too large."""
    same = [page[name].to_pylist() for name in ("generation", "source", "topic", "incarnation")]
    sizes, start, held = [size or 0 for size in page["body_size"].to_pylist()], 0, 0
    for row, life in enumerate(zip(*same, strict=True)):
        if row > start and (life != tuple(values[start] for values in same) or held + sizes[row] > PAGE_BYTES):
            yield page.slice(start, row - start)
            start, held = row, 0
        held += sizes[row]
    yield page.slice(start)


def eligible(letters: pa.Table) -> pa.Table:
    """Those that are open, and those that are blocked by nothing but others of these."""
    allowed: set[str] = set()
    chosen = []
    for letter, status, before in zip(*(letters[name].to_pylist() for name in ("id", "status", "blocked_by")), strict=True):
        good = status == Status.OPEN or (status == Status.BLOCKED and before in allowed)
        chosen.append(good)
        if good:
            allowed.add(letter)
    return picked(letters, np.flatnonzero(chosen))


def losing(letters: pa.Table, keys: Mapping[str, Sequence[bytes]], options: ReprocessOptions) -> list[Change | Free]:
    """The events are lost: a later copy of one counts as new.

    Args:
        keys: letter -> the keys that it holds.
    """
    now, rows = dt.datetime.now(dt.UTC), letters.drop_columns(["body", "properties", "extras"]).to_pylist()
    held = sorted({key for own in keys.values() for key in own})
    changed = pa.table({"id": letters["id"], "status": [Status.LOST.value] * len(rows), "holds_key": [False] * len(rows)})
    done = {"at": now, "action": Action.LOST.value, "by": options.by, "reason": options.reason}
    firsts = [resolved.first_failure(row) for row in rows if row["attempts"] == 1]
    entries = [{**done, "letter_id": row["id"], "reserved": -len(keys.get(row["id"], ()))} for row in rows]
    return [Change(changed, history([*firsts, *entries])), Free(pa.table({"key": pa.array(held, pa.binary(16))}))]
