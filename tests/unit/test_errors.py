"""The error tree: drawn as it is, speaking for itself, and able to travel between processes."""

from __future__ import annotations

import pickle
import re

import pytest

import dedup
from checkpoint import errors
from checkpoint.errors import DedupError

CLASSES = sorted((c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, DedupError)), key=lambda c: c.__name__)


def drawn_tree() -> dict[str, str]:
    """Class name -> parent's name, as the module's docstring draws them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r" {4}([ │├└─]*)([A-Z]\w+)", line)
        if found:
            depth = len(found[1]) // 4
            path[depth:] = [found[2]]
            parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    """Every error is in the drawing, under the class it really inherits from, and the drawing has no others."""
    assert drawn_tree() == {c.__name__: c.__bases__[0].__name__ for c in CLASSES}


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_an_error_keeps_type_and_message_when_pickled(error: type[DedupError]) -> None:
    """Spark moves errors between processes: type, message and notes survive."""
    original = error("orders: position 7")
    original.add_note("seen on partition 3")
    copy = pickle.loads(pickle.dumps(original))
    assert type(copy) is error
    assert str(copy) == "orders: position 7"
    assert copy.__notes__ == ["seen on partition 3"]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_an_error_says_what_it_means_without_help(error: type[DedupError]) -> None:
    """The docstring is the default message, and it is a sentence."""
    assert str(error()) == error.__doc__
    assert str(error()).endswith(".")


def test_commands_that_errors_name_exist() -> None:
    """What an error tells people to type is a command that there is."""
    from typer.main import get_command

    from dedup.cli.app import app

    for words in re.findall(r"`dedup ([a-z -]+)`", " ".join(c.__doc__ or "" for c in CLASSES)):
        command = get_command(app)
        for word in words.split():
            command = command.commands[word]


def test_errors_are_named_as_users_import_them() -> None:
    """A traceback and a letter say `dedup.SinkMismatch`, which can be imported by that name; no reader looks for a package `checkpoint`."""
    public = [name for name in dedup.__all__ if isinstance(found := getattr(errors, name, None), type) and issubclass(found, DedupError)]
    assert len(public) > 30
    assert {getattr(errors, name).__module__ for name in public} == {"dedup"}
    assert all(getattr(dedup, name) is getattr(errors, name) for name in public)
