"""`dedup consumer forget`: erase what dedup keeps of one key. A shell around `DeadLetters.forget` (reprocessing/forget.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from checkpoint.errors import Refused
from dedup.cli.exits import found
from dedup.cli.options import By, Name, Yes, progress, who
from dedup.cli.show import NOTHING_DONE, AsJson, print_json, print_table
from dedup.reprocessing.dead_letters import DeadLetters
from dedup.reprocessing.forget import Forgotten, refusal
from dedup.urls import StoreUrl, check_consumer, open_store

COLUMNS = ("what", "result", "count", "example")

REMAINS = ("where it remains", "until", "what removes it")

Key = Annotated[
    list[str] | None,
    typer.Option(
        "--key", help="The key, as `show` prints it. Repeat the option for each column of the consumer's key.", show_default=False
    ),
]
LetterIds = Annotated[
    list[str] | None,
    typer.Option(
        "--letter", help="A dead letter, by its id or its first digits, and all with its key. May be repeated.", show_default=False
    ),
]
Numbers = Annotated[
    list[int] | None,
    typer.Option("--message", min=0, help="One more message, by its number in the outbox. May be repeated.", show_default=False),
]
RequiredReason = Annotated[
    str, typer.Option("--reason", help="Why it is erased; kept with it. Do not name the person here.", show_default=False)
]


def register(commands: typer.Typer) -> None:
    """Add `dedup consumer forget`."""
    commands.command(epilog="Example: dedup consumer forget orders --key m-2 --reason 'request 4711' --yes")(forget)


def forget(
    name: Name,
    reason: RequiredReason,
    key: Key = None,
    letter: LetterIds = None,
    message: Numbers = None,
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
) -> None:
    """Erase what dedup keeps of a key.

    Dead letters lose their bodies, headers, errors, readable keys and the texts of their history; messages that were sent or discarded lose
    their bodies, keys and headers. The reservation stays, so the event is a duplicate if it comes again. The command refuses to erase while
    a letter of the key is open or blocked, or a message of it is not sent. It reports where the data can still be found. The exit code is 1
    if something of the key came meanwhile, or was left: run the command again.

    Crash: a part is erased, with its record; run the command again.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    letters = DeadLetters(opened)
    ids = [letters.find(one) for one in letter or ()]
    with progress("erasing") as told:
        asked: dict[str, Any] = {"key": key or (), "letters": ids, "messages": message or (), "by": who(by), "reason": reason}
        done = letters.forget(name, **asked, dry_run=not yes, on_progress=told)
    _show(done, as_json)
    if done.dry_run and (why := refusal(done)):
        raise Refused(why)
    found(not done.is_done)


def _show(done: Forgotten, as_json: bool) -> None:
    if as_json:
        document = asdict(done)
        print_json({**document, "done": not document.pop("dry_run")})
        return
    print_table(COLUMNS, list(_rows(done)), empty="nothing of this key is kept")
    print_table(REMAINS, [(one.where, one.until, one.then) for one in done.remains], title="what can still be found", empty="nothing")
    typer.echo(f"dedup erases nothing in: {'; '.join(done.elsewhere)}.")
    if done.dry_run and done.is_done and (done.letters or done.messages):
        typer.echo(NOTHING_DONE)


def _rows(done: Forgotten) -> Iterator[tuple[str, str, int, str]]:
    erased = "would be erased" if done.dry_run else "erased"
    lines = [
        ("letters", erased, done.letters, ""),
        ("letters", "erased before", done.letters_erased_before, ""),
        ("letters", "left: they wait", len(done.waiting), _first(done.waiting)),
        ("letters", "left: another key is shown alike", len(done.others), _first(done.others)),
        *(("letters", f"left: {why}", count, done.examples[why][:12]) for why, count in done.letters_skipped.items()),
        ("messages", erased, done.messages, ""),
        ("messages", "left: they were not sent", len(done.unsent), str(done.unsent[0]) if done.unsent else ""),
    ]
    yield from (line for line in lines if line[2])


def _first(ids: list[str]) -> str:
    return ids[0][:12] if ids else ""
