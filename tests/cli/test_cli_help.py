"""The command line before it has a store: help, errors, secrets, and the SQL that somebody else will run."""

from __future__ import annotations

import gc
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from checkpoint.postgres.connection import address
from dedup.cli import main
from dedup.cli.app import YOUNG, app
from dedup.urls import mask_secrets

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


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=lambda value: value if isinstance(value, str) else "")
def test_each_command_has_help_with_an_example(name: str, command: Any, dedup: Run) -> None:
    """`--help` says what the command does, every option has a text, and the example is a call that the command understands."""
    code, out, _ = dedup(f"{name} --help")
    assert code == 0
    assert f"Example: dedup {name}" in " ".join(out.split())
    assert all(p.help for p in command.params if p.param_type_name == "option")
    words = shlex.split(command.epilog.removeprefix("Example: ").partition(">")[0])[1 + len(name.split()) :]
    with command.make_context(name, words, resilient_parsing=False) as context:
        assert not context.args


@pytest.mark.full
@pytest.mark.parametrize("noun", sorted({name.split()[0] for name, _ in commands() if " " in name}))
def test_each_noun_has_help_with_an_example(noun: str, dedup: Run) -> None:
    """`dedup NOUN --help` ends with a call of one of its commands, which that command understands."""
    code, out, _ = dedup(f"{noun} --help")
    (example,) = re.findall(rf"Example: dedup ({noun} .*)", " ".join(out.split()))
    (name, command), *_ = [(name, command) for name, command in commands() if example.startswith(f"{name} ")]
    with command.make_context(name, shlex.split(example)[len(name.split()) :], resilient_parsing=False) as context:
        assert (code, context.args) == (0, [])


@pytest.mark.postgres
def test_an_unreachable_server_is_one_line_without_the_password(dedup: Run) -> None:
    """No stack trace, no secret, and what to do."""
    for url in ("postgresql://ann:s3cret@127.0.0.1:1/shop", "'host=127.0.0.1 port=1 dbname=shop user=ann password=s3cret'"):
        for line in ("verify", "publisher list", "checkpoint set --namespace n --hub h --partition 0 --to 5"):
            code, out, err = dedup(f"{line} --store {url}")
            assert (code, out, err.count("\n")) == (4, "", 1)
            assert (
                "PostgreSQL at 127.0.0.1:1 (database shop, user ann) cannot be reached" in err and "Connection refused. Check that" in err
            )
            assert "s3cret" not in err


def test_the_address_is_what_libpq_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that the DSN leaves out come from the environment; several hosts are all named; no password is."""
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    assert address("") == "the local socket:5432"
    assert address("postgresql://a,b:5433/shop?password=s3cret") == "a:5432, b:5433 (database shop)"
    monkeypatch.setenv("PGHOST", "db")
    monkeypatch.setenv("PGUSER", "ann")
    assert address("dbname=shop port=6000") == "db:6000 (database shop, user ann)"


def test_a_stack_trace_is_shown_on_request_only(dedup: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DEDUP_DEBUG=1 lets the error through as Python tells it."""
    code, _, err = dedup(f"verify --store {tmp_path}/none")
    assert (code, err.count("\n"), "first batch" in err) == (2, 1, True)
    monkeypatch.setenv("DEDUP_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["dedup", "verify", "--store", f"{tmp_path}/none"])
    with pytest.raises(Exception, match="There is no store in"):
        main()


@pytest.mark.delta
def test_a_folder_without_a_store_is_refused(dedup: Run, tmp_path: Path) -> None:
    """A mistyped folder never verifies: there has to be a consumer in it. `migrate` says that there is no state yet."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for line in ("verify", "consumer list", "dead-letter list", "checkpoint list"):
        for name in ("file", "empty", "none"):
            code, out, err = dedup(f"{line} --store {tmp_path}/{name}")
            assert (code, out) == (2, "") and f"There is no store in {tmp_path}/{name}" in err
    for line in ("migrate", "migrate --check"):
        code, out, _ = dedup(f"{line} --store {tmp_path}/none")
        assert (code, "There is no state yet" in out, "up to date" in out) == (0, True, False)
    assert "the first batch of each consumer creates its tables" in dedup(f"migrate --sql --store {tmp_path}/none")[2]


def test_no_store_is_one_line_that_says_how_to_name_one(dedup: Run) -> None:
    """The first thing everybody forgets."""
    code, _, err = dedup("verify")
    assert (code, "DEDUP_STORE" in err) == (2, True)


@pytest.mark.postgres
def test_migrate_prints_the_sql_and_touches_nothing(empty_postgres: str, dedup: Run) -> None:
    """--sql is for a role that may create tables; --check names what is missing, with exit code 1; only the plain command applies it."""
    code, out, _ = dedup("migrate --sql")
    assert (code, "create table" in out) == (0, True)
    assert "needs a migration" in dedup(f"migrate --check --store {shlex.quote(empty_postgres)}")[1]
    code, _, err = dedup(f"verify --store {shlex.quote(empty_postgres)}")
    assert (code, "dedup migrate" in err) == (3, True)
    code, out, _ = dedup(f"migrate --check --store {shlex.quote(empty_postgres)}")
    assert (code, "needs a migration" in out) == (1, True)
    assert "applied 0001" in dedup(f"migrate --store {shlex.quote(empty_postgres)}")[1]
    assert "up to date" in dedup(f"migrate --check --store {shlex.quote(empty_postgres)}")[1]


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://ann:p@ss:word@db/shop failed", "postgresql://ann:***@db/shop failed"),
        ("postgresql://ann@db/shop?password=secret&x=1", "postgresql://ann@db/shop?password=***&x=1"),
        ("host=db password='a b' user=ann", "host=db password=*** user=ann"),
        ("az://lake/dedup?sig=abc%2F", "az://lake/dedup?sig=***"),
        ("postgresql://ann@db/shop", "postgresql://ann@db/shop"),
    ],
)
def test_secrets_are_masked(text: str, masked: str) -> None:
    """Passwords, keys and signatures never reach the screen, whatever form the URL has."""
    assert mask_secrets(text) == masked


@pytest.mark.full
@pytest.mark.postgres
def test_output_into_a_closed_pipe_is_no_stack_trace() -> None:
    """`dedup ... | head` ends quietly when head has read enough."""
    line = '"$0" -m dedup migrate --sql | true'
    assert subprocess.run(["bash", "-c", line, sys.executable], capture_output=True, text=True, timeout=60, check=True).stderr == ""


def test_the_command_searches_for_cycles_seldom(dedup: Run) -> None:
    """Messages that go out by the thousand are objects by the dozen: in a process of ours Python does not look at them again and again."""
    before = gc.get_threshold()
    try:
        assert dedup("--version")[0] == 0 and gc.get_threshold()[0] == YOUNG
    finally:
        gc.set_threshold(*before)
