"""`dedup dead-letter`: list, group and show; discard, reopen and edit; export and import.

A shell around `DeadLetters` (reprocessing/dead_letters.py). `reprocess` is in cli/reprocess.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import dedup
from checkpoint.errors import Refused
from deadletter.hiding import SEALED_TEXT, mark_of
from deadletter.json_rows import json_rows
from deadletter.plans import given_a_key
from deadletter.selection import Selection
from deadletter.work import Changed, Which
from dedup.cli.options import By, Commands, Ids, Reason, Yes, check_names, one_of, progress, selecting, who, whole_ids
from dedup.cli.reprocess import consumer_of
from dedup.cli.show import CHANGES, NOTHING_DONE, AsJson, cell, print_fields, print_json, print_named, print_table
from dedup.reprocessing.dead_letters import DeadLetters, Letter, shown
from dedup.reprocessing.files import Imported
from dedup.urls import StoreUrl, open_store

COLUMNS = ["id", "consumer", "position", "kind", "status", "reason", "attempts", "duplicates", "last_failed_at"]

PLACE = ["source", "topic", "partition", "sequence_number", "part"]

HISTORY_COLUMNS = ["at", "action", "by", "reason", "error_type", "error_message"]

SHOWN_BYTES = 2000
"""Bytes of a body that `show` prints; --json has all of it."""

HASHES = {"idempotence_key": "key", "sequence_key": "sequence"}
"""Readable column -> the column with its hash."""

PRINTED_BELOW = ("body", "extras", "properties", "stack")

commands = Commands(
    help="Dead letters: events that could not be processed.",
    epilog="Example: dedup dead-letter group --status OPEN --store /lake/dedup",
    no_args_is_help=True,
)

Open = Annotated[
    str,
    typer.Option(
        "--open",
        metavar="MODULE:ATTRIBUTE",
        help="Your Consumer object: its redact= opens a sealed letter.",
        show_default=False,
    ),
]

RequiredReason = Annotated[str, typer.Option("--reason", help="Why the change is made; kept with it.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add `dedup dead-letter ...`."""
    register_changes(commands)
    register_files(commands)
    app.add_typer(commands, name="dead-letter")


@commands.command("list", epilog="Example: dedup dead-letter list --consumer orders --kind REJECTED --status OPEN --limit 20")
@selecting("Show at most this many letters", limit=100)
def list_(selection: Selection, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List dead letters by position.

    A letter is listed if it matches all filters that are given.
    """
    letters = _letters(store, selection)
    if as_json:
        print_json(json_rows(letters.select(selection)))
        return
    found = letters.select(selection, [*(c for c in COLUMNS if c != "position"), *PLACE]).to_pylist()
    rows = [{**row, "id": row["id"][:12], "position": _position(row)} for row in found]
    print_table(COLUMNS, [[row[c] for c in COLUMNS] for row in rows], empty="no dead letters match")
    _tell_of_more(selection, len(rows))


def _letters(store: str, selection: Selection) -> DeadLetters:
    """The letters of the store. Raises ConfigError where the selection names what the store knows nothing of."""
    opened = open_store(store)
    check_names(opened, selection)
    return DeadLetters(opened)


def _tell_of_more(selection: Selection, shown: int) -> None:
    if selection.limit and shown == selection.limit:
        typer.echo(f"These are the first {selection.limit}; --limit 0 shows all.")


@commands.command(epilog="Example: dedup dead-letter group --consumer orders --status OPEN")
@selecting("Show at most this many groups", limit=100)
def group(selection: Selection, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Group dead letters by error and place.

    Each row says how many letters a group has, since when, and the id of an example. The largest group comes first.
    """
    found = _letters(store, selection).groups(selection)
    if as_json:
        print_json(json_rows(found))
        return
    rows = [{**row, "example": row["example"][:12]} for row in found.to_pylist()]
    print_table(found.column_names, [list(row.values()) for row in rows], empty="no dead letters match")
    _tell_of_more(selection, len(rows))


@commands.command(epilog="Example: dedup dead-letter show 3f9a12bc --store /lake/dedup")
def show(
    id: Annotated[str, typer.Argument(help="The id of the dead letter, or its first digits.", show_default=False)],
    open_with: Open = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with its body and history.

    Bytes that are not text are shown in hex. A sealed letter is shown as it is stored, unless --open names what opens it.
    """
    letter = _opening(store, open_with).show(id)
    if as_json:
        print_json({**json_rows(letter.table)[0], "redaction": _redaction(letter.row), "history": json_rows(letter.history)})
        return
    properties, stack = letter.row["properties"], letter.row["stack"]
    print_fields([*_fields(letter.row).items(), *([("redaction", said)] if (said := _redaction(letter.row)) else [])])
    print_named([(p["key"], _text(p["value"])) for p in properties or []], title="properties" if properties else "no properties")
    past = letter.history.to_pylist()
    print_table(
        HISTORY_COLUMNS, [[_said(entry[c]) for c in HISTORY_COLUMNS] for entry in past], title="history", empty="never tried: it waits"
    )
    if stack:
        typer.echo("\nstack trace")
        typer.echo("\n".join(map(cell, stack.splitlines())))
    _print_body(letter)


def _opening(store: str, open_with: str) -> DeadLetters:
    """The letters of the store, or else of the consumer that is named; with what opens and seals them."""
    if not open_with:
        return DeadLetters(open_store(store))
    consumer = consumer_of(open_with)
    return DeadLetters(open_store(store) if store else consumer.store, consumer.failure.redact)


def _redaction(row: Mapping[str, Any]) -> str | None:
    """What the letter hides, in words."""
    mark = mark_of(row["extras"])
    return None if mark is None else f"masked: {', '.join(mark.masked)}" if mark.masked else "sealed: --open shows it"


def _said(value: Any) -> Any:
    """A text as it is, or that it is sealed: nobody reads base64."""
    return "(sealed)" if isinstance(value, str) and value.startswith(SEALED_TEXT) else value


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """What `show` prints on one line each; behind a readable key stands its hash."""
    shown: dict[str, Any] = {}
    for name in row:
        if name not in (*PRINTED_BELOW, *HASHES.values()):
            shown[name] = _said(row[name])
        if name in HASHES:
            shown[f"{name}_hash"] = row[HASHES[name]]
    hashes = {name: value.hex() for name, value in shown.items() if isinstance(value, bytes)}
    event_key = {} if row["event_key"] is None else {"event_key": _text_with_hex(row["event_key"])}
    return {name: value for name, value in {**shown, **hashes, **event_key}.items() if value is not None}


def _text_with_hex(value: bytes) -> str:
    """Bytes as text with their hex beside it, or as hex alone if they are no text."""
    text, numbers = _text(value), value[:SHOWN_BYTES].hex(" ")
    return text if text.startswith(numbers) else f"{text} (hex {numbers})"


def _print_body(letter: Letter) -> None:
    row, mark = letter.row, mark_of(letter.row["extras"])
    if mark is not None and not mark.masked and row["body"] is not None:
        typer.echo(f"\nbody: sealed ({row['body_size']} bytes)")
        return
    typer.echo(f"\nbody ({row['body_size']} bytes)" if row["body"] is not None else "\nbody: null")
    if letter.json is not None and len(row["body"]) <= SHOWN_BYTES:
        typer.echo(cell(json.dumps(letter.json, indent=2, ensure_ascii=False)))
    else:
        typer.echo(cell(_text(row["body"])))


def _position(row: dict[str, Any]) -> str:
    part = f".{row['part']}" if row["part"] else ""
    return f"{row['source']}/{row['topic']}/{row['partition']}:{row['sequence_number']}{part}"


def _text(value: bytes | None) -> str:
    """Bytes as text if they are text, else in hex; cut to SHOWN_BYTES."""
    if value is None:
        return ""
    start = value[:SHOWN_BYTES]
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError:
        text = start.hex(" ")
    return text + (f" ... ({len(value) - SHOWN_BYTES} bytes more; --json shows all)" if len(value) > SHOWN_BYTES else "")


def register_changes(commands: typer.Typer) -> None:
    """Add the commands."""
    commands.command(epilog="Example: dedup dead-letter discard 3f9a12bc --reason 'test data' --yes")(discard)
    commands.command(epilog="Example: dedup dead-letter reopen --consumer orders --fingerprint 81c6f2d0a4b1e377 --yes")(reopen)
    commands.command(epilog="Example: dedup dead-letter edit 3f9a12bc --body @fixed.json --reason 'price was missing' --yes")(edit)


@selecting("Discard at most this many letters")
def discard(
    reason: RequiredReason,
    selection: Selection,
    ids: Ids = None,
    release_key: Annotated[
        bool, typer.Option("--release-key", help="Release the key as well: the message counts as new if it arrives again.")
    ] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
) -> None:
    """Give up dead letters.

    The letters keep their keys, and letters that wait behind them can be reprocessed.
    """
    letters = _letters(store, selection)
    which = whole_ids(letters, ids, selection)[: selection.limit] or selection
    with progress("discarding") as told:
        done = letters.discard(which, reason=reason, by=who(by), release_key=release_key, dry_run=not yes, on_progress=told)
    _print_changed(done, "discarded", as_json, which)


@selecting("Reopen at most this many letters")
def reopen(
    selection: Selection,
    ids: Ids = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Open discarded letters again.

    A letter stays discarded if its key was released and another event has taken it.
    """
    letters = _letters(store, selection)
    which = whole_ids(letters, ids, selection)[: selection.limit] or selection
    with progress("reopening") as told:
        done = letters.reopen(which, reason=reason, by=who(by), dry_run=not yes, on_progress=told)
    _print_changed(done, "reopened", as_json, which)


def edit(
    id: Annotated[str, typer.Argument(help="The id of the dead letter, or its first digits.", show_default=False)],
    body: Annotated[
        str | None, typer.Option("--body", help="The new body: text, or @FILE for exactly its bytes.", show_default=False)
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="The new idempotence key. Repeat the option for each column of the consumer's key.", show_default=False),
    ] = None,
    accept_any_body: Annotated[
        bool, typer.Option("--accept-any-body", help="Take the body as it is, even if the letter's body is JSON and this one is not.")
    ] = False,
    open_with: Open = "",
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Change the body or the key of an open letter.

    The letter can then be reprocessed. Its history keeps the original. If the consumer decodes JSON, the new body must be JSON.
    """
    if key and not any(key):
        raise dedup.ConfigError("--key is empty. Give the new key, or leave the option out.")
    letters = _opening(store, open_with)
    whole, new = letters.find(id), _body(body)
    before = letters.select(Selection(ids=(whole,)), ["body_size", "idempotence_key"]).to_pylist()[0]
    accepted = {"accept_any_body": accept_any_body, "dry_run": not yes}
    done = letters.edit(whole, body=new, key=key or None, reason=reason, by=who(by), **accepted)
    changes = _edited(before, new, key)
    if as_json:
        print_json({**_changed_json(done), "changes": [dict(zip(CHANGES, row, strict=True)) for row in changes]})
        return
    print_table(CHANGES, [(what.replace("_", " "), now, then) for what, now, then in changes], title=whole[:12])
    if new is not None:
        by_hand = bool(key) or bool(given_a_key(letters.store.history(whole)))
        typer.echo(
            "The letter keeps the key that it was given, whatever the new body says."
            if by_hand
            else "The key comes from the new body. Check that it is the id of this message."
        )
    typer.echo("edited; `dedup dead-letter reprocess` runs it as it is" if yes else NOTHING_DONE)


def _edited(before: Mapping[str, Any], body: bytes | None, key: Sequence[str] | None) -> list[tuple[str, Any, Any]]:
    """(column of the letter, its value now, its value then) for each thing that an edit changes; of a body its bytes are counted."""
    sizes = [] if body is None else [("body_size", before["body_size"], len(body))]
    return [*sizes, *([("idempotence_key", before["idempotence_key"], shown(key))] if key else [])]


def _body(given: str | None) -> bytes | None:
    if given is None or not given.startswith("@"):
        return None if given is None else given.encode()
    try:
        return Path(given[1:]).read_bytes()
    except OSError as error:
        raise dedup.ConfigError(f"The body cannot be read from {given[1:]}: {error.strerror}.") from error


def _print_changed(done: Changed, word: str, as_json: bool, which: Which) -> None:
    if as_json:
        print_json(_changed_json(done))
    else:
        _print_counts(done, word)
    if not done.changed and done.skipped and not isinstance(which, Selection):
        raise Refused(f"None of these letters can be {word}: {'; '.join(done.skipped)}.")


def _print_counts(done: Changed, word: str) -> None:
    would = "would be " if done.dry_run else ""
    rows: list[tuple[Any, ...]] = [(kind, f"{would}{word}", count, "") for kind, count in done.by_kind.items()]
    rows += [("", f"skipped: {why}", count, done.examples[why][:12]) for why, count in done.skipped.items()]
    print_table(["kind", "result", "letters", "example"], rows, empty="no dead letters match")
    if done.dry_run and done.changed:
        typer.echo(NOTHING_DONE)


def _changed_json(done: Changed | Imported) -> dict[str, Any]:
    document = asdict(done)
    return {**document, "done": not document.pop("dry_run")}


class FileFormat(StrEnum):
    """What a file of letters can be."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def register_files(commands: typer.Typer) -> None:
    """Add the commands."""
    commands.command(epilog="Example: dedup dead-letter export letters.jsonl --consumer orders --status OPEN")(export)
    commands.command("import", epilog="Example: dedup dead-letter import letters.jsonl --yes")(import_)


@selecting("Write at most this many letters")
def export(
    file: Annotated[str, typer.Argument(help="The new file, or - for standard output.", show_default=False)],
    selection: Selection,
    format: Annotated[
        FileFormat | None,
        typer.Option(
            "--format",
            **one_of(FileFormat),
            help="The format of the file.  [default: by the ending of its name, else jsonl]",
            show_default=False,
        ),
    ] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
) -> None:
    """Write dead letters to a file.

    The file holds their exact bytes and their history: as JSON lines with bytes in base64, or as Parquet.
    """
    if as_json and file == "-":
        raise dedup.ConfigError("--json and - both write to standard output: name a file.")
    target = sys.stdout.buffer if file == "-" else Path(file)
    with progress("exporting") as told:
        count = _letters(store, selection).export(selection, target, format.value if format else None, told)
    if as_json:
        print_json({"file": file, "letters": count})
    else:
        typer.echo(f"{count} letters exported", err=file == "-")


def import_(
    file: Annotated[Path, typer.Argument(help="A file that `dedup dead-letter export` wrote.", show_default=False)],
    store: StoreUrl = "",
    accept_keys: Annotated[
        bool,
        typer.Option(
            "--accept-keys", help="Reserve the keys of the file without checking them. Else a key that cannot be checked is refused."
        ),
    ] = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Put exported letters back.

    Letters that the store already has stay as they are.
    """
    with progress("importing") as told:
        asked = {"accept_keys": accept_keys, "dry_run": not yes}
        done = DeadLetters(open_store(store)).import_(file, by=who(by), reason=reason, **asked, on_progress=told)
    if as_json:
        print_json(_changed_json(done))
        return
    rows = [
        ("would be imported" if done.dry_run else "imported", done.imported),
        ("of these as DUPLICATE: their key is decided here", done.duplicates),
        ("in the store already: left as they are", done.existing),
    ]
    print_table(["result", "letters"], rows)
    if done.dry_run and done.imported:
        typer.echo(NOTHING_DONE)
