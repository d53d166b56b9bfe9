"""`--log-json`: whatever a command writes to standard error is one JSON object a line, also where the call itself is wrong."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dedup.cli import lines
from dedup.cli.app import app
from kit.orders import batch, orders
from kit.outgoing import publisher
from kit.paths import environment
from kit.places import DeltaPlace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def place(tmp_path: Path) -> DeltaPlace:
    """A place where `shop` has decided three orders, whose messages wait."""
    made = DeltaPlace(tmp_path)
    made.create_sink()
    publisher(made.store())(batch(*orders(range(3))), 0)
    return made


def documents(text: str) -> list[dict[str, Any]]:
    """Each line; a line that is no JSON fails."""
    return [json.loads(line) for line in text.splitlines()]


def leaves(command: Any, name: str = "") -> dict[str, Any]:
    """Name -> command, of all commands."""
    if not hasattr(command, "commands"):
        return {name.strip(): command}
    return {found: leaf for child, inner in command.commands.items() for found, leaf in leaves(inner, f"{name} {child}").items()}


def test_every_command_has_the_option() -> None:
    """All but the demo, whose output is for people."""
    without = {name for name, one in leaves(get_command(app)).items() if not any("--log-json" in p.opts for p in one.params)}
    assert without == {"demo"}


@pytest.mark.parametrize(
    ("line", "code", "error"),
    [
        ("verify --log-json", 2, "dedup.ConfigError"),
        ("verify --log-json --store postgresql://ann:s3cret@127.0.0.1:1/shop", 4, "dedup.StoreUnavailable"),
        ("verify --fast --log-json", 2, None),
        ("consumer lag --log-json --fail-above much", 2, None),
        ("nonsense --log-json", 2, None),
    ],
)
def test_an_error_is_one_line(line: str, code: int, error: str | None, dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is the usual one. The line names the type of the error, has its stack, and no password."""
    monkeypatch.setenv("DEDUP_DEBUG", "1")  # which changes nothing here
    found, out, err = dedup(line)
    (told,) = documents(err)
    assert (found, out, told["level"], told["logger"]) == (code, "", "ERROR", "dedup")
    assert told.get("error_type") == error and ("traceback" in told) == (error is not None)
    assert "s3cret" not in err and not told["message"].startswith("dedup:")


def test_the_variable_is_the_option(dedup: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEDUP_LOG_JSON=1 asks for lines, =0 does not; the answer on standard output and the logging of the process stay what they were."""
    monkeypatch.setenv("DEDUP_LOG_JSON", "0")
    plain = dedup("verify")[2]
    assert plain.startswith("dedup: No store given")
    monkeypatch.setenv("DEDUP_LOG_JSON", "1")
    assert documents(dedup("verify")[2])[0]["message"] in plain
    assert dedup("--version") == (0, f"dedup {__import__('dedup').__version__}\n", "")
    assert not lines.are_written() and logging.getLogger("dedup").level == logging.NOTSET


@pytest.mark.full
@pytest.mark.delta
def test_the_answer_stays_where_it_is(place: DeltaPlace, dedup: Run) -> None:
    """Standard output and the exit code are the same with the option as without it."""
    for line in ("status --json", "consumer list", "verify"):
        plain, lined = dedup(line, place), dedup(f"{line} --log-json", place)
        assert (plain[0], len(plain[1])) == (lined[0], len(lined[1])) and plain[1]
        assert all(told["level"] in ("INFO", "WARNING") for told in documents(lined[2]))


def test_warnings_and_threads_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """What Python itself writes to standard error is a line as well: a warning, and the error that ends a thread."""

    def ends() -> None:
        raise ZeroDivisionError("x")

    with lines.written(), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # the block above took its place
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        thread = threading.Thread(target=ends, name="t1")
        thread.start()
        thread.join()
    warned, ended = documents(capsys.readouterr().err)
    assert (warned["logger"], "DeprecationWarning: old" in warned["message"]) == ("py.warnings", True)
    assert (ended["message"], ended["error_type"]) == ("the thread t1 ended with an error", "ZeroDivisionError")


def running(folder: Path, url: str, *line: str) -> subprocess.Popen[str]:
    """A command that goes on until it is stopped."""
    whole = [sys.executable, "-m", "dedup", *line, "--log-json", "--store", url]
    return subprocess.Popen(whole, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def first_and_stopped(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> dict[str, Any]:
    """The first line of a command; all that it writes until it is stopped are lines."""
    assert process.stderr is not None
    with process:
        told = json.loads(process.stderr.readline())
        process.send_signal(number)
        documents(process.stderr.read())
    return dict(told)


@pytest.mark.full
@pytest.mark.delta
def test_a_dispatcher_that_is_refused_tells_it_in_lines(place: DeltaPlace) -> None:
    """`outbox dispatch` runs on; its line names the consumer and the error."""
    (Path(place.where) / "away.py").write_text("def send(messages):\n    raise ConnectionRefusedError('no answer')\n")
    told = first_and_stopped(running(Path(place.where), place.url, "outbox", "dispatch", "shop", "--call", "away:send"))
    assert (told["level"], told["consumer"], told["error_type"]) == ("WARNING", "shop", "dedup.DestinationUnavailable")


@pytest.mark.delta
def test_the_server_of_metrics_tells_its_address_in_a_line(place: DeltaPlace) -> None:
    """`metrics --listen`: the line is no warning."""
    told = first_and_stopped(running(Path(place.where), place.url, "metrics", "--listen", "127.0.0.1:0"))
    assert told["level"] == "INFO" and told["message"].startswith("Metrics are at http://127.0.0.1:")


@pytest.mark.postgres
def test_upkeep_that_cannot_reach_the_store_tells_it_in_lines(tmp_path: Path) -> None:
    """`upkeep --every` goes on, and each turn that failed is a line with the type of the error."""
    url = "postgresql://ann:s3cret@127.0.0.1:1/shop"  # pragma: allowlist secret
    told = first_and_stopped(running(tmp_path, url, "upkeep", "--retention", "30d", "--every", "0.5s", "--yes"))
    assert (told["level"], told["error_type"]) == ("WARNING", "dedup.StoreUnavailable") and "s3cret" not in str(told)
