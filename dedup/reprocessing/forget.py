"""Erase what dedup keeps of one idempotence key: letters that are settled, their history, and messages that have left.

The reservation stays, so a message that comes again is a duplicate. The row of each letter stays, too, without its contents: `verify`
counts it. Work that was not done is not erased: letters that wait and messages that were not sent have to be done, or given up, first.

Messages go before letters: letters say which messages are theirs. Whoever dies in between calls it again. Called by dead_letters.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from checkpoint.errors import ConfigError, Refused, command
from checkpoint.head import Head
from deadletter import plans
from deadletter.letter import is_erased
from deadletter.plans import WAITING_STATUSES, Who
from deadletter.selection import Selection
from deadletter.work import Progress, change, no_progress
from dedup.core import keys
from dedup.core.messages import Chosen, Entry, State
from dedup.core.retention import Remains
from dedup.core.store import Store
from dedup.reprocessing.files import lives_of, values_of

LISTED = ["id", "consumer", "source", "topic", "kind", "status", "reason", "key", "idempotence_key"]

LEFT = (State.SENT, State.DISCARDED)
"""States of messages that nobody sends any more."""

TOLD = 10
"""Letters, and messages, that a refusal names."""

ELSEWHERE = (
    "rows of sinks",
    "the broker's log, and topics that messages were sent to",
    "files that were exported, logs of processes, and Spark's own checkpoint and scratch files",
)
"""Where dedup erases nothing."""


@dataclass(frozen=True)
class ToForget:
    """What is to be forgotten, of one consumer."""

    consumer: str
    key: tuple[str, ...] = ()  # one text for each column of the idempotence key
    letters: tuple[str, ...] = ()  # whole ids: these, and all with the same key
    messages: tuple[int, ...] = ()  # numbers in the outbox that dedup cannot tell by itself


@dataclass
class Forgotten:
    """What was found of a key, what was erased, and what remains. It tells no content."""

    consumer: str
    letters: int = 0  # settled, with contents: erased, or to be erased
    letters_erased_before: int = 0
    letters_skipped: dict[str, int] = field(default_factory=dict)  # why -> how many were left as they are
    examples: dict[str, str] = field(default_factory=dict)  # why -> id of one of those
    messages: int = 0  # sent or discarded: erased, or to be erased
    waiting: list[str] = field(default_factory=list)  # ids of letters that are open or blocked
    unsent: list[int] = field(default_factory=list)  # numbers of messages
    others: list[str] = field(default_factory=list)  # ids of letters that show the same text, and have another key
    remains: list[Remains] = field(default_factory=list)
    elsewhere: tuple[str, ...] = ELSEWHERE
    dry_run: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing of the key waits for somebody."""
        return not (self.waiting or self.unsent or self.letters_skipped)


@dataclass(frozen=True)
class Found:
    """What the store has of the keys."""

    letters: pa.Table  # LISTED
    messages: Sequence[Entry]
    others: Sequence[str]

    @property
    def waiting(self) -> list[str]:
        """Ids of letters that are not settled."""
        rows = zip(ids_of(self.letters), self.letters["status"].to_pylist(), strict=True)
        return [letter for letter, status in rows if status in WAITING_STATUSES]

    @property
    def erased(self) -> int:
        """Letters that were erased before."""
        return int(np.count_nonzero(is_erased(self.letters).to_numpy()))

    @property
    def unsent(self) -> list[int]:
        """Numbers of messages that have not left."""
        return [entry.number for entry in self.messages if entry.state not in LEFT]

    @property
    def sent(self) -> list[int]:
        """Numbers of messages that have left."""
        return [entry.number for entry in self.messages if entry.state in LEFT]

    @property
    def whole(self) -> int:
        """How many of those were not erased."""
        return sum(entry.state in LEFT and not entry.is_erased for entry in self.messages)


def forget(store: Store, asked: ToForget, who: Who, *, dry_run: bool, on_progress: Progress = no_progress) -> Forgotten:
    """See `DeadLetters.forget`.

    Crash: messages are erased or not, and each portion of letters is; a second call goes on.
    """
    if not (asked.key or asked.letters or asked.messages):
        raise ConfigError("Say what to forget: a key, letters, or messages.")
    found = find(store, asked)
    report = Forgotten(asked.consumer, waiting=found.waiting, unsent=found.unsent, others=list(found.others), dry_run=dry_run)
    report.letters_erased_before = found.erased
    if not dry_run:
        if why := refusal(report):
            raise Refused(why)
        _erase(store, asked, found, who, report, on_progress)
    else:
        report.messages, report.letters = found.whole, found.letters.num_rows - found.erased - len(found.waiting)
    report.remains = store.scrub(asked.consumer, dry_run=dry_run)
    return report


def _erase(store: Store, asked: ToForget, found: Found, who: Who, report: Forgotten, on_progress: Progress) -> None:
    if found.sent:
        store.on_step("messages")
        report.messages = store.outbox(asked.consumer).erase(found.sent, by=who.by, reason=who.reason)
    done = change(store, ids_of(found.letters), lambda access: plans.forget(access.letters, who), dry_run=False, on_progress=on_progress)
    report.letters, report.letters_skipped = done.changed, {w: n for w, n in done.skipped.items() if w != plans.ERASED_BEFORE}
    report.examples = {why: done.examples[why] for why in report.letters_skipped}
    # Letters and messages that came meanwhile: whoever asked has to know that they are there.
    again = find(store, replace(asked, messages=()))
    report.waiting, report.unsent = again.waiting, again.unsent


def find(store: Store, asked: ToForget) -> Found:
    """What the store has of the keys that are meant.

    Raises:
        ConfigError: the key has another number of parts; a letter is of another consumer, or there is none; a message is not there.
        Refused: as `key_settings`.
    """
    head, named = store.head(asked.consumer), _letters(store, asked.consumer, asked.letters)
    if strange := sorted(set(asked.letters) - set(named["id"].to_pylist())):
        raise ConfigError(f"{asked.consumer!r} has no letter {strange[0]}. {command('dead-letter', 'list', '--consumer', asked.consumer)}.")
    texts = {*({shown_key(asked.key)} if asked.key else ()), *named["idempotence_key"].drop_null().to_pylist()}
    hashes = sorted(_wanted(head, asked.key, texts, named))
    ids = sorted({*asked.letters, *(id for text in sorted(texts) for id in store.named(asked.consumer, text, hashes))})
    letters = _letters(store, asked.consumer, ids)
    own = plans.keys_of(letters, store.history(*ids)) if ids else {}
    wanted = {key for letter in asked.letters for key in own.get(letter, ())} | _wanted(head, asked.key, texts, letters)
    plain = {text for text in texts if _parts(head, text)}
    rows = zip(ids_of(letters), letters["key"].to_pylist(), letters["idempotence_key"].to_pylist(), strict=True)
    # A letter of a conflict has no hash, because another event has the key: it is known by the text alone, where that is whole.
    mine = {i for i, key, text in rows if i in asked.letters or not wanted.isdisjoint(own.get(i, ())) or (key is None and text in plain)}
    wanted |= {key for letter in mine for key in own.get(letter, ())}
    chosen = letters.filter(pa.array([i in mine for i in ids_of(letters)], pa.bool_()))
    return Found(chosen, _messages(store, asked, sorted(mine), wanted), sorted(set(ids_of(letters)) - mine))


def ids_of(letters: pa.Table) -> list[str]:
    """The ids, in the order of the letters."""
    found: list[str] = letters["id"].to_pylist()
    return found


def _wanted(head: Head, given: Sequence[str], texts: Iterable[str], letters: pa.Table) -> set[bytes]:
    """Hashes of the key that was given, and of those that are shown as these texts, where a text has one reading."""
    keys_of_texts = [tuple(given)] if given else [parts for text in texts if (parts := _parts(head, text))]
    return {key for parts in keys_of_texts for key in keys_named(head, parts, _places(head, letters))}


def key_settings(head: Head) -> Mapping[str, str]:
    """What keys are made of. Raises Refused where no batch has said it since the consumer was made, or reset."""
    if head.settings is None:
        raise Refused(
            f"Consumer {head.consumer!r} has committed no batch since it was made or reset, so nobody knows yet what its keys are made of. "
            "Nothing was changed. Start it, and repeat this after its first batch."
        )
    return head.settings


def _columns(head: Head) -> list[str]:
    found: list[str] = json.loads(key_settings(head).get("key_columns", "[]")) or [keys.MESSAGE_ID]
    return found


def _parts(head: Head, text: str) -> tuple[str, ...] | None:
    """The parts of a key that is shown as this text; None where the text is cut, or has several readings."""
    count, pieces = len(_columns(head)), text.split("|")
    if len(text) >= keys.TEXT_SIZE or count not in (1, len(pieces)):
        return None
    return (text,) if count == 1 else tuple(pieces)


def _letters(store: Store, consumer: str, ids: Sequence[str]) -> pa.Table:
    return store.letters(Selection(consumer, ids=tuple(ids), limit=None), LISTED)


def _messages(store: Store, asked: ToForget, letters: Sequence[str], wanted: Collection[bytes]) -> list[Entry]:
    outbox = store.outbox(asked.consumer)
    numbers = {*asked.messages, *outbox.about(letters, sorted(wanted))}
    found = outbox.entries(Chosen(numbers=tuple(sorted(numbers)), limit=None)) if numbers else []
    if missing := sorted(set(asked.messages) - {entry.number for entry in found}):
        raise ConfigError(f"{asked.consumer!r} has no message {missing[0]}. {command('outbox', 'list', asked.consumer)} shows the numbers.")
    return found


def _places(head: Head, letters: pa.Table) -> set[tuple[str, str]]:
    """Source and topic wherever the consumer has been."""
    there = zip(letters["source"].to_pylist(), letters["topic"].to_pylist(), strict=True)
    return {*((p.source, p.topic) for p in head.checkpoints), *there}


def keys_named(head: Head, parts: Sequence[str], places: Iterable[tuple[str, str]]) -> set[bytes]:
    """The hashes that events with these key columns have or had, in each life of the consumer, at each of these topics.

    Args:
        parts: as letters show them: bytes in hex, null as nothing.

    Raises:
        ConfigError: the number of parts is not that of the key columns. Refused: as `key_settings`.
    """
    settings, columns = key_settings(head), _columns(head)
    if len(parts) != len(columns):
        raise ConfigError(f"A key of {head.consumer!r} has {len(columns)} part(s): {', '.join(columns)}. Give each of them, in this order.")
    whole = settings.get("key_scope") == "consumer"
    scopes = {b""} if whole else {keys.encode_parts([source.encode(), topic.encode()]) for source, topic in places}
    lives = lives_of(head.consumer, head.keyspace)
    bodies = [keys.USER_KEY + keys.encode_parts(values) for values in itertools.product(*map(values_of, parts))]
    return {
        hashlib.sha256(life + scope + body).digest()[: keys.KEY_SIZE]
        for life, scope, body in itertools.product(lives, sorted(scopes), bodies)
    }


def shown_key(parts: Sequence[str]) -> str:
    """A key as letters show it."""
    return "|".join(parts).replace("\x00", "")[: keys.TEXT_SIZE]


def refusal(report: Forgotten) -> str:
    """Why nothing is erased, and what to type first; empty where all work of the key is done."""
    told = "; ".join(_first(report))
    return f"Nothing was erased, because work of this key is not done. {told}." if told else ""


def _first(report: Forgotten) -> Iterable[str]:
    """What has to be done before, one command each."""
    if report.waiting:
        ids, more = [i[:12] for i in report.waiting[:TOLD]], _more(report.waiting)
        yield (
            f"{len(report.waiting)} letters wait: reprocess them, or give them up with "
            f"{command('dead-letter', 'discard', *ids, '--reason', 'to be forgotten', '--yes')}{more}"
        )
    if report.unsent:
        numbers = report.unsent[:TOLD]
        yield (
            f"{len(report.unsent)} messages were not sent: let {command('outbox', 'dispatch', report.consumer)} send them, or give them up "
            f"with {command('outbox', 'discard', report.consumer, *numbers, '--yes')}{_more(report.unsent)}"
        )


def _more(those: Sequence[Any]) -> str:
    return f", and so on for {len(those) - TOLD} more" if len(those) > TOLD else ""
