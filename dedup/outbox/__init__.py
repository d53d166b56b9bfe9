"""Outgoing messages: recorded by `tx.publish`, stored in the consumer's transaction, sent after it with the ids they were stored with.

Knows no store and no broker: dedup/postgres and dedup/delta keep the messages, dedup/kafka and dedup/eventhub send them.
"""

from dedup.core.messages import Message, State
from dedup.outbox.destination import Call, Destination, Outcome, SendFailure
from dedup.outbox.dispatch import Dispatched, Dispatcher, Patience
from dedup.outbox.exactly_once import ExactlyOnce

__all__ = ["Call", "Destination", "Dispatched", "Dispatcher", "ExactlyOnce", "Message", "Outcome", "Patience", "SendFailure", "State"]
