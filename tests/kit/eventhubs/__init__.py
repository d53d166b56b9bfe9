"""A double of the Event Hubs service, written from AMQP 1.0 and what the azure-eventhub client sends. It is not Microsoft's code.

`python -m eventhubs` runs it in a process of its own; `control.Double` starts, feeds and breaks it from tests. What it does like the
service: sessions, links, credit, CBS with shared access signatures, batches, sequence numbers, offsets, owner levels, the limit of five
receivers, retention, management. What it does not: TLS, WebSockets, geo-replication, quotas of throughput, persistence.
"""
