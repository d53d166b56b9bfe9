"""What a chunk uses of the budget of each kind of dead letter, and the error that says that it is too much. Pure.

Called by the flow before the handler runs, by the attempts of the handler, and once more by a store whose transactions commit side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from checkpoint.advice import command
from checkpoint.errors import BudgetExceeded
from deadletter.budget import Budget, Excess, Spent, Used
from deadletter.letter import Kind
from dedup.index import Bools, Index
from dedup.letters import REASONS
from dedup.planning import KEY_CONFLICT, NO_KEY, REDELIVERED, UNDECODABLE, Settled

_BEFORE_THE_HANDLER = ((UNDECODABLE, Kind.UNDECODABLE), (NO_KEY, Kind.NO_KEY), (KEY_CONFLICT, Kind.KEY_CONFLICT))
"""States in the order in which an event may come into them."""

_CAUSES = {
    Kind.HANDLER_ERROR: "a bug or an outage",
    Kind.UNDECODABLE: "a bad deploy of a producer or of a schema",
    Kind.NO_KEY: "a bad deploy of a producer, or a wrong idempotence_key=",
    Kind.KEY_CONFLICT: "a producer that sends changed messages under old keys, or an idempotence_key= that does not name the message",
    Kind.REJECTED: "a bug",
}

WIDELY = 10
"""Windows that the advice lifts the budget for."""


def before_handler(settled: Settled) -> dict[Kind, Used]:
    """What a chunk uses before any of it comes to the handler: events that do not decode, have no key, or conflict with one."""
    among, used = settled.state != REDELIVERED, {}
    for state, kind in _BEFORE_THE_HANDLER:
        failed = settled.state == state
        used[kind] = _used(settled.index, among, failed, REASONS[kind])
        among = among & ~failed
    return used


def _used(index: Index, among: Bools, failed: Bools, why: str) -> Used:
    if not failed.any():
        return Used(int(np.count_nonzero(among)))
    first = int(np.argmax(failed))
    return Used(int(np.count_nonzero(among)), np.cumsum(among)[failed].tolist(), f"{index.describe(first)}: {why}")


def require(
    consumer: str, budget: Budget | None, before: Mapping[Kind, Spent], used: Mapping[Kind, Used], also: str = "", what: str = "batch"
) -> None:
    """Raise BudgetExceeded where the chunk brings one of these kinds over its limits.

    Args:
        also: words for whose failures are counted with its own. what: of which nothing is parked.
    """
    excess = None if budget is None else budget.excess(before, used)
    if excess:
        raise BudgetExceeded(_message(consumer, excess, also, what))


def _message(consumer: str, excess: Excess, also: str, what: str) -> str:
    kind, window = excess.kind, excess.window
    return (
        f"Consumer {consumer!r}: {also}{excess.failed} of {window} events in a row are {kind} ({excess.failed / window:.0%}), "
        f"{excess.allowed} may be ({excess.allowed / window:.0%}): {_CAUSES[kind]}, not bad events. None of this {what} was parked. "
        f"One of them is {excess.example}. Repair the cause; or, if these events are known to be bad, "
        f"{command('budget', 'lift', consumer, '--kind', kind, '--events', WIDELY * window)}."
    )
