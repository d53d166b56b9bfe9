-- The state of dedup: who may commit, where we are, which positions are decided.
-- Forward only. {schema} stands for the quoted name of the schema; `dedup migrate --sql` prints it filled in.

create table {schema}.consumer (
    id int generated always as identity primary key,
    name text not null unique,
    generation int not null default 0,
    keyspace int not null default 0,
    epoch bigint not null default 0,
    holder_host text,
    holder_pid int,
    holder_started text,
    holder_run_id text,
    taken_at timestamptz,
    joint boolean not null default false
);
comment on table {schema}.consumer is
    'One row per consumer: the epoch that may commit, and who holds it. Every batch share-locks its row; a takeover updates it.';
comment on column {schema}.consumer.joint is 'The epoch belongs to all runner processes in member, not to one holder.';

create table {schema}.progress (
    consumer_id int references {schema}.consumer (id),
    seq bigint not null default 0,
    attempt uuid,
    settings jsonb,
    query_id text,
    batch_id bigint,
    batch_ended boolean not null default true,
    gap_accepted boolean not null default false,
    spent jsonb not null default '{}',
    written_by xid8,
    epoch bigint not null default 0,
    generation int not null default 0,
    recorded bigint,
    reserved uuid,
    reserved_in int,
    page bigint,
    constraint progress_consumer_id unique (consumer_id),
    constraint progress_consumer check (consumer_id is not null)
);
-- Tools that write the rows of a whole database anew choose tables by a unique index of columns that are not null (pg_repack does:
-- https://reorg.github.io/pg_repack/, Restrictions): this row's xmin is to stay as it is.
alter table {schema}.progress replica identity full;
comment on table {schema}.progress is
    'What the last decision left: apart from consumer, because a batch updates it while others share-lock the consumer.';
comment on column {schema}.progress.batch_ended is 'False: of batch_id some chunks are decided, and not the last one.';
comment on column {schema}.progress.spent is
    'By kind of dead letter, what is used of its budget. decided: events that came to where they may fail in this way, the clock; '
    'failures: values of that clock that failed, the last ones; lifted: up to this value a person has admitted all failures.';
comment on column {schema}.progress.written_by is
    'The transaction that wrote this row. The row''s own xmin says the same, unless the row was loaded from a dump or another copy.';
comment on column {schema}.progress.epoch is 'The epoch of the last decision.';
comment on column {schema}.progress.generation is 'The generation of the last decision.';
comment on column {schema}.progress.recorded is 'The last decision with batch records.';
comment on column {schema}.progress.reserved is 'One of the keys that were reserved last, of an event that was processed: nothing but a purge takes it away.';
comment on column {schema}.progress.reserved_in is 'The table of reservations that has it.';
comment on column {schema}.progress.page is 'How far pages of messages were numbered.';

create table {schema}.heartbeat (
    consumer_id int primary key references {schema}.consumer (id),
    epoch bigint not null default 0,
    beats bigint not null default 0,
    beat_at timestamptz,
    backend_pid int,
    backend_start timestamptz
);
comment on table {schema}.heartbeat is
    'Signs of life outside any batch, and the database session of the instance that holds the epoch.';

create table {schema}.topic (
    id int generated always as identity primary key,
    consumer_id int not null references {schema}.consumer (id),
    source text not null,
    topic text not null,
    incarnation int not null default 0,
    incarnation_id text,
    unique (consumer_id, source, topic)
);
comment on table {schema}.topic is 'The topics of a consumer, and in which life each of them is. Empty names: key-only mode.';
comment on column {schema}.topic.incarnation_id is
    'The broker''s own id of that incarnation (Kafka: topic id; Event Hubs: when it was created). Null: not known yet, or nothing can tell.';

create table {schema}.checkpoint (
    consumer_id int not null references {schema}.consumer (id),
    topic_id int not null references {schema}.topic (id),
    partition int not null,
    sequence_number bigint not null,
    event_offset text,
    enqueued_time timestamptz,
    query_id text not null default '',
    passed bigint,
    log_time boolean not null default false,
    primary key (consumer_id, topic_id, partition)
);
comment on table {schema}.checkpoint is 'The low watermark per partition: every position up to it is decided.';
comment on column {schema}.checkpoint.event_offset is 'The broker''s own offset of that event: handed back as it is, never compared.';
comment on column {schema}.checkpoint.passed is
    'A person decided to go on behind this position: those up to it that no batch has seen are absent, an accepted gap.';
comment on column {schema}.checkpoint.log_time is
    'Whether enqueued_time is when the broker took the event (Event Hubs, LogAppendTime of Kafka). That alone goes forward in a partition; '
    'what a producer said (CreateTime of Kafka) may be any time.';

create table {schema}.member (
    consumer_id int not null references {schema}.consumer (id),
    run_id text not null,
    epoch bigint not null,
    host text not null,
    pid int not null,
    started text not null,
    beats bigint not null default 0,
    backend_pid int not null,
    backend_start timestamptz,
    joined_at timestamptz not null default clock_timestamp(),
    primary key (consumer_id, run_id)
);
comment on table {schema}.member is 'The runner processes that have joined the epoch, their signs of life, and the database session of each one''s batches.';

create table {schema}.partition_claim (
    consumer_id int not null references {schema}.consumer (id),
    topic_id int not null references {schema}.topic (id),
    partition int not null,
    number bigint not null,
    run_id text not null,
    claimed_at timestamptz not null default clock_timestamp(),
    primary key (consumer_id, topic_id, partition)
);
comment on table {schema}.partition_claim is
    'The fence of a partition among runner processes: a batch locks its row and compares the number, each claim raises it.';

create table {schema}.sink (
    consumer_id int not null references {schema}.consumer (id),
    name text not null,
    generation int not null,
    relation oid not null,
    primary key (consumer_id, name)
);
comment on table {schema}.sink is 'The tables that a consumer has written to in a generation: one that was dropped and loaded again has another oid.';

create table {schema}.batch (
    consumer_id int not null references {schema}.consumer (id),
    generation int not null,
    topic_id int not null references {schema}.topic (id),
    incarnation int not null,
    partition int not null,
    query_id text not null,
    batch_id bigint not null,
    chunk int not null,
    epoch bigint not null,
    seq bigint not null,
    attempt uuid,
    first_seen bigint,
    last_seen bigint,
    seen int8multirange not null,
    duplicates int8multirange not null,
    skipped int8multirange not null,
    late int8multirange not null,
    delivered bigint not null,
    redelivered bigint not null,
    processed bigint not null,
    duplicate bigint not null,
    skipped_rows bigint not null,
    dead_lettered bigint not null,
    reserved bigint not null,
    committed_at timestamptz not null,
    id bigint generated always as identity primary key
);
comment on table {schema}.batch is
    'What was decided about positions: per chunk and partition the positions seen, and which were duplicates, skipped or late. '
    'Below retention merged to one row, or to few with very many ranges, with query_id '''' and batch_id -1.';
create index batch_seen on {schema}.batch (consumer_id, topic_id, incarnation, partition, last_seen);
create index batch_seq on {schema}.batch (consumer_id, seq);

create table {schema}.consumer_action (
    id bigint generated always as identity primary key,
    consumer_id int not null references {schema}.consumer (id),
    at timestamptz not null default clock_timestamp(),
    by text not null,
    reason text not null,
    before jsonb not null,
    after jsonb not null
);
comment on table {schema}.consumer_action is 'What people decided about the state: who, when, why, and the head before and after.';
