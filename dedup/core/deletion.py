"""What deleting a consumer means: how much there is of it, what speaks against it, and the error that says so. Pure; both stores use it.

A deletion is decided by one commit, from which on no instance of the consumer commits. What it has in the store goes after that, in
portions: whoever calls again goes on. An instance that is still there when somebody begins a new consumer of that name stays fenced,
because epoch and life of the new one are above those of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from checkpoint.errors import ConfigError, Refused, command
from checkpoint.head import Present


@dataclass(frozen=True)
class Deletion:
    """What a deletion of a consumer has deleted, or would delete."""

    consumer: str
    parts: Mapping[str, int]  # "dead letters", "messages", ... -> how many
    running: tuple[str, ...] = ()  # processes that run it, or may run it
    waiting: tuple[str, ...] = ()  # what of it is not done yet
    under_way: bool = False  # it was decided by an earlier call, which did not come to its end
    dry_run: bool = False


@dataclass(frozen=True)
class Allowed:
    """What a person deletes although it speaks against it."""

    running: bool = False
    waiting: bool = False


def refusal(found: Deletion, allowed: Allowed) -> str | None:
    """Why this consumer is not deleted, and what to do; None where nothing speaks against it."""
    if found.under_way:
        return None
    told = []
    if found.running and not allowed.running:
        told.append(f"it runs, or may run: {'; '.join(found.running)}. Stop it first, or fence it with --although-running")
    if found.waiting and not allowed.waiting:
        told.append(f"it has {', '.join(found.waiting)}. Deal with that first, or give it up with --although-waiting")
    return f"Consumer {found.consumer!r} is not deleted: {'. Also: '.join(told)}." if told else None


def require(found: Deletion, allowed: Allowed) -> None:
    """Raise Refused where something speaks against it."""
    if (why := refusal(found, allowed)) is not None:
        raise Refused(why)


def waits(counts: Mapping[str, int]) -> tuple[str, ...]:
    """How many of each kind, of which there are any."""
    return tuple(f"{count} {what}" for what, count in counts.items() if count)


def running(processes: Iterable[Present]) -> tuple[str, ...]:
    """Those that are not known to be gone."""
    return tuple(f"process {one.pid} on {one.host}" for one in processes if one.alive is not False)


def being_deleted(consumer: str, by: str) -> Refused:
    """The error of whoever wants to do something with a consumer that is being deleted.

    Args:
        by: who decided it, and when.
    """
    return Refused(
        f"Consumer {consumer!r} is being deleted, by {by}, and a part of it is still there. Nothing can be done with it any more. "
        f"Run {command('consumer', 'delete', consumer, '--yes')} once more; after that the name is free."
    )


def no_consumer(consumer: str, known: Iterable[str]) -> ConfigError:
    """The error where there is none of this name."""
    return ConfigError(f"There is no consumer {consumer!r} in this store. It has: {', '.join(known) or 'none'}.")
