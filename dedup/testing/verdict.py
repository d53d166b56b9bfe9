"""What the kit says: which promise is broken, how that was seen, in plain words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dedup.testing.job import Effect, Row

CLOCK = "the result depends on the clock"
CHANCE = "the result depends on chance, or on something else than the events"
PART = "it does not mean the same on a part of a batch"
ORDER = "the result depends on the order between partitions"
INPUT = "it changes its input"
TWICE = "it fails when it sees a key twice"
DOUBLED = "it writes again what is delivered again"
LOST = "it loses what is delivered again"
OUTSIDE = "it writes outside tx: the effect of a failed attempt stays"
STAYS = "the effect of a failed attempt stays"
DEATH = "it does not get over a death"
POISON = "a bad event stops the others"
CLEAN = "it fails on the clean rows"
BOOKS = "the tables do not prove themselves"

ADVICE = {
    CLOCK: "Take times from the event (enqueued_time), or let the sink fill them in.",
    CHANCE: "Derive ids from the event (its key, its position); read nothing that changes between two runs.",
    PART: "Batches are cut differently after a restart, and a failing one is halved. Write what each event means alone, or merge by key.",
    ORDER: "Put what belongs together into one partition, or merge with newer_by=.",
    INPUT: "Copy before you change: the same rows may be given again.",
    TWICE: "Use an insert that takes a known key for done, or let a Consumer drop what it has seen.",
    DOUBLED: "Write by key (merge, upsert), or let a Consumer drop what it has seen.",
    LOST: "Do not remember outside the sink's own transaction what is done.",
    OUTSIDE: "Write through tx, or hand the idempotence key to the other side.",
    STAYS: "Make it one transaction, or one that can be repeated.",
    DEATH: "What is written before the death must not be in the way of what is written again.",
    POISON: "Set the bad event aside (tx.reject, or raise in a Consumer's handler) and go on.",
    CLEAN: "Nothing else was tried.",
    BOOKS: "This is no fault of the handler: please report it.",
}


@dataclass
class Finding:
    """One broken promise."""

    promise: str
    seen: str  # the first schedule that showed it, and what was there
    times: int = 1  # schedules that showed it

    def __str__(self) -> str:
        more = f" (and in {self.times - 1} more)" if self.times > 1 else ""
        return f"{self.promise}. Seen: {self.seen}{more}. {ADVICE[self.promise]}"


@dataclass
class Verdict:
    """All that was tried, and what was found."""

    findings: list[Finding] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)  # the schedules, in order

    @property
    def ok(self) -> bool:
        """Whether every promise was kept in every schedule."""
        return not self.findings

    @property
    def broken(self) -> set[str]:
        """The promises that were not."""
        return {finding.promise for finding in self.findings}

    def add(self, promise: str, seen: str) -> None:
        """Note what was seen; of each promise the first is kept."""
        for finding in self.findings:
            if finding.promise == promise:
                finding.times += 1
                return
        self.findings.append(Finding(promise, seen))

    def require(self) -> None:
        """Raise AssertionError with all of it in plain words, unless ok."""
        if self.findings:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        told = [f"{len(self.tried)} schedules, {len(self.findings)} broken promises"]
        return "\n".join(told + [f"* {finding}" for finding in self.findings])


def differences(expected: Effect, found: Effect) -> tuple[list[str], list[str]]:
    """(lost, doubled): in words, by sink. A row that came out changed is in both."""
    lost, more = [], []
    for sink in sorted({*expected, *found}):
        wanted, there = expected.get(sink, Counter()), found.get(sink, Counter())
        if missing := wanted - there:
            lost.append(f"{sink} lacks {missing.total()} rows, such as {_told(missing)}")
        if surplus := there - wanted:
            more.append(f"{sink} has {surplus.total()} rows too many, such as {_told(surplus)}")
    return lost, more


def _told(rows: Counter[Row]) -> str:
    return "(" + ", ".join(f"{name}={value[:60]}" for name, value in min(rows)) + ")"


def unstable(one: Effect, other: Effect) -> dict[str, set[str]]:
    """Sink -> columns whose values differ between two runs over the same events."""
    found: dict[str, set[str]] = {}
    for sink in {*one, *other}:
        if one.get(sink) != other.get(sink):
            found[sink] = {name for name, _ in _columns(one, sink) ^ _columns(other, sink)}
    return found


def _columns(effect: Effect, sink: str) -> set[tuple[str, str]]:
    values: dict[tuple[str, str], int] = Counter()
    for row, times in effect.get(sink, Counter()).items():
        for cell in row:
            values[cell] += times
    return {(name, f"{value} {times}") for (name, value), times in values.items()}


def without(effect: Effect, columns: dict[str, set[str]]) -> Effect:
    """The effect without these columns."""
    return {sink: _less(rows, columns.get(sink, set())) for sink, rows in effect.items()}


def _less(rows: Counter[Row], columns: set[str]) -> Counter[Row]:
    kept: Counter[Row] = Counter()
    for row, times in rows.items():
        kept[tuple(cell for cell in row if cell[0] not in columns)] += times
    return kept
