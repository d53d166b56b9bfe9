"""The rows of a batch kept where tasks have prepared them: the driver gets their positions, keys and payload hashes, and decides.

One job prepares the rows, wherever Spark has them, and writes them as Arrow files into a folder of this attempt, which driver and tasks
share. The handler's tasks read these files: a batch is evaluated once, and its rows neither visit the driver nor are shuffled. Where tasks
commit by themselves, the driver only says which rows each of them reads. Called by dedup/spark/tasks.py for handlers of events; needs no
Spark itself.
"""

from __future__ import annotations

import base64
import itertools
import logging
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoint import holders
from checkpoint.errors import StoreUnavailable
from checkpoint.position import Ints
from deadletter import outage
from dedup.core.envelope import ENVELOPE, POSITION
from dedup.core.keys import SEQUENCE
from dedup.core.rows import ArrowFrames, in_utc, picked, taken
from dedup.core.store import Frames
from dedup.decode.prepare import PAYLOAD_HASH, Prepare, complete, payload_hashes, prepare_keys
from dedup.pipeline.batch import EvaluatedArrow, EvaluatedBatch, Evaluating, index_columns

log = logging.getLogger("dedup")

GATHERED_ROWS, GATHERED_BYTES = 131_072, 64 * 1024 * 1024
"""Rows of a task that are prepared, and kept in one file, together."""

PREFIX = "dedup-kept-"
"""Folders of kept rows: then the host, the process, when it started, and something random."""

_PLACE = POSITION[:3]
"""A topic partition: source, topic, partition."""

PIECES = pa.schema(
    [
        pa.field("path", pa.string()),  # null: the rows could not be kept
        pa.field("size", pa.int64()),  # bytes of the file
        pa.field("first", pa.int64()),  # row of it
        *map(ENVELOPE.field, _PLACE),
        pa.field("index", pa.binary()),  # positions, keys and payload hashes, as an Arrow stream
    ]
)
"""What tasks answer: one row for each topic partition of each file."""

_ALIKE = {"part": pa.scalar(0, pa.int64()), "_undecodable": pa.scalar(False)}
"""Columns that do not travel where all of their values are this one."""

_EMPTY = pa.schema([*map(ENVELOPE.field, POSITION), pa.field("_key", pa.binary(16)), pa.field("_undecodable", pa.bool_())])


# The tasks' side.


@dataclass(frozen=True)
class Keeping:
    """How tasks prepare and keep rows. Travels to them."""

    folder: str
    finish: Any  # from the input to prepared rows
    late: Prepare | None  # where it is, `finish` is not used: what readable keys need is made of few rows, later

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Prepare and keep the rows of this task; yields PIECES.

        Crash: files of an attempt whose answer does not come are read by nobody; they go with the folder.
        """
        for table in _gathered(batches):
            yield from self._keep(in_utc(table))

    def _keep(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        rows = self.finish(table) if self.late is None else prepare_keys(table, self.late)
        if self.late is not None:
            rows = rows.append_column(PAYLOAD_HASH, payload_hashes(rows, self.late))
        rows, starts = _by_place(rows)
        path = f"{self.folder}/{uuid.uuid4().hex}.arrow"
        try:
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, rows.schema) as out:
                out.write_table(rows)
        except OSError as error:
            yield pa.RecordBatch.from_pylist([{"topic": str(error)}], schema=PIECES)
            return
        for first, end in itertools.pairwise(starts):
            yield _piece((path, os.path.getsize(path), first), rows.slice(first, end - first))


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= GATHERED_ROWS or size >= GATHERED_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


def _by_place(rows: pa.Table) -> tuple[pa.Table, list[int]]:
    """The rows with those of each topic partition together, as they came; and where each of these begins, and the end."""
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    for name in _PLACE:
        encoded = rows[name].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = codes * max(len(encoded.dictionary), 1) + encoded.indices.to_numpy(zero_copy_only=False)
    if (codes[1:] < codes[:-1]).any() and len(np.unique(codes)) <= np.count_nonzero(np.diff(codes)):
        order = np.argsort(codes, kind="stable")
        rows, codes = rows.take(pa.array(order)), codes[order]
    return rows, [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), rows.num_rows]


def _piece(at: tuple[str, int, int], rows: pa.Table) -> pa.RecordBatch:
    names = [name for name in ("sequence_number", "part", "_key", PAYLOAD_HASH, "_undecodable", SEQUENCE[0]) if name in rows.column_names]
    index = rows.select([name for name in names if name not in _ALIKE or not _is_alike(rows[name], _ALIKE[name])])
    if rows["_key"].type != pa.binary(16):
        index = index.set_column(index.column_names.index("_key"), "_key", rows["_key"].cast(pa.binary(16)))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, index.schema) as out:
        out.write_table(index.combine_chunks())
    place = {name: rows[name][0].as_py() for name in _PLACE}
    return pa.RecordBatch.from_pylist(
        [{**dict(zip(PIECES.names, at, strict=False)), **place, "index": sink.getvalue().to_pybytes()}], schema=PIECES
    )


def _is_alike(column: pa.ChunkedArray, value: pa.Scalar) -> bool:
    return not column.null_count and bool(pc.all(pc.equal(column, value)).as_py())


def _read_file(path: str, size: int) -> pa.Table:
    try:
        if (found := os.path.getsize(path)) != size:  # asked first: to read behind the end of a mapped file ends the process
            raise OSError(f"{found} bytes of {size}")
        with pa.memory_map(path) as file:
            return pa.ipc.open_file(file).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreUnavailable(f"Kept rows of the batch are gone ({path}: {error}). Nothing was decided; run the batch again.") from error


class KeptRows(NamedTuple):
    """Some rows of one topic partition, in one file. Travels to tasks."""

    path: str
    size: int  # bytes of the file
    first: int  # row of it
    rows: int
    left_out: Ints | None = None  # of these rows; None: `chosen` says more
    chosen: Ints | None = None  # None: all but those that are left out

    def open(self, files: dict[str, pa.Table]) -> pa.Table:
        """All rows of the file, which are here from now on. Raises StoreUnavailable where it is gone, or not the one that was written."""
        if self.path not in files:
            files[self.path] = _read_file(self.path, self.size)
        return files[self.path]

    def read(self, files: dict[str, pa.Table]) -> pa.Table:
        """The rows. Raises StoreUnavailable as `open`."""
        table = self.open(files).slice(self.first, self.rows)
        if self.chosen is not None:
            return picked(table, self.chosen)
        if self.left_out is None:
            return table
        kept = np.ones(self.rows, dtype=bool)
        kept[self.left_out] = False
        return table.filter(pa.array(kept))


class Share(NamedTuple):
    """The rows of one topic partition that a run of the handler is given. Travels to tasks."""

    base: int  # number of the first one among all that the run is given
    parts: tuple[KeptRows, ...]
    order: Ints | None  # of the rows of all parts, by position; None: that is theirs
    lanes: Ints | None  # the number of each row's sequence; None: none has one

    @property
    def rows(self) -> int:
        """How many rows are read for it."""
        return sum(part.rows for part in self.parts)

    def split(self) -> list[Share]:
        """A share for each file, where the order of the rows is that of the files; else this one."""
        return [self] if self.order is not None else [self._replace(parts=(part,), lanes=None) for part in self.parts]

    def read(self, files: dict[str, pa.Table]) -> pa.Table:
        """The rows in the order of their positions. Raises StoreUnavailable."""
        table = pa.concat_tables([part.read(files) for part in self.parts])
        return table if self.order is None else taken(table, self.order)


# The driver's side.


class Keeps(Protocol):
    """Tasks that can keep rows."""

    def folder(self) -> AbstractContextManager[str] | None:
        """A folder that this process shares with all tasks, for the time of the block; None where there is none."""

    def keep(self, prepare: Prepare, folder: str) -> tuple[pa.Table, Prepare | None]:
        """Evaluate the batch, once: its rows are kept in the folder. Returns PIECES, and how to complete few of the rows."""


@dataclass(frozen=True)
class KeptBatch:
    """A batch whose handler runs in tasks: its rows are kept there if they can, else they are evaluated as ever."""

    batch: Evaluating
    tasks: Keeps

    @contextmanager
    def evaluate(self, prepare: Prepare) -> Iterator[EvaluatedBatch]:
        """Map, decode, compute keys, and evaluate, once.

        Crash: as `kept`.
        """
        with kept(self.tasks, prepare) as found:
            if found is not None:
                yield found
                return
        with self.batch.evaluate(prepare) as rows:
            yield rows


@contextmanager
def kept(tasks: Keeps, prepare: Prepare) -> Iterator[EvaluatedInTasks | None]:
    """The rows of the batch, kept by these tasks for the time of the block; None where they cannot be.

    Crash: the folder of a process that dies is removed by the next one on this host that keeps rows, if it can tell that it died.
    """
    folder = tasks.folder()
    if folder is not None:
        with folder as here:
            pieces, late = tasks.keep(prepare, here)
            if _all_here(pieces):
                yield EvaluatedInTasks(pieces, late)
                return
    yield None


def _all_here(pieces: pa.Table) -> bool:
    """Whether all rows were kept, in files that this process finds, too."""
    paths = set(pieces["path"].to_pylist())
    if None in paths:
        said = next(row["topic"] for row in pieces.to_pylist() if row["path"] is None)
        log.warning("tasks could not keep the rows of the batch (%s): they come by the driver, or by a shuffle", said)
        return False
    if missing := [path for path in paths if not os.access(path, os.R_OK)]:
        log.warning("%s, which a task has written, cannot be read here: the folder is not shared, and rows come another way", missing[0])
        give_up(missing[0])
        return False
    return True


@dataclass(frozen=True)
class EvaluatedKept(EvaluatedArrow):
    """Rows that were read from kept files, in a task that decides them."""

    late: Prepare | None = None  # how to complete few of them

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        found = super().content(rows)
        return found if self.late is None else complete(found.drop_columns([PAYLOAD_HASH]), self.late, found[PAYLOAD_HASH])


def deal(those: Sequence[Share], tasks: int) -> list[list[Share]]:
    """Those for each of at most so many tasks: the largest first, each to the task that has the fewest rows so far."""
    dealt: list[list[Share]] = [[] for _ in range(min(tasks, len(those)))]
    loads = [0] * len(dealt)
    for one in sorted(those, key=lambda one: -one.rows):
        least = loads.index(min(loads))
        dealt[least].append(one)
        loads[least] += one.rows
    return dealt


def in_runs(those: Sequence[Share], tasks: int) -> list[list[Share]]:
    """Those for each of at most so many tasks, in their order, of about as many rows each."""
    total, before = sum(one.rows for one in those), 0
    dealt: list[list[Share]] = [[] for _ in range(tasks)]
    for one in those:
        dealt[before * tasks // total].append(one)
        before += one.rows
    return [mine for mine in dealt if mine]


@dataclass(frozen=True, eq=False)
class KeptFrame:
    """What a handler of events is given where rows are kept: which rows of which files."""

    shares: tuple[Share, ...]

    def dealt(self, tasks: int, lanes: Ints | None = None) -> list[list[Share]]:
        """The shares of at most so many tasks, the largest first, each to the task that has the fewest rows so far.

        Args:
            lanes: of each row of the frame the number of its sequence; -1: none. None: the tasks find out by themselves.
        """
        return deal(list(self.shares) if lanes is None else self._with_lanes(lanes), tasks)

    def _with_lanes(self, lanes: Ints) -> list[Share]:
        bases = [share.base for share in self.shares[1:]]
        return [
            share._replace(lanes=at if (at >= 0).any() else None) for share, at in zip(self.shares, np.split(lanes, bases), strict=True)
        ]


@dataclass(eq=False)
class EvaluatedInTasks:
    """Rows in files of tasks. Their numbers are those of all pieces one after the other, by topic partition and first position."""

    pieces: pa.Table  # PIECES
    late: Prepare | None  # how to complete few rows
    frames: Frames = field(default_factory=ArrowFrames)

    def __post_init__(self) -> None:
        told = self.pieces.drop_columns(["index"]).to_pylist()
        blobs = [_opened(blob) for blob in self.pieces["index"]]
        order = sorted(range(len(told)), key=lambda n: (_place(told[n]), _first(blobs[n])))
        self._told, self._blobs = [told[n] for n in order], [blobs[n] for n in order]
        self._starts = np.cumsum([0, *(blob.num_rows for blob in self._blobs)])
        self._places = np.array([0, *np.cumsum([_place(a) != _place(b) for a, b in itertools.pairwise(self._told)])], dtype=np.int64)

    @cached_property
    def index(self) -> pa.Table:
        """INDEX_COLUMNS and, with a sequence key, `_sequence` of every row."""
        if not self._blobs:
            return _EMPTY.empty_table()
        counts = np.diff(self._starts)
        columns = {name: _repeated([row[name] for row in self._told], counts, _EMPTY.field(name).type) for name in _PLACE}
        columns |= {name: self._column(name) for name in self._blobs[0].column_names}
        columns |= {name: self._column(name) for name in _ALIKE}
        return pa.table({name: columns[name] for name in index_columns(list(columns))})

    def _column(self, name: str) -> pa.ChunkedArray:
        parts = [
            blob[name] if name in blob.column_names else pa.chunked_array([pa.repeat(_ALIKE[name], blob.num_rows)]) for blob in self._blobs
        ]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)

    def payload_hashes(self) -> Ints:
        """The payload hash of every row."""
        return self._hashes

    @cached_property
    def _hashes(self) -> Ints:
        return np.asarray(self._column(PAYLOAD_HASH)) if self._blobs else np.zeros(0, np.int64)

    def content(self, rows: Ints) -> pa.Table:
        """These rows, in this order."""
        wanted, back = np.unique(rows, return_inverse=True)
        if not self._told:
            return self.index
        files: dict[str, pa.Table] = {}
        parts = list(self._parts(wanted)) or list(self._parts(np.zeros(1, np.int64)))  # of no rows: their columns
        found = taken(pa.concat_tables([part.read(files) for part in parts]), back)
        return found if self.late is None else complete(found.drop_columns([PAYLOAD_HASH]), self.late, pa.array(self._hashes[rows]))

    def frame(self, rows: Ints) -> KeptFrame:
        """These rows, in this order, which is that of their positions."""
        places = self._places[self._piece_of(rows)]
        bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(rows)]
        return KeptFrame(tuple(self._share(first, rows[first:end]) for first, end in itertools.pairwise(bounds) if end > first))

    def expect(self, rows: Ints) -> None:
        """Nothing to make: a frame is quick."""

    def _share(self, base: int, rows: Ints) -> Share:
        if bool((rows[1:] > rows[:-1]).all()):
            return Share(base, tuple(self._parts(rows)), None, None)
        ascending = np.sort(rows)
        return Share(base, tuple(self._parts(ascending)), np.searchsorted(ascending, rows), None)

    def _piece_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._starts, rows, "right") - 1
        return found

    def _parts(self, rows: Ints) -> Iterator[KeptRows]:
        """These rows, which ascend, by the files that they are in."""
        for piece in np.unique(self._piece_of(rows)).tolist():
            start, end = (int(at) for at in self._starts[piece : piece + 2])
            local = rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start
            left_out = np.setdiff1d(np.arange(end - start), local, assume_unique=True) if len(local) < end - start else None
            told = self._told[piece]
            whole = KeptRows(told["path"], told["size"], told["first"], end - start)
            few = left_out is not None and len(local) < len(left_out)
            yield whole._replace(chosen=local) if few else whole._replace(left_out=left_out)


def _opened(blob: pa.Scalar) -> pa.Table:
    return pa.ipc.open_stream(blob.as_buffer()).read_all()


def _place(row: dict[str, Any]) -> tuple[tuple[bool, Any], ...]:
    return tuple((row[name] is not None, row[name] if row[name] is not None else 0) for name in _PLACE)


def _first(blob: pa.Table) -> int:
    first = blob["sequence_number"][0].as_py()
    return -1 if first is None else int(first)


def _repeated(values: Sequence[Any], counts: Ints, kind: pa.DataType) -> pa.Array:
    encoded = pa.array(values, kind).dictionary_encode()
    codes = encoded.indices.take(pa.array(np.repeat(np.arange(len(values)), counts)))
    found = pa.DictionaryArray.from_arrays(codes, encoded.dictionary)
    return found if pa.types.is_string(kind) else found.dictionary_decode()


_OTHER = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""The scheme of a URL."""

_NAME = re.compile(rf"{PREFIX}(?P<host>.+)-(?P<pid>\d+)-(?P<started>[a-z2-7]*)-[0-9a-f]{{32}}")
"""The name of a folder of kept rows."""

_not_shared: set[str] = set()
"""Folders in which a task did not find what another one had written."""


def give_up(path: str) -> None:
    """A task does not find this file: from now on this process keeps no rows in that place."""
    _not_shared.add(os.path.dirname(os.path.dirname(path)))


_GONE = re.compile(r"StoreUnavailable: (?P<said>Kept rows of the batch are gone \((?P<path>[^:]*): .*?run the batch again\.)", re.DOTALL)
"""What a task says of a file: Spark brings only the text of its error."""


@contextmanager
def giving_up() -> Iterator[None]:
    """Raise StoreUnavailable where the block, or a task of it, did not find a file, and keep no more rows there."""
    try:
        yield
    except Exception as error:
        found = _GONE.search(outage.words(error))
        if found is None:
            raise
        give_up(found["path"])
        raise StoreUnavailable(found["said"]) from error


def path_of(scratch: str) -> str | None:
    """The path that a folder for scratch files is; None where it is object storage, or another file system of Spark's (`dbfs:/x`)."""
    path = scratch.removeprefix("file://").removeprefix("file:")
    return None if _OTHER.match(path) else path


def shared_folder(base: str | None) -> AbstractContextManager[str] | None:
    """A folder for kept rows below this one, or below the system's for temporary files; None where it was given up."""
    root = os.path.abspath(tempfile.gettempdir() if base is None else base)
    if root in _not_shared:
        return None
    try:
        folder = _made(root, 0o700 if base is None else 0o777)
    except OSError as error:
        log.warning("nothing can be written in %s (%s): the rows of batches are not kept there", root, error)
        _not_shared.add(root)
        return None
    return _removed(folder)


def _made(root: str, mode: int) -> str:
    """A new folder there. Crash: it stays until the next call on this host, or for ever where nobody can tell that its process died."""
    os.makedirs(root, exist_ok=True)
    _sweep(root)
    folder = os.path.join(root, _name(holders.this_process()))
    os.mkdir(folder)
    os.chmod(folder, mode)  # whatever the umask: executors may run as another user
    return folder


@contextmanager
def _removed(folder: str) -> Iterator[str]:
    """The folder; removed with the block. Crash: as of `_made`."""
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name(mine: holders.Process) -> str:
    """A new name for a folder of this process, as `_holder` reads it."""
    started = base64.b32encode(mine.started.encode()).decode().rstrip("=").lower()  # nothing that a file system forbids
    return f"{PREFIX}{mine.host}-{mine.pid}-{started}-{uuid.uuid4().hex}"


def _holder(name: str) -> holders.Process | None:
    """The process that has made a folder of this name; None where it does not tell."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    coded = found["started"].upper()
    try:
        started = base64.b32decode(coded + "=" * (-len(coded) % 8)).decode()
    except ValueError:  # the folder is somebody else's
        return None
    return holders.Process(found["host"], int(found["pid"]), started)


def _sweep(root: str) -> None:
    """Remove folders of processes that are proven to be gone: those of another container may have the same host and number."""
    for name in os.listdir(root):
        holder = _holder(name)
        if holder is not None and holders.is_alive(*holder) is False:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
