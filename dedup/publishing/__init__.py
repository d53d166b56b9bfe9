"""Publish events so that a consumer of dedup handles each of them once, however often it was sent.

Importing this package needs no driver. A publisher needs PostgreSQL for its state, and the driver of its broker.
"""

from dedup.publishing.events import OutgoingEvent
from dedup.publishing.publisher import Published, Publisher

__all__ = ["OutgoingEvent", "Published", "Publisher"]
