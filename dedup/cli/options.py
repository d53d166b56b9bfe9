"""What commands share: options that mean the same everywhere, durations, `module:attribute` as a user's own object, a progress bar.

A user's module is imported here, and nowhere else. The bar is on standard error, and only where somebody looks at it.
"""

from __future__ import annotations

import datetime as dt
import getpass
import importlib
import inspect
import operator
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dedup
from deadletter import Kind, Status
from deadletter.selection import Selection
from dedup.cli import lines
from dedup.cli.exits import told
from dedup.cli.show import is_terminal
from dedup.core.near import near
from dedup.core.store import Store
from dedup.reprocessing import unsent
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.urls import StoreAddress, check_consumer

Name = Annotated[str, typer.Argument(help="The consumer's name.", show_default=False)]
AnyName = Annotated[str, typer.Argument(help="The consumer's name. Without it: all consumers of the store.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Make the change. Without it the command only shows what would change.")]
By = Annotated[str, typer.Option("--by", help="Who makes the change; kept with it.  [default: the login name]", show_default=False)]
Reason = Annotated[str, typer.Option("--reason", help="Why the change is made; kept with it.", show_default=False)]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="Only this topic. May be repeated.", show_default=False)]
Ids = Annotated[
    list[str] | None,
    typer.Argument(help="Ids of dead letters, or their first digits. Without ids: the filters.", show_default=False),
]


StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="A setting of the object storage that a Delta store is on, as delta-rs names it. May be repeated. "
        "Secrets belong in the environment: arguments can be read by everybody on this machine.",
        show_default=False,
    ),
]

FailAbove = Annotated[
    Any,
    typer.Option(
        "--fail-above",
        parser=lambda text: amount(text),
        metavar="NUMBER|DURATION",
        help="Exit with code 1 if a lag is above this number (10000), or longer than this time (90s, 30m, 12h, 14d).",
        show_default=False,
    ),
]

ALIKE = 0.6
"""How alike a mistyped word is at least to the one that was meant, where 1 is the same: words of a command line are short."""

SHORTEST = 0.5
"""Seconds between two turns of a command that goes on until it is stopped, at least."""

LONGEST = 36_500
"""Days of the longest duration."""

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd])")
_COUNT = re.compile("[0-9]{1,18}")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}

POSITIONS = ("source", "topic", "partition", "first", "last")
"""What says which positions of the log."""

NOT_LOGGED = ("demo",)
"""Commands without --log-json: what the demo tells is for people."""

Command = Callable[..., None]
Done = TypeVar("Done")


class Commands(typer.Typer):
    """Commands that take --log-json, and --storage-option wherever they take --store."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Command], Command]:  # type: ignore[override]
        """As typer's; `store` is a StoreAddress then."""
        register = super().command(name, **settings)

        def decorate(command: Command) -> Command:
            plain = (name or command.__name__) in NOT_LOGGED
            register(_with_storage_options(command if plain else _with_log_json(command)))
            return command

        return decorate


def _with_log_json(command: Command) -> Command:
    """The option is there for the help; `lines.wanted` has read it before."""
    own = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("log_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=lines.LogJson)

    def called(*, log_json: bool, **given: Any) -> None:
        command(**given)

    return _as(called, command, [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()), option])


def _with_storage_options(command: Command) -> Command:
    own = inspect.signature(command, eval_str=True)
    if "store" not in own.parameters:
        return command

    def called(*, storage_option: list[str] | None, **given: Any) -> None:
        command(**{**given, "store": StoreAddress(given["store"], dict(map(_setting, storage_option or ())))})

    option = inspect.Parameter("storage_option", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=StorageOption)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values()]
    parameters.insert([p.name for p in parameters].index("store") + 1, option)
    return _as(called, command, parameters)


def _as(called: Command, command: Command, parameters: list[inspect.Parameter]) -> Command:
    """`called`, which looks like `command` with these parameters."""
    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter("give --storage-option as KEY=VALUE, as in azure_storage_account_name=shop.")
    return name, value


def who(by: str) -> str:
    """Who makes a change: as told, else the login name, else the number of a user without one, as containers have them."""
    try:
        return by or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def duration(text: str) -> dt.timedelta:
    """A number with a unit: 90s, 30m, 12h, 14d."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise typer.BadParameter(f"{text!r} is not a duration. Give a number with a unit: 90s, 30m, 12h or 14d.")
    if float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] > LONGEST * 86400:
        raise typer.BadParameter(f"{text!r} is longer than {LONGEST}d.")
    return dt.timedelta(**{_UNITS[found[2]]: float(found[1])})


def amount(text: str) -> int | dt.timedelta:
    """A number, or a duration."""
    if _COUNT.fullmatch(text.strip()):
        return int(text)
    try:
        return duration(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is neither a number nor a duration. Give 10000, or 90s, 30m, 12h, 14d.") from None


def moment(text: str) -> dt.datetime:
    """A time in ISO 8601, without a zone in UTC and without a time of day at midnight; or how long ago it was, as a duration."""
    if _DURATION.fullmatch(text.strip()):
        return dt.datetime.now(dt.UTC) - duration(text)
    try:
        value = dt.datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time. Give one as 2026-01-31 or 2026-01-31T14:00, or as an age: 90s, 30m, 12h, 14d."
        ) from None
    return value if value.tzinfo else value.replace(tzinfo=dt.UTC)


def one_of(choices: Iterable[StrEnum]) -> dict[str, Any]:
    """What makes `typer.Option` take one of these values in any case, also with - for _, and name all of them in help and errors."""
    known = {choice.value: choice for choice in choices}
    folded = {name.casefold(): choice for name, choice in known.items()}

    def parsed(text: str) -> StrEnum:
        found = folded.get(text.strip().casefold().replace("-", "_"))
        if found is None:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}.{did_you_mean(text, known)}")
        return found

    def completed(incomplete: str) -> list[str]:
        return [name for name in known if name.casefold().startswith(incomplete.casefold())]

    return {"parser": parsed, "metavar": "|".join(known), "autocompletion": completed}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A question with the known name that is nearest to the given one; empty where none is near."""
    found = near(given.strip(), known, ALIKE)
    return f" Did you mean {found}?" if found else ""


OPTIONS: dict[str, Any] = {
    "consumer": Annotated[str | None, typer.Option(help="Only of this consumer.")],
    "source": Annotated[str | None, typer.Option(help="Only from this source, which is the name of the broker.")],
    "topic": Annotated[str | None, typer.Option(help="Only of this topic.")],
    "partition": Annotated[int | None, typer.Option(help="Only of this partition.")],
    "first": Annotated[int | None, typer.Option("--from", help="Only from this sequence number (Kafka: offset) on.")],
    "last": Annotated[int | None, typer.Option("--to", help="Only up to this sequence number, which is included.")],
    "since": Annotated[
        dt.datetime | None,
        typer.Option(
            parser=moment, metavar="TIME", help="Only if it last failed at this time or later; an ISO 8601 time in UTC, or an age: 12h."
        ),
    ],
    "until": Annotated[
        dt.datetime | None,
        typer.Option(
            parser=moment, metavar="TIME", help="Only if it last failed before this time; an ISO 8601 time in UTC, or an age: 12h."
        ),
    ],
    "kind": Annotated[Kind | None, typer.Option(**one_of(Kind), help="Only of this kind.")],
    "status": Annotated[Status | None, typer.Option(**one_of(Status), help="Only in this status.")],
    "fingerprint": Annotated[str | None, typer.Option(help="Only with this fingerprint: the same error at the same place.")],
    "key": Annotated[str | None, typer.Option(help="Only with this idempotence key, as `show` prints it.")],
    "sequence_key": Annotated[str | None, typer.Option(help="Only with this sequence key, as `show` prints it.")],
    "text": Annotated[str | None, typer.Option(help="Only with this text in reason, error message or stack.")],
}
"""Name of the parameter -> its option. A letter is selected if it matches all options that are given."""


def selecting(most: str = "", *, limit: int = 0, only: tuple[str, ...] = tuple(OPTIONS)) -> Callable[[Command], Command]:
    """Give a command options of OPTIONS and `--limit`, and call it with `selection`, a Selection, in their place.

    Args:
        most: what the command does at most, as in "Show at most this many letters". Without it there is no `--limit`.
        limit: the default; 0 is all.
        only: the options that it gets.
    """
    names = [name for name in OPTIONS if name in only]

    def decorate(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=OPTIONS[n]) for n in names]
        if most:
            option = Annotated[int, typer.Option(min=0, help=f"{most}; 0: all.")]
            added.append(inspect.Parameter("limit", inspect.Parameter.KEYWORD_ONLY, default=limit, annotation=option))
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "selection"]

        def called(**given: Any) -> None:
            command(selection=_selection({name: given.pop(name, None) for name in [*names, "limit"]}), **given)

        return _as(called, command, [*(p for p in kept if _is_argument(p)), *added, *(p for p in kept if not _is_argument(p))])

    return decorate


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(note, typer.models.ArgumentInfo) for note in getattr(parameter.annotation, "__metadata__", ()))


def _selection(given: dict[str, Any]) -> Selection:
    limit = given.pop("limit") or None
    if None not in (given.get("first"), given.get("last")) and given["first"] > given["last"]:
        raise typer.BadParameter(f"--from {given['first']} is above --to {given['last']}: no position is between them.")
    if None not in (given.get("since"), given.get("until")) and given["since"] >= given["until"]:
        raise typer.BadParameter(f"--since {given['since']} is not before --until {given['until']}: no time is between them.")
    plain: dict[str, Any] = {name: value.value if isinstance(value, Kind | Status) else value for name, value in given.items()}
    return Selection(**plain, limit=limit)


def says_which(selection: Selection) -> bool:
    """Whether any option was given."""
    return any(getattr(selection, name) is not None for name in OPTIONS)


def whole_ids(letters: DeadLetters, ids: Sequence[str] | None, selection: Selection, example: str = "--consumer") -> list[str]:
    """The ids in full; empty where filters say which letters are meant. Raises ConfigError for both, and for neither.

    Args:
        example: a filter that the command has.
    """
    if bool(ids) == says_which(selection):
        both = "You gave ids and filters. " if ids else ""
        raise dedup.ConfigError(f"{both}Say which letters you mean: either ids, or filters such as {example} and --fingerprint.")
    return [letters.find(one) for one in ids or ()]


def check_names(store: Store, selection: Selection) -> None:
    """Raise ConfigError, with the names there are, for a consumer, source or topic that the store knows nothing of.

    A topic is known if a consumer has a checkpoint in it, a letter is of it, or a message is for it.
    """
    if selection.consumer is not None:
        check_consumer(store, selection.consumer)
    asked = Selection(selection.consumer, selection.source, selection.topic, limit=1)
    if asked == Selection(selection.consumer, limit=1) or DeadLetters(store).select(asked, ["id"]).num_rows:
        return
    names = store.consumers() if selection.consumer is None else [selection.consumer]
    known = sorted({(p.source, p.topic) for name in names for p in store.head(name).checkpoints} | _of_messages(store, names, selection))
    if not any(selection.source in (None, source) and selection.topic in (None, topic) for source, topic in known):
        wanted = " of ".join(repr(name) for name in (selection.topic, selection.source) if name is not None)
        what = "source" if selection.topic is None else "topic"
        shown = ", ".join(f"{topic!r} of {source!r}" for source, topic in known)
        raise dedup.ConfigError(f"No checkpoint, dead letter or message is of {what} {wanted}. Known topics: {shown or 'none'}.")


def _of_messages(store: Store, names: Sequence[str], selection: Selection) -> set[tuple[str, str]]:
    """Source and topic of messages, whose letters may be meant."""
    if selection.kind not in (None, Kind.UNSENT):
        return set()
    return {(unsent.SOURCE, topic) for name in names for topic in store.outbox(name).topics()}


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


def above(count: int, seconds: float | None, limit: int | dt.timedelta) -> bool:
    """Whether that many are above the limit, or so old that they are; an age that is not known counts as too old."""
    if isinstance(limit, int):
        return count > limit
    return bool(count) and (seconds is None or seconds > limit.total_seconds())


def again_and_again(
    every: dt.timedelta, turn: Callable[[], Done], show: Callable[[Done], None], may_pass: Callable[[Exception], bool]
) -> NoReturn:
    """A turn so often, until the process is stopped. An error of it that may pass is told, and the next turn comes.

    Another one is raised, as is any error of `show`: whoever read the output may have gone.
    """
    while True:
        try:
            done = turn()
        except Exception as error:
            if not may_pass(error):
                raise
            lines.note(f"dedup: {told(error)}", error=error)
        else:
            show(done)
        time.sleep(max(every.total_seconds(), SHORTEST))


@contextmanager
def progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Gives what takes (done, all)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disabled = not is_terminal(sys.stderr) or lines.are_written()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=disabled) as shown:
        task = shown.add_task(doing, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
