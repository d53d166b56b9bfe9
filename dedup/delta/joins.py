"""The part of DeltaStore for processes that share an epoch, and what is kept of a process outside its decisions.

Entering, leaving and claiming are decisions of the ledger, so a batch that was planned before one of them is planned again, and finds out.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from checkpoint.errors import CommitConflict, StillHeld
from checkpoint.position import Partition
from dedup.delta.decide import Decision, decide
from dedup.delta.header import Header
from dedup.delta.state import ConsumerState
from dedup.delta.states import AMEND_ATTEMPTS, States
from dedup.delta.storage import Options
from dedup.delta.takeover import Heartbeat, Takeover, is_gone, take_epoch
from dedup.store import Claim, Head, Holder

log = logging.getLogger("dedup")


class Joins:
    """Each method is a decision of its own, or none."""

    path: str
    storage_options: Options
    _states: States

    def join(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become one of the processes that share the consumer's epoch; returns the head.

        An epoch that is shared is entered; one that a single copy holds is taken over by the rules of `take_epoch`.

        Raises:
            StillHeld: after twice `takeover_after` a single copy still shows signs of life.

        Crash: this process is on record or not; on record, it counts as gone with its process, or after a silence.
        """
        with (state := self._states.of(consumer)).lock:
            rules = Takeover(holder, takeover_after, force, on_wait, lambda _: None, shared=True)
            epoch = take_epoch(state, self._heartbeat(consumer), rules).epoch
            return self._decide(state, epoch, "join", lambda header: {"members": _entered(header, holder)}).head

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Take this process off the record, so that nobody waits for it.

        Crash: as if it had not been called.
        """
        with self._states.caught_up(consumer) as state:
            self._decide(state, epoch, "leave", lambda h: {"members": tuple(m for m in h.members or () if m.run_id != run_id)})

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more. It never waits.

        Raises:
            Fenced: a newer epoch was taken.

        Crash: the number is raised or not; raised, nobody commits for the partition until the next claim.
        """
        with self._states.caught_up(consumer) as state:
            raised = self._decide(state, epoch, "claim", lambda h: {"claims": {**h.claims, partition: h.claims.get(partition, 0) + 1}})
        return Claim(partition, raised.claims[partition], run_id)

    def _decide(self, state: ConsumerState, epoch: int, kind: str, change: Callable[[Header], dict[str, Any]]) -> Header:
        """One decision that changes who runs; planned again where another one comes first. Raises Fenced."""
        for _ in range(AMEND_ATTEMPTS):
            state.catch_up()
            state.require_sound()
            if state.header.head.epoch != epoch:
                raise state.fenced()
            now = dt.datetime.now(dt.UTC)
            header = state.following(kind, uuid.uuid4().hex, now, state.header.head, **change(state.header))
            try:
                decide(state, Decision(header), lambda _: None)
            except CommitConflict:
                continue
            return header
        raise StillHeld(f"Consumer {state.ledger.consumer!r} commits all the time: no {kind} came through. Try again.")

    def _heartbeat(self, consumer: str) -> Heartbeat:
        return Heartbeat(self._states.turns(consumer).heartbeat)

    def trial(self, consumer: str, scope: str = "") -> str | None:
        """What `set_trial` kept last under this scope, unless a batch of it was committed since."""
        return self._states.turns(consumer).trial_of(scope).read()

    def set_trial(self, consumer: str, trial: str | None, scope: str = "") -> None:
        """Keep it outside any transaction. Crash: it survives the death of the process, not that of the machine."""
        self._states.turns(consumer).trial_of(scope).keep(trial)

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, tell other copies every `every` seconds that this one is alive."""
        return self._heartbeat(consumer).beating(epoch, every)


def _entered(header: Header, holder: Holder) -> tuple[Holder, ...]:
    """With this process, and without those that are provably gone."""
    others = (m for m in header.members or () if m.run_id != holder.run_id and (m.pid == holder.pid or not is_gone(m, holder)))
    return (*others, holder)
