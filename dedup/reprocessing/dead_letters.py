"""What a person does with dead letters, but for running handlers: look, group, show, discard, reopen, edit, export, import.

The command `dedup dead-letter` is a shell around this. Works while the stream runs, and does not stall it.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from checkpoint.errors import ConfigError, Refused
from checkpoint.head import Head
from deadletter import hiding, plans
from deadletter.letter import HISTORY, Action, Status
from deadletter.plans import BUSY, NOT_THERE, WAITING_STATUSES, Plan, Who, history
from deadletter.selection import Selection
from deadletter.store import KEYS, Change
from deadletter.work import Access, Changed, Progress, Which, change, no_progress
from dedup.core import keys
from dedup.core.store import Store
from dedup.decode import json_bodies
from dedup.reprocessing import files, unsent
from dedup.reprocessing import forget as forgetting
from dedup.reprocessing.files import Format, Imported
from dedup.reprocessing.forget import Forgotten, ToForget
from dedup.reprocessing.outcomes import first_failure

NO_JSON = "the body is not JSON"
"""How the reason of a letter begins whose body the decoder of JSON could not read; before it can stand that the body is too large."""


@dataclass(frozen=True)
class Letter:
    """One dead letter, whole."""

    table: pa.Table  # LETTERS + duplicates, one row
    history: pa.Table  # HISTORY, oldest first, its first failure included

    @property
    def row(self) -> dict[str, Any]:
        """Its columns."""
        return dict(self.table.to_pylist()[0])

    @property
    def text(self) -> str | None:
        """The body as text; None where it is null or no UTF-8."""
        try:
            return None if self.row["body"] is None else self.row["body"].decode()
        except UnicodeDecodeError:
            return None

    @property
    def json(self) -> Any:
        """The body as a JSON value; None where it is none."""
        try:
            return None if self.text is None else json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class DeadLetters:
    """The dead letters of a store.

    A method that changes letters takes a selection (its `limit` counts; the default is the first 100) or whole ids. It works in portions,
    each of which is one transaction. It skips letters whose status does not allow the change, and the result says why. If a person and a
    reprocess change one letter at once, one of them does it, and the other one skips the letter.

    Args:
        store: PostgresStore or DeltaStore.
        redact: what sealed the letters, as `consumer.failure.redact` has it. With it `show` opens them, and `edit` seals a new body.
            Everything else has letters as they are stored.
    """

    def __init__(self, store: Store, redact: hiding.Redact | None = None) -> None:
        self.store, self.redact = store, redact

    def select(self, selection: Selection, columns: Sequence[str] | None = None) -> pa.Table:
        """Letters in position order, those of messages (UNSENT) last: LETTERS and how many later `duplicates` of its key each has stopped.

        Args:
            columns: only these.
        """
        if unsent.is_meant(selection) or (selection.after and unsent.meant_by(self.store, [selection.after], "select")):
            return unsent.letters(self.store, selection, columns)
        events = self.store.letters(selection, columns)
        left = None if selection.limit is None else selection.limit - events.num_rows
        if left == 0:
            return events
        return unsent.joined(events, unsent.letters(self.store, replace(selection, limit=left, after=None), columns))

    def groups(self, selection: Selection | None = None) -> pa.Table:
        """Letters by fingerprint and kind, the largest group first, with first and last failure and an example (GROUPS)."""
        asked = selection or Selection()
        return unsent.largest(self.store.groups(asked), unsent.groups(self.store, asked), asked.limit)

    def show(self, id: str) -> Letter:
        """One letter with its history; opened, where it is sealed and `redact` is there.

        Args:
            id: whole, or the first digits of it.

        Raises:
            ConfigError: no letter begins like that, or more than one.
            Refused: it is sealed, and `redact` cannot open it.
        """
        letter = self.select(Selection(ids=(self.find(id),)))
        (row,) = letter.drop_columns(["body", "extras"]).to_pylist()
        past = self.store.history(row["id"])
        if row["attempts"] and not pc.any(pc.equal(past["action"], Action.FAILED.value)).as_py():
            past = pa.concat_tables([history([first_failure(row)]), past])
        found = Letter(letter, past.sort_by("at"))
        return found if self.redact is None else opened(found, self.redact)

    def find(self, id: str) -> str:
        """The whole id of the one letter whose id begins like that. Raises ConfigError where there is none, or more than one."""
        found = self.select(Selection(id=id, limit=2), ["id"])["id"].to_pylist() if id else []
        if len(found) != 1:
            many = "more than one dead letter begins" if found else "no dead letter begins"
            raise ConfigError(f"{many} with {id!r}. `dedup dead-letter list` shows ids.")
        return str(found[0])

    def discard(
        self, which: Which, *, reason: str, by: str, release_key: bool = False, dry_run: bool = False, on_progress: Progress = no_progress
    ) -> Changed:
        """Give letters up: they are not run again, and letters that wait for them in their sequence are released.

        Args:
            which: letters of messages (kind UNSENT) are meant by that kind, or by their ids, alone.
            release_key: forget the key as well, so that the message counts as new when it comes again. Without it the letter still holds
                its key, and the message is a duplicate.
            dry_run: return what would be done, and change nothing.
            on_progress: called with letters done and letters meant.

        Raises:
            ConfigError: the reason is blank; letters of messages are mixed with others.

        Crash: each portion is done or not; a second call goes on with the others.
        """
        if not reason.strip():
            raise ConfigError("Give a reason: it is kept with the letters.")
        if isinstance(which, Selection) and unsent.is_meant(which):
            return unsent.discard(self.store, which, by=by, reason=reason, dry_run=dry_run)
        if not isinstance(which, Selection) and (messages := unsent.meant_by(self.store, which, "discard")):
            return unsent.discard(self.store, messages, by=by, reason=reason, dry_run=dry_run)
        who = _who(by, reason)

        def plan(access: Access) -> Plan:
            if not release_key:
                return plans.discard(access.letters, HISTORY.empty_table(), (), who, release_key)
            past = access.history(access.letters.filter(access.letters["holds_key"]))
            keys = plans.held(access.letters, past).values()
            return plans.discard(access.letters, past, access.known(k for own in keys for k in own), who, release_key)

        return change(self.store, which, plan, dry_run=dry_run, on_progress=on_progress)

    def reopen(self, which: Which, *, reason: str, by: str, dry_run: bool = False, on_progress: Progress = no_progress) -> Changed:
        """Take discards back: the letters are open again, or blocked if an earlier letter of their sequence is open or blocked.

        A letter that released its key reserves it again; where another event has been decided under it since, it is skipped.

        Raises Refused for messages (UNSENT): who gave one up has done so for good.

        Crash: each portion is done or not; a second call goes on with the others.
        """
        who = _who(by, reason)
        unsent.refuse(self.store, which, "reopen")

        def plan(access: Access) -> Plan:
            free = access.letters.filter(pc.invert(access.letters["holds_key"]))
            past = access.history(free.filter(free["key"].is_valid()))
            keys = plans.released(access.letters, past).values()
            return plans.reopen(access.letters, past, access.known(k for own in keys for k in own), who)

        return change(self.store, which, plan, dry_run=dry_run, on_progress=on_progress)

    def edit(
        self,
        id: str,
        *,
        body: bytes | None = None,
        key: str | Sequence[str] | None = None,
        reason: str,
        by: str,
        accept_any_body: bool = False,
        dry_run: bool = False,
    ) -> Changed:
        """Change the body of an open or blocked letter, or its idempotence key; reprocess then takes it as it is now.

        What was there is kept in the history. After an edit of the body the key is computed from it when the letter is reprocessed; a key
        that is given here counts whatever the body says. The letter holds the old key as well: the original is a duplicate when it comes
        again, also after a purge.

        Args:
            id: whole.
            key: one text for each column of the consumer's `idempotence_key=`.
            accept_any_body: take a body that is no JSON also for a letter whose body is decoded as JSON.

        Raises:
            ConfigError: there is nothing to change, no such letter, one that is settled, the new key is decided already, or the letter's
                body is JSON and the new one is not.
            Refused: the letter is of a message (UNSENT); it is masked, and a new body would be stored as it is; it is sealed, and
                `redact` cannot open and seal it; or a key is given, and the consumer has committed no batch since it was made or reset.

        Crash: the edit is made with its history, or not.
        """
        wanted = Edit(body, (key,) if isinstance(key, str) else None if key is None else tuple(key))
        if wanted == Edit():
            raise ConfigError("Give a new body, a new key, or both.")
        unsent.refuse(self.store, [id], "edit")
        done = change(
            self.store, [id], lambda access: _edit(access, wanted, accept_any_body, _who(by, reason), self.redact), dry_run=dry_run
        )
        for why in (NOT_THERE, BUSY):
            if why in done.skipped:
                raise Refused(f"Letter {id!r} was not edited: {why}.")
        return done

    def forget(
        self,
        consumer: str,
        *,
        key: str | Sequence[str] = (),
        letters: Sequence[str] = (),
        messages: Sequence[int] = (),
        by: str,
        reason: str,
        dry_run: bool = False,
        on_progress: Progress = no_progress,
    ) -> Forgotten:
        """Erase what letters and messages of one idempotence key hold of its events; returns what was erased and what remains.

        Erased are bodies, headers, other columns, errors and readable keys of its letters, the texts of their history, and bodies, keys
        and headers of its messages. Kept are the reservation, and of each letter its position, kind, status, counts and times.

        Args:
            key: one text for each column of the consumer's `idempotence_key=`, as letters show it.
            letters: whole ids: these letters, and all with the same key. For letters that have no key.
            messages: numbers of more messages. dedup knows those of `letters_to=`, and those of `tx.publish` whose ids it made of the key
                (in handlers of events, or with `order=`). It cannot tell others.
            by: who erases, and why (`reason`): both are kept. Do not name the person there.
            dry_run: return what would be done, and change nothing.

        Raises:
            ConfigError: nothing is named, the reason is blank, the key has another number of parts, or a letter or message is not there.
            Refused: letters of the key are open or blocked, or messages of it were not sent; or the consumer has committed no batch since
                it was made or reset, so that keys cannot be computed. Nothing was erased.

        Crash: each portion is erased or not, and who erased it is kept with it; a second call goes on with the others.
        """
        if not reason.strip():
            raise ConfigError("Give a reason: it is kept with the letters.")
        asked = ToForget(consumer, (key,) if isinstance(key, str) else tuple(key), tuple(letters), tuple(messages))
        return forgetting.forget(self.store, asked, _who(by, reason), dry_run=dry_run, on_progress=on_progress)

    def export(
        self, selection: Selection, to: str | Path | BinaryIO, format: Format | None = None, on_progress: Progress = no_progress
    ) -> int:
        """Write letters with their history to a new file; returns how many. Exact bytes, in bounded memory.

        Args:
            to: the file's path, or where to write to.
            format: "jsonl" or "parquet"; by default what the path ends with, else JSON lines.

        Raises:
            ConfigError: the file is there already.
            Refused: letters of messages (UNSENT) are meant.
            StoreRestored, PublicationStuck: letters may be missing, because tables were restored or copied back. What is there can be read
                all the same: by `select`, `groups` and `show`.

        Crash: the file is there, whole, or not there.
        """
        unsent.refuse(self.store, selection, "export")
        return files.export(self.store, selection, to, format, on_progress)

    def import_(
        self,
        path: str | Path,
        *,
        by: str,
        reason: str = "",
        accept_keys: bool = False,
        dry_run: bool = False,
        on_progress: Progress = no_progress,
    ) -> Imported:
        """Put letters back that `export` wrote, under their ids and with their history. Those that are there already are left alone.

        They hold their keys again. A letter whose key is decided here comes in as a DUPLICATE. The whole file is checked before the first
        letter comes in: ids have to be those of their positions, keys and sequences those of their readable columns, and other columns of
        an event (`extras`) cannot have the names of its own.

        Args:
            accept_keys: reserve keys as the file has them. Needed for those of which the readable text is cut, or does not show them whole.

        Raises:
            ConfigError: the file is not one that `export` wrote, or was changed since (the error names line or letter, and column); its
                consumer is not in this store. Nothing was imported.
            StoreError: whatever the store raises. Where letters came in before that, a note on the error says how many.

        Crash: each portion is done or not; a second call goes on with the others.
        """
        who = _who(by, reason or f"imported from {Path(path).name}")
        return files.import_(self.store, Path(path), who, accept_keys, dry_run, on_progress)


def opened(letter: Letter, redact: hiding.Redact) -> Letter:
    """A letter and its history as they were before they were sealed. Raises Refused where they cannot be opened."""
    row, mark = letter.row, hiding.mark_of(letter.row["extras"])
    table = letter.table
    if mark is not None and not mark.masked:
        table = hiding.with_contents(table, {0: hiding.opened(row, mark, redact)})
        row = table.to_pylist()[0]
    part, sealed = hiding.part_of(row, hiding.TEXTS), mark is not None and not mark.masked
    past = [_opened_entry(entry, part, redact, sealed=sealed) for entry in letter.history.to_pylist()]
    return Letter(pa.Table.from_pylist([hiding.open_texts(row, part, redact)], table.schema), pa.Table.from_pylist(past, HISTORY))


def _opened_entry(entry: dict[str, Any], part: hiding.LetterPart, redact: hiding.Redact, *, sealed: bool) -> dict[str, Any]:
    said = hiding.open_texts(entry, part, redact)
    said["reason"] = entry["reason"]  # a person's own
    if sealed and entry["body"] is not None:
        said["body"] = hiding.unseal(entry["body"], replace(part, part=hiding.BODY), redact)
    return said


def _edit(access: Access, wanted: Edit, accept_any_body: bool, who: Who, redact: hiding.Redact | None) -> Plan:
    if not access.letters.num_rows:
        return Plan()
    past, head = access.history(), access.head
    (letter,) = access.letters.to_pylist()
    own = plans.held(access.letters, past).get(letter["id"], [])
    key = [] if wanted.key is None else [given_key(head, letter, wanted.key)]
    _refuse_edit(letter)
    plain, body = _contents_of(letter, wanted.body, redact)
    plan = edit(letter, replace(wanted, stored=body), head, own, access.known(key), who)
    if wanted.body is not None and not accept_any_body:
        _refuse_broken_json(plain, wanted.body)
    return plan


def _contents_of(letter: dict[str, Any], body: bytes | None, redact: hiding.Redact | None) -> tuple[dict[str, Any], bytes | None]:
    """The letter as it was before it was sealed, and the new body as it is to be stored.

    Raises:
        Refused: the body would be stored as it is, where the letter hides what its event said.
    """
    mark = hiding.mark_of(letter["extras"])
    if mark is None or body is None:
        return letter, body
    if mark.masked or redact is None:
        how = "is masked" if mark.masked else "is sealed"
        advice = "reprocess it: the event is read from the log" if mark.masked else "say what seals it: --open MODULE:CONSUMER (redact=)"
        raise Refused(f"Letter {letter['id'][:12]} {how}, and the new body would be stored for all to read. Nothing was changed: {advice}.")
    return {**letter, **hiding.opened(letter, mark, redact)}, hiding.seal_body(letter, body, redact)


def _who(by: str, reason: str) -> Who:
    return Who(by, reason, dt.datetime.now(dt.UTC))


def given_key(head: Head, letter: Mapping[str, Any], parts: Sequence[str]) -> bytes:
    """The key that an event with these key columns has, at this letter's topic.

    Args:
        parts: one text for each column of `idempotence_key=`; one for a message id.

    Raises:
        ConfigError: the number of parts is not that of the key columns. Refused: nobody knows what keys are made of.
    """
    settings = forgetting.key_settings(head)
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
    if body is None or json.loads(forgetting.key_settings(head).get("key_payload", "[]")):
        return int(letter["payload_hash"] or 0)
    return int.from_bytes(hashlib.sha256(keys.encode(body)).digest()[:8], "big", signed=True)


@dataclass(frozen=True)
class Edit:
    """What a person changes of one letter: the body, the key (one text for each key column), or both."""

    body: bytes | None = None
    key: tuple[str, ...] | None = None
    stored: bytes | None = None  # the body as it is to be stored, where a letter is sealed


def edit(letter: Mapping[str, Any], edit: Edit, head: Head, own: Sequence[bytes], known: Sequence[bytes], who: Who) -> Plan:
    """Change the body or the key; what was there before is kept in the history, and the old key stays reserved.

    Args:
        own: keys that the letter holds.
        known: the new key, where it is reserved or held.

    Raises:
        ConfigError: the letter is neither open nor blocked, or the new key is decided.
    """
    _refuse_edit(letter)
    changes: dict[str, Any] = {"id": [letter["id"]]}
    entry = {**who.did(Action.EDITED), "letter_id": letter["id"], "key": letter["key"], "reserved": 0}
    if edit.body is not None:
        stored = edit.body if edit.stored is None else edit.stored
        changes |= {"body": pa.array([stored], pa.binary()), "body_size": pa.array([len(edit.body)], pa.int64())}
        changes["body_sha256"] = pa.nulls(1, pa.binary())
        entry["body"] = letter["body"]
    reserve = KEYS.empty_table()
    if edit.key is not None:
        entry["idempotence_key"] = letter["idempotence_key"] or ""
        key = given_key(head, letter, edit.key)
        if key not in own:
            _refuse_decided(edit.key, known)
        if key not in known:
            reserve = plans.reservations([key], [payload_hash(head, letter, edit.body)])
        changes |= {"key": pa.array([key], pa.binary(16)), "holds_key": [True], "idempotence_key": [shown(edit.key)]}
        entry["reserved"] = reserve.num_rows
    return Plan((Change(pa.table(changes), history([entry])),), reserve, {letter["kind"]: 1})


def _refuse_edit(letter: Mapping[str, Any]) -> None:
    advice = {Status.DISCARDED: "Reopen it first.", Status.REPROCESSED: "It had its effect, and cannot have another one."}
    if letter["status"] not in WAITING_STATUSES:
        raise Refused(f"Letter {letter['id'][:12]} is {letter['status']}. {advice.get(letter['status'], 'It is settled.')}")


def _refuse_broken_json(letter: Mapping[str, Any], body: bytes) -> None:
    found = json_bodies.fault(body) if is_json(letter) else None
    if found is not None:
        raise ConfigError(
            f"{found.brief.replace('the body', 'The new body', 1)}. The body of letter {letter['id'][:12]} is decoded as JSON, so this one "
            "would fail again. Correct it, or take it as it is with --accept-any-body (accept_any_body=True)."
        )


def is_json(letter: Mapping[str, Any]) -> bool:
    """Whether its consumer decodes JSON, as far as the letter shows it: its decoder said so, or the body is an object or a list.

    A body that the letter has in part is judged by its first character.
    """
    body = letter["body"] or b""
    cut = (letter["body_size"] or 0) > len(body)
    return NO_JSON in letter["reason"] or (body.lstrip()[:1] in (b"{", b"[") and (cut or json_bodies.fault(body) is None))


def _refuse_decided(parts: Sequence[str], known: Iterable[bytes]) -> None:
    if any(known):
        raise Refused(
            f"The key {shown(parts)!r} is decided already: an event with it was processed, or a letter holds it. "
            "If this letter is a duplicate of that event, discard it; else give it another key."
        )
