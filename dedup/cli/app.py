"""The command `dedup`: tables for people, `--json` for programs, one line for each error.

Names are `dedup NOUN VERB`; `demo`, `metrics`, `migrate`, `status`, `upkeep` and `verify` are about the whole store. A command that carries
out a person's decision makes the change with `--yes` only; without it the command shows what would change. exits.py has the exit codes.
"""

from __future__ import annotations

import gc
import logging
import sys
from contextlib import nullcontext
from typing import Annotated, NoReturn

import typer

import dedup
from dedup.cli import (
    checkpoint,
    consumer,
    dead_letter,
    delete,
    exits,
    forget,
    lag,
    lines,
    outbox,
    prometheus,
    publisher,
    reprocess,
    setup,
    sink,
    status,
    upkeep,
    verify,
)
from dedup.cli.options import Commands
from dedup.process import leave

YOUNG = 50_000
"""Objects made and not freed, after which Python searches the youngest for cycles: its own 700 are those of some fifty messages."""

UNREAD = "PacifyFlushWrapper"
"""What typer puts in place of standard output where its reader has gone. It ends with 1 then, which here means that something is wrong."""

app = Commands(
    name="dedup",
    help="Inspect and repair what dedup has stored: consumers, checkpoints, dead letters, outgoing messages. "
    "Name the store with --store URL or the variable DEDUP_STORE. "
    "DEDUP_SCHEMA names its schema in PostgreSQL, if that is not `dedup`. "
    "A command that has the option --yes shows what it would change; repeat it with --yes to make the change.",
    epilog=f"Example: dedup verify --store postgresql://localhost/shop\n\n{exits.HELP}",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
setup.register(app)
status.register(app)
prometheus.register(app)
verify.register(app)
consumer.register(app)
lag.register(consumer.commands)
forget.register(consumer.commands)
delete.register(consumer.commands)
checkpoint.register(app)
verify.register_batch(app)
dead_letter.register(app)
reprocess.register(consumer.commands, dead_letter.commands)
consumer.register_budget(app)
sink.register(app)
outbox.register(app)
publisher.register(app)
upkeep.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dedup {dedup.__version__}")
        raise typer.Exit


@app.callback()
def _app(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


def main() -> None:
    """Run the command. An error is one line on standard error and an exit code of exits.py."""
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    with lines.written() if lines.wanted() else nullcontext():
        try:
            sys.exit(_run())
        except Exception as error:  # noqa: BLE001  the last place that can turn an error into a sentence
            exits.fail(error)


def _run() -> int:
    """The exit code. For programs typer does not print by itself what is wrong with a call."""
    if not lines.are_written():
        app(prog_name="dedup")
    try:
        return app(prog_name="dedup", standalone_mode=False) or 0
    except typer.Abort:
        return exits.ExitCode.INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # a call that is wrong has it, in each version of typer
            raise
        lines.note(f"dedup: {error.format_message()}", logging.ERROR)
        return exits.ExitCode.USAGE


def program() -> NoReturn:
    """The program `dedup`: `main` in a process of its own."""
    try:
        main()
        sys.exit()
    except SystemExit as ended:
        leave(SystemExit(exits.ExitCode.UNREAD) if type(sys.stdout).__name__ == UNREAD else ended)
