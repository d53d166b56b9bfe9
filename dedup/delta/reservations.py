"""The reservations of one consumer, as of the last look at its ledger: from files where they can be opened, else from the ledger itself.

Reservations are the rows of the ledger's sections `keys` and `held`, without those that a later decision freed. Promises that files count
only where they are of the very history that the ledger has, and that damage in them gives no answer: the keys are then read anew.
Called by the consumer state, and by `verify`.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import CommitConflict
from dedup.core.keys import Bools
from dedup.delta import keys as runs_of_keys
from dedup.delta.key_files import HELD as HELD_DAY
from dedup.delta.key_files import I64, DamagedKeys, Days, KeyFolder, KeyList, ReplacedKeys
from dedup.delta.key_objects import KeyObjects
from dedup.delta.keys import KeyIndex
from dedup.delta.ledger import FREED, HELD, KEYS, Header, Ledger, LedgerFile
from dedup.delta.storage import explained

log = logging.getLogger("dedup")

_Answer = TypeVar("_Answer")

READ_AT_ONCE = 1_000_000
"""Rows of reservations; a file is a request on object storage, and the smaller ones are asked for at the same time."""

_FOREIGN = "they are of another history, or newer than this look at the ledger"

FREED_ROWS = pa.schema([pa.field("key", pa.binary()), pa.field("seq", pa.int64())])
"""Keys, and the newest decision that freed each."""


class Look(NamedTuple):
    """What a look at the ledger has found."""

    header: Header
    table_id: str
    files: Sequence[LedgerFile]
    header_at: Callable[[int], Header | None]  # of a decision


class ReservedKeys:
    """They are read with the first question, since most commands ask none. Not picklable; for one thread at a time.

    Args:
        folder: of files of keys.
        copies: of those files beside the ledger; None where the ledger is on the same disk.
    """

    def __init__(self, ledger: Ledger, folder: KeyFolder, copies: KeyObjects | None = None) -> None:
        self._ledger, self.folder, self.copies = ledger, folder, copies
        self.forget()

    def forget(self) -> None:
        """Know nothing until the next question."""
        self._index, self._absent = KeyIndex(), True

    def take(self, look: Look, known: int) -> None:
        """Take in the decisions after the known one, where there was a question before.

        Raises:
            StoreUnavailable: the ledger cannot be read.
        """
        if self._absent or look.header.keyspace_since > known:
            return self.forget()
        try:
            self._add(look, known)
        except DamagedKeys as error:
            self._lose(error)

    def probe(self, keys: pa.Array | pa.ChunkedArray, look: Callable[[], Look]) -> tuple[Bools, I64, Bools]:
        """For each key: whether it is reserved, the payload hash it was reserved with (0 if it is not), and whether a letter holds it.

        Args:
            look: called where all of them have to be read; with all files.

        Raises:
            StoreUnavailable: the ledger cannot be read. CommitConflict: it went on since the last look.
        """
        return self._asked(lambda index: index.probe(keys), look)

    def count(self, look: Callable[[], Look]) -> int:
        """How many there are. Raises as `probe`."""
        return self._asked(len, look)

    def _asked(self, question: Callable[[KeyIndex], _Answer], look: Callable[[], Look]) -> _Answer:
        """The answer; where files are damaged, all keys are read from the ledger first."""
        try:
            return question(self._known(look))
        except DamagedKeys as error:
            self._lose(error)
        return question(self._known(look))

    def _known(self, look: Callable[[], Look]) -> KeyIndex:
        if self._absent:
            self._read(look())
            self._absent = False
        return self._index

    def _read(self, look: Look, *, again: bool = True) -> None:
        """All of them: from files, if there are any of this history, else from the ledger. Raises as `probe`."""
        try:
            self._index, after = self._opened(look)
            self._add(look, after)
        except DamagedKeys as error:
            if again and isinstance(error, ReplacedKeys):  # by another process: the list names others now
                return self._read(look, again=False)
            self._tell(error)
            self._distrust()
            self._index = KeyIndex(self.folder)
            self._add(look, look.header.keyspace_since)

    def _opened(self, look: Look) -> tuple[KeyIndex, int]:
        """What files have, where they are of this very history, and the decision that they go up to. Raises DamagedKeys."""
        listed = self.folder.load()
        mine = listed if listed is not None and _of_history(listed, look) else None
        if (fetched := self._newer(look, mine)) is not None:
            return fetched
        if mine is not None:
            return KeyIndex(self.folder, self.folder.open(mine)), mine.seq
        if listed is not None:
            self._tell(_FOREIGN)
        return KeyIndex(self.folder), look.header.keyspace_since

    def _newer(self, look: Look, mine: KeyList | None) -> tuple[KeyIndex, int] | None:
        """As `_opened`, from copies, where the folder has no list or one that much has come after. Raises DamagedKeys."""
        if self.copies is None or (mine is not None and _behind(mine, look) <= runs_of_keys.FLUSH_ROWS):
            return None
        try:
            return self._fetched(self.copies, look, -1 if mine is None else mine.seq)
        except OSError as error:
            self._tell(explained(self.copies.uri, error))
        except DamagedKeys as error:
            if mine is None:
                raise
            if not isinstance(error, ReplacedKeys):
                self.copies.distrust()
            self._tell(error)
        return None

    def _fetched(self, copies: KeyObjects, look: Look, after: int) -> tuple[KeyIndex, int] | None:
        """As `_opened`, from copies that go beyond a decision. Raises DamagedKeys, OSError.

        Crash: as in `KeyObjects.fetch`; or the folder has all of the files, with their list or without.
        """
        names = [name for name in copies.lists() if name.seq > after]
        for name in names:
            decided = look.header_at(name.seq) if name.seq <= look.header.seq else None
            if decided is not None and decided.attempt == name.attempt and _of_history((copied := copies.load(name)).listed, look):
                runs = copies.fetch(copied, self.folder)
                self.folder.save(copied.listed)
                return KeyIndex(self.folder, runs), name.seq
        if names and after < 0:
            self._tell(_FOREIGN)
        return None

    def _add(self, look: Look, after: int) -> None:
        """Raises DamagedKeys, StoreUnavailable, CommitConflict."""
        # Somebody may have looked meanwhile, and delta-rs moves the snapshot itself; or the last look has failed, and there are no files.
        if max((file.last for file in look.files), default=0) != look.header.seq:
            raise CommitConflict(f"The ledger {self._ledger.uri} is not as it was at the last look: somebody has decided. Try again.")
        self._index.forget_before(kept_since(look.header))
        gone = freed(self._ledger, look.files, after)
        if gone.num_rows:
            self._index.discard(gone["key"])
        for rows, days in reservations(self._ledger, look.files, after, gone, look.header):
            self._index.add(rows["key"], rows["payload_hash"].to_numpy(), days)
        kept = self._index.keep(look.table_id, look.header.keyspace_since, look.header.seq, look.header.attempt)
        if kept is not None and self.copies is not None:
            self.copies.offer(kept)

    def _lose(self, error: DamagedKeys) -> None:
        if not isinstance(error, ReplacedKeys):
            self._distrust()
        self._tell(error)
        self.forget()

    def _distrust(self) -> None:
        """Open these files no more. Crash: the lists are there or not."""
        self.folder.forget()
        if self.copies is not None:
            self.copies.distrust()

    def _tell(self, why: object) -> None:
        log.warning("Files of keys of %r cannot be used, so the keys are read from the ledger: %s", self._ledger.consumer, why)


def _behind(listed: KeyList, look: Look) -> int:
    """Rows of the files that have to be read after opening a list's."""
    return sum(file.rows for file in look.files if file.section == KEYS and file.last > listed.seq)


def _of_history(listed: KeyList, look: Look) -> bool:
    """Whether the ledger has the very decision that a list goes up to, and it is not of a time that was taken back."""
    after = look.header.keyspace_since
    same = (listed.ledger, listed.keyspace_since) == (look.table_id, after) and after <= listed.seq <= look.header.seq
    decided = look.header_at(listed.seq) if same else None
    return decided is not None and decided.attempt == listed.attempt


def kept_since(header: Header) -> int:
    """The first day, counted from 1970, of which reservations are kept; 0 without a purge."""
    if header.purged_before is None:
        return 0
    return min((dt.date.fromisoformat(header.purged_before) - dt.date(1970, 1, 1)).days, HELD_DAY - 1)  # of the year 2149


def freed(ledger: Ledger, files: Sequence[LedgerFile], after: int) -> pa.Table:
    """FREED_ROWS of the decisions after this one."""
    some = _together([f for f in files if f.section == HELD and f.last > after])
    found = [ledger.read(group, ["key", "kind"], after) for group in some]
    rows = pa.concat_tables([t.filter(pc.equal(t["kind"], FREED)).select(["key", "seq"]) for t in found]) if found else None
    if rows is None or not rows.num_rows:
        return FREED_ROWS.empty_table()
    newest = rows.group_by("key").aggregate([("seq", "max")])
    return pa.table([newest["key"], newest["seq_max"]], schema=FREED_ROWS)


def reservations(
    ledger: Ledger, files: Sequence[LedgerFile], after: int, gone: pa.Table, header: Header
) -> Iterator[tuple[pa.Table, Days]]:
    """(key, payload_hash, seq) of the decisions after this one, some files at a time, and their days: HELD for those that a letter holds.

    What the purge of this header has purged does not come, also where its rows are still there. What was reserved later comes, even if its
    day is one of those that were purged.

    Args:
        gone: FREED_ROWS. A decision may free a key and reserve it again; the other way round it does not list it.
    """
    for section in (KEYS, HELD):
        for some in _together([f for f in files if f.section == section and f.last > after]):
            rows = ledger.read(some, ["key", "payload_hash", "kind" if section == HELD else "day"], after)
            if section == HELD:
                rows = rows.filter(pc.invert(pc.equal(rows["kind"], FREED)))
            rows = _kept(rows, gone) if gone.num_rows else rows
            days = np.full(rows.num_rows, HELD_DAY, dtype=np.uint16) if section == HELD else _days_of(rows)
            living = (days >= kept_since(header)) | (rows["seq"].to_numpy() > header.purged_in)
            yield (rows, days) if living.all() else (rows.filter(pa.array(living)), days[living])


def _days_of(rows: pa.Table) -> Days:
    """The column `day` as days since 1970."""
    return np.asarray(rows["day"].cast(pa.int32()).to_numpy(), dtype=np.uint16)


def _together(files: Sequence[LedgerFile]) -> Iterator[list[LedgerFile]]:
    """Groups of files that are read at once, of at most READ_AT_ONCE rows unless one file has more."""
    group, rows = list[LedgerFile](), 0
    for file in files:
        if group and rows + file.rows > READ_AT_ONCE:
            yield group
            group, rows = [], 0
        group.append(file)
        rows += file.rows
    if group:
        yield group


def _kept(rows: pa.Table, gone: pa.Table) -> pa.Table:
    at = pc.index_in(rows["key"], value_set=gone["key"].combine_chunks())
    return rows.filter(pc.fill_null(pc.greater_equal(rows["seq"], gone["seq"].take(at)), True))
