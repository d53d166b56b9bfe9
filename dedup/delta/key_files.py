"""Files of reserved keys, which are opened and not read: sorted pages, a filter in front of them, and the list of the files that count.

A file holds keys in ascending order, without repeats, and is never changed. Its filter, and the first key and the checksum of each page,
are read into memory at once. A page is read when a probe asks for it, and each time compared with its checksum: what is damaged, cut off
or gone gives no answer, also where that happens while the file is open. Pages are not mapped into memory, because the system ends a process
that asks for a mapped page which is gone.

The list says which files are the reservations up to which decision, and is replaced as a whole. Whoever opens it compares that decision
with the ledger, which alone counts: files that are lost, damaged or foreign are made again from it.

Called by the key index and by the consumer state.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import struct
import tempfile
import time
import uuid
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from checkpoint.errors import StoreUnavailable
from dedup.core.bloom import Bloom
from dedup.core.keys import Bools, Places, Words, find_keys

log = logging.getLogger("dedup")

_Item = TypeVar("_Item", bound=np.generic)

I64 = npt.NDArray[np.int64]
Days = npt.NDArray[np.uint16]
"""UTC days since 1970 on which keys were reserved; HELD for those that a letter holds."""

HELD = 0xFFFF
"""In place of the day: no purge drops what a letter holds."""

PAGE_KEYS = 512

PAGE = np.dtype([("high", "<u8", PAGE_KEYS), ("low", "<u8", PAGE_KEYS), ("payload", "<i8", PAGE_KEYS), ("day", "<u2", PAGE_KEYS)])
"""13 kB: what one look-up reads."""

FORMAT = 1
"""Of files and list. Those of another format are made again."""

AT_ONCE = 256
"""Keys that are looked up, and pages that are read, at once: up to 3.4 MB."""

LIST = "list"
"""Name of the list in the folder."""

AVOIDED = 600
"""Seconds after a failure in which the folder is not used."""

ABANDONED = 24 * 3600
"""Seconds after which a file that the list does not name was left by a process that died."""

_TRAILER = struct.Struct("<QI8s")
"""Behind the description of a file: its length, its checksum, and these letters."""

_LETTERS = b"dedupkey"


class DamagedKeys(StoreUnavailable):
    """A file is not as it was written. The keys have to be read from the ledger."""


class ReplacedKeys(DamagedKeys):
    """A file is gone: perhaps because another process has joined files, and the list names newer ones."""


@dataclass(frozen=True, eq=False)
class KeyRows:
    """Columns of keys in ascending order."""

    _FIELDS: ClassVar = ("high", "low", "payload", "day")

    high: Words
    low: Words
    payload: I64
    day: Days

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, rows: slice | Places | Bools) -> KeyRows:
        return KeyRows(*(getattr(self, name)[rows] for name in self._FIELDS))

    @classmethod
    def concat(cls, parts: Sequence[KeyRows]) -> KeyRows:
        """One behind the other; of at least one part."""
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls._FIELDS))


@dataclass(frozen=True, eq=False)
class Hits:
    """Which of some keys are in a run, and what it has of these."""

    found: Bools  # of all that were asked for
    rows: Places  # of those that were found, like the next two
    payload: I64
    day: Days

    def those(self, kept: Bools) -> Hits:
        """Without some of what was found."""
        if kept.all():
            return self
        found = self.found.copy()
        found[found] = kept
        return Hits(found, self.rows[kept], self.payload[kept], self.day[kept])


class Pages:
    """The pages of a file, which stays open.

    Args:
        file: may be closed then.
        name: for messages.
        sums: checksum of each page.
    """

    def __init__(self, file: BinaryIO, name: object, sums: npt.NDArray[np.uint32]) -> None:
        self._name, self._sums = name, sums
        self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        with contextlib.suppress(OSError, AttributeError):  # the system need not read what lies around a page
            os.posix_fadvise(self._number, 0, 0, os.POSIX_FADV_RANDOM)

    @property
    def size(self) -> int:
        """Bytes of the whole file. Raises OSError."""
        return os.fstat(self._number).st_size

    def content(self, first: int, size: int) -> bytes:
        """These bytes of the file, as they are now; fewer at its end. Raises OSError."""
        return os.pread(self._number, size, first)

    def read(self, pages: Places) -> npt.NDArray[Any]:
        """These pages, ascending, as they were written. Raises DamagedKeys."""
        starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
        counts = np.diff(starts, append=len(pages))
        content = b"".join(map(self._neighbours, pages[starts].tolist(), counts.tolist()))
        view = memoryview(content)
        sums = [zlib.crc32(view[at : at + PAGE.itemsize]) for at in range(0, len(content), PAGE.itemsize)]
        if len(wrong := pages[np.array(sums, dtype=np.uint32) != self._sums[pages]]):
            raise DamagedKeys(f"{self._name}: page {wrong[0]} is not as it was written")
        return np.frombuffer(content, PAGE)

    def _neighbours(self, first: int, count: int) -> bytes:
        try:
            content = os.pread(self._number, count * PAGE.itemsize, first * PAGE.itemsize)
        except OSError as error:  # for instance because another host has deleted the file
            raise DamagedKeys(f"{self._name}: {error}") from error
        if len(content) != count * PAGE.itemsize:
            raise DamagedKeys(f"{self._name}: page {first + len(content) // PAGE.itemsize} is gone")
        return content


@dataclass(eq=False)
class StoredRun:
    """One open file. Every method that asks for keys raises DamagedKeys."""

    path: Path | None  # None: the file ends with this process
    name: str | None  # None: no list can name it
    rows: int
    days: dict[int, int]  # day -> keys
    pages: Pages
    first: tuple[Words, Words]  # key of each page
    filter: Bloom
    dead: I64  # rows whose keys were freed, ascending

    @classmethod
    def open(cls, path: Path, dead: Sequence[int] = ()) -> StoredRun:
        """Open a file. Raises DamagedKeys."""
        try:
            with path.open("rb") as file:
                return cls.of(file, path, dead)
        except FileNotFoundError as error:
            raise ReplacedKeys(f"{path}: {error}") from error
        except OSError as error:
            raise DamagedKeys(f"{path}: {error}") from error

    @classmethod
    def of(cls, file: BinaryIO, path: Path | None, dead: Sequence[int] = (), name: str | None = None) -> StoredRun:
        """Use an open file, which may be closed then. Raises DamagedKeys, OSError.

        Args:
            name: of a file without a path.
        """
        name = name if path is None else path.name
        try:
            told, blocks = _described(file)
            if told["name"] != name:
                raise ValueError(f"it was written as {told['name']}")
            bloom = Bloom(told["capacity"], (np.frombuffer(blocks[0], "<u8"), np.frombuffer(blocks[1], "<u8")))
            first = np.frombuffer(blocks[2], "<u8"), np.frombuffer(blocks[3], "<u8")
            pages = Pages(file, path or name, np.frombuffer(blocks[4], "<u4"))
            return cls(path, name, told["rows"], dict(told["days"]), pages, first, bloom, np.array(dead, dtype=np.int64))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise DamagedKeys(f"{path or name}: {error}") from error

    def __len__(self) -> int:
        return self.rows

    def find(self, high: Words, low: Words) -> Hits:
        """Which keys are here and not freed. Ascending keys share what is read."""
        found = self.filter.may_have(high, low)
        asked = np.flatnonzero(found)
        parts = [self._looked_up(high[some], low[some])[1] for some in _in_parts(asked)]
        found[asked] = np.concatenate([part.found for part in parts])
        hits = Hits(found, *(np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "payload", "day")))
        return hits.those(~np.isin(hits.rows, self.dead)) if len(self.dead) else hits

    def keys(self, rows: I64) -> tuple[Words, Words]:
        """The halves of the keys of these rows."""
        parts = [self._of_rows(some, ("high", "low")) for some in _in_parts(rows)]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def free(self, rows: Places) -> None:
        """Count these rows no more."""
        self.dead = np.union1d(self.dead, rows)

    def count(self, since: int) -> int:
        """Keys of this day and later ones, and those that letters hold."""
        days = [self._of_rows(some, ("day",))[0] for some in _in_parts(self.dead)] if since else [self.dead]
        return sum(count for day, count in self.days.items() if day >= since) - sum(int(np.count_nonzero(d >= since)) for d in days)

    def cuts(self, bounds: Words) -> Places:
        """The row of the first key whose first half is not below each bound."""
        parts = [self._looked_up(some, np.zeros_like(some))[0] for some in _in_parts(bounds)]
        return np.minimum(np.concatenate(parts), self.rows)

    def part(self, first: int, end: int) -> KeyRows:
        """These rows, without those that were freed."""
        begin, behind = first // PAGE_KEYS, -(-end // PAGE_KEYS)
        parts = [self.pages.read(some) for some in _in_parts(np.arange(begin, behind))]
        columns = (np.concatenate([pages[name] for pages in parts]).reshape(-1) for name in PAGE.names or ())
        rows = KeyRows(*columns)[first - begin * PAGE_KEYS : end - begin * PAGE_KEYS]
        dead = self.dead[(self.dead >= first) & (self.dead < end)] - first
        return rows[np.delete(np.arange(len(rows)), dead)] if len(dead) else rows

    def _looked_up(self, high: Words, low: Words) -> tuple[Places, Hits]:
        """The row where each key is or would be, and what the pages have of those that are there."""
        before, exact = find_keys(*self.first, high, low)
        page = np.maximum(np.where(exact, before, before - 1), 0)
        numbers, which = np.unique(page, return_inverse=True)
        pages = self.pages.read(numbers)
        at, found = find_keys(pages["high"].reshape(-1), pages["low"].reshape(-1), high, low)
        rows = at + (page - which) * PAGE_KEYS
        found &= rows < self.rows  # behind them is what fills the last page
        place = np.divmod(at[found], PAGE_KEYS)
        return rows, Hits(found, rows[found], pages["payload"][place], pages["day"][place])

    def _of_rows(self, rows: I64, columns: Sequence[str]) -> list[npt.NDArray[Any]]:
        page, at = np.divmod(rows, PAGE_KEYS)
        numbers, which = np.unique(page, return_inverse=True)
        pages = self.pages.read(numbers)
        return [pages[name][which, at] for name in columns]


def _in_parts(some: npt.NDArray[_Item]) -> list[npt.NDArray[_Item]]:
    """At least one part."""
    return [some[at : at + AT_ONCE] for at in range(0, max(len(some), 1), AT_ONCE)]


def _described(file: BinaryIO) -> tuple[dict[str, Any], list[bytes]]:
    """The description of a file, and what stands between it and the pages. Raises ValueError, OSError, struct.error."""
    end = file.seek(0, os.SEEK_END) - _TRAILER.size
    file.seek(max(end, 0))
    length, told_sum, letters = _TRAILER.unpack(file.read())
    if letters != _LETTERS or length > end:
        raise ValueError("it is no file of keys, or its end is missing")
    file.seek(end - length)
    text = file.read(length)
    told = json.loads(text) if zlib.crc32(text) == told_sum else {}
    if told.get("format") != FORMAT:
        raise ValueError("its description is damaged or of another format")
    first = told["pages"] * PAGE.itemsize
    if first + sum(told["blocks"]) != end - length:
        raise ValueError("a part of it is missing")
    file.seek(first)
    blocks = [file.read(size) for size in told["blocks"]]
    if [zlib.crc32(block) for block in blocks] != told["sums"]:
        raise ValueError("its filter is damaged")
    return told, blocks


class NewFile:
    """A file that is being written: rows are cut into pages.

    Args:
        path: of the file; None: it ends with this process.
        capacity: as many keys as there will be at most.
        name: of a file without a path, where a list may name it.

    Raises:
        OSError: here and in each method; for instance where the disk is full.
    """

    def __init__(self, path: Path | None, capacity: int, name: str | None = None) -> None:
        self.path, self._name = path, name if path is None else path.name
        self._file: Any = tempfile.TemporaryFile(prefix="dedup-keys-") if path is None else path.open("x+b")  # noqa: SIM115
        self._left = weakref.finalize(self, _delete, self._file, path)  # by an index that nobody needs any more
        self._rest, self._rows = list[KeyRows](), 0
        self._filter, self._days = Bloom(capacity), Counter[int]()
        self._sums, self._firsts = list[int](), list[tuple[Words, Words]]()

    def add(self, rows: KeyRows) -> None:
        """Write rows that come behind those before them. Crash: a part of a file is there, which no list names."""
        self._rows += len(rows)
        self._filter.add(rows.high, rows.low)
        days, counts = np.unique(rows.day, return_counts=True)
        self._days.update(dict(zip(days.tolist(), counts.tolist(), strict=True)))
        some = KeyRows.concat([*self._rest, rows])
        whole = len(some) // PAGE_KEYS * PAGE_KEYS
        self._write(some[:whole])
        self._rest = [some[whole:]]

    def finish(self) -> StoredRun | None:
        """The file as it is now, open; None, and no file, for no rows.

        Crash: a file is there, whole or not, which no list names.
        """
        if not self._rows:
            self.abandon()
            return None
        self._fill()
        self._describe()
        self._file.flush()
        os.fsync(self._file.fileno())
        run = StoredRun.of(self._file, self.path, name=self._name)
        self._left.detach()
        self._file.close()
        return run

    def abandon(self) -> None:
        """Delete what there is of it. Crash: it stays, and no list names it."""
        self._left()

    def _fill(self) -> None:
        """Fill up the last page with the highest key, which no look-up takes for a row."""
        if rest := len(KeyRows.concat(self._rest)):
            none = np.full(PAGE_KEYS - rest, 2**64 - 1, dtype=np.uint64)
            self._write(KeyRows.concat([*self._rest, KeyRows(none, none, none.astype(np.int64), none.astype(np.uint16))]))

    def _write(self, rows: KeyRows) -> None:
        pages = np.empty(len(rows) // PAGE_KEYS, dtype=PAGE)
        for name in PAGE.names or ():
            pages[name] = getattr(rows, name).reshape(-1, PAGE_KEYS)
        content = memoryview(pages.tobytes())
        self._file.write(content)
        self._sums += [zlib.crc32(content[at : at + PAGE.itemsize]) for at in range(0, len(content), PAGE.itemsize)]
        # Copied: a view would keep all keys in memory until the file is whole.
        self._firsts.append((rows.high[::PAGE_KEYS].copy(), rows.low[::PAGE_KEYS].copy()))

    def _describe(self) -> None:
        firsts = [np.concatenate(halves) for halves in zip(*self._firsts, strict=True)]
        blocks = [a.tobytes() for a in (*self._filter.words, *firsts, np.array(self._sums, dtype=np.uint32))]
        told = {
            "format": FORMAT,
            "name": self._name,  # rows that the list calls freed are rows of this file
            "rows": self._rows,
            "pages": len(self._sums),
            "capacity": self._filter.capacity,
            "days": sorted(self._days.items()),
            "blocks": [len(block) for block in blocks],
            "sums": [zlib.crc32(block) for block in blocks],
        }
        text = json.dumps(told).encode()
        self._file.writelines((*blocks, text, _TRAILER.pack(len(text), zlib.crc32(text), _LETTERS)))


@dataclass(frozen=True)
class KeyList:
    """The files that hold the reservations of a ledger from the beginning of a keyspace up to one decision."""

    ledger: str  # id of the table
    keyspace_since: int
    seq: int
    attempt: str  # of that decision: another history has another one
    files: dict[str, list[int]]  # name -> rows whose keys were freed

    def encoded(self, **more: Any) -> bytes:
        """As text, with its checksum; `decoded` is the inverse."""
        text = json.dumps({"format": FORMAT, **asdict(self), **more}).encode()
        return b"%08x\n%s" % (zlib.crc32(text), text)


class KeptKeys(NamedTuple):
    """A list, and its files as they are open."""

    listed: KeyList
    runs: Sequence[StoredRun]


def decoded(content: bytes) -> dict[str, Any]:
    """The fields of a KeyList, and what was written beside them. Raises ValueError where it is damaged or of another format."""
    told_sum, text = content.split(b"\n", 1)
    told = json.loads(text) if int(told_sum, 16) == zlib.crc32(text) else {}
    if not isinstance(told, dict) or told.pop("format", None) != FORMAT:
        raise ValueError("it is damaged or of another format")
    return told


class ArrivingFile:
    """A file that is copied into the folder: under another name until it is whole. Whoever drops it unfinished deletes it.

    Args:
        folder: None: it ends with this process.
        size: bytes.

    Raises:
        OSError: here and in each method.
    """

    def __init__(self, folder: Path | None, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._target = None if folder is None else folder / name
        self._path = None if folder is None else folder / f"{uuid.uuid4().hex}.keys"
        self._file: Any = tempfile.TemporaryFile(prefix="dedup-keys-") if self._path is None else self._path.open("x+b")  # noqa: SIM115
        self._left = weakref.finalize(self, _delete, self._file, self._path)

    def write(self, content: Any, first: int) -> None:
        """Put bytes where they belong; for several threads at once. Crash: half a file is there, which no list names."""
        while len(content):
            done = os.pwrite(self._file.fileno(), content, first)
            content, first = memoryview(content)[done:], first + done

    def finish(self, dead: Sequence[int]) -> StoredRun:
        """The file, open, under its name. Raises DamagedKeys. Crash: it is there whole, under either name, and no list names it."""
        os.fsync(self._file.fileno())
        run = StoredRun.of(self._file, self._target, dead, self.name)
        if self._path is not None and self._target is not None:
            self._path.replace(self._target)
        self._left.detach()
        self._file.close()
        return run


class KeyFolder:
    """Where the files of one consumer are. Several processes may use it: each list is whole, and the last one counts.

    Args:
        path: of the folder; None: files end with this process.
        copied: files go elsewhere, too, so that lists name them, also those that end with this process.
    """

    def __init__(self, path: Path | None = None, *, copied: bool = False) -> None:
        self.path, self._copied = path, copied
        self._told = False
        self._avoided = -math.inf  # since when, by the monotonic clock

    @property
    def usable(self) -> bool:
        """Whether lists can name the files, and there was no failure lately."""
        return (self.path is not None or self._copied) and time.monotonic() - self._avoided > AVOIDED

    def new(self, capacity: int) -> NewFile:
        """A file for so many keys, which no list names yet; where the folder cannot be used, one without a name, in the temporary folder.

        Raises:
            OSError: there is no room there either.

        Crash: a file that no list names; `save` deletes it after a day.
        """
        name = f"{uuid.uuid4().hex}.keys" if self.usable else None
        if self.path is not None and name is not None:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                return NewFile(self.path / name, capacity)
            except OSError as error:
                self.failed(error)
        return NewFile(None, capacity, name) if self.path is None else NewFile(None, capacity)

    def arriving(self, name: str, size: int) -> ArrivingFile | None:
        """A file of this name and size that comes from elsewhere; None where it is there already. Raises OSError."""
        if self.path is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            if _size(self.path / name) == size:
                return None  # a start that was killed has brought it
        return ArrivingFile(self.path, name, size)

    def failed(self, error: OSError) -> None:
        """A file could not be written or opened: use the temporary folder for a while."""
        self._avoided = time.monotonic()
        if not self._told and self.path is not None:
            log.warning("No files of keys can be kept in %s (%s). The next start reads all keys from the ledger.", self.path, error)
        self._told = True

    def load(self) -> KeyList | None:
        """The list; None where there is none that can be read."""
        try:
            return KeyList(**decoded((self.path / LIST).read_bytes())) if self.path else None
        except (FileNotFoundError, NotADirectoryError):
            return None  # as at a first start
        except (OSError, ValueError, TypeError) as error:
            log.warning("The list of files of keys in %s cannot be used, so the keys are read from the ledger: %s", self.path, error)
            return None

    def save(self, listed: KeyList, gone: Iterable[str] = ()) -> None:
        """Replace the list, and delete files that it names no more. Where that fails, a warning says so, and the old list stays.

        Crash: the old list counts or the new one; files that neither names are deleted after a day.
        """
        if self.path is None:
            return
        new = self.path / f"{LIST}.{uuid.uuid4().hex}"
        try:
            with new.open("xb") as file:
                file.write(listed.encoded())
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path / LIST)
            _fsync(self.path)
            for path in {*(self.path / name for name in gone), *self._abandoned(listed)}:
                path.unlink(missing_ok=True)
        except OSError as error:
            self.failed(error)

    def open(self, listed: KeyList) -> list[StoredRun]:
        """Its files. Raises DamagedKeys."""
        assert self.path is not None
        return [StoredRun.open(self.path / name, dead) for name, dead in listed.files.items()]

    def require(self, files: Iterable[str]) -> None:
        """Raise ReplacedKeys where these are not all there."""
        try:
            lost = [name for name in files if self.path is not None and not (self.path / name).exists()]
        except OSError as error:
            raise ReplacedKeys(f"{self.path}: {error}") from error
        if lost:
            raise ReplacedKeys(f"{self.path}: another process has replaced {', '.join(lost[:3])}")

    def forget(self) -> None:
        """Open these files no more. Crash: the list is there or not."""
        with contextlib.suppress(OSError):
            if self.path is not None:
                (self.path / LIST).unlink(missing_ok=True)

    def _abandoned(self, listed: KeyList) -> list[Path]:
        assert self.path is not None
        others = [p for p in self.path.iterdir() if p.name not in listed.files and (p.suffix == ".keys" or p.name.startswith(f"{LIST}."))]
        return [p for p in others if _age(p) > ABANDONED]


def _size(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _age(path: Path) -> float:
    """In seconds; 0 where another process has just deleted or renamed it."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _delete(file: BinaryIO, path: Path | None) -> None:
    with contextlib.suppress(OSError):  # closing it writes what is buffered
        file.close()
    with contextlib.suppress(OSError):  # the list does not name it
        if path is not None:
            path.unlink(missing_ok=True)


def _fsync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
