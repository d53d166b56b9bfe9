"""The keys of a letter: which ones it holds, and the one that a person gives it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError
from deadletter.letter import Action
from dedup import keys
from dedup.store import KEYS, Head


def edits(history: pa.Table) -> pa.Table:
    """The rows of HISTORY that tell of an edit.

    `key` is what the letter had before it; `idempotence_key` is null but where the edit gave the letter another key.
    """
    return history.filter(pc.equal(history["action"], Action.EDITED.value))


def was_given(history: pa.Table) -> bool:
    """Whether a person gave this letter its key: then it counts, whatever the body says."""
    return bool(edits(history)["idempotence_key"].is_valid().combine_chunks().true_count)


def keys_of(letters: pa.Table, history: pa.Table) -> dict[str, list[bytes]]:
    """Letter id -> its keys: the one it has, and those that edits replaced. While `holds_key` is true, all of them are reserved for it.

    Args:
        history: HISTORY of these letters, or of more.
    """
    found: dict[str, dict[bytes, None]] = defaultdict(dict)
    past = edits(history)
    past = past.filter(pc.is_in(past["letter_id"], value_set=letters["id"].combine_chunks()))
    pairs = [*zip(letters["id"].to_pylist(), letters["key"].to_pylist(), strict=True)]
    pairs += zip(past["letter_id"].to_pylist(), past["key"].to_pylist(), strict=True)
    for letter, key in pairs:
        if key is not None:
            found[letter][key] = None
    return {letter: list(known) for letter, known in found.items()}


def reservations(keys: Sequence[bytes], payload_hashes: Sequence[int]) -> pa.Table:
    """KEYS, each key once, sorted."""
    distinct = dict(zip(keys, payload_hashes, strict=True))
    ordered = sorted(distinct)
    return pa.table([pa.array(ordered, pa.binary(16)), pa.array([distinct[k] for k in ordered], pa.int64())], schema=KEYS)


def given_key(head: Head, letter: Mapping[str, Any], parts: Sequence[str]) -> bytes:
    """The key that an event with these key columns has, at this letter's topic.

    Args:
        parts: one text for each column of `idempotence_key=`; one for a message id.

    Raises:
        ConfigError: the number of parts is not that of the key columns.
    """
    settings = head.settings or {}
    columns = json.loads(settings.get("key_columns", "[]")) or [keys.MESSAGE_ID]
    if len(parts) != len(columns):
        raise ConfigError(f"A key of {head.consumer!r} has {len(columns)} part(s): {', '.join(columns)}. Give each of them, in this order.")
    scope = [] if settings.get("key_scope") == "consumer" else [letter["source"].encode(), letter["topic"].encode()]
    encoded = keys.prefix(head.consumer, head.keyspace) + keys.encode_parts(scope)
    encoded += keys.USER_KEY + keys.encode_parts(part.encode() for part in parts)
    return hashlib.sha256(encoded).digest()[: keys.KEY_SIZE]


def shown(parts: Sequence[str]) -> str:
    """A key as people read it."""
    return "|".join(parts).replace("\x00", "")[: keys.TEXT_SIZE]


def payload_hash(head: Head, letter: Mapping[str, Any], body: bytes | None) -> int:
    """Of the payload that a given key stands for: the new body where the whole body counts, else what the letter has."""
    if body is None or json.loads((head.settings or {}).get("key_payload", "[]")):
        return int(letter["payload_hash"] or 0)
    return int.from_bytes(hashlib.sha256(keys.encode(body)).digest()[:8], "big", signed=True)
