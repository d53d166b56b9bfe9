"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from checkpoint.errors import command
from kit.paths import ROOT, TESTS

SOURCES = [file for package in ("checkpoint", "deadletter", "dedup") for file in (ROOT / package).rglob("*.py")]


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: str(file.relative_to(TESTS)))
def test_each_test_says_what_it_guards(file: Path) -> None:
    """Every test has a docstring that is a sentence, so that the list of tests reads as the specification."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = [*tree.body, *(node for group in tree.body if isinstance(group, ast.ClassDef) for node in group.body)]
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert not [node.name for node in tests if not (ast.get_docstring(node) or "").endswith((".", "?", ")"))]


def test_advised_commands_quote_the_names_in_them() -> None:
    """A name with a space or a semicolon would make another command of what a message advises: `checkpoint.errors.command` quotes it."""
    assert not [where for file in SOURCES if file.name != "errors.py" or file.parent.name != "checkpoint" for where in _unquoted(file)]


def _unquoted(file: Path) -> list[str]:
    """Where a message has a command with a value in it."""
    texts = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.JoinedStr)]
    return [
        f"{file}:{text.lineno}"
        for text in texts
        if re.search("(`dedup |^dedup (budget|consumer|sink|publisher|checkpoint|batch|dead-letter) )[^`]*\0", _flat(text))
    ]


def _flat(text: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in text.values)


@pytest.mark.parametrize("name", ["shop", "my shop", "ann's shop", "a;b", 'a"b', "$HOME", "kafka:orders-1.x"])
def test_a_shell_takes_an_advised_command_as_it_is_meant(name: str) -> None:
    """What a message advises can be typed, whatever the name; ordinary names look as they are."""
    assert shlex.split(command("sink", "accept", name, name).strip("`")) == ["dedup", "sink", "accept", name, name]
    assert command("sink", "sync", "shop", "--topic", "my-topic.v1", "--from", 3) == "`dedup sink sync shop --topic my-topic.v1 --from 3`"


IN_BOTH_STORES = {"ConsumerState", "Joins", "Sink", "SinkColumns"}
ONE_IDEA = {
    "Handle",
    "Job",
    "LogReader",
    "PostgresCheckpointStore",
    "Sender",
}  # a protocol and what keeps it, sync and aio, public and ours


def test_a_class_name_stands_for_one_idea() -> None:
    """A name that is in several files is the same idea in both stores, or behind one protocol."""
    names = Counter(name for file in SOURCES for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    assert {name for name, count in names.items() if count > 1} == IN_BOTH_STORES | ONE_IDEA


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_that_is_spoken_of_exists(file: Path) -> None:
    """Who follows a comment to another module finds it."""
    text = re.sub(r"`[\w/]+\.py`", "", file.read_text(encoding="utf-8"))  # in quotes: of somebody else's package
    spoken = set(re.findall(r"\b[\w/]*\w\.py\b", text)) - {"checkpoint.py", "deadletter.py"}  # a user's own
    assert not [name for name in sorted(spoken) if not any(path.endswith(f"/{name}") for path in _there())]


@cache
def _there() -> list[str]:
    """Each module of ours, from the top."""
    return [f"/{file.relative_to(ROOT)}" for file in (*SOURCES, *TESTS.rglob("*.py"))]
