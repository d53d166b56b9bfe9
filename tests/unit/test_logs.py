"""`dedup.logs`: a record is one line of JSON, says what it is about, and holds no secret."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from checkpoint.errors import StoreUnavailable
from dedup.logs import JsonLines, about, json_lines

Lines = io.StringIO

log = logging.getLogger("dedup.tests.logs")


@pytest.fixture
def stream() -> Iterator[Lines]:
    """What the lines of `log` are written to."""
    written = Lines()
    handler = json_lines(written)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield written
    log.removeHandler(handler)


def told(stream: Lines) -> list[dict[str, Any]]:
    """Each line as a document."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_line(stream: Lines) -> None:
    """Time in RFC 3339 and UTC, level, logger and message; a message of several lines, or of any letters, is one line of ASCII."""
    log.info("a\nb: %s", "ärger")
    log.debug("not asked for")
    (line,) = told(stream)
    assert set(line) == {"time", "level", "logger", "message"} and stream.getvalue().isascii()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert (line["level"], line["logger"], line["message"]) == ("INFO", "dedup.tests.logs", "a\nb: ärger")
    odd = logging.makeLogRecord({"msg": "half a pair: \ud800"})
    assert json.loads(JsonLines().format(odd))["message"] == "half a pair: \ud800"


def test_a_record_says_what_it_is_about(stream: Lines) -> None:
    """Within `about` each record has the fields, inner blocks add theirs, the record's own win, and another thread has none of them."""
    with about(consumer="shop", batch=7):
        with about(epoch=3):
            log.info("in")
        log.info("own", extra={"batch": 8, "password": "hush"})
        thread = threading.Thread(target=log.info, args=("beside",))
        thread.start()
        thread.join()
    log.info("out")
    found = {
        line["message"]: {name: line[name] for name in line if name not in ("time", "level", "logger", "message")} for line in told(stream)
    }
    assert found == {
        "in": {"consumer": "shop", "batch": 7, "epoch": 3},
        "own": {"consumer": "shop", "batch": 8},
        "beside": {},
        "out": {},
    }


def test_an_error_is_told_in_fields(stream: Lines) -> None:
    """With its type, message and stack where it is logged with its stack; an error in the message has its type there, too."""
    try:
        raise StoreUnavailable("no answer")
    except StoreUnavailable:
        log.exception("it failed")
    log.warning("later: %s", ZeroDivisionError("x"))
    whole, brief = told(stream)
    assert (whole["error_type"], whole["error_message"]) == ("dedup.StoreUnavailable", "no answer")
    assert whole["traceback"].startswith("Traceback") and "test_logs" in whole["traceback"] and whole["message"] == "it failed"
    assert (brief["error_type"], brief["error_message"], "traceback" in brief) == ("ZeroDivisionError", "x", False)


def test_secrets_stay_out(stream: Lines) -> None:
    """In the message, in the error and in its stack."""
    try:
        raise RuntimeError("cannot reach postgresql://ann:s3cret@db/shop")  # pragma: allowlist secret
    except RuntimeError as error:
        log.exception("password=s3cret: %s", error)
    (line,) = told(stream)
    assert "s3cret" not in stream.getvalue() and all("***" in line[name] for name in ("message", "error_message", "traceback"))


def test_it_needs_no_driver_and_no_store() -> None:
    """Any program may write its logs like that: the module imports what hides secrets, and no driver."""
    program = "import sys, dedup.logs; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert not {"pyspark", "psycopg", "deltalake", "typer"} & set(loaded)
