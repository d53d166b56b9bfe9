"""Tables: whole and plain in a pipe, readable at 80 columns of a real terminal, never a control code that somebody else chose."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from rich.cells import cell_len

from dedup import Selection
from dedup.cli import show
from dedup.cli.reprocess import _print_reprocessed
from dedup.core.messages import Chosen, State
from dedup.demo import main
from dedup.demo.audit import Audit
from dedup.reprocessing.options import Reprocessed, Unread
from fixtures.variants import of_which
from kit.orders import batch, event
from kit.outgoing import Receiver, dispatcher, publisher
from kit.people import BODY
from kit.places import DeltaPlace

pytestmark = pytest.mark.delta

Run = Callable[..., tuple[int, str, str]]

LONG = "an error message of an ordinary length, as a handler raises it when something that it needs is not what it expects to find"

READING = [
    "consumer list",
    "consumer show shop",
    "checkpoint list",
    "batch list shop",
    "verify",
    "dead-letter list",
    "dead-letter group",
    "dead-letter show {letter}",
    "budget show shop",
    "outbox list shop",
    "outbox show shop {message}",
    "outbox lag",
]

CHANGING = [
    "consumer accept-gap shop",
    "consumer accept-incarnation shop --source broker --topic orders",
    "consumer accept-restore shop",
    "consumer reset shop",
    "checkpoint set shop --topic orders --partition 0 --to 19",
    "dead-letter discard {letter} --reason x",
    "dead-letter edit {letter} --body {{}}",
    "budget lift shop --kind NO_KEY --events 50",
    "sink accept shop orders",
    "sink sync",
    "outbox retry shop {message}",
    "outbox discard shop {message}",
    "outbox purge shop --older-than 1d",
]
"""As they look without --yes."""


LINES = [*READING, *CHANGING]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Command -> the same with ids and a store, whose consumer has dead letters and messages that cannot be sent."""
    place = DeltaPlace(tmp_path_factory.mktemp("tables"))
    place.create_sink()
    store = place.store()
    publisher(store)(batch(*[event(n, f"o{n}", 0) for n in range(3)], event(3, "b", -1), event(4, body=BODY)), 0)
    letter = store.letters(Selection())["id"][0].as_py()
    receiver = Receiver()
    receiver.refused = {b"o1": ValueError(LONG)}
    dispatcher(place, receiver).once()
    message = store.outbox("shop").entries(Chosen((State.DEAD,)))[0].number
    store.close()
    url = shlex.quote(place.url)
    return {line: f"{line.format(letter=letter, message=message)} --store {url}" for line in LINES}


@pytest.mark.parametrize("line", of_which(9, LINES))
def test_a_pipe_gets_plain_whole_tables(line: str, lines: dict[str, str], dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No control codes, a header in one line without an empty name, and one line per row, however narrow the terminal beside it is."""
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = dedup(lines[line])
    assert (code, err) == (0, ""), err
    assert out.strip() and "\x1b" not in out
    printed = out.splitlines()
    for number, rule in enumerate(printed):
        if rule and set(rule) <= {"─", " "}:
            header = printed[number - 1]
            starts = [at for at in range(len(rule)) if rule[at] == "─" and (at == 0 or rule[at - 1] == " ")]
            ends = [*(at - len(show.GAP) for at in starts[1:]), len(rule)]
            assert all(header[start:end].strip() for start, end in zip(starts, ends, strict=True)), printed
            assert len(starts) > 1


@pytest.mark.parametrize("line", of_which(9, LINES))
def test_a_terminal_of_80_columns_is_enough(line: str, lines: dict[str, str], dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is broken by the terminal: a table that is too wide becomes a block per row, and nothing of a value is left out."""
    monkeypatch.setenv("COLUMNS", "80")
    piped = dedup(lines[line])[1]
    shown = in_terminal(lambda: dedup(lines[line]))
    too_long = [text for text in shown if cell_len(text) > 80 and " " in text.strip()]
    assert shown and not too_long
    values = re.findall(r"[a-zA-Z_]{8,}", "\n".join(text for text, rule in pairwise([*piped.splitlines(), ""]) if set(rule) - set("─ ")))
    everything = "".join("".join(shown).split())
    assert [word for word in values if word not in everything] == []


def in_terminal(run: Callable[[], object]) -> list[str]:
    """The lines that `run` prints to a real terminal."""
    master, slave = pty.openpty()
    read = bytearray()
    reader = threading.Thread(target=_read, args=(master, read))
    reader.start()
    before = sys.stdout
    with open(slave, "w", encoding="utf-8") as sys.stdout:
        try:
            run()
        finally:
            sys.stdout.flush()
            sys.stdout, terminal = before, sys.stdout
            terminal.close()
    reader.join()
    os.close(master)
    return read.decode().replace("\r\n", "\n").splitlines()


def _read(master: int, into: bytearray) -> None:
    """Until the other end is closed, which is an error of its own."""
    try:
        while data := os.read(master, 1 << 16):
            into.extend(data)
    except OSError:
        return


@pytest.mark.parametrize("variables", of_which(1, [{}, {"NO_COLOR": "1"}]))
def test_the_width_is_that_of_the_terminal(variables: dict[str, str], lines: dict[str, str]) -> None:
    """Asked of the terminal itself, where no variable says it; there are no colors, with NO_COLOR and without."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | variables
    command = [sys.executable, "-m", "dedup", *shlex.split(lines["batch list shop"])]
    done = subprocess.run(command, stdout=slave, stderr=subprocess.PIPE, env=environment, check=True, timeout=60)
    os.close(slave)
    read = bytearray()
    _read(master, read)
    os.close(master)
    shown = read.decode().splitlines()
    assert done.stderr == b"" and "── 1 of " in shown[0] and max(map(cell_len, shown)) <= 60
    assert b"\x1b" not in read


def test_values_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """What somebody else has written into a value is shown, and breaks neither line nor terminal; wide characters keep columns straight."""
    show.print_table(["id", "text"], [[1, "a\x1b[31mb\nc"], [22, "日本"]])
    assert capsys.readouterr().out.splitlines() == ["id  text", "──  ─────────────", " 1  a\\x1b[31mb\\nc", "22  日本"]


def test_a_look_at_letters_tells_of_those_that_are_too_old(capsys: pytest.CaptureFixture[str]) -> None:
    """They are none of the selected ones: without a word nobody would know why."""
    _print_reprocessed(Reprocessed(expired=2, dry_run=True), from_log=False)
    assert "2 letters are older than Limits(reprocess_within=...), and are left." in capsys.readouterr().out


def test_a_look_at_letters_tells_how_many_wait_behind_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A run takes those as well: without a word it would do more than was shown."""
    _print_reprocessed(Reprocessed(selected=1, behind=2, dry_run=True), from_log=False)
    assert "Up to 2 more wait behind these, and are run as well where these pass." in capsys.readouterr().out


def test_a_table_names_some_of_many_letters_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Where thousands are unread, also at each turn of --every: the first ones, and how many there are beside them."""
    unread = [Unread(f"letter-{n:02}", "kafka", "orders", 0, n, "the broker is away") for n in range(25)]
    _print_reprocessed(Reprocessed(unread=unread), from_log=False)
    shown = capsys.readouterr().out
    assert re.findall(r"letter-(\d\d)", shown) == [f"{n:02}" for n in range(20)]
    assert "\n5 more letters are unread: --json names all.\n" in shown
    _print_reprocessed(Reprocessed(unread=unread[:20]), from_log=False)
    assert "more letters" not in capsys.readouterr().out


def test_the_demo_breaks_no_line_in_a_pipe() -> None:
    """Each result is one line with a name, a count and a meaning, and no control code."""
    audit = Audit(338_000, 1_200, 8_000, 900, 320_000, {("REJECTED", "no departure"): 8_255}, 0, 1, ("x",))
    pipe = io.StringIO()
    main.console_for(pipe).print(main.as_table(audit, 3, "dedup demo --seed 7"))
    printed = pipe.getvalue().splitlines()
    assert "\x1b" not in pipe.getvalue() and [name.strip() for name in printed[2].split("┃")[1:4]] == ["result", "count", "meaning"]
    rows = [[part.strip() for part in line.split("│")[1:4]] for line in printed if line.startswith("│")]
    assert len(rows) == 8 and all(all(row) for row in rows)
