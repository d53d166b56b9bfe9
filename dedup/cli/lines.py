"""What a command writes to standard error: sentences for people, or with `--log-json` one JSON object a line for programs.

What a command answers goes to standard output in either case. Whether lines are wanted is read from the command line itself: a call that
cannot be understood is answered in the same form.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from dedup.logs import JsonLines, json_lines

LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json",
        envvar="DEDUP_LOG_JSON",
        show_envvar=True,
        help="Write log lines and errors to standard error as JSON, one object a line.",
    ),
]
"""The option of every command but the demo."""

_YES = ("1", "true", "t", "yes", "y", "on")
"""What the option takes in its variable."""

OURS = ("dedup", "checkpoint")
"""Loggers of which a line tells what goes well, too; of all others only warnings."""

log = logging.getLogger("dedup")


def wanted() -> bool:
    """Whether this call asks for JSON lines."""
    return "--log-json" in sys.argv[1:] or os.environ.get("DEDUP_LOG_JSON", "").lower() in _YES


def are_written() -> bool:
    """Whether standard error is for programs now."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


@contextmanager
def written() -> Iterator[None]:
    """In the block every record, warning of Python and error of a thread becomes a line."""
    root, handler, hook = logging.getLogger(), json_lines(), threading.excepthook
    levels = {name: logging.getLogger(name).level for name in OURS}
    root.addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = _log_thread
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.captureWarnings(False)
        threading.excepthook = hook
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _log_thread(ended: Any) -> None:
    if not issubclass(ended.exc_type, SystemExit):
        name = ended.thread.name if ended.thread else "that is gone"
        log.error("the thread %s ended with an error", name, exc_info=(ended.exc_type, ended.exc_value, ended.exc_traceback))


def note(text: str, level: int = logging.WARNING, *, error: Exception | None = None) -> None:
    """Tell on standard error what is no answer. A JSON line has the error with its stack, and not the name of the command in front."""
    if are_written():
        log.log(level, "%s", text.removeprefix("dedup: "), exc_info=error)
    else:
        typer.echo(text, err=True)
