"""What can go wrong when Event Hubs is read, beside checkpoint.errors."""

from __future__ import annotations

from checkpoint.errors import SourceUnavailable


class ReceiverStolen(SourceUnavailable):
    """Another receiver of the same consumer group took this partition. Stop one of the two, or give each a consumer group of its own."""
