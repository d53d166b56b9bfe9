"""Letters in files: JSON lines or Parquet, exact bytes, with their history, in bounded memory.

Called by deadletters.py.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import ConfigError
from deadletter.letter import HISTORY, LETTERS, Action, Kind, Status
from deadletter.selection import Selection
from dedup import letter_plans, letter_proof
from dedup.json_rows import from_json, json_rows
from dedup.letter_plans import Plan, Who
from dedup.letter_work import PORTION, PORTION_BYTES, Progress, commit, known, listed, portions
from dedup.outage import with_replanning
from dedup.store import Head, Store

Format = Literal["jsonl", "parquet"]

_PAST = [f for f in HISTORY if f.name not in ("letter_id", "reserved")]

KEPT = pa.schema([*LETTERS, pa.field("duplicates", pa.int64(), nullable=False), pa.field("history", pa.list_(pa.struct(_PAST)))])
"""Columns of a file. What a letter's history reserved is of the store it was in, and stays there."""

PLACE = ("source", "topic", "incarnation", "partition", "sequence_number", "part", "id")
"""Position order within a consumer."""


def export(store: Store, selection: Selection, to: str | Path | BinaryIO, format: Format | None, on_progress: Progress) -> int:
    """See `DeadLetters.export`.

    Raises StoreRestored or PublicationStuck where letters may be missing: a file looks whole.

    Crash: the file is there, whole, or not there.
    """
    for consumer in store.consumers() if selection.consumer is None else [selection.consumer]:
        store.require_letters(consumer)
    letters, seen = listed(store, selection), 0
    with _target(to) as target, _writer(target, format or _guessed(to)) as write:
        for _, ids in portions(letters):
            write(_whole(store, ids))
            seen += len(ids)
            on_progress(seen, letters.num_rows)
    return seen


@contextmanager
def _target(to: str | Path | BinaryIO) -> Iterator[BinaryIO]:
    """Where to write: what was given, or a file that gets its name when it is whole."""
    if not isinstance(to, str | Path):
        yield to
        return
    path = Path(to)
    if path.exists():
        raise ConfigError(f"{path} is there already. Name another file.")
    part = path.with_name(path.name + ".part")
    with _opened(part, "wb", "written") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _opened(path: Path, mode: str, what: str) -> BinaryIO:
    try:
        return cast(BinaryIO, path.open(mode))
    except OSError as error:
        raise ConfigError(f"{path} cannot be {what}: {error.strerror}. Name another file.") from error


@contextmanager
def _writer(target: BinaryIO, format: Format) -> Iterator[Callable[[pa.Table], Any]]:
    if format == "jsonl":
        yield lambda rows: target.writelines(f"{json.dumps(row)}\n".encode() for row in json_rows(rows))
    else:
        with pq.ParquetWriter(target, KEPT, compression="zstd") as writer:
            yield writer.write_table


def _whole(store: Store, ids: Sequence[str]) -> pa.Table:
    """KEPT of these letters."""
    letters = store.letters(Selection(ids=tuple(ids), limit=None))
    past: dict[str, list[dict[str, Any]]] = {}
    for entry in store.history(*ids).to_pylist():
        past.setdefault(entry.pop("letter_id"), []).append(entry)
    own = pa.array([past.get(i, []) for i in letters["id"].to_pylist()], KEPT.field("history").type)
    return letters.append_column("history", own).select(KEPT.names).cast(KEPT)


def _guessed(name: object) -> Format:
    return "parquet" if str(name).endswith(".parquet") else "jsonl"


@dataclass
class Imported:
    """What became of the letters of a file."""

    read: int = 0
    imported: int = 0
    duplicates: int = 0  # of those: their key is decided here
    existing: int = 0  # left alone; so is a letter that the file has twice
    by_kind: dict[str, int] = field(default_factory=dict)  # of those that came in
    dry_run: bool = False


def import_(store: Store, path: Path, who: Who, accept_keys: bool, dry_run: bool, on_progress: Progress) -> Imported:
    """See `DeadLetters.import_`.

    Crash: each portion is done or not; a second call leaves alone what came in.
    """
    _check_file(store, path, accept_keys)
    done = Imported(dry_run=dry_run)
    try:
        _import(store, path, who, done, on_progress)
    except Exception as error:
        if done.imported and not dry_run:
            error.add_note(f"{done.imported} letters of {path} came in before that. A second call leaves them alone and goes on.")
        raise
    return done


def _check_file(store: Store, path: Path, accept_keys: bool) -> None:
    """Read the file once before anything of it comes in. Raises ConfigError that names the letter and its column."""
    consumers, heads = set(store.consumers()), dict[str, Head]()
    for rows in _read(path):
        for name in dict.fromkeys(rows["consumer"].to_pylist()):
            if name not in consumers:
                raise ConfigError(f"There is no consumer {name!r} in this store, whose letters are in {path}. Start it once, on any batch.")
            heads[name] = heads.get(name) or store.head(name)
        if not accept_keys:
            _check_keys(rows, heads, path)


def _check_keys(rows: pa.Table, heads: Mapping[str, Head], path: Path) -> None:
    for letter in rows.drop_columns(["body", "stack", "extras"]).to_pylist():
        try:
            letter_proof.check_keys(letter, letter["history"] or (), heads[letter["consumer"]])
        except letter_proof.Unproven as error:
            raise ConfigError(
                f"{path}, letter {letter['id']}, {error}. It would hold a key that nobody can see, and events that have it would pass for "
                "duplicates. Nothing was imported. If you trust this file, reserve its keys as they are: --accept-keys."
            ) from error


def _import(store: Store, path: Path, who: Who, done: Imported, on_progress: Progress) -> None:
    for rows in _read(path):
        for name in dict.fromkeys(rows["consumer"].to_pylist()):
            portion = rows.filter(pc.equal(rows["consumer"], name))
            _count(done, portion, with_replanning(lambda: _take_in(store, name, _distinct(portion), who, done.dry_run)))  # noqa: B023
        done.read += rows.num_rows
        on_progress(done.read, done.read)


def _count(done: Imported, portion: pa.Table, plan: Plan) -> None:
    came = sum(plan.kinds.values())
    done.imported += came
    done.existing += portion.num_rows - came
    done.duplicates += len(plan.skipped.get("duplicates", ()))
    for kind, count in plan.kinds.items():
        done.by_kind[kind] = done.by_kind.get(kind, 0) + count


def _take_in(store: Store, consumer: str, portion: pa.Table, who: Who, dry_run: bool) -> Plan:
    """Plan these letters of one consumer and, unless it is a dry run, put them into the store.

    Crash: all of them are there, or none.
    """
    with store.begin_letters(consumer) as transaction:
        there = store.letters(Selection(ids=tuple(portion["id"].to_pylist()), limit=None), ["id"])["id"].combine_chunks()
        new = portion.filter(pc.invert(pc.is_in(portion["id"], value_set=there)))
        if not new.num_rows:
            return Plan()
        letters, past = new.drop_columns(["history"]), _past(new)
        keys = itertools.chain.from_iterable(letter_plans.held(letters, past).values())
        plan = letter_plans.take_in(letters, past, known(store, consumer, keys, transaction), who)
        if not dry_run:
            commit(store, transaction, plan)
    return plan


def _past(rows: pa.Table) -> pa.Table:
    """HISTORY of letters as a file has them."""
    pairs = zip(rows["id"].to_pylist(), rows["history"].to_pylist(), strict=True)
    return pa.Table.from_pylist([{**entry, "letter_id": i, "reserved": 0} for i, past in pairs for entry in past or ()], schema=HISTORY)


def _distinct(rows: pa.Table) -> pa.Table:
    """Each letter once, in position order."""
    numbered = rows.append_column("row", pa.array(range(rows.num_rows), pa.int64()))
    firsts = numbered.group_by("id").aggregate([("row", "min")])["row_min"]
    return rows.take(firsts).sort_by([(name, "ascending") for name in PLACE])


def _read(path: Path) -> Iterator[pa.Table]:
    """KEPT, in portions. Raises ConfigError for a file that `export` did not write."""
    if not path.exists():
        raise ConfigError(f"There is no file {path}.")
    with _opened(path, "rb", "read") as file:
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        yield from _read_parquet(path, file) if is_parquet else _read_lines(path, file)


def _read_parquet(path: Path, file: BinaryIO) -> Iterator[pa.Table]:
    try:
        source = pq.ParquetFile(file)
        for number in range(source.num_row_groups):
            rows = source.read_row_group(number)
            missing = [f.name for f in KEPT if f.name not in rows.column_names]
            if missing:
                raise ConfigError(f"{path} is not an export of dead letters: it has no {', '.join(missing)}.")
            yield _checked(rows.select(KEPT.names).cast(KEPT))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} is not an export of dead letters: {error}") from error


def _read_lines(path: Path, file: Iterable[bytes]) -> Iterator[pa.Table]:
    lines: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(file, 1):
        if line.strip():
            lines.append((number, line))
            size += len(line)
        if len(lines) == PORTION or size > PORTION_BYTES:
            yield _parsed(path, lines)
            lines, size = [], 0
    if lines:
        yield _parsed(path, lines)


def _parsed(path: Path, lines: Sequence[tuple[int, bytes]]) -> pa.Table:
    try:
        return _checked(from_json([json.loads(line) for _, line in lines], KEPT))
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, pa.ArrowException) as error:
        if len(lines) == 1:
            raise ConfigError(f"{path}, line {lines[0][0]}: not a dead letter: {error}") from error
        return pa.concat_tables(_parsed(path, [line]) for line in lines)


def _checked(rows: pa.Table) -> pa.Table:
    """The rows, as they are. Raises ValueError where one says what no letter says."""
    actions = pc.list_flatten(rows["history"]).combine_chunks()
    said = {"kind": (rows["kind"], Kind), "status": (rows["status"], Status), "action": (pc.struct_field(actions, "action"), Action)}
    for name, (values, there) in said.items():
        if strange := set(pc.unique(values).to_pylist()) - {*there}:
            raise ValueError(f"{name} {sorted(map(str, strange))[0]!r}")
    if not pc.all(pc.match_substring_regex(rows["id"], "^[0-9a-f]{32}$")).as_py():
        raise ValueError("an id that is not 32 hex digits")
    if pc.any(pc.and_(rows["holds_key"], pc.is_null(rows["key"]))).as_py():
        raise ValueError("a letter that holds a key and has none")
    for letter in rows.drop_columns(["history", "stack", "properties"]).to_pylist():
        try:
            letter_proof.check_itself(letter)
        except letter_proof.Unproven as error:
            raise ValueError(f"letter {letter['id']}, {error}") from error
    return rows
