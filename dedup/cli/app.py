"""The command line: one typer application."""

from __future__ import annotations

from typing import Annotated

import typer

import dedup

app = typer.Typer(name="dedup", no_args_is_help=True, add_completion=False, help="Every message handled once, and none lost.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dedup {dedup.__version__}")
        raise typer.Exit


@app.callback()
def _app(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


def main() -> None:
    """Run the command `dedup`."""
    app()
