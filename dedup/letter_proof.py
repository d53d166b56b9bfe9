"""Whether letters of a file are what they say: ids are of positions, keys of what people read, and other columns replace none of
an event's own. A file may be damaged, or made by somebody who wants to hold keys or to change events. Pure.

Called by letter_files.py for what it reads, before any of it is imported.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from deadletter.letter import Action, Kind, Status, letter_id
from dedup import keys
from dedup.envelope import ENVELOPE
from dedup.store import Head

TRIES = 10_000
"""Ways to read a text as the parts of a key that are tried."""

LIVES = 1_000
"""Lives of a consumer that are looked through for the one in which a key was computed."""

SETTLED = (Status.REPROCESSED, Status.DUPLICATE, Status.LOST)
"""Statuses of letters that hold no key any more."""

OWN_COLUMNS = frozenset(name.lower() for name in (*ENVELOPE.names, *keys.HIDDEN, "data"))
"""What a letter's other columns cannot be named, in any case: they would stand in for those of the event itself."""

Parts = Sequence[bytes | None]


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
    if letter["holds_key"] and letter["status"] in SETTLED:
        raise Unproven("holds_key", f"a letter that is {letter['status']} holds no key")
    _check_id(letter)
    _check_body(letter)
    if letter["extras"]:
        _check_extras(letter["extras"])


def _check_id(letter: Mapping[str, Any]) -> None:
    if letter["sequence_number"] < 0:  # key-only: it follows from the key that was there when it was parked, or from its delivery
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
    try:
        found = pa.ipc.open_stream(extras).read_all()
        found.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError) as error:
        raise Unproven("extras", f"it is no Arrow stream: {error}") from error
    if found.num_rows != 1:
        raise Unproven("extras", f"it has {found.num_rows} rows instead of one")
    refuse_own(found.column_names)


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
    lives = [keys.prefix(letter["consumer"], life) + before for life in range(letter["generation"], -1, -1)[:LIVES]]
    for body in itertools.chain.from_iterable(bodies):
        if any(hashlib.sha256(life + body).digest()[: keys.KEY_SIZE] == found for life in lives):
            return
    shown = "no readable key" if text is None else f"the readable key {text[:60]!r}"
    why = ", which is cut: it cannot be checked" if text is not None and len(text) >= keys.TEXT_SIZE else ""
    raise Unproven(column, f"it does not follow from {shown}{why}, nor from the position")


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
        for parts in itertools.product(*map(_values, shown)):
            yield parts
            tried += 1
            if tried == TRIES:
                return


def _values(shown: str) -> list[bytes | None]:
    """The values that one part is shown as."""
    plain: list[bytes | None] = [shown.encode("utf-8", "surrogatepass")]
    return [*plain, None] if not shown else [*plain, *_from_hex(shown)]


def _from_hex(shown: str) -> list[bytes]:
    try:
        found = bytes.fromhex(shown)
    except ValueError:
        return []
    return [found] if found.hex() == shown else []
