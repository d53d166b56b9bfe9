"""Exit codes: what a script can tell apart without reading a message, and the one line that each error becomes."""

from __future__ import annotations

import errno
import logging
import os
import sys
from enum import IntEnum

import typer

import dedup
from checkpoint.errors import (
    CommitUnknown,
    ConfigError,
    DestinationUnavailable,
    LettersUnread,
    Refused,
    ReprocessStopped,
    SourceUnavailable,
    StoreUnavailable,
)
from deadletter.redact import redact
from dedup.cli import lines
from dedup.urls import mask_secrets


class HandlerAway(Exception):
    """The handler, which is the user's, cannot go on now: what it calls is away. The same command gets further later."""


class ExitCode(IntEnum):
    """What the command's exit code means."""

    DONE = 0
    """The command did its work."""
    FOUND = 1
    """The command did its work and found something wrong: a contradiction, a lag above the limit, letters that failed or were not read."""
    USAGE = 2
    """The call is wrong: an option, a name, a file or a setting. Correct it."""
    REFUSED = 3
    """The state does not allow it. Read the message: it says what to do first."""
    UNREACHABLE = 4
    """The store, the broker, or what the handler calls, cannot be reached. Try again later."""
    UNEXPECTED = 5
    """An error that this program does not expect. DEDUP_DEBUG=1 shows where it comes from."""
    INTERRUPTED = 130
    """Ctrl-C ended the command."""
    UNREAD = 141
    """Whoever read the output has closed it, as `head` does. 128 + SIGPIPE, as shells say."""


HELP = "Exit codes: " + "; ".join(
    f"{code.value} {what}"
    for code, what in {
        ExitCode.DONE: "done",
        ExitCode.FOUND: "something is wrong (verify: a contradiction; lag: above the limit; status: a warning; "
        "reprocess: letters failed or were not read)",
        ExitCode.USAGE: "the call is wrong",
        ExitCode.REFUSED: "the state does not allow it",
        ExitCode.UNREACHABLE: "the store, the broker or what the handler calls cannot be reached",
        ExitCode.UNEXPECTED: "unexpected error",
        ExitCode.INTERRUPTED: "ended by Ctrl-C",
        ExitCode.UNREAD: "the reader of the output has gone",
    }.items()
)
"""The table for the help."""


def exit_code(error: Exception) -> ExitCode:
    """The exit code for an error that ends a command."""
    match error:
        case ReprocessStopped() | LettersUnread():
            return ExitCode.FOUND
        case StoreUnavailable() | CommitUnknown() | SourceUnavailable() | DestinationUnavailable() | HandlerAway():
            return ExitCode.UNREACHABLE
        case Refused():
            return ExitCode.REFUSED
        case ConfigError() | ImportError() | UnicodeEncodeError():
            return ExitCode.USAGE
        case dedup.DedupError():
            return ExitCode.REFUSED
        case OSError(errno=errno.ENOSPC):
            return ExitCode.USAGE
        case _:
            return ExitCode.UNEXPECTED


def fail(error: Exception) -> None:
    """End the process: one line on standard error without secrets; a stack trace only with DEDUP_DEBUG=1, or in a line of JSON."""
    if os.environ.get("DEDUP_DEBUG") and not lines.are_written():
        raise error
    lines.note(f"dedup: {_sentence(error)}", logging.ERROR, error=error)
    sys.exit(exit_code(error))


def found(wrong: bool) -> None:
    """End the command with exit code FOUND where something is wrong."""
    if wrong:
        raise typer.Exit(ExitCode.FOUND)


def _sentence(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} is not valid UTF-8. Pass a body with arbitrary bytes as @FILE."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"There is no space left for the output{f' in {error.filename}' if error.filename else ''}. Free some, or write elsewhere."
    return told(error) if _is_known(error) else f"{told(error)} (DEDUP_DEBUG=1 shows the stack trace)"


def told(error: Exception) -> str:
    """What went wrong in one line, without secrets."""
    text = str(error) if _is_known(error) else f"{type(error).__name__}: {error}"
    return redact(mask_secrets(" ".join(text.split())))


def _is_known(error: Exception) -> bool:
    """Whether the text alone says what is wrong."""
    return isinstance(error, (dedup.DedupError, ImportError, HandlerAway))
