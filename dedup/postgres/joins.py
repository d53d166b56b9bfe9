"""The part of PostgresStore for processes that share an epoch, and what is kept of a process outside its transactions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

from checkpoint.position import Partition
from checkpoint.postgres.dsn import Connection
from checkpoint.postgres.sqlfiles import Statements
from dedup.claims import OVER_BUDGET
from dedup.postgres import heartbeat, join, slices, state
from dedup.postgres.epoch import Patience
from dedup.process import this_process
from dedup.store import Claim, Head, Holder, Slice


class Joins:
    """Each method is a transaction of its own, or none."""

    _sql: Statements
    dsn: str
    filter_memory: int
    _registered: dict[Any, int]

    def _begin_anew(self) -> None:
        """Without connections."""
        raise NotImplementedError

    def _connection(self, doing: str) -> AbstractContextManager[Connection]:
        """A connection outside any transaction."""
        raise NotImplementedError

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
            StillHeld: a single copy showed life for twice `takeover_after`, or its session cannot be ended from here.

        Crash: this process is on record or not; on record, it counts as gone with its database session.
        """
        with self._connection(f"Joining {consumer!r}") as connection:
            join.join(connection, self._sql, consumer, holder, Patience(takeover_after, force, on_wait))
            found = state.read(connection, self._sql, consumer)
        assert found is not None
        return found.head

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Take this process off the record, so that nobody waits for it.

        Crash: as if it had not been called.
        """
        with self._connection(f"Leaving {consumer!r}") as connection:
            connection.execute(self._sql["leave"], {"consumer": consumer, "run_id": run_id})

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more.

        Waits for a batch of it that is open, as long as its process shows life; after `takeover_after` seconds without, its session is
        ended.

        Raises:
            Fenced: a newer epoch was taken. StillHeld: the open batch takes longer than twice `takeover_after`.

        Crash: the number is raised or not; raised, nobody commits for the partition until the next claim.
        """
        with self._connection(f"Claiming {partition} for {consumer!r}") as connection:
            number = join.claim(connection, self._sql, consumer, epoch, run_id, partition, takeover_after)
        return Claim(partition, number, run_id)

    def in_tasks(self) -> Self:
        """The same store for a process of tasks: it keeps no filter of known keys, of which there would be one in each."""
        store = copy.copy(self)
        store.filter_memory = 0
        store._begin_anew()
        return store

    def room(self, consumer: str) -> int:
        """How many connections this role could have here for tasks, those of this consumer's tasks included."""
        with self._connection(f"Counting connections for {consumer!r}") as connection:
            return slices.room(connection, self._sql, consumer)

    def _register(self, connection: Connection, consumer: str, epoch: int, claim: Claim | None) -> None:
        """Put this session on record, so that whoever takes over, or claims the partition, knows which one to look for."""
        session, key = connection.info.backend_pid, (consumer, epoch, claim and claim.run_id)
        if self._registered.get(key) == session:
            return
        if claim is None:
            connection.execute(self._sql["register_session"], {"consumer": consumer, "epoch": epoch})
        elif isinstance(claim, Slice):
            slices.enter(connection, self._sql, consumer, epoch, Holder(*this_process(), claim.run_id))
        else:
            join.enter(connection, self._sql, consumer, epoch, Holder(*this_process(), claim.run_id))
        self._registered = {key: session}

    def trial(self, consumer: str, scope: str = "") -> str | None:
        """What `set_trial` kept last under this scope; None once a batch of it has been recorded."""
        with self._connection(f"Reading what {consumer!r} was trying") as connection:
            row = connection.execute(self._sql["trial"], {"consumer": consumer, "scope": scope}).fetchone()
        return row[0] if row else None

    def trials(self, consumer: str) -> list[str]:
        """What slices have kept by `set_trial` and not recorded a batch since."""
        with self._connection(f"Reading what {consumer!r} was trying") as connection:
            return [row[0] for row in connection.execute(self._sql["trials"], {"consumer": consumer, "note": OVER_BUDGET})]

    def set_trial(self, consumer: str, trial: str | None, scope: str = "") -> None:
        """Note what is about to be tried, outside any transaction.

        Crash: it outlives this process as soon as this returns; a crash of the server may forget it.
        """
        with self._connection(f"Noting what {consumer!r} is trying") as connection:
            connection.execute(self._sql["set_trial"], {"consumer": consumer, "trial": trial, "scope": scope})

    def heartbeat(self, consumer: str, epoch: int, every: float, run_id: str = "") -> AbstractContextManager[None]:
        """While the block runs, show life every `every` seconds, on a connection of its own."""
        return heartbeat.beating(self.dsn, self._sql, consumer, epoch, every, run_id)
