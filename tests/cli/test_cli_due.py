"""`dedup dead-letter reprocess --due --every`: rounds that go on through an outage, and end with what no waiting mends."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.errors import CommitConflict, CommitUnknown, DedupError, HandlerError, RegistryUnavailable, SealUnavailable
from dedup.reprocessing.letters import reprocess
from fixtures.variants import of_which
from kit.orders import batch, event
from kit.places import DeltaPlace

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.delta

DUE = """
from dedup import Retry
from kit.orders import consumer as made, flatten
from kit.places import DeltaPlace
from pathlib import Path

def handle(rows, tx):
    if Path({down!r}).exists():
        raise ValueError("the service is down")
    if Path({away!r}).exists():
        raise ConnectionRefusedError("no answer from https://ann:s3cret@shop.example")
    tx.write(flatten(rows), "orders")


consumer = made(DeltaPlace(Path({folder!r})).store(), budget=None, retry=Retry(later=[0.001], first=0, longest=0, total=0))
consumer._handler = handle
"""


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    """Where the handler writes."""
    made = DeltaPlace(tmp_path / "store")
    made.create_sink()
    return made


@pytest.fixture
def line(place: DeltaPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The command that runs two letters, which are due. Its handler finds no service while the file `away` is there."""
    name, down = f"shop_{uuid.uuid4().hex}", tmp_path / "down"
    (tmp_path / f"{name}.py").write_text(DUE.format(folder=place.where, down=str(down), away=str(tmp_path / "away")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    down.touch()
    __import__(name).consumer(batch(event(0, "a"), event(1, "b")), 0)
    down.unlink()
    return f"dead-letter reprocess {name}:consumer --frames arrow --due"


def rounds(patch: pytest.MonkeyPatch, most: int, then: Callable[[int], Any] = lambda number: None) -> list[float]:
    """The pauses between rounds, in seconds: nobody waits for them, and the last one is Ctrl-C."""
    seen: list[float] = []

    def sleep(seconds: float) -> None:
        seen.append(seconds)
        then(len(seen))
        if len(seen) == most:
            raise KeyboardInterrupt

    # not time.sleep itself: other threads of this process sleep, too, and would stop in its place
    patch.setattr("dedup.cli.options.time", SimpleNamespace(sleep=sleep))
    return seen


def test_what_is_due_is_run_so_often_until_somebody_stops_it(
    place: DeltaPlace, line: str, dedup: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that finds nothing prints nothing; --every changes rows, so it asks for --yes."""
    assert dedup(f"{line} --every 1s")[0] == 2 and dedup(f"{line.removesuffix(' --due')} --every 1s --yes")[0] == 2
    code, out, _ = dedup(f"{line} --json")
    assert (code, json.loads(out)["selected"], json.loads(out)["done"]) == (0, 2, False)
    pauses = rounds(monkeypatch, 3)
    _, out, _ = dedup(f"{line} --every 1s --yes --json")
    assert (pauses, json.loads(out)["reprocessed"]) == ([1.0] * 3, 2), "two rounds said nothing"
    assert [row["id"] for row in place.read()] == ["a", "b"]


def test_rounds_go_on_while_the_service_is_away(
    place: DeltaPlace, line: str, tmp_path: Path, dedup: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the handler that is no event's fault is told without secrets, and a later round runs the letters."""
    away = tmp_path / "away"
    away.touch()
    pauses = rounds(monkeypatch, 3, lambda number: away.unlink() if number == 2 else None)
    _, out, err = dedup(f"{line} --every 1s --yes --json")
    assert (len(pauses), json.loads(out)["reprocessed"]) == (3, 2), (out, err)
    assert err.count("ConnectionRefusedError: no answer from") == 2 and "s3cret" not in err
    assert [row["id"] for row in place.read()] == ["a", "b"]


def test_a_service_that_is_away_asks_for_another_try(line: str, tmp_path: Path, dedup: Run) -> None:
    """What the handler calls cannot be reached: exit code 4, and nobody is asked to report it."""
    (tmp_path / "away").touch()
    code, out, err = dedup(f"{line} --yes --json")
    assert (code, out) == (4, "") and "ConnectionRefusedError: no answer from" in err and "run this again" in err
    assert "s3cret" not in err and "DEDUP_DEBUG" not in err


@pytest.mark.parametrize("every", ["", " --every 1s"])
def test_what_was_done_before_a_stop_is_told(line: str, every: str, tmp_path: Path, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script reads one whole document beside the error; with --every the next turn comes, and without it the exit code is 1."""
    (tmp_path / "down").touch()
    pauses = rounds(monkeypatch, 2)
    code, out, err = dedup(f"{line} --yes --json --stop-after 1{every}")
    assert json.loads(out)["failed"] == 2 and err.count("letters in a row failed again") == 1
    assert len(pauses) == 2 if every else code == 1


@pytest.mark.parametrize("error", of_which(1, [CommitUnknown, CommitConflict, RegistryUnavailable, SealUnavailable]))
def test_rounds_go_on_after_what_stops_no_stream(error: type[DedupError], line: str, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer, another writer, or a registry that is away ends no rounds, as it ends no stream."""
    failing = [error("nothing was decided")]

    def once(*given: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop()
        return reprocess(*given, **options)

    monkeypatch.setattr("dedup.cli.reprocess.reprocess", once)
    pauses = rounds(monkeypatch, 2)
    _, out, err = dedup(f"{line} --every 1s --yes --json")
    assert (len(pauses), json.loads(out)["reprocessed"]) == (2, 2) and "dedup: nothing was decided" in err


def test_what_no_waiting_mends_ends_the_rounds(line: str, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that stays ends the command with its exit code, so that a supervisor sees it."""

    def once(*_: Any, **__: Any) -> Any:
        raise HandlerError("it broke a rule")

    monkeypatch.setattr("dedup.cli.reprocess.reprocess", once)
    pauses = rounds(monkeypatch, 1)
    code, out, err = dedup(f"{line} --every 1s --yes")
    assert (code, out, pauses) == (3, "", []) and "it broke a rule" in err


@pytest.mark.full
def test_rounds_end_with_the_reader_of_their_output(line: str, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed output is no outage: the command ends, as `head` expects."""

    def closed(_: Any) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("dedup.cli.reprocess.print_json", closed)
    pauses = rounds(monkeypatch, 1)
    code, _, _ = dedup(f"{line} --every 1s --yes --json")
    assert (code != 0, pauses) == (True, [])
