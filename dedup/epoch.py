"""Becoming the one copy of a consumer that may commit. Called by the consumer at the first batch of a query run."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dedup.process import this_process
from dedup.store import Head, Holder, Store

log = logging.getLogger("dedup")


@dataclass(frozen=True)
class Live:
    """One query run of this process that holds the epoch."""

    run_key: str
    head: Head
    begun: bool = False  # whether the last try of a batch was through


def take_epoch(store: Store, consumer: str, run_key: str, takeover_after: float, *, force: bool) -> Head:
    """The epoch of a query run, taken once: a copy that was fenced stays fenced. Raises StillHeld.

    Crash: as the store's `take_epoch` says.
    """
    holder = Holder(*this_process(), run_key)
    head = store.take_epoch(consumer, holder, takeover_after=takeover_after, force=force, on_wait=_tell_waiting)
    log.info("%s: epoch %d", consumer, head.epoch)
    return head


def _tell_waiting(seconds: float, who: str) -> None:
    log.warning("waiting %.0f s for the other copy (%s) to show no life; takeover=True does not wait", seconds, who)
