"""The tables of names in two pages of reference, so that a checkout shows them too. `python docs/names.py` writes them anew.

docs/reference/api.md gets a table below each heading, with what its lines with `:::` name. docs/reference/commands.md gets one of all
commands.
tests/docs/test_site.py compares the pages with the code.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

API, COMMANDS = ROOT / "docs/reference/api.md", ROOT / "docs/reference/commands.md"

GIVEN = ("Tx", "Report")
"""Classes that users are given, and do not make."""

_TABLE = re.compile(r"\| (?:name|command) \| what it \w+ \|\n\|---\|---\|\n(?:\|.*\|\n)*\n")
_ENTRY = re.compile(r"^::: ([\w.]+)\n((?: +.*\n)*)", re.MULTILINE)


def api_page(page: str) -> str:
    """The page with a table below each heading."""
    before, *sections = re.split(r"(?m)^(?=## )", _TABLE.sub("", page))
    return before + "".join(map(_with_table, sections))


def _with_table(section: str) -> str:
    heading, _, rest = section.partition("\n\n")
    rows = [row for path, options in _ENTRY.findall(section) for row in _rows(path, _listed(options))]
    return f"{heading}\n\n| name | what it is |\n|---|---|\n{''.join(rows)}\n{rest}"


def _listed(options: str) -> list[str] | None:
    """The names after `members:`; None: all public ones."""
    found = re.search(r"members: \[(.*)\]", options)
    return found[1].split(", ") if found else None


def _rows(path: str, members: list[str] | None) -> Iterator[str]:
    """One row for what `path` names and one for each of its members."""
    thing = _resolved(path)
    if inspect.ismodule(thing):
        for name in members or ():
            yield from _rows(f"{path}.{name}", None)
        return
    yield _row(public_name(path), thing)
    if inspect.isclass(thing) and not issubclass(thing, enum.Enum):
        names = [n for n, one in vars(thing).items() if not n.startswith("_") and _is_documented(one)] if members is None else members
        for name in names:
            if _is_documented(found := inspect.getattr_static(thing, name, None)):
                yield _row(f"{public_name(path)}.{name}", found)


def _is_documented(thing: Any) -> bool:
    found = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    return (inspect.isfunction(found) or isinstance(found, property)) and bool(found.__doc__)


def public_name(path: str) -> str:
    """What a user writes: `Consumer`, `kafka.Broker`."""
    name, package = path.rpartition(".")[2], ".".join(path.split(".")[: 1 + path.startswith("dedup.")])
    if hasattr(importlib.import_module("dedup"), name):
        return name
    short = f"{package}.{name}" if hasattr(importlib.import_module(package), name) else path
    return short.removeprefix("dedup.")


def _resolved(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


def _row(name: str, thing: Any) -> str:
    found = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
    shown = f"{name}{_signature(found)}".replace("|", "\\|")
    return f"| `{shown}` | {first_sentence(found.__doc__ or '')} |\n"


def _signature(thing: Any) -> str:
    """The parameters with their defaults, without types; empty for what is not called."""
    if isinstance(thing, property) or (inspect.isclass(thing) and (issubclass(thing, enum.Enum) or thing.__name__ in GIVEN)):
        return ""
    given = inspect.signature(thing)
    public = [p for p in given.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_")]
    plain = [p.replace(annotation=p.empty, default=_default(p.default)) for p in public]
    return str(given.replace(parameters=plain, return_annotation=given.empty)).replace("=Ellipsis", "=...")


def _default(value: Any) -> Any:
    """The default as it is, or `...` where its text is not Python."""
    return value if value is inspect.Parameter.empty or not repr(value).startswith("<") else ...


def first_sentence(text: str) -> str:
    """Of a docstring."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0].removesuffix(":").removesuffix(".").replace("|", "\\|") + "."


def commands_page(page: str) -> str:
    """The page with a table of all commands in the place of the one it has."""
    return _TABLE.sub("| command | what it does |\n|---|---|\n" + "".join(_command_rows()).replace("\\", r"\\") + "\n", page)


def _command_rows() -> Iterator[str]:
    import typer.main

    from dedup.cli.app import app

    def walk(path: str, command: Any) -> Iterator[str]:
        for name, inner in command.commands.items():
            if hasattr(inner, "commands"):
                yield from walk(f"{path} {name}", inner)
            else:
                yield f"| `{path} {name}` | {first_sentence(inner.help or '')} |\n"

    yield from walk("dedup", typer.main.get_command(app))


PAGES: dict[Path, Callable[[str], str]] = {API: api_page, COMMANDS: commands_page}

if __name__ == "__main__":
    for file, filled in PAGES.items():
        file.write_text(filled(file.read_text()))
