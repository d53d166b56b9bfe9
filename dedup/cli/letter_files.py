"""`dedup dead-letters export` and `import`: letters in files, exactly."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dedup.cli.consumers import By, Reason, Yes, who
from dedup.cli.filters import selecting
from dedup.cli.letter_changes import NOTHING_DONE
from dedup.cli.progress import progress
from dedup.cli.show import AsJson, print_json, print_table
from dedup.cli.stores import StoreUrl, open_store
from dedup.deadletters import DeadLetters
from dedup.store import Selection


class FileFormat(StrEnum):
    """What a file of letters can be."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def register(commands: typer.Typer) -> None:
    """Add the commands."""
    commands.command(epilog="Example: dedup dead-letters export letters.jsonl --consumer orders --status OPEN")(export)
    commands.command("import", epilog="Example: dedup dead-letters import letters.jsonl --yes")(import_)


@selecting()
def export(
    file: Annotated[str, typer.Argument(help="A new file, or - for standard output.", show_default=False)],
    selection: Selection,
    format: Annotated[
        FileFormat | None, typer.Option("--format", help="[default: what the name ends with, else jsonl]", show_default=False)
    ] = None,
    store: StoreUrl = "",
) -> None:
    """Write letters with their history to a file: JSON lines (bytes in base64) or Parquet, exactly."""
    target = sys.stdout.buffer if file == "-" else Path(file)
    with progress("exporting") as told:
        count = DeadLetters(open_store(store)).export(selection, target, format.value if format else None, told)
    typer.echo(f"{count} letters exported", err=file == "-")


def import_(
    file: Annotated[Path, typer.Argument(help="What `export` wrote.", show_default=False)],
    store: StoreUrl = "",
    accept_keys: Annotated[
        bool, typer.Option("--accept-keys", help="Reserve keys as the file has them, also those that cannot be checked.")
    ] = False,
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Put exported letters back, as they were. Those that are there already are left alone."""
    with progress("importing") as told:
        asked = {"accept_keys": accept_keys, "dry_run": not yes}
        done = DeadLetters(open_store(store)).import_(file, by=who(by), reason=reason, **asked, on_progress=told)
    if as_json:
        print_json(asdict(done))
        return
    rows = [
        ("come in" if done.dry_run else "came in", done.imported),
        ("of these as DUPLICATE: their key is decided here", done.duplicates),
    ]
    print_table(["letters", ""], [*rows, ("are there already, and left alone", done.existing)])
    if done.dry_run and done.imported:
        typer.echo(NOTHING_DONE)
