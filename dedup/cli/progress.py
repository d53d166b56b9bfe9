"""A progress bar for long work, on standard error and only where somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (done, all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(doing, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
