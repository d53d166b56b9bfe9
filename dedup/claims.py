"""What a store offers to processes that share one epoch. Part of the seam of store.py; passes the same contract suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from checkpoint.position import Partition

if TYPE_CHECKING:
    from dedup.store import Head, Holder


@dataclass(frozen=True)
class Claim:
    """A partition that one of several processes under one epoch has claimed. Its number is what fences: each claim raises it."""

    partition: Partition
    number: int
    run_id: str  # of the process

    @property
    def scope(self) -> str:
        """What a trial of this partition is kept under."""
        return str(self.partition)


class Sharing(Protocol):
    """Entering an epoch beside others, leaving it, and making partitions one's own."""

    def join(
        self,
        consumer: str,
        holder: Holder,
        *,
        takeover_after: float,
        force: bool = False,
        on_wait: Callable[[float, str], None] = lambda seconds, who: None,
    ) -> Head:
        """Become one of the processes that share an epoch; returns the head. For a single copy it waits as `take_epoch` does."""

    def leave(self, consumer: str, epoch: int, run_id: str) -> None:
        """Go, so that nobody waits for this process."""

    def claim(self, consumer: str, epoch: int, run_id: str, partition: Partition, *, takeover_after: float) -> Claim:
        """Make one partition this process's own: whoever had it cannot commit any more. Raises Fenced, StillHeld."""
