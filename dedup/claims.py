"""What a store offers to processes that share one epoch. Part of the seam of store.py; passes the same contract suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

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


@dataclass(frozen=True)
class Slice(Claim):
    """The events of one partition in one batch, as a task of the driver that holds the epoch works on them.

    What fences it is the epoch, and not its number; two tasks of one slice take turns, and the second one finds its positions seen.
    """

    query_id: str
    batch_id: int
    expected: int | None  # where the checkpoint has to stand, unless at a chunk end that this query and batch recorded
    attempt: str  # of the driver at this batch: where one slice is over the budget, no other one begins a transaction
    patience: float  # seconds after which a run of the handler has ended itself; infinite without a limit


OVER_BUDGET = "over budget"
"""The scope under which a slice notes the attempt in which it was over the budget."""


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


@runtime_checkable
class Slicing(Protocol):
    """What a store offers whose slices Spark's tasks can commit by themselves: `begin` takes their `Slice`."""

    def in_tasks(self) -> Any:
        """The same store for a process of tasks."""

    def trials(self, consumer: str) -> list[str]:
        """What slices have kept by `set_trial` and not recorded a batch since."""

    def room(self, consumer: str) -> int:
        """How many connections this role could have for tasks, those of this consumer's tasks included."""
