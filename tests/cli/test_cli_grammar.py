"""What holds for all commands: names, one form of durations and confirmations, JSON, exit codes and completion."""

from __future__ import annotations

import datetime as dt
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from checkpoint import errors
from deadletter import Kind, Status
from deadletter.policy import WATCHED
from dedup.cli.app import app
from dedup.cli.dead_letter import FileFormat
from dedup.cli.exits import HELP, ExitCode, exit_code
from dedup.cli.options import above, amount, duration, moment, one_of
from dedup.cli.outbox import StateName
from dedup.cli.reprocess import FrameKind
from fixtures.variants import of_which
from kit.paths import ROOT

Run = Callable[..., tuple[int, str, str]]


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for child, inner in command.commands.items():
                yield from walk(f"{name} {child}".strip(), inner)
        else:
            yield name, command

    yield from walk("", get_command(app))


COMMANDS = dict(commands())

WHOLE_STORE = {"demo", "metrics", "migrate", "status", "upkeep", "verify"}
"""Commands without a noun."""

NAMES = """
    demo migrate verify upkeep
    consumer: list show lag replay accept-gap accept-incarnation accept-restore reset forget delete
    checkpoint: list set import-blob mirror-blob mirror-group
    batch: list
    dead-letter: list group show discard reopen edit export import reprocess
    budget: show lift
    sink: sync accept
    outbox: dispatch list show retry discard purge lag
    publisher: list show export import set-partitions discard purge
"""

CARRIED_OUT = {"demo", "migrate", "sink sync", "outbox dispatch"}
"""They change rows without --yes: what they carry out is decided already, and is safe to repeat."""

DECISIONS = {
    "consumer replay",
    "consumer accept-gap",
    "consumer accept-incarnation",
    "consumer accept-restore",
    "consumer reset",
    "consumer forget",
    "consumer delete",
    "checkpoint set",
    "checkpoint import-blob",
    "dead-letter discard",
    "dead-letter reopen",
    "dead-letter edit",
    "dead-letter import",
    "dead-letter reprocess",
    "budget lift",
    "sink accept",
    "outbox retry",
    "outbox discard",
    "publisher import",
    "publisher set-partitions",
    "publisher discard",
}
"""A person's decision: who made it and why is kept."""

UPKEEP = {"checkpoint mirror-blob", "checkpoint mirror-group", "outbox purge", "publisher purge", "upkeep"}
"""They change rows with --yes, and decide nothing that a record would be kept of."""


def options(name: str) -> set[str]:
    """The long options of a command."""
    return {text for parameter in COMMANDS[name].params for text in parameter.opts if text.startswith("--")}


def test_the_commands_are_these() -> None:
    """Noun and verb, nouns in the singular; a change of a name is seen here."""
    named = {
        f"{noun} {verb}"
        for noun, _, verbs in (line.partition(":") for line in NAMES.strip().splitlines()[1:])
        for noun, verb in ((noun.strip(), v) for v in verbs.split())
    }
    assert set(COMMANDS) == named | WHOLE_STORE


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_json(name: str) -> None:
    """A program never has to read a table."""
    assert "--json" in options(name)


@pytest.mark.parametrize("name", COMMANDS)
def test_changes_are_confirmed_in_one_way(name: str) -> None:
    """--yes wherever rows change by a person's decision, and --dry-run nowhere."""
    given = options(name)
    assert "--dry-run" not in given
    assert ("--yes" in given) == (name in DECISIONS | UPKEEP)
    assert ({"--by", "--reason"} <= given) == (name in DECISIONS)


@pytest.mark.full
@pytest.mark.parametrize("noun", ["", *sorted({name.split()[0] for name in COMMANDS} - WHOLE_STORE)])
def test_a_list_of_commands_shows_whole_sentences(noun: str, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns nothing of what a command is for is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    listed = dedup(f"{noun} --help")[1].partition("Commands:")[2].partition("Example")[0].splitlines()
    assert all(line.endswith(".") for line in listed if line.strip()), listed


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43_200), ("14d", 1_209_600), ("0.5s", 0.5), ("0s", 0)],
)
def test_a_duration_is_a_number_with_a_unit(text: str, seconds: float) -> None:
    """Seconds, minutes, hours, days; whole or not."""
    assert duration(text) == dt.timedelta(seconds=seconds)


NO_DURATIONS = ["", "7", "soon", "-1d", "1w", "1d12h", "d", "1 d x", "1e3s", "99999999999d", "infd", "nans", "٣d", "1.٥h"]


@pytest.mark.parametrize("text", NO_DURATIONS)
def test_anything_else_is_no_duration(text: str) -> None:
    """The message shows the forms that there are, or the longest that is taken."""
    with pytest.raises(typer.BadParameter, match=r"90s, 30m, 12h or 14d|longer than 36500d"):
        duration(text)


@pytest.mark.full
def test_a_wrong_duration_is_a_usage_error_on_every_option(dedup: Run) -> None:
    """Each option that takes a duration says the same, before the store is asked."""
    lines = [
        "outbox purge shop --older-than 7",
        "publisher purge --older-than soon",
        "outbox dispatch shop --call a:b --every 1",
        "checkpoint mirror-blob --every x",
        "checkpoint mirror-group shop --every x",
    ]
    for line in lines:
        code, _, err = dedup(line)
        assert (code, "90s, 30m, 12h or 14d" in " ".join(err.split())) == (2, True), err
    code, _, err = dedup("outbox lag --fail-above much")
    assert (code, "10000, or 90s, 30m, 12h, 14d" in " ".join(err.split())) == (2, True), err


def test_a_time_can_be_an_age() -> None:
    """`--since 12h` is twelve hours ago; the form is that of every duration."""
    before, age = dt.datetime.now(dt.UTC), dt.timedelta(hours=12)
    assert before - age <= moment("12h") <= dt.datetime.now(dt.UTC) - age


def test_a_limit_is_a_number_or_a_duration() -> None:
    """A number is compared with how many there are, a duration with the age of the oldest; an age that nobody knows is too old."""
    assert amount("10000") == 10_000 and amount("15m") == dt.timedelta(minutes=15)
    assert above(11, None, 10) and not above(10, None, 10)
    minute = dt.timedelta(minutes=1)
    assert above(1, 61.0, minute) and not above(1, 60.0, minute)
    assert above(1, None, minute) and not above(0, None, minute)


@pytest.mark.parametrize("text", ["٣", "１０", "²", "-1", "1.5", "much", "9" * 5_000], ids=lambda text: text[:9])
def test_anything_else_is_no_limit(text: str) -> None:
    """Digits are those of ASCII, and not more than a count can have."""
    with pytest.raises(typer.BadParameter, match=r"neither a number nor a duration\. Give 10000, or 90s, 30m, 12h, 14d\."):
        amount(text)


CHOICES = {
    "dead-letter list --kind": Kind,
    "dead-letter list --status": Status,
    "budget lift shop --events 1 --kind": WATCHED,
    "outbox list shop --state": StateName,
    "dead-letter export - --format": FileFormat,
    "dead-letter reprocess a:b --frames": FrameKind,
    "consumer replay a:b --frames": FrameKind,
}
"""Call -> the values of its last option."""


@pytest.mark.parametrize("call", of_which(3, CHOICES))
def test_a_word_that_an_option_does_not_know_is_answered_with_those_it_knows(call: str, dedup: Run) -> None:
    """The message names the wrong word and all values as they are written, and the nearest one where one is near."""
    known = [str(value) for value in CHOICES[call]]
    for given in ("nothing", known[0][:-1].swapcase()):
        code, out, err = dedup(f"{call} {given}")
        told = " ".join(err.split())
        assert (code, out) == (2, "")
        assert f"'{given}' is none of {', '.join(known)}." in told
        assert (f"Did you mean {known[0]}?" in told) == (given != "nothing")


def test_a_value_of_an_option_is_taken_in_any_case() -> None:
    """`--kind handler_error`, `Handler-Error` and `HANDLER_ERROR` mean one kind."""
    for choices in CHOICES.values():
        parse = one_of(choices)["parser"]
        for value in choices:
            assert {parse(form) for form in (value, value.lower(), value.title(), value.replace("_", "-"))} == {value}


def test_no_option_takes_its_values_in_another_way() -> None:
    """An option with named values is made by `one_of`; typer's own message spells the values in lower case."""
    known = {*map("|".join, CHOICES.values()), "NUMBER|DURATION"}
    for name, command in COMMANDS.items():
        context = command.context_class(command, info_name=name)
        shown = [record[0] for p in command.params if (record := p.get_help_record(context))]
        assert {word for text in shown for word in text.split() if "|" in word} <= known, name


CODES = {
    errors.ConfigError: 2,
    errors.SettingsChanged: 2,
    errors.Refused: 3,
    errors.Fenced: 3,
    errors.StillHeld: 3,
    errors.SchemaOutdated: 3,
    errors.PublicationStuck: 3,
    errors.PositionsMissing: 3,
    errors.HandlerError: 3,
    errors.ReprocessStopped: 1,
    errors.LettersUnread: 1,
    errors.StoreUnavailable: 4,
    errors.CommitUnknown: 4,
    errors.SourceUnavailable: 4,
    errors.RegistryUnavailable: 4,
    errors.DestinationUnavailable: 4,
    ImportError: 2,
    RuntimeError: 5,
}


@pytest.mark.parametrize(("error", "code"), CODES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_exit_codes_tell_errors_apart(error: type[Exception], code: int) -> None:
    """Wrong call, refused, unreachable, unexpected: a script knows what to do without reading the message."""
    assert exit_code(error()) == code


def test_the_help_and_the_docs_have_all_exit_codes(dedup: Run) -> None:
    """One table, in `dedup --help` and in the documentation."""
    _, out, _ = dedup("--help")
    assert HELP in " ".join(out.split())
    tables = [text for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")) if "| exit code |" in (text := file.read_text())]
    assert len(tables) == 1
    rows = [int(n) for n in re.findall(r"^\| (\d+) \|", tables[0].partition("| exit code |")[2].partition("\n\n")[0], re.MULTILINE)]
    assert rows == [code.value for code in ExitCode]


def test_an_unknown_option_is_a_usage_error(dedup: Run) -> None:
    """Exit code 2, and the help that says which there are."""
    code, _, err = dedup("verify --fast")
    assert (code, "--help" in err) == (2, True)


ABORTS = """
import io, sys, time
import pyarrow as pa, pyarrow.csv as csv
from dedup.process import leave

class Slow(io.RawIOBase):
    first = True
    def readable(self):
        return True
    def readinto(self, into):
        if not self.first:
            time.sleep(0.3)
        self.first, data = False, b"1,2\\n" * (len(into) // 4)
        into[: len(data)] = data
        return len(data)

reader = csv.open_csv(pa.PythonFile(Slow(), mode="r"), read_options=csv.ReadOptions(block_size=4096))
print(reader.read_next_batch().num_rows)
leave(SystemExit(eval(sys.argv[1])))
"""
"""A program that ends while a thread of Arrow still calls Python."""


@pytest.mark.parametrize(("code", "expected", "said"), of_which(1, [("3", 3, ""), ("None", 0, ""), ("'why'", 1, "why\n")]))
def test_a_thread_that_outlives_the_command_does_not_change_its_exit_code(code: str, expected: int, said: str) -> None:
    """The end of the interpreter would abort under such a thread; the command prints what it has to say and ends with its own exit code."""
    done = subprocess.run([sys.executable, "-c", ABORTS, code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "1023\n", said)


@pytest.mark.full
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there such a thread waits forever, and Arrow for it")
def test_the_end_of_the_interpreter_does_not_end_such_a_program_well() -> None:
    """Without `leave` it aborts, or its thread keeps it from ending: the test before this one shows something."""
    program = ABORTS.replace("\nleave(", "\nsys.exit(").replace("SystemExit(", "(")
    line = [sys.executable, "-c", program, "3"]
    with suppress(subprocess.TimeoutExpired):
        assert subprocess.run(line, capture_output=True, text=True, check=False, timeout=60).returncode < 0


def completed(words: str) -> str:
    """What bash is given for this line."""
    count = len(shlex.split(words)) if words.endswith(" ") else len(shlex.split(words)) - 1
    environment = {**os.environ, "_DEDUP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    program = [sys.executable, "-c", "from dedup.cli import program; program()"]
    return subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.full
def test_the_shell_completes_commands_and_options(dedup: Run) -> None:
    """`dedup --install-completion` is there, and what it installs gets the nouns, the verbs and the options."""
    assert "--install-completion" in dedup("--help")[1]
    assert {"consumer", "checkpoint", "dead-letter", "outbox", "verify"} <= set(completed("dedup ").split())
    assert set(completed("dedup dead-letter re").split()) == {"reopen", "reprocess"}
    assert "--fail-above" in completed("dedup consumer lag --f").split()


def test_the_docs_name_only_commands_that_there_are() -> None:
    """Whatever follows `dedup` in a command line of the documentation is a command."""
    nouns = {name.split()[0] for name in COMMANDS}
    for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = Path(file).read_text(encoding="utf-8")
        typed = [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        for words in re.findall(
            r"(?:`|^)dedup ([a-z][a-z-]*(?: [a-z][a-z-]*)?)", "\n".join([*re.findall(r"`[^`\n]+`", text), *typed]), re.M
        ):
            noun, _, verb = words.partition(" ")
            assert words in COMMANDS or noun in WHOLE_STORE or (noun in nouns and not verb), f"{file}: dedup {words}"
