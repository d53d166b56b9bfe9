-- Publishers: who may send as a producer group, which sequence numbers are given, what is stored and not confirmed, which ids are known.
-- Forward only.

create table {schema}.publish_destination (
    id int generated always as identity primary key,
    source text not null,
    topic text not null,
    unique (source, topic)
);
comment on table {schema}.publish_destination is 'The event hubs and topics that publishers send to. Message ids are known for each of them.';

create table {schema}.publisher (
    id int generated always as identity primary key,
    destination_id int not null references {schema}.publish_destination (id),
    name text not null,
    epoch bigint not null default 0,
    partitions int not null,
    run_id text,
    holder_host text,
    holder_pid int,
    holder_started text,
    taken_at timestamptz,
    set_by text,
    set_reason text,
    unique (destination_id, name)
);
comment on table {schema}.publisher is
    'One row per producer group and destination: the owner level that may store and confirm. Every writer locks its row first.';
comment on column {schema}.publisher.partitions is 'Over how many partitions keys are spread: as the topic had when the group began, until a person says another number.';

create table {schema}.publisher_lane (
    publisher_id int not null references {schema}.publisher (id),
    partition int not null,
    next_sequence bigint not null,
    confirmed bigint not null,
    primary key (publisher_id, partition),
    check (confirmed < next_sequence)
);
comment on table {schema}.publisher_lane is
    'Sequence numbers of a producer group in one partition: the next to be given, and the last the broker has confirmed. Partition -1: the broker chooses.';

create table {schema}.publisher_event (
    publisher_id int not null references {schema}.publisher (id),
    partition int not null,
    sequence bigint not null,
    message_id text not null,
    event_key text,
    content_type text,
    properties text not null,
    body bytea not null,
    stored_at timestamptz not null default clock_timestamp(),
    primary key (publisher_id, partition, sequence)
);
comment on table {schema}.publisher_event is 'Events that are stored and not confirmed yet, as they are sent, however often that has to be.';

create table {schema}.published_id (
    destination_id int not null references {schema}.publish_destination (id),
    message_id text not null,
    payload_hash bigint not null,
    publisher_id int not null references {schema}.publisher (id),
    partition int not null,
    sequence bigint not null,
    stored_at timestamptz not null default clock_timestamp(),
    primary key (destination_id, message_id)
);
comment on table {schema}.published_id is 'Ids that callers gave: a second event with one of them is not sent. Kept until they are purged.';
create index published_id_stored_at on {schema}.published_id using brin (stored_at);
