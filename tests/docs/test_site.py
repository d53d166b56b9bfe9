"""The site: what it says of commands, errors and settings is what the code has. `make docs` builds it, with every link checked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.paths import ROOT

ERRORS = (ROOT / "docs/reference/errors.md").read_text()
SETTINGS = (ROOT / "docs/reference/settings.md").read_text()


def hooks(file: str = "hooks") -> Any:
    """What mkdocs calls, or another module of docs/."""
    spec = importlib.util.spec_from_file_location(f"site_{file}", ROOT / f"docs/{file}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_error_says_what_to_do_now() -> None:
    """Each class of the error tree has one section, no other name has one, and each section says what to do now."""
    sections = dict(re.findall(r"^##+ `(\w+)`\n(.*?)(?=^##|\Z)", ERRORS, re.MULTILINE | re.DOTALL))
    assert set(sections) == set(hooks().errors())
    assert not [name for name, text in sections.items() if "what to do now" not in text.lower()]


def test_the_page_of_errors_shows_the_docstrings() -> None:
    """Under the heading of each error is its docstring, which is its default message, and the class that it belongs to."""
    from checkpoint.errors import PositionGap

    page = hooks().with_messages(ERRORS)
    section = page.split("### `PositionGap`")[1].split("\n### ")[0]
    assert f"> {PositionGap.__doc__}" in section and "(#checkpointerror)" in section


def test_every_command_is_on_the_page_of_commands() -> None:
    """The page has the help of each command of the program, with all of its options."""
    import typer.main

    from dedup.cli.app import app

    page = "\n".join(hooks().commands())
    found = list(_leaves(typer.main.get_command(app), "dedup"))
    assert len(found) > 30
    for path, command in found:
        section = page.split(f"# {path}\n")[1].split("\n##")[0]
        assert not [p.opts for p in command.params if p.opts[0].startswith("--") and p.opts[0] not in section], path


def test_the_pages_of_names_and_commands_are_those_of_the_code() -> None:
    """A checkout has each name with its parameters, and each command, with a sentence; `python docs/names.py` writes them."""
    names = hooks("names")
    for file, filled in names.PAGES.items():
        page = file.read_text()
        assert filled(page) == page, f"run python docs/names.py: {file} is behind the code"
    page = names.API.read_text()
    assert "`DeadLetters.select(selection, columns=None)`" in page and "| `dedup dead-letter show` | Show one" in names.COMMANDS.read_text()
    for section in re.split(r"(?m)^## ", page)[1:]:
        assert len(re.findall(r"^\| `", section, re.MULTILINE)) >= len(re.findall(r"^::: ", section, re.MULTILINE)), section.splitlines()[0]


def test_every_name_of_the_page_can_be_imported() -> None:
    """`Consumer` from dedup, `kafka.Broker` from dedup.kafka, `checkpoint.PostgresCheckpointStore` from checkpoint."""
    for name in re.findall(r"^\| `([\w.]+)", hooks("names").API.read_text(), re.MULTILINE):
        thing: Any = importlib.import_module("checkpoint" if name.startswith("checkpoint.") else "dedup")
        for part in name.removeprefix("checkpoint.").split("."):
            found = hasattr(thing, part)
            thing = getattr(thing, part) if found else importlib.import_module(f"{thing.__name__}.{part}")


def test_a_long_call_in_a_table_can_be_broken() -> None:
    """A call with many parameters would push the other columns out of sight; short values stay one word."""
    long = "tx.merge(rows, table, keys, newer_by=None, delete_when=None)"
    shown = hooks().on_page_content(f"<tr><td><code>{long}</code></td><td><code>--yes</code></td><td><code>a|b</code></td></tr>")
    assert 'class="long">tx.<wbr>merge(<wbr>rows, table' in shown
    assert "<td><code>--yes</code></td><td><code>a|b</code></td>" in shown


def test_every_column_of_a_table_is_explained() -> None:
    """The page of columns has a section for each command that lists something, with exactly the columns of its tables."""
    from checkpoint.head import Head, Spent
    from deadletter.letter import GROUPS
    from dedup.cli import checkpoint, consumer, dead_letter, lag, outbox, publisher, reprocess, show, status, upkeep, verify

    tables = {
        "consumer list": consumer.LISTED,
        "consumer show": consumer.state_json(Head("shop"), 0),
        "consumer accept-gap": show.CHANGES,
        "consumer lag": lag.COLUMNS,
        "status": status.COLUMNS,
        "checkpoint list": ["consumer", *checkpoint.CHECKPOINTS],
        "checkpoint set": checkpoint.MOVE,
        "batch list": verify.BATCH_COLUMNS,
        "verify": verify.PROOF_COLUMNS,
        "budget show": ["kind", *consumer.kind_json(Spent())],
        "dead-letter list": dead_letter.COLUMNS,
        "dead-letter group": GROUPS.names,
        "dead-letter show": dead_letter.HISTORY_COLUMNS,
        "dead-letter edit": show.CHANGES,
        "dead-letter reprocess": reprocess.RESULTS,
        "consumer replay": reprocess.REPLAYED,
        "upkeep": upkeep.COLUMNS,
        "outbox list": outbox.COLUMNS,
        "outbox lag": outbox.LAG,
        "publisher list": publisher.COLUMNS,
        "publisher show": dict.fromkeys([*publisher.LANE, *publisher.EVENT]),
    }
    page = (ROOT / "docs/reference/columns.md").read_text().split("\n## dedup ")[1:]
    told = {part.splitlines()[0]: re.findall(r"^\| ([\w ,]+) \| (?!means)", part, re.MULTILINE) for part in page}
    assert {name: sorted(", ".join(rows).split(", ")) for name, rows in told.items()} == {
        name: sorted(column.replace("_", " ") for column in columns) for name, columns in tables.items()
    }


def _leaves(command: Any, path: str) -> Any:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, one in (inner or {}).items():
        yield from _leaves(one, f"{path} {name}")


def test_every_setting_of_the_consumer_is_in_the_table() -> None:
    """A setting that the page does not tell of does not exist for its readers; each group has a table of its own."""
    from dedup import Consumer, FailurePolicy, Limits, Takeover

    made = (Consumer, FailurePolicy, Takeover, Limits)
    settings = [name for one in made for name in inspect.signature(one).parameters if name not in ("name", "store")]
    assert [s for s in settings if f"`{s}`" not in SETTINGS] == []


def test_every_command_that_an_error_names_exists() -> None:
    """The page of errors names commands that have help."""
    from typer.testing import CliRunner

    from dedup.cli.app import app

    found = {tuple(m.split()[1:3]) for m in re.findall(r"`(dedup (?:consumer|budget|outbox|publisher|dead-letter|sink) [\w-]+)", ERRORS)}
    assert len(found) > 5
    for words in found:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, in which functions of Python are named."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def test_the_site_has_every_page() -> None:
    """A page under docs/ is in the navigation, and a broken link or anchor is an error of `make docs`."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Settings)
    named = set(re.findall(r"[\w/-]+\.md", str(settings["nav"])))
    assert {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} <= named
    assert set(settings["validation"]["links"].values()) == {"warn"}
    assert not [page for page in (ROOT / "docs").rglob("*.md") if "```mermaid" in page.read_text()], "drawn by a script of another site"
    words = (ROOT / "Makefile").read_text().split("\ndocs:")[1].split("\n\n")[0]
    assert "--strict" in words and "--quiet" not in words


def build(folder: Path, place: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs` with the words that `make docs` gives it. (With --quiet, --strict does not see a warning.)"""
    words = re.search(r"/mkdocs (build .*)", (ROOT / "Makefile").read_text())
    assert words
    command = [sys.executable, "-m", "mkdocs", *words[1].split(), "--site-dir", str(place)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_the_site_builds(tmp_path: Path) -> None:
    """`make docs` has no warning: each link and each anchor leads somewhere, each name of the API page exists."""
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("link", ["none.md", "tutorial/start.md#nowhere"])
def test_a_broken_link_ends_the_build(tmp_path: Path, link: str) -> None:
    """A link to a page or to an anchor that does not exist is an error of `make docs`, which names it."""
    for name in ("docs", "benchmarks", "checkpoint", "deadletter", "dedup"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs/index.md").open("a") as page:
        page.write(f"\n[broken]({link})\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and link.split("#")[-1] in done.stderr, done.stderr
