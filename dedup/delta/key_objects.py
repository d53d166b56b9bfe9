"""Copies of files of keys beside the ledger, on object storage: a process on a new machine fetches them in place of reading the ledger.

A file of keys is `NAME/NUMBER`, its parts in order; a list is `lists/DECISION-ATTEMPT`. None of them is ever changed, so no list replaces
another one: of two processes the list of the later decision counts, whichever was slower. Whoever fetches a list compares it with the
ledger, and each page of a file with its checksum. A process writes its files, then its list, on a thread of its own: no batch waits for
that, and no failure there fails one.

Where several processes share a consumer, each has files of its own. One of them copies its files; the others leave it to that one, until
it has written no list for an hour.

Called by the reservations of a consumer, and by the store's upkeep.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from dedup.delta import objects
from dedup.delta.key_files import ABANDONED, ArrivingFile, DamagedKeys, KeptKeys, KeyFolder, KeyList, ReplacedKeys, StoredRun, decoded
from dedup.delta.objects import Stat
from dedup.delta.storage import StorageOptions, explained

log = logging.getLogger("dedup")

PART = 4 * 1024 * 1024
"""Bytes of an object: one plain request writes or reads it, and a process that dies leaves no half of it."""

LISTS = "lists"
"""Name of the folder of lists."""

OTHERS = 3600
"""Seconds after its last list in which another process is left to copy its files, and in which the list before stays, with its files."""

LATE = 12 * 3600
"""Seconds after which a list that could not be written is out of date."""

_NAME = re.compile(r"[0-9a-f]{32}\.keys")

CLOSING = 30.0
"""Seconds that the end of the process waits for copies, and the closing of a store."""


class ListName(NamedTuple):
    """A list, by the decision that it goes up to."""

    seq: int
    attempt: str

    @property
    def path(self) -> str:
        """Of the object."""
        return f"{LISTS}/{self.seq:020d}-{self.attempt}"

    @classmethod
    def of(cls, path: str) -> ListName | None:
        """The inverse of `path`; None for anything else."""
        folder, _, name = path.rpartition("/")
        seq, _, attempt = name.partition("-")
        return cls(int(seq), attempt) if folder == LISTS and seq.isdecimal() and attempt else None


class CopiedKeys(NamedTuple):
    """A list, and the bytes of its files."""

    listed: KeyList
    sizes: Mapping[str, int]


class KeyObjects:
    """The copies of one consumer.

    Args:
        uri: of their folder.
    """

    def __init__(self, uri: str, options: StorageOptions) -> None:
        self.uri, self._options = uri, options
        self._work = Aside(uri)
        self._met: set[str] | None = None  # lists of which another process is no reason to wait
        self._files: dict[str, Collection[str]] = {}  # path of a list -> its files
        self._fetched: ListName | None = None
        self._distrusted = False

    def lists(self) -> list[ListName]:
        """All lists, the newest first; one request. None where files from here were damaged. Raises OSError."""
        return [] if self._distrusted else _lists(objects.listed(self.uri, self._options, LISTS))

    def load(self, name: ListName) -> CopiedKeys:
        """A list, whose files are fetched then. Raises OSError; ReplacedKeys: it is gone; DamagedKeys."""
        self._fetched = name
        return self._list(name)

    def _list(self, name: ListName) -> CopiedKeys:
        content = objects.get(self.uri, self._options, name.path)
        if content is None:
            raise ReplacedKeys(f"{self.uri}/{name.path} is gone")
        try:
            told = decoded(content.to_pybytes())
            sizes = {str(file): int(size) for file, size in told.pop("sizes").items()}
            listed = KeyList(**told)
            if sizes.keys() != listed.files.keys() or not all(map(_NAME.fullmatch, sizes)):
                raise ValueError("its files are no files of keys")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedKeys(f"{self.uri}/{name.path}: {error}") from error
        return CopiedKeys(listed, sizes)

    def fetch(self, copied: CopiedKeys, folder: KeyFolder) -> list[StoredRun]:
        """The files of a list, as files of the folder, open.

        Raises:
            OSError: the storage, or the disk. ReplacedKeys: a part is gone. DamagedKeys: it is no such file.

        Crash: some files are in the folder, whole or not; no list of the folder names them, and the next start takes those that are whole.
        """
        coming = {file: folder.arriving(file, size) for file, size in copied.sizes.items()}
        parts = [(file, at) for file in coming.values() if file is not None for at in range(0, file.size, PART)]
        objects.at_once(self._take, parts)
        return [_opened(folder, file, coming[file], dead) for file, dead in copied.listed.files.items()]

    def offer(self, kept: KeptKeys) -> None:
        """Copy files and their list, soon and on a thread of its own, unless something newer is offered first. Crash: see `_copy`."""
        self._work.do("copy", partial(self._copy, kept, time.time()))

    def distrust(self) -> None:
        """Files that were fetched, or files of the folder, were damaged: fetch nothing more. The list that was fetched goes away.

        Crash: it stays, and the next process meets the damage again.
        """
        self._distrusted = True
        if self._fetched is not None:
            self._work.do("drop", partial(objects.delete, self.uri, self._options, [self._fetched.path]))
            self._fetched = None

    def clean(self) -> None:
        """Delete what no process needs any more; waits a while for it. What fails is logged. Crash: see `_clean`."""
        self._work.do("clean", lambda: self._clean(objects.listed(self.uri, self._options)))
        self.wait()

    def wait(self, seconds: float = CLOSING) -> bool:
        """Wait for what was offered, and tell whether it is done."""
        return self._work.wait(seconds)

    def _take(self, part: tuple[ArrivingFile, int]) -> None:
        file, first = part
        path = _part(file.name, first)
        content = objects.get(self.uri, self._options, path)
        if content is None:
            raise ReplacedKeys(f"{self.uri}/{path} is gone")
        if content.size != min(PART, file.size - first):
            raise DamagedKeys(f"{self.uri}/{path} has {content.size} bytes")
        file.write(memoryview(content), first)

    def _copy(self, kept: KeptKeys, offered: float) -> None:
        """Write what is not there of these files, then the list, then delete what is not needed any more.

        Raises:
            OSError, DamagedKeys: the storage, or a file; `Aside` logs it.

        Crash: parts of files are there, which no list names and `_clean` deletes after a day; or the list and all of its files.
        """
        there = objects.listed(self.uri, self._options)
        if time.time() - offered > LATE or self._others_do(there):
            return
        name, sizes = ListName(kept.listed.seq, kept.listed.attempt), {str(run.name): run.pages.size for run in kept.runs}
        for run in kept.runs:
            self._copy_file(run, sizes[str(run.name)], there)
        if time.time() - offered > LATE:
            return  # this machine has slept meanwhile
        self._put(name.path, kept.listed.encoded(sizes=sizes), there)
        self._met = {*(self._met or ()), name.path}
        self._files[name.path] = frozenset(sizes)
        self._clean(there)

    def _others_do(self, there: Mapping[str, Stat]) -> bool:
        """Whether another process has written a list since this one looked first, and lately."""
        newest = next((name.path for name in _lists(there)), None)
        if self._met is None:
            self._met = {path for path in (newest,) if path is not None}
        return newest is not None and newest not in self._met and time.time() - there[newest].modified < OTHERS

    def _copy_file(self, run: StoredRun, size: int, there: dict[str, Stat]) -> None:
        for first in range(0, size, PART):
            wanted = min(PART, size - first)
            found = there.get(path := _part(str(run.name), first))
            if found is None or found.size != wanted:
                content = run.pages.content(first, wanted)
                if len(content) != wanted:
                    raise DamagedKeys(f"{run.path or run.name}: a part of it is gone")
                self._put(path, content, there)

    def _put(self, path: str, content: bytes, there: dict[str, Stat]) -> None:
        objects.put(self.uri, self._options, path, pa.py_buffer(content))
        there[path] = Stat(len(content), time.time(), None)

    def _clean(self, there: Mapping[str, Stat]) -> None:
        """Delete lists that newer ones have replaced, with what they alone name; and after a day whatever no list names.

        The list before the newest stays while that is young: somebody may just be fetching its files. A list of a later decision that has
        become a day older than the last one is of a history that was taken back, and goes.

        Crash: some are deleted. Files that no list names any more go after a day.
        """
        kept, dropped = _sorted_out(there, time.time())
        try:
            needed = {file for name in kept for file in self._files_of(name)}
            replaced = {file for name in dropped for file in self._files_of(name)}
        except ReplacedKeys:
            return  # another process replaces lists, and has perhaps one that is not known here: that process deletes, too
        names = {*(name.path for name in kept), *(name.path for name in dropped)}
        others = {path: path.partition("/")[0] for path in there.keys() - names}
        old = [p for p, file in others.items() if file not in needed and (file in replaced or time.time() - there[p].modified > ABANDONED)]
        for paths in ([name.path for name in dropped], old):
            if paths:
                objects.delete(self.uri, self._options, paths)
        self._files = {path: files for path, files in self._files.items() if path in {name.path for name in kept}}

    def _files_of(self, name: ListName) -> Collection[str]:
        if name.path not in self._files:
            try:
                self._files[name.path] = frozenset(self._list(name).sizes)
            except ReplacedKeys:
                raise
            except DamagedKeys:  # nobody can use it
                self._files[name.path] = frozenset()
        return self._files[name.path]


def _part(name: str, first: int) -> str:
    """Path of the part of a file that begins with this byte."""
    return f"{name}/{first // PART:05d}"


def _lists(paths: Collection[str]) -> list[ListName]:
    return sorted(filter(None, map(ListName.of, paths)), reverse=True)


def _sorted_out(there: Mapping[str, Stat], now: float) -> tuple[list[ListName], list[ListName]]:
    """The lists that stay, and the others."""
    names = _lists(there)
    if not names:
        return [], []
    written = {name: there[name.path].modified for name in names}
    latest = max(names, key=lambda name: written[name])
    living = [name for name in names if written[latest] - written[name] <= ABANDONED]
    kept = {latest, *living[: 2 if now - written[living[0]] < OTHERS else 1]}
    return sorted(kept), [name for name in names if name not in kept]


def _opened(folder: KeyFolder, name: str, file: ArrivingFile | None, dead: Sequence[int]) -> StoredRun:
    if file is not None:
        return file.finish(dead)
    assert folder.path is not None
    return StoredRun.open(folder.path / name, dead)


class Aside:
    """Work on a thread of its own, which ends when there is none; of each kind only the newest waits.

    Args:
        uri: of the copies. The log says once that they cannot be written, until they can again.
    """

    def __init__(self, uri: str) -> None:
        self._uri, self._told = uri, False
        self._lock, self._waiting = threading.Lock(), dict[str, Callable[[], None]]()
        self._thread: threading.Thread | None = None
        _all.add(self)

    def do(self, kind: str, work: Callable[[], None]) -> None:
        """Do this soon. Crash: it is not done, or a part of it."""
        with self._lock:
            self._waiting.pop(kind, None)  # the new work comes behind whatever waits
            self._waiting[kind] = work
            if self._thread is None or not self._thread.is_alive():  # it is not alive in a process that was forked
                thread = threading.Thread(target=self._run, name="dedup key copies", daemon=True)
                with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
                    thread.start()
                    self._thread = thread

    def wait(self, seconds: float) -> bool:
        """Wait until everything is done, and tell whether it is."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
                self._told = False
            except Exception as error:  # noqa: BLE001 - whatever it is, the ledger has every key
                if not self._told:
                    log.warning(
                        "Copies of files of keys in %s could not be written; they are tried again with the next files. Until then a start "
                        "on another machine reads more from the ledger: %s",
                        self._uri,
                        explained(self._uri, error),
                    )
                self._told = True

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            kind = next(iter(self._waiting), None)
            if kind is None:
                self._thread = None
                return None
            return self._waiting.pop(kind)


_all: weakref.WeakSet[Aside] = weakref.WeakSet()


def finish() -> None:
    """At the end of the process: wait a while for copies, so that short jobs leave them, too."""
    until = time.monotonic() + CLOSING
    for each in list(_all):
        each.wait(max(until - time.monotonic(), 0.0))


atexit.register(finish)
