"""Kafka and the Kafka endpoint of Event Hubs: the ids and ends of topics, reading them again by position, sending messages, and consumer
groups that show where a consumer stands.

The stream itself comes through Spark's own Kafka source. This package needs confluent-kafka: `pip install 'dedup-spark[kafka]'`.
"""

from checkpoint.install import needs

try:
    import confluent_kafka  # noqa: F401  asked here, so that who lacks it reads one sentence
except ModuleNotFoundError as missing:
    raise ImportError(needs("dedup.kafka", "confluent-kafka", "kafka")) from missing

from dedup.kafka.broker import Broker
from dedup.kafka.eventhubs import EventHubs, Options, eventhubs_options
from dedup.kafka.group import GroupMirror
from dedup.kafka.log import LogReader, log_reader
from dedup.kafka.outbox import Topics, TransactionalTopics

__all__ = ["Broker", "EventHubs", "GroupMirror", "LogReader", "Options", "Topics", "TransactionalTopics", "eventhubs_options", "log_reader"]
