"""Publishing so that each event is one event at a consumer of ours, however often it had to be sent.

Importing this needs no driver; a publisher needs PostgreSQL for its state, and the driver of what it sends to.
"""

from dedup.publishing.events import OutgoingEvent
from dedup.publishing.publisher import Published, Publisher

__all__ = ["OutgoingEvent", "Published", "Publisher"]
