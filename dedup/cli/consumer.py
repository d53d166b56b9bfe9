"""`dedup consumer` and `dedup budget`: what state each consumer is in, and a person's decisions about it.

The budget shows how near a consumer is to the limits of each kind of dead letter; a known flood of one kind can be admitted.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Annotated, Any

import typer

import dedup
from checkpoint import changes
from checkpoint.changes import Amendment
from checkpoint.head import Head, Spent
from deadletter import policy
from deadletter.policy import WATCHED
from dedup.cli.options import By, Commands, Name, Reason, Yes, one_of, who
from dedup.cli.show import CHANGES, NOTHING_DONE, AsJson, print_fields, print_json, print_table
from dedup.core.store import Store
from dedup.urls import StoreUrl, check_consumer, open_store

commands = Commands(
    help="Consumers: their state, and decisions about it.",
    epilog="Example: dedup consumer show orders --store /lake/dedup",
    no_args_is_help=True,
)

CHECKPOINTS = ["source", "topic", "partition", "sequence_number", "offset", "enqueued_time", "query_id"]
"""Columns of a checkpoint."""

LISTED = ["consumer", "epoch", "generation", "decisions", "partitions", "query_id", "batch_id"]
"""Columns of a consumer; head_json explains them."""

WINDOWS = (100, 1_000)
"""Events over which failures are shown; the limits themselves are the consumer's own (`budget=`)."""

budget_commands = Commands(
    help="Budgets: how many events may fail.", epilog="Example: dedup budget show orders --store /lake/dedup", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add `dedup consumer ...`."""
    app.add_typer(commands, name="consumer")


@commands.command("list", epilog="Example: dedup consumer list --store /lake/dedup --json")
def list_(store: StoreUrl = "", as_json: AsJson = False) -> None:
    """List all consumers of the store."""
    opened = open_store(store)
    heads = [opened.head(name) for name in opened.consumers()]
    if as_json:
        print_json([head_json(head) for head in heads])
        return
    rows = [(h.consumer, h.epoch, h.generation, h.seq, len(h.checkpoints), h.query_id, h.batch_id) for h in heads]
    print_table(LISTED, rows, empty="no consumers yet")


@commands.command(epilog="Example: dedup consumer show orders --store /lake/dedup")
def show(name: Name, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Show one consumer: progress, settings, checkpoints."""
    opened = open_store(store)
    check_consumer(opened, name)
    document = state_json(opened.head(name), opened.reserved(name))
    if as_json:
        print_json(document)
        return
    print_fields((key, value) for key, value in document.items() if not isinstance(value, (dict, list)) and value is not None)
    if document["settings"]:
        print_fields(sorted(document["settings"].items()), title="settings")
    for key, title in _PARTS.items():
        if rows := _rows_of(document[key]):
            print_table(list(rows[0]), [list(row.values()) for row in rows], title=title)


_PARTS = {
    "budget": "budget: events that were decided, and up to which event failures are admitted",
    "checkpoints": "checkpoints",
    "incarnations": "topics that were created again",
    "incarnation_ids": "ids that the broker gives to topics",
}


def _rows_of(part: Any) -> list[dict[str, Any]]:
    return [{"kind": kind, **row} for kind, row in part.items()] if isinstance(part, dict) else part


@commands.command(epilog="Example: dedup consumer accept-gap orders --reason 'retention passed over the weekend' --yes")
def accept_gap(name: Name, store: StoreUrl = "", as_json: AsJson = False, yes: Yes = False, by: By = "", reason: Reason = "") -> None:
    """Go on although positions were never delivered.

    The positions between the checkpoint and the next batch are recorded as absent.
    """
    amend(open_store(store), name, changes.accept_gap, as_json, yes, by, reason)


@commands.command(epilog="Example: dedup consumer accept-incarnation orders --source broker-1 --topic orders --yes")
def accept_incarnation(
    name: Name,
    source: Annotated[str, typer.Option("--source", help="The topic's source, as `dedup checkpoint list` shows it.", show_default=False)],
    topic: Annotated[str, typer.Option("--topic", help="The topic that was created again.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Read a topic that was created again.

    The consumer reads the topic from its first position. Its checkpoints of the deleted topic are removed.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    known = {(p.source, p.topic) for p in opened.head(name).checkpoints}
    if (source, topic) not in known:
        raise dedup.ConfigError(
            f"{name!r} has no checkpoint of topic {topic!r} of {source!r}. It has: {', '.join(map('/'.join, sorted(known)))}."
        )
    amend(opened, name, lambda head: changes.accept_incarnation(head, source, topic), as_json, yes, by, reason)


@commands.command(epilog="Example: dedup consumer accept-restore orders --reason 'database restored to 09:00' --yes")
def accept_restore(name: Name, store: StoreUrl = "", as_json: AsJson = False, yes: Yes = False, by: By = "", reason: Reason = "") -> None:
    """Go on from state that was restored from a backup.

    Find out first what is missing: events after the backup may have their effect again.
    """
    amend(open_store(store), name, changes.accept_restore, as_json, yes, by, reason)


@commands.command(epilog="Example: dedup consumer reset orders --reason 'new sink, read all again' --yes")
def reset(name: Name, store: StoreUrl = "", as_json: AsJson = False, yes: Yes = False, by: By = "", reason: Reason = "") -> None:
    """Begin again as if nothing had been processed.

    Events that are read again have their effect again. Rows of sinks stay as they are.
    """
    amend(open_store(store), name, changes.reset, as_json, yes, by, reason)


def amend(store: Store, name: str, change: Amendment, as_json: bool, yes: bool, by: str, reason: str) -> None:
    """Show what a decision changes and, with `yes`, make it.

    Crash: the store replaces the head in one commit, so the decision is made whole or not at all; repeat the command to see which.
    """
    check_consumer(store, name)
    before = store.head(name)
    planned = differences(before, change(before))
    done = yes and bool(planned)
    decision = store.amend(name, change, by=who(by), reason=reason).seq if done else None
    if as_json:
        changed = [dict(zip(CHANGES, row, strict=True)) for row in planned]
        print_json({"consumer": name, "changes": changed, "decision": decision, "done": done})
    else:
        _print_amendment(name, planned, decision)


def _print_amendment(name: str, planned: list[tuple[str, Any, Any]], decision: int | None) -> None:
    if not planned:
        typer.echo(f"{name}: nothing to change.")
        return
    print_table(CHANGES, planned)
    typer.echo(NOTHING_DONE if decision is None else f"{name}: done, as decision {decision}.")


def differences(before: Head, after: Head) -> list[tuple[str, Any, Any]]:
    """(what, now, then) for each part of the head that differs; checkpoints and incarnations one by one."""
    old, new = _flat(before), _flat(after)
    return [(key, old.get(key, ""), new.get(key, "")) for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]


def _flat(head: Head) -> dict[str, Any]:
    return {
        "generation": head.generation,
        "keyspace": head.keyspace,
        "settings": dict(sorted(head.settings.items())) if head.settings else None,
        "query": head.query_id,
        "last batch": head.batch_id,
        "gap accepted": head.gap_accepted,
        **{f"budget of {kind} lifted until event": one.lifted for kind, one in sorted(head.spent.items())},
        **{f"checkpoint {p}": c.sequence_number for p, c in sorted(head.checkpoints.items())},
        **{f"incarnation {'/'.join(topic)}": life for topic, life in sorted(head.incarnations.items())},
        **{f"broker's id of {'/'.join(topic)}": told for topic, told in sorted(head.incarnation_ids.items())},
    }


def checkpoint_rows(head: Head) -> list[dict[str, Any]]:
    """One dict per partition, in order, with the keys CHECKPOINTS."""
    return [
        dict(zip(CHECKPOINTS, (*partition, c.sequence_number, c.offset, c.enqueued_time, c.query_id), strict=True))
        for partition, c in sorted(head.checkpoints.items())
    ]


def head_json(head: Head) -> dict[str, Any]:
    """The head as one JSON object."""
    return {
        "consumer": head.consumer,
        "epoch": head.epoch,
        "generation": head.generation,
        "keyspace": head.keyspace,
        "decisions": head.seq,
        "query_id": head.query_id,
        "batch_id": head.batch_id,
        "gap_accepted": head.gap_accepted,
        "budget": {str(kind): {"decided": one.decided, "lifted": one.lifted} for kind, one in sorted(head.spent.items())},
        "settings": dict(head.settings) if head.settings is not None else None,
        "checkpoints": checkpoint_rows(head),
        "incarnations": [{"source": s, "topic": t, "incarnation": life} for (s, t), life in sorted(head.incarnations.items())],
        "incarnation_ids": [{"source": s, "topic": t, "incarnation_id": told} for (s, t), told in sorted(head.incarnation_ids.items())],
    }


def state_json(head: Head, reserved: int | None) -> dict[str, Any]:
    """What `show` prints as one JSON object: the head, and how many keys are reserved."""
    return {**head_json(head), "reserved": reserved}


def register_budget(app: typer.Typer) -> None:
    """Add `dedup budget ...`."""
    app.add_typer(budget_commands, name="budget")


@budget_commands.command("show", epilog="Example: dedup budget show orders --store /lake/dedup")
def show_budget(name: Name, store: StoreUrl = "", as_json: AsJson = False) -> None:
    """Show how many events fail, by kind of dead letter.

    The table counts the failures among the last events, and how many failures are admitted. Failures of a kind without a limit, as REJECTED
    is by default, are not kept: they count as none.
    """
    opened = open_store(store)
    check_consumer(opened, name)
    head = opened.head(name)
    kinds = {kind.value: kind_json(head.spent.get(kind, Spent())) for kind in WATCHED}
    if as_json:
        print_json({"consumer": name, "kinds": kinds})
        return
    print_table(["kind", *kind_json(Spent())], [(kind, *shown.values()) for kind, shown in kinds.items()])


@budget_commands.command(
    epilog="Example: dedup budget lift orders --kind UNDECODABLE --events 5000 --reason 'old app sends XML, fix is on its way' --yes"
)
def lift(
    name: Name,
    kind: Annotated[  # as Kind, typer would offer those without a budget where the option is missing
        Any, typer.Option("--kind", **one_of(WATCHED), help="The kind of dead letters; only these have a budget.", show_default=False)
    ],
    events: Annotated[int, typer.Option("--events", min=1, help="Failures among this many next events do not count.", show_default=False)],
    store: StoreUrl = "",
    as_json: AsJson = False,
    yes: Yes = False,
    by: By = "",
    reason: Reason = "",
) -> None:
    """Admit a known flood of failures.

    Each of the next events may become a dead letter of this kind, and none counts against the budget. A batch that waits because the budget
    is exceeded continues on its own.
    """
    amend(open_store(store), name, lambda head: policy.lift_budget(head, events, kind), as_json, yes, by, reason)


def kind_json(spent: Spent) -> dict[str, Any]:
    """How a kind stands with its budget: one value for each column."""
    failed = {f"failed_of_the_last_{window}": _failed(spent, window) for window in WINDOWS}
    return {"decided_events": spent.decided, **failed, "admitted_from_now_on": max(0, spent.lifted - spent.decided)}


def _failed(spent: Spent, window: int) -> int:
    """Failures that count among the last so many events."""
    return len(spent.failures) - bisect_right(spent.failures, max(spent.decided - window, spent.lifted))
