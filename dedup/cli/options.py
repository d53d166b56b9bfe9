"""What commands share: the options that choose dead letters, `module:attribute` as a user's own object, and a progress bar.

The module is imported here, and nowhere else. The bar is on standard error, and only where somebody looks at it.
"""

from __future__ import annotations

import datetime as dt
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dedup
from deadletter import Kind, Status
from deadletter.selection import Selection

LIMIT = Annotated[int, typer.Option(min=0, help="At most so many; 0 for all.")]

POSITIONS = ("source", "topic", "partition", "first", "last")
"""What says which positions of the log."""

Command = Callable[..., None]


def moment(text: str) -> dt.datetime:
    """A time in ISO 8601; without a zone it is UTC, without a time of day midnight."""
    try:
        value = dt.datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time; give one as 2026-01-31 or 2026-01-31T14:00.") from None
    return value if value.tzinfo else value.replace(tzinfo=dt.UTC)


OPTIONS: dict[str, Any] = {
    "consumer": Annotated[str | None, typer.Option(help="Of this consumer.")],
    "source": Annotated[str | None, typer.Option(help="From this source.")],
    "topic": Annotated[str | None, typer.Option(help="Of this topic.")],
    "partition": Annotated[int | None, typer.Option(help="Of this partition.")],
    "first": Annotated[int | None, typer.Option("--from", help="From this sequence number (Kafka's offset) on.")],
    "last": Annotated[int | None, typer.Option("--to", help="Up to this sequence number, included.")],
    "since": Annotated[dt.datetime | None, typer.Option(parser=moment, metavar="TIME", help="Last failed then or later; ISO 8601, UTC.")],
    "until": Annotated[dt.datetime | None, typer.Option(parser=moment, metavar="TIME", help="Last failed before then; ISO 8601, UTC.")],
    "kind": Annotated[Kind | None, typer.Option(case_sensitive=False, help="Of this kind.")],
    "status": Annotated[Status | None, typer.Option(case_sensitive=False, help="In this status.")],
    "fingerprint": Annotated[str | None, typer.Option(help="With this fingerprint: the same error at the same place.")],
    "key": Annotated[str | None, typer.Option(help="With this idempotence key, as `show` prints it.")],
    "sequence_key": Annotated[str | None, typer.Option(help="With this sequence key, as `show` prints it.")],
    "text": Annotated[str | None, typer.Option(help="With this text in reason, error message or stack.")],
}
"""Name of the parameter -> its option. All that are given must match."""


def selecting(*, limit: int | None = 0, only: tuple[str, ...] = tuple(OPTIONS)) -> Callable[[Command], Command]:
    """Give a command options of OPTIONS and `--limit`, and call it with `selection`, a Selection, in their place.

    Args:
        limit: the default; 0 is all. None: there is no such option.
        only: the options that it gets.
    """
    names = [name for name in OPTIONS if name in only]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OPTIONS[n]) for n in names]
        if limit is not None:
            added.append(inspect.Parameter("limit", inspect.Parameter.KEYWORD_ONLY, default=limit, annotation=LIMIT))
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "selection"]

        def called(**given: Any) -> None:
            command(selection=_selection({name: given.pop(name, None) for name in [*names, "limit"]}), **given)

        called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
        parameters = [*(p for p in kept if _is_argument(p)), *added, *(p for p in kept if not _is_argument(p))]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(note, typer.models.ArgumentInfo) for note in getattr(parameter.annotation, "__metadata__", ()))


def _selection(given: dict[str, Any]) -> Selection:
    limit = given.pop("limit") or None
    if None not in (given.get("first"), given.get("last")) and given["first"] > given["last"]:
        raise typer.BadParameter(f"--from {given['first']} is above --to {given['last']}: no position is between them.")
    plain: dict[str, Any] = {name: value.value if isinstance(value, Kind | Status) else value for name, value in given.items()}
    return Selection(**plain, limit=limit)


def says_which(selection: Selection) -> bool:
    """Whether any option was given."""
    return any(getattr(selection, name) is not None for name in OPTIONS)


def find(target: str, what: str, example: str) -> Any:
    """What `module:attribute` names; modules are also looked for in the working directory.

    Args:
        what: names it in errors, as in "consumer".
        example: a target as it should be.

    Raises:
        ConfigError: it is not there, or its module imports something that is not.
    """
    module, _, attribute = target.partition(":")
    if not module or not attribute or module.startswith("."):
        raise dedup.ConfigError(f"{target!r} does not say where the {what} is. Give module:attribute, as in `{example}`.")
    sys.path.insert(0, os.getcwd())
    try:
        return operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise dedup.ConfigError(f"Module {module!r} imports {error.name!r}, which is not there: install it here.") from error
        raise dedup.ConfigError(f"There is no module {module!r}. Start the command in the folder that it is in.") from error
    except AttributeError as error:
        raise dedup.ConfigError(f"Module {module!r} has no {attribute!r}: {error}.") from error


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (done, all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(doing, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
