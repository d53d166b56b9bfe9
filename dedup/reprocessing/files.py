"""Letters in files: JSON lines or Parquet, exact bytes, with their history, in bounded memory.

What is read is judged before any of it is imported: ids are of positions, keys of what people read, and other columns replace none of
an event's own. A file may be damaged, or made by somebody who wants to hold keys or to change events. Called by dead_letters.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from checkpoint.errors import ConfigError, Refused
from checkpoint.head import Head
from deadletter import hiding, plans
from deadletter.json_rows import from_json, json_rows
from deadletter.letter import ERASED, HISTORY, LETTERS, Action, Kind, Status, letter_id
from deadletter.outage import with_replanning
from deadletter.plans import Plan, Who
from deadletter.selection import Selection
from deadletter.work import PORTION, PORTION_BYTES, Progress, commit, known, listed, portions
from dedup.core import keys
from dedup.core.envelope import ENVELOPE
from dedup.core.store import Store
from dedup.reprocessing.whole_file import whole_file

Format = Literal["jsonl", "parquet"]

_PAST = [f for f in HISTORY if f.name not in ("letter_id", "reserved")]

KEPT = pa.schema([*LETTERS, pa.field("duplicates", pa.int64(), nullable=False), pa.field("history", pa.list_(pa.struct(_PAST)))])
"""Columns of a file. What a letter's history reserved is of the store it was in, and stays there."""

PLACE = ("source", "topic", "incarnation", "partition", "sequence_number", "part", "id")
"""Position order within a consumer."""

TRIES = 10_000
"""Ways to read a text as the parts of a key that are tried."""

LIVES = 1_000
"""Lives of a consumer that are looked through for the one in which a key was computed."""

SETTLED = (Status.REPROCESSED, Status.DUPLICATE, Status.LOST)
"""Statuses of letters that hold no key any more."""

OWN_COLUMNS = frozenset(name.lower() for name in (*ENVELOPE.names, *keys.HIDDEN))
"""What a letter's other columns cannot be named, in any case: they would stand in for those of the event itself.

`data` is not among them: it is the input's own where the consumer has no decode=, which no file says. What runs the letter asks.
"""

Parts = Sequence[bytes | None]


def export(store: Store, selection: Selection, to: str | Path | BinaryIO, format: Format | None, on_progress: Progress) -> int:
    """See `DeadLetters.export`.

    Raises StoreRestored or PublicationStuck where letters may be missing: a file looks whole. Raises ConfigError for a name that ends like
    files of another format.

    Crash: the file is there, whole, or not there.
    """
    format = format or _guessed(to)
    for consumer in store.consumers() if selection.consumer is None else [selection.consumer]:
        store.require_letters(consumer)
    letters, seen = listed(store, selection), 0
    with _target(to) as target, _writer(target, format) as write:
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
    with whole_file(path) as file:
        yield file


def _opened(path: Path) -> BinaryIO:
    """The open file, to be read. Raises ConfigError, which names it."""
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Name another file.") from error


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


_OTHERS = (".csv", ".tsv", ".txt", ".xlsx", ".avro", ".orc")
"""Endings of files of another format, which somebody else would read as such."""


def _guessed(name: object) -> Format:
    if str(name).lower().endswith(_OTHERS):
        raise ConfigError(f"{name} does not end in .jsonl or .parquet, the formats of exported letters. Rename it, or say --format jsonl.")
    return "parquet" if str(name).lower().endswith(".parquet") else "jsonl"


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
            check_keys(letter, letter["history"] or (), heads[letter["consumer"]])
        except Unproven as error:
            raise Refused(
                f"{path}, letter {letter['id']}, {error}. It would hold a key that its text does not show, and events with this key would "
                "count as duplicates. Nothing was imported. If you trust this file, reserve its keys as they are: --accept-keys."
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
        keys = itertools.chain.from_iterable(plans.held(letters, past).values())
        plan = plans.take_in(letters, past, known(store, consumer, keys, transaction), who)
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
    with _opened(path) as file:
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
            check_itself(letter)
        except Unproven as error:
            raise ValueError(f"letter {letter['id']}, {error}") from error
    return rows


class Unproven(ValueError):
    """A column says what does not follow from the others."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"column {column}: {why}")


def check_itself(letter: Mapping[str, Any]) -> None:
    """Check what a letter tells about itself, whatever store it comes into.

    Raises:
        Unproven: it is damaged or made up.
    """
    if letter["kind"] == Kind.UNSENT:
        raise Unproven("kind", "UNSENT letters are messages of an outbox, which no export has")
    if letter["reason"] == ERASED and letter["status"] in plans.WAITING_STATUSES:
        raise Unproven("status", "its contents were erased: nothing is left that could be run")
    if letter["holds_key"] and letter["status"] in SETTLED:
        raise Unproven("holds_key", f"a letter that is {letter['status']} holds no key")
    _check_id(letter)
    if letter["extras"]:
        _check_extras(letter["extras"])
    mark = _mark(letter["extras"])
    if mark is None:
        _check_body(letter)
    elif mark.masked and letter["body_sha256"] is None:
        raise Unproven("body_sha256", "the letter is masked, and has no digest by which its event could be known")


def _check_id(letter: Mapping[str, Any]) -> None:
    if letter["sequence_number"] < 0:  # key-only: it follows from its delivery, and from the key and the decision of then
        return
    names = ("consumer", "generation", "source", "topic", "incarnation", "partition", "sequence_number", "part")
    if letter["id"] != letter_id(*(letter[name] for name in names)):
        raise Unproven("id", "it is not the id of the letter's position")


def _check_body(letter: Mapping[str, Any]) -> None:
    body, size, digest = letter["body"], letter["body_size"], letter["body_sha256"]
    if (body is None) != (size is None) or (size is not None and size < len(body)):
        raise Unproven("body_size", f"it is {size}, and the body has {None if body is None else len(body)} bytes")
    if digest is None and body is not None and size != len(body):
        raise Unproven("body_size", f"it is {size}, and the body, which is said to be whole, has {len(body)} bytes")
    if digest is not None and len(digest) != 32:
        raise Unproven("body_sha256", f"it has {len(digest)} bytes, and a SHA-256 has 32")


def _check_extras(extras: bytes) -> None:
    """Raise Unproven for other columns that are no Arrow stream of one row, or have names that belong to the event."""
    refuse_own(hiding.own_columns(one_row(extras).column_names))


def one_row(extras: bytes) -> pa.Table:
    """A letter's other columns. Raises Unproven where they are no Arrow stream of one row: their values would be those of other events."""
    try:
        found = pa.ipc.open_stream(extras).read_all()
        found.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise Unproven("extras", f"it is no Arrow stream: {error}") from error
    if found.num_rows != 1:
        raise Unproven("extras", f"it has {found.num_rows} rows instead of one")
    return found


def _mark(extras: bytes | None) -> hiding.HiddenMark | None:
    """What a letter says of what it hides. Raises Unproven where that cannot be read."""
    try:
        return hiding.mark_of(extras)
    except (ValueError, TypeError, AttributeError) as error:
        raise Unproven("extras", "it says in an unknown form what the letter hides") from error


def refuse_own(names: Sequence[str]) -> None:
    """Raise Unproven where one of a letter's other columns would stand in for a column of the event itself, or two have one name."""
    own = sorted(name for name in names if name.lower() in OWN_COLUMNS)
    if own:
        raise Unproven("extras", f"it has columns that belong to the event itself: {', '.join(own)}")
    lower = [name.lower() for name in names]
    twice = sorted({name for name in lower if lower.count(name) > 1})
    if twice:
        raise Unproven("extras", f"it has several columns of one name: {', '.join(twice)}")


def check_keys(letter: Mapping[str, Any], past: Iterable[Mapping[str, Any]], head: Head) -> None:
    """Check that the keys and the sequence of a letter are those that its readable columns tell, by the settings of the consumer here.

    Args:
        past: its history.

    Raises:
        Unproven: one is another, or cannot be computed from what the letter has: its text is cut, or contains what text cannot show.
    """
    settings = head.settings or {}
    proven: set[bytes | None] = {None}
    if letter["key"] is not None:
        _check_key("key", letter["key"], letter["idempotence_key"], letter, settings)
        proven.add(letter["key"])
    for entry in past:
        key, text = entry["key"], entry["idempotence_key"]
        if entry["action"] == Action.EDITED and key not in proven:
            _check_key("history.key", key, text, letter, settings)
            proven.add(key)
    if letter["sequence"] is not None:
        _check_sequence(letter, settings)


def _check_key(column: str, key: bytes, text: str | None, letter: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    place = [letter["source"], letter["topic"]]
    scope = [] if settings.get("key_scope") == "consumer" else _texts(place)
    columns = json.loads(settings.get("key_columns", "[]"))
    numbers = _texts([letter[name] for name in ("incarnation", "partition", "sequence_number", "part")])
    position = numbers if scope else [*_texts(place), *numbers]
    bodies: list[Iterable[bytes]] = [[keys.POSITION_KEY + keys.encode_parts(position)]]
    if not columns:
        bodies.append(keys.USER_KEY + keys.encode_parts([one]) for one in _message_ids(letter))
    bodies.append(keys.USER_KEY + keys.encode_parts(parts) for parts in _readings(text, len(columns) or 1))
    _require(column, key, text, letter, keys.encode_parts(scope), bodies)


def _check_sequence(letter: Mapping[str, Any], settings: Mapping[str, str]) -> None:
    count = len(json.loads(settings.get("sequence_key", "[]")))
    place = keys.encode_parts(_texts([letter[name] for name in keys.SEQUENCE_PLACE]))
    bodies = [(place + keys.encode_parts(parts) for parts in _readings(letter["sequence_key"], count))] if count else []
    _require("sequence", letter["sequence"], letter["sequence_key"], letter, keys.SEQUENCE_KEY, bodies)


def _require(
    column: str, found: bytes, text: str | None, letter: Mapping[str, Any], before: bytes, bodies: Iterable[Iterable[bytes]]
) -> None:
    lives = [life + before for life in lives_of(letter["consumer"], letter["generation"])]
    for body in itertools.chain.from_iterable(bodies):
        if any(hashlib.sha256(life + body).digest()[: keys.KEY_SIZE] == found for life in lives):
            return
    if text is None and (why := _no_text(column, letter)) is not None:
        raise Unproven(column, f"it cannot be checked, because {why}")
    shown = "no readable key" if text is None else f"the readable key {text[:60]!r}"
    why = ", which is cut: it cannot be checked" if text is not None and len(text) >= keys.TEXT_SIZE else ""
    raise Unproven(column, f"it does not follow from {shown}{why}, nor from the position")


def _no_text(column: str, letter: Mapping[str, Any]) -> str | None:
    """Why an export of ours has no readable key there; None where it would have one."""
    if letter["reason"] == ERASED:
        return "`dedup consumer forget` erased the readable key"
    if column == "history.key":
        return "it is the key of a body that an edit replaced, and its text is not kept"
    return None


def lives_of(consumer: str, newest: int) -> list[bytes]:
    """What the keys of each life of a consumer begin with, the newest life first."""
    return [keys.prefix(consumer, life) for life in range(newest, -1, -1)[:LIVES]]


def _texts(values: Iterable[object]) -> list[bytes]:
    return [str(value).encode("utf-8", "surrogatepass") for value in values]


def _message_ids(letter: Mapping[str, Any]) -> list[bytes]:
    pairs = letter["properties"] or ()
    return [pair["value"] for pair in pairs if pair["key"] in keys.MESSAGE_ID_PROPERTIES and pair["value"] is not None][:1]


def _readings(text: str | None, count: int) -> Iterator[Parts]:
    """The parts of a key, as many as `count`, that are shown as this text: joined with `|`, null as nothing, bytes in hex."""
    if text is None or len(text) >= keys.TEXT_SIZE:
        return
    pieces = text.split("|")
    cuts = itertools.combinations(range(1, len(pieces)), count - 1)
    tried = 0
    for cut in cuts:
        bounds = [0, *cut, len(pieces)]
        shown = ["|".join(pieces[a:b]) for a, b in itertools.pairwise(bounds)]
        for parts in itertools.product(*map(values_of, shown)):
            yield parts
            tried += 1
            if tried == TRIES:
                return


def values_of(shown: str) -> list[bytes | None]:
    """The values that one part is shown as."""
    plain: list[bytes | None] = [shown.encode("utf-8", "surrogatepass")]
    return [*plain, None] if not shown else [*plain, *_from_hex(shown)]


def _from_hex(shown: str) -> list[bytes]:
    try:
        found = bytes.fromhex(shown)
    except ValueError:
        return []
    return [found] if found.hex() == shown else []
