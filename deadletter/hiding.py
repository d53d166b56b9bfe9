"""What a letter stores of its event under `FailurePolicy(redact=)`: masked for good, or sealed so that whoever has the key can open it.

Letters are hidden once, before anything of them is written: the store, the copies of `letters_to=` and exported files get the same rows.
A letter says itself what is hidden: its `extras` have the column MARK. Nobody runs a handler on such a letter: a sealed one is opened
first, and of a masked one the event is read from the log again. Keys, hashes and the fingerprint are computed before, and stay as they are.
Pure, but for the user's functions. Called by core/letters.py, which makes letters, and by reprocessing/.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint import given
from checkpoint.errors import Refused, SealUnavailable
from deadletter.failure import Failure, clean
from deadletter.letter import LETTERS, PROPERTIES, Kind, extras_of
from deadletter.masks import HIDDEN, Contents

log = logging.getLogger("dedup")

MARK, SEALED = "_dedup_redaction", "_dedup_sealed"
"""Columns of a letter's `extras`: what is hidden, as JSON; and headers and other columns, sealed."""

MASKED = "masked"
"""What the mark says of a letter whose event has to be read from the log again. Else it is "sealed"."""

SEALED_TEXT = "sealed:"
"""What the error message of a letter or of its history begins with where base64 of a sealed text follows."""

REJECTION = "rejected by the handler; its reason is hidden by redact="

BODY, REST, TEXTS = "body", "rest", "texts"

_CONTENTS = ("id", "consumer", "source", "topic", "body", "body_sha256", "properties", "extras")
_CHANGED = pa.struct([LETTERS.field(name) for name in ("body", "body_sha256", "properties", "extras")])
TOLD = ("reason", "error_message", "stack")
"""Texts of a letter that may quote its event; the last two are those of its history."""

_WHY_BYTES = 500


@dataclass(frozen=True)
class LetterPart:
    """A part of a letter, as what seals it is told: a seal can be bound to it, so that no part opens in the place of another one."""

    letter: str
    """The letter's id."""
    consumer: str
    """The consumer's name."""
    part: str
    """"body", "rest" (headers and other columns) or "texts" (of the error)."""
    source: str = ""
    """The event's broker."""
    topic: str = ""
    """The event's topic."""

    @property
    def bound(self) -> bytes:
        """What never changes of it: bytes to authenticate with the sealed ones."""
        return json.dumps([self.consumer, self.letter, self.part]).encode()


class Sealing(Protocol):
    """What hides contents so that they can be had again. Has to be picklable for handlers that run in Spark's tasks."""

    def seal(self, data: bytes, of: LetterPart) -> bytes:
        """Return the bytes to store. Whatever it raises is an outage: the batch is tried again, and nothing of it is stored."""

    def open(self, sealed: bytes, of: LetterPart) -> bytes:
        """Return what `seal` was given. Whatever it raises leaves the letter as it is."""


Redact: TypeAlias = Sealing | Callable[[Contents], Contents]
"""What `FailurePolicy(redact=)` takes: `Encrypt`, or another object with `seal` and `open`; `Mask`, or another function of `Contents`."""


def is_sealing(value: object) -> bool:
    """Whether it has `seal` and `open`."""
    return callable(getattr(value, "seal", None)) and callable(getattr(value, "open", None))


def is_redact(value: object) -> bool:
    """Whether it may be given as `redact=`."""
    return not isinstance(value, type) and (is_sealing(value) or given.takes(value, 1))


def keeps_texts(redact: Redact | None) -> bool:
    """Whether texts of errors are stored as they are."""
    return redact is None or getattr(redact, "texts", "hide") == "keep"


def hide(letters: pa.Table, plain: pa.Table, redact: Redact) -> pa.Table:
    """LETTERS as they are to be stored.

    Args:
        letters: LETTERS with the contents of their events.
        plain: the same letters, their texts without values of the event.

    Raises:
        SealUnavailable: a part could not be sealed.
    """
    rows = letters.select(_CONTENTS).to_pylist()
    kept = pa.Table.from_struct_array(pa.array([_hidden(row, redact) for row in rows], _CHANGED))
    columns = {name: kept[name] for name in kept.column_names}
    if not keeps_texts(redact):
        pairs = zip(rows, letters.select(TOLD).to_pylist(), plain.select(TOLD).to_pylist(), strict=True)
        told = [hide_texts(part_of(row, TEXTS), said, bare, redact) for row, said, bare in pairs]
        columns |= {name: pa.array([one[name] for one in told], pa.string()) for name in TOLD}
    return pa.table([columns.get(name, letters[name]) for name in LETTERS.names], schema=LETTERS)


def hide_history(past: pa.Table, plain: pa.Table, letters: pa.Table, redact: Redact) -> pa.Table:
    """HISTORY of these letters as it is to be stored; `plain` has the same rows, their texts without values of the event."""
    if keeps_texts(redact) or not past.num_rows:
        return past
    parts = {row["id"]: part_of(row, TEXTS) for row in letters.select(_CONTENTS[:4]).to_pylist()}
    rows = zip(past.to_pylist(), plain.to_pylist(), strict=True)
    told = [{**row, **hide_texts(parts[row["letter_id"]], texts_of(row), texts_of(bare), redact)} for row, bare in rows]
    return pa.Table.from_pylist(told, schema=past.schema)


def texts_of(row: Mapping[str, Any]) -> dict[str, str | None]:
    """What a row of HISTORY tells of an error."""
    return {name: row.get(name) for name in TOLD[1:]}


def part_of(row: Mapping[str, Any], part: str) -> LetterPart:
    """A part of the letter of this row, which has id, consumer, source and topic."""
    return LetterPart(row["id"], row["consumer"], part, row["source"], row["topic"])


def without_values(failure: Failure) -> Failure:
    """The failure without what its text says: its type, its place and its fingerprint stay."""
    if failure.kind == Kind.CRASHED:  # the text is ours
        return failure
    where = f"at {failure.place}, " if failure.place else ""
    return replace(failure, message=f"{where}its text is hidden by redact=", stack="")


def hide_texts(
    part: LetterPart, said: Mapping[str, str | None], plain: Mapping[str, str | None], redact: Redact | None
) -> dict[str, str | None]:
    """The texts of one failure as they are to be stored.

    Args:
        said: reason (or without it), error_message and stack.
        plain: the same without values of the event.
    """
    if redact is None or keeps_texts(redact) or dict(said) == dict(plain):
        return dict(said)
    stored: dict[str, str | None] = {**plain, "stack": None}
    if is_sealing(redact):
        sealed = _sealed(cast(Sealing, redact), json.dumps(dict(said)).encode(), part)
        stored["error_message"] = SEALED_TEXT + base64.b64encode(sealed).decode()
    return stored


def _hidden(row: Mapping[str, Any], redact: Redact) -> dict[str, Any]:
    return _seal_row(row, cast(Sealing, redact)) if is_sealing(redact) else _mask_row(row, cast(Callable[[Contents], Contents], redact))


def _seal_row(row: Mapping[str, Any], sealing: Sealing) -> dict[str, Any]:
    body, sealed = row["body"], None
    if row["properties"] or row["extras"]:
        rest = pa.table({"properties": pa.array([row["properties"]], PROPERTIES), "extras": pa.array([row["extras"]], pa.binary())})
        sealed = _sealed(sealing, extras_of(rest), part_of(row, REST))
    return {
        "body": None if body is None else _sealed(sealing, body, part_of(row, BODY)),
        "body_sha256": row["body_sha256"],
        "properties": None,
        "extras": extras_of(pa.table({MARK: [json.dumps({"how": "sealed"})], SEALED: pa.array([sealed], pa.binary())})),
    }


def _sealed(sealing: Sealing, data: bytes, of: LetterPart) -> bytes:
    try:
        found = sealing.seal(data, of)
    except MemoryError:
        raise
    except Exception as error:
        raise SealUnavailable(_unsealed(of, f"{type(error).__name__}: {clean(str(error), _WHY_BYTES)}")) from error
    if not isinstance(found, bytes) or found == data:
        raise SealUnavailable(_unsealed(of, f"seal returned {'its argument' if found == data else type(found).__name__}, not sealed bytes"))
    return found


def _unsealed(of: LetterPart, why: str) -> str:
    return (
        f"Consumer {of.consumer!r}: the {of.part} of dead letter {of.letter[:12]} cannot be sealed (FailurePolicy(redact=)): {why}. "
        "Nothing was stored: the letter and what belongs to its transaction."
    )


def _mask_row(row: Mapping[str, Any], mask: Callable[[Contents], Contents]) -> dict[str, Any]:
    kept, others = {name: row[name] for name in _CHANGED.names}, _others(row["extras"])
    before = _contents(row, others)
    after = _masked(before, mask, row)
    parts = [*_changed_parts(before, after)]
    if not parts:
        return kept
    columns = {name: others[name] if f"columns.{name}" not in parts else _one(after.columns.get(name)) for name in others}
    return {
        "body": after.body,
        "body_sha256": row["body_sha256"] or digest(row["body"]),
        "properties": [{"key": name, "value": value} for name, value in after.headers] if row["properties"] is not None else None,
        "extras": extras_of(pa.table({**columns, MARK: [json.dumps({"how": MASKED, "parts": parts})]})),
    }


def digest(body: bytes | None) -> bytes:
    """SHA-256 of a whole body, by which the event is known that the log gives again."""
    return hashlib.sha256(body or b"").digest()


def _others(extras: bytes | None) -> dict[str, pa.ChunkedArray]:
    if not extras:
        return {}
    found = pa.ipc.open_stream(extras).read_all()
    return dict(zip(found.column_names, found.columns, strict=True))


def _contents(row: Mapping[str, Any], others: Mapping[str, pa.ChunkedArray]) -> Contents:
    headers = tuple((header["key"], header["value"]) for header in row["properties"] or ())
    return Contents(row["body"], headers, {name: _value(column) for name, column in others.items()})


def _value(column: pa.ChunkedArray) -> Any:
    try:
        return column[0].as_py()
    except (ValueError, OverflowError, ImportError):  # nanoseconds, times that Python has not
        return str(column[0])


def _masked(before: Contents, mask: Callable[[Contents], Contents], row: Mapping[str, Any]) -> Contents:
    """What the user's function leaves; nothing where it fails: an event that it does not understand is stored by its digest alone."""
    try:
        return _checked(mask(before), before)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  the user's function; its text may quote the event
        named = f"{row['consumer']}: redact= raised %s for dead letter {row['id']}: the letter keeps nothing of its event but the digest"
        log.error(named, type(error).__name__)
        return before.hidden()


def _checked(after: Contents, before: Contents) -> Contents:
    """Raises TypeError for what is no Contents of this event."""
    pairs_fit = all(isinstance(name, str) and isinstance(value, bytes | None) for name, value in after.headers)
    if not (isinstance(after, Contents) and isinstance(after.body, bytes | None) and pairs_fit and isinstance(after.columns, Mapping)):
        raise TypeError("no Contents")
    emptied = after.body is None and before.body is not None
    return replace(after, body=HIDDEN.encode()) if emptied else after


def _changed_parts(before: Contents, after: Contents) -> Iterator[str]:
    """Names of what was masked: body, headers, columns.NAME."""
    if after.body != before.body:
        yield "body"
    if tuple(after.headers) != before.headers:
        yield "headers"
    for name, value in before.columns.items():
        kept = after.columns.get(name)
        if kept is not value and (type(kept) is not type(value) or kept != value):
            yield f"columns.{name}"


def _one(value: Any) -> pa.Array:
    try:
        return pa.array([value])
    except (pa.ArrowException, TypeError, OverflowError):
        return pa.array([HIDDEN])


@dataclass(frozen=True)
class HiddenMark:
    """What a letter says of what it hides."""

    masked: tuple[str, ...]  # names of parts; empty where the letter is sealed
    others: Mapping[str, pa.ChunkedArray]  # the input's other columns as far as they are kept
    sealed: bytes | None  # headers and other columns

    @property
    def how(self) -> str:
        """Whether it is masked or sealed, in that word."""
        return MASKED if self.masked else "sealed"


def mark_of(extras: bytes | None) -> HiddenMark | None:
    """The mark in a letter's `extras`; None for a letter that hides nothing."""
    if not extras or MARK.encode() not in extras:
        return None
    found = _others(extras)
    if MARK not in found:
        return None
    said, sealed = json.loads(found.pop(MARK)[0].as_py()), found.pop(SEALED, None)
    return HiddenMark(tuple(said.get("parts", ())), found, None if sealed is None else sealed[0].as_py())


def marks(letters: pa.Table) -> dict[int, HiddenMark]:
    """Row -> its mark, of those letters that hide something."""
    maybe = pc.fill_null(pc.match_substring(letters["extras"], MARK.encode()), False).to_pylist()
    found = {row: mark_of(letters["extras"][row].as_py()) for row, it in enumerate(maybe) if it}
    return {row: mark for row, mark in found.items() if mark is not None}


def open_letters(letters: pa.Table, redact: Redact | None, leave: Collection[str] = ()) -> tuple[pa.Table, dict[str, str]]:
    """These letters, sealed ones with the body, headers and other columns of their events. Their texts stay as they are.

    Args:
        leave: ids of letters that need no opening.

    Returns:
        The letters without those that cannot be opened; and why, by id.
    """
    why, changes = dict[str, str](), dict[int, dict[str, Any]]()
    for row, mark in marks(letters).items():
        letter = letters.slice(row, 1).to_pylist()[0]
        if mark.masked or letter["id"] in leave:
            continue
        try:
            changes[row] = opened(letter, mark, redact)
        except Refused as error:
            why[letter["id"]] = str(error)
    closed = pc.is_in(letters["id"], value_set=pa.array(list(why), pa.string()))
    return with_contents(letters, changes).filter(pc.invert(closed)), why


def with_contents(letters: pa.Table, changes: Mapping[int, Mapping[str, Any]]) -> pa.Table:
    """These letters with other contents: row -> body, properties and extras."""
    for name in ("body", "properties", "extras") if changes else ():
        values = letters[name].to_pylist()
        for row, change in changes.items():
            values[row] = change[name]
        place = letters.schema.get_field_index(name)
        letters = letters.set_column(place, letters.schema.field(name), pa.array(values, letters.schema.field(name).type))
    return letters


def opened(letter: Mapping[str, Any], mark: HiddenMark, redact: Redact | None) -> dict[str, Any]:
    """Body, properties and extras of a sealed letter, as the event had them. Raises Refused where they cannot be had."""
    body, rest = letter["body"], dict[str, Any](properties=None, extras=None)
    whole = None if body is None else unseal(body, part_of(letter, BODY), redact)
    if mark.sealed is not None:
        (rest,) = pa.ipc.open_stream(unseal(mark.sealed, part_of(letter, REST), redact)).read_all().to_pylist()
    return {"body": whole, **rest}


def unseal(sealed: bytes, of: LetterPart, redact: Redact | None) -> bytes:
    """What was sealed. Raises Refused, which says what is missing."""
    letter = "The letter is sealed"
    if redact is None or not is_sealing(redact):
        raise Refused(f"{letter}, and nothing opens it: give what sealed it as FailurePolicy(redact=). Nothing was changed.")
    try:
        found = cast(Sealing, redact).open(sealed, of)
    except MemoryError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {clean(str(error), _WHY_BYTES)}".rstrip(".: ")
        raise Refused(f"{letter}, and cannot be opened: {why}. Nothing was changed.") from error
    if not isinstance(found, bytes):
        raise Refused(f"{letter}, and open of redact= returned {type(found).__name__} in place of bytes. Nothing was changed.")
    return found


def open_texts(row: Mapping[str, Any], of: LetterPart, redact: Redact) -> dict[str, Any]:
    """This row of LETTERS or HISTORY with what its error said, where that is sealed. Raises Refused where it cannot be opened."""
    said = row["error_message"]
    if said is None or not said.startswith(SEALED_TEXT) or not is_sealing(redact):
        return dict(row)
    found = json.loads(unseal(base64.b64decode(said.removeprefix(SEALED_TEXT)), replace(of, part=TEXTS), redact))
    return {**row, **{name: value for name, value in found.items() if name in row}}


def seal_body(letter: Mapping[str, Any], body: bytes, redact: Redact) -> bytes:
    """A new body of a sealed letter, as it is to be stored. Raises SealUnavailable."""
    return _sealed(cast(Sealing, redact), body, part_of(letter, BODY))


def unmasked(letter: Mapping[str, Any], mark: HiddenMark, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Body, properties and extras of a masked letter's event: what is masked comes from the log, the other parts are the letter's own.

    Args:
        whole: body, properties and columns (name -> array of one value) of the event as the log has it.

    Raises:
        Refused: a column is masked that the log reader does not give.
    """
    columns: dict[str, Any] = dict(mark.others)
    for name in (part.removeprefix("columns.") for part in mark.masked if part.startswith("columns.")):
        if name not in whole["columns"]:
            raise Refused(f"Its column {name!r} is masked, and the log reader gives no such column.")
        columns[name] = whole["columns"][name]
    return {
        "body": whole["body"],
        "properties": whole["properties"] if "headers" in mark.masked else letter["properties"],
        "extras": extras_of(pa.table(columns)) if columns else None,
    }


def refuse_hidden(letters: pa.Table) -> None:
    """Raise Refused where a letter still hides something: no handler gets a mask, or sealed bytes, in place of an event."""
    found = marks(letters)
    for row, mark in found.items():
        raise Refused(f"Letter {letters['id'][row].as_py()} is {mark.how}: no handler can run on what it keeps. Leave it out.")


def own_columns(names: Sequence[str]) -> list[str]:
    """These columns of a letter's `extras` without those that say what is hidden."""
    return [name for name in names if name not in (MARK, SEALED)] if MARK in names else list(names)
