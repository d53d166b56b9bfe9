"""`dedup dead-letters discard`, `restore` and `edit`: what a person decides about letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import dedup
from dedup.cli.consumers import By, Reason, Yes, who
from dedup.cli.filters import says_which, selecting
from dedup.cli.progress import progress
from dedup.cli.show import AsJson, print_json, print_table
from dedup.cli.stores import StoreUrl, open_store
from dedup.deadletters import DeadLetters
from dedup.letter_work import Changed, Which
from dedup.store import Selection

Ids = Annotated[list[str] | None, typer.Argument(help="Ids, or the first digits of them; else give filters.", show_default=False)]
Why = Annotated[str, typer.Option("--reason", help="Why; kept with the decision.", show_default=False)]

NOTHING_DONE = "Nothing was changed. Repeat the command with --yes to do it."


def register(commands: typer.Typer) -> None:
    """Add the commands."""
    commands.command(epilog="Example: dedup dead-letters discard 3f9a12bc --reason 'test data' --yes")(discard)
    commands.command(epilog="Example: dedup dead-letters restore --consumer orders --fingerprint 81c6f2d0a4b1e377 --yes")(restore)
    commands.command(epilog="Example: dedup dead-letters edit 3f9a12bc --body @fixed.json --reason 'price was missing' --yes")(edit)


@selecting()
def discard(
    reason: Why,
    selection: Selection,
    ids: Ids = None,
    release_key: Annotated[
        bool, typer.Option("--release-key", help="Forget the key as well: a later copy of the message counts as new.")
    ] = False,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
) -> None:
    """Give letters up, for a reason. They go on to hold their keys, and letters that wait behind them can be reprocessed."""
    letters = DeadLetters(open_store(store))
    which = _which(letters, ids, selection)
    with progress("discarding") as told:
        done = letters.discard(which, reason=reason, by=who(by), release_key=release_key, dry_run=not yes, on_progress=told)
    _print_changed(done, "discarded", as_json, which)


@selecting()
def restore(
    selection: Selection,
    ids: Ids = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Take discards back. A letter whose key was released and is decided by now stays discarded."""
    letters = DeadLetters(open_store(store))
    which = _which(letters, ids, selection)
    with progress("restoring") as told:
        done = letters.restore(which, reason=reason, by=who(by), dry_run=not yes, on_progress=told)
    _print_changed(done, "restored", as_json, which)


def edit(
    id: Annotated[str, typer.Argument(help="The letter's id, or the first digits of it.", show_default=False)],
    body: Annotated[
        str | None, typer.Option("--body", help="The new body: text, or @FILE for exactly its bytes.", show_default=False)
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help="The new idempotence key; once for each column of the consumer's key.", show_default=False),
    ] = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Change the body or the key of a letter that waits, so that it can be reprocessed. The original is kept in its history."""
    letters = DeadLetters(open_store(store))
    whole, new = letters.find(id), _body(body)
    before = letters.show(whole).row
    done = letters.edit(whole, body=new, key=key or None, reason=reason, by=who(by), dry_run=not yes)
    if as_json:
        print_json(asdict(done))
        return
    then = {"body": None if new is None else f"{len(new)} bytes", "key": "|".join(key) if key else None}
    now = {"body": f"{before['body_size']} bytes", "key": before["idempotence_key"]}
    print_table(
        [whole[:12], "now" if not yes else "before", "then"], [(n, now[n], value) for n, value in then.items() if value is not None]
    )
    typer.echo("edited; reprocess takes it as it is now" if yes else NOTHING_DONE)


def _body(given: str | None) -> bytes | None:
    if given is None or not given.startswith("@"):
        return None if given is None else given.encode()
    try:
        return Path(given[1:]).read_bytes()
    except OSError as error:
        raise dedup.ConfigError(f"The body cannot be read from {given[1:]}: {error.strerror}.") from error


def _which(letters: DeadLetters, ids: Sequence[str] | None, selection: Selection) -> Which:
    if bool(ids) == says_which(selection):
        raise dedup.ConfigError("Say which letters: either ids, or filters such as --consumer and --fingerprint.")
    return [letters.find(i) for i in ids] if ids else selection


def _print_changed(done: Changed, word: str, as_json: bool, which: Which) -> None:
    if as_json:
        print_json(asdict(done))
    else:
        _print_counts(done, word)
    if not done.changed and done.skipped and not isinstance(which, Selection):
        raise dedup.ConfigError(f"None of these letters can be {word}: {'; '.join(done.skipped)}.")


def _print_counts(done: Changed, word: str) -> None:
    rows: list[tuple[Any, ...]] = [(kind, word, count, "") for kind, count in done.by_kind.items()]
    rows += [("", f"skipped: {why}", count, done.examples[why][:12]) for why, count in done.skipped.items()]
    print_table(["kind", "would be" if done.dry_run else "", "letters", "example"], rows, empty="no dead letters match")
    if done.dry_run and done.changed:
        typer.echo(NOTHING_DONE)
