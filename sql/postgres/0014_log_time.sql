-- Whose clock the time of a checkpoint is. Of checkpoints that are there nobody knows.

alter table {schema}.checkpoint add column log_time boolean not null default false;
comment on column {schema}.checkpoint.log_time is
    'Whether enqueued_time is when the broker took the event (Event Hubs, LogAppendTime of Kafka). That alone goes forward in a partition; '
    'what a producer said (CreateTime of Kafka) may be any time.';
