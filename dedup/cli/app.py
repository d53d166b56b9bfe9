"""The command `dedup`: tables for people, `--json` for programs, one sentence for whatever goes wrong.

Nothing that changes a decision is done without `--yes`; without it the command tells what it would do.
Exit codes: 0 done, 1 `verify` or `demo` found a contradiction, 2 the command could not do its work.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

import dedup
from dedup.cli import checkpoints, consumers, lag, letters, outbox, publishers, reprocess, upkeep, verify
from dedup.urls import mask_secrets

YOUNG = 50_000
"""Objects made and not freed, after which Python searches the youngest for cycles: its own 700 are those of some fifty messages."""

app = typer.Typer(
    name="dedup",
    help="Every message has its effect once, and none is lost. The store is --store URL or the variable DEDUP_STORE; "
    "the schema of its state in PostgreSQL, where it is not `dedup`, is the variable DEDUP_SCHEMA.",
    epilog="Example: dedup verify --store postgresql://localhost/shop",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
upkeep.register(app)
consumers.register(app)
checkpoints.register(app)
verify.register(app)
lag.register(app)
letters.register(app)
reprocess.register(app, letters.commands)
consumers.register_budget(app)
outbox.register(app)
publishers.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dedup {dedup.__version__}")
        raise typer.Exit


@app.callback()
def _app(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


def main() -> None:
    """Run the command; an error is one line on standard error and exit code 2, a stack trace only with DEDUP_DEBUG=1."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    try:
        app(prog_name="dedup")
    except Exception as error:  # the last place that can turn an error into a sentence
        if os.environ.get("DEDUP_DEBUG"):
            raise
        typer.echo(f"dedup: {_sentence(error)}", err=True)
        sys.exit(2)


def _sentence(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} is no text in UTF-8. A body of any bytes is given as @FILE."
    known = isinstance(error, (dedup.DedupError, ImportError))
    text = str(error) if known else f"{type(error).__name__}: {error} (DEDUP_DEBUG=1 shows where)"
    return mask_secrets(" ".join(text.split()))
