"""How to reprocess, `ReprocessOptions`, and what became of it, `Reprocessed`. Values of this package."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpoint import given
from dedup.core.settings import REPROCESS
from dedup.pipeline.report import Report

FIRST_PAGE, LARGEST_PAGE, PAGE_BYTES = 10, 1_000, 64 * 1024 * 1024
"""Letters of the first page, which shows whether anything passes at all; letters and bytes of later ones."""


@dataclass(frozen=True)
class Unread:
    """A letter that was not run, because its whole body could not be read from the log."""

    letter: str  # its id
    source: str
    topic: str
    partition: int
    sequence_number: int
    why: str

    def __str__(self) -> str:
        """As messages name it."""
        return f"{self.topic}/{self.partition} {self.sequence_number} (letter {self.letter[:12]})"


@dataclass
class Reprocessed:
    """What became of the selected letters."""

    selected: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    reprocessed: int = 0
    duplicates: int = 0  # their message turned out to be decided elsewhere
    failed: int = 0  # again; the same letters with one more attempt
    waiting: int = 0  # behind another letter of their sequence
    left: int = 0  # somebody else has them, or they changed meanwhile
    behind: int = 0  # a dry run: not selected, and run as well if the selected ones before them pass
    expired: int = 0  # left, and not selected: older than the consumer's reprocess_within
    lost: int = 0  # neither kept whole nor in the log any more
    unread: list[Unread] = field(default_factory=list)  # not run: the log, which alone has their whole bodies, could not be read
    processed: int = 0  # positions of the selected range that need `replay`
    absent: int = 0  # positions of it that were never delivered: they need `from_log`
    filled: Report | None = None  # with from_log: what became of the absent positions' rows
    dry_run: bool = False

    @property
    def tried(self) -> int:
        """Selected letters that were dealt with."""
        return self.reprocessed + self.duplicates + self.failed + self.waiting + self.left + self.lost + len(self.unread)


@dataclass(frozen=True)
class ReprocessOptions:
    """How `reprocess` and `replay` run.

    Raises:
        ConfigError: an option has another type or range than it takes.
    """

    by: str = field(default_factory=getpass.getuser)
    reason: str | None = None
    limit: int | None = None
    """The largest number of letters, with those that waited for others; expired ones and those that cannot be read do not count."""
    rate: float | None = None
    """The largest number of letters a second; it counts the same letters as `limit`."""
    stop_after: int = 20
    """Stop after so many failures in a row."""
    skip_missing: bool = False
    """True: letters whose body is neither kept nor in the log become LOST, and missing positions are left out."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the numbers of letters, or positions, that are done and that are meant."""
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        given.check_fields(REPROCESS, self, "ReprocessOptions")

    @property
    def at_once(self) -> int:
        """Letters that may be run before the first pause: those of one second."""
        return LARGEST_PAGE if self.rate is None else max(1, min(LARGEST_PAGE, int(self.rate)))
