"""What the demo says: one table for people, one object for programs, a bar while they wait."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dedup.demo.audit import Audit
from dedup.demo.target import CONSUMER, Target


def as_json(audit: Audit, kills: int) -> str:
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
    table.add_column("")
    table.add_column("count", justify="right")
    table.add_column("", style="dim", overflow="fold")
    for name, count, meaning in _lines(audit, kills):
        style = "bold red" if name in ("lost", "doubled") and count else None
        table.add_row(name, f"{count:,}", meaning, style=style)
    return table


def _lines(audit: Audit, kills: int) -> Iterator[tuple[str, int, str]]:
    yield "delivered", audit.delivered, "by the topic, whether for the first time or again"
    yield "redelivered", audit.redelivered, "a position that was delivered before, after a rebalance: dropped"
    yield "duplicates", audit.duplicates, "a known flight at a new position: dropped"
    yield "written", audit.written, "rows in the sink"
    for (kind, reason), count in audit.dead_letters.items():
        yield f"dead letters {kind}", count, reason
    yield "kills", kills, f"SIGKILL to Python and JVM in mid-run; {audit.replayed:,} events came once more although they were decided"
    yield "lost", audit.lost, "expected and not there"
    yield "doubled", audit.doubled, "there and not expected"


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


def show_where(console: Console, place: Target, folder: Path) -> None:
    """Paths to look into and commands to type."""
    places = {**place.where(), "what was delivered": f"{folder}/delivery-log.parquet", "the driver's log": f"{folder}/driver.log"}
    commands = map(place.command, ("dead-letters list", "checkpoints", f"verify {CONSUMER}"))
    console.print("\nWhere to look next")
    for line in (*(f"{name}: {path}" for name, path in places.items()), *commands):
        console.print(f"  {line}", soft_wrap=True, markup=False)
