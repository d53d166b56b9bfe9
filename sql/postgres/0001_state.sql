-- The state of dedup: who may commit, where we are, which positions and keys are decided.
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
    floor bigint,
    passed bigint,
    log_time boolean not null default false,
    primary key (consumer_id, topic_id, partition)
);
comment on table {schema}.checkpoint is 'The low watermark per partition: every position up to it is decided.';
comment on column {schema}.checkpoint.event_offset is 'The broker''s own offset of that event: handed back as it is, never compared.';
comment on column {schema}.checkpoint.floor is 'Reservations of positions at or below may have been purged.';
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
    committed_at timestamptz not null
);
comment on table {schema}.batch is
    'What was decided about positions: per chunk and partition the positions seen, and which were duplicates, skipped or late. '
    'Below retention merged to one row with query_id '''' and batch_id -1.';
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

create table {schema}.reservation_generation (
    id int primary key,
    created_at timestamptz not null default clock_timestamp(),
    closed_at timestamptz,
    purged_at timestamptz
);
comment on table {schema}.reservation_generation is
    'Reservations are written to the child table of the one row without closed_at: number n is table reservation_00000n.';
create unique index reservation_generation_current on {schema}.reservation_generation ((true)) where closed_at is null;

create table {schema}.reservation (key uuid not null, payload_hash bigint not null);
comment on table {schema}.reservation is
    'Keys that were decided: hash of consumer, scope and key, and of the payload. Rows are in the children, each with a unique index of its own.';

create table {schema}.reservation_000001 (unique (key)) inherits ({schema}.reservation);
insert into {schema}.reservation_generation (id) values (1);

create function {schema}.reservation_lock() returns bigint
    language sql stable set search_path = {schema}, pg_temp
as $body$ select (1684366448::bigint << 32) | 'reservation'::regclass::oid::bigint $body$;
comment on function {schema}.reservation_lock() is
    'The advisory lock of the reservations: shared by every batch, exclusive for rotation, so that no two transactions write different children.';

create function {schema}.rotate_reservations() returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '10s'
as $body$
declare
    next int;
    child text;
    permission record;
begin
    perform pg_advisory_xact_lock(reservation_lock());
    -- Statements after the lock see what every earlier holder committed.
    update reservation_generation set closed_at = clock_timestamp() where closed_at is null;
    select max(id) + 1 into next from reservation_generation;
    child := 'reservation_' || lpad(next::text, 6, '0');
    execute format('create table %I (unique (key)) inherits (reservation)', child);
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'reservation'::regclass and a.grantee <> c.relowner
    loop
        execute format('grant %s on %I to %s', permission.what, child, permission.who);
    end loop;
    insert into reservation_generation (id) values (next);
    return child;
end
$body$;
comment on function {schema}.rotate_reservations() is
    'Begin a new child of reservation. Waits for open batches, at most ten seconds. Returns the name of the new table.';

create function {schema}.purge_reservations(before timestamptz) returns int
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '10s'
as $body$
declare
    old record;
    horizon timestamptz;
    dropped int := 0;
begin
    -- One purge at a time; batches go on.
    perform pg_advisory_xact_lock(reservation_lock() + (1::bigint << 32));
    for old in select id, closed_at from reservation_generation where closed_at < before and purged_at is null order by id loop
        execute format('drop table %I', 'reservation_' || lpad(old.id::text, 6, '0'));
        update reservation_generation set purged_at = clock_timestamp() where id = old.id;
        horizon := old.closed_at;
        dropped := dropped + 1;
    end loop;
    if horizon is not null then
        -- Everything that reserved in a dropped table was recorded before that table was closed.
        update checkpoint c set floor = greatest(c.floor, b.top)
        from (
            select r.consumer_id, r.topic_id, r.partition, max(r.last_seen) as top
            from batch r
            join topic t on t.id = r.topic_id and t.incarnation = r.incarnation
            join consumer o on o.id = r.consumer_id and r.generation >= o.keyspace
            where r.committed_at <= horizon and r.last_seen is not null
            group by r.consumer_id, r.topic_id, r.partition
        ) b
        where (c.consumer_id, c.topic_id, c.partition) = (b.consumer_id, b.topic_id, b.partition);
        perform merge_batches(horizon);
    end if;
    return dropped;
end
$body$;
comment on function {schema}.purge_reservations(timestamptz) is
    'Drop the children of reservation closed before that time and merge the batch records they belong to. Keys held by letters stay held. '
    'Returns how many tables were dropped.';

create function {schema}.merge_batches(horizon timestamptz) returns void
    language sql set search_path = {schema}, pg_temp
as $body$
with old as (
    -- Records since the last reset count together, whatever generation they are of.
    delete from batch b using consumer c where b.consumer_id = c.id and b.committed_at <= horizon
    returning b.*, b.generation >= c.keyspace as living
), merged as (
    select consumer_id, living, max(generation) as generation, topic_id, incarnation, partition,
        max(epoch) as epoch, max(seq) as seq, max(committed_at) as committed_at,
        min(first_seen) as first_seen, max(last_seen) as last_seen,
        sum(delivered) as delivered, sum(redelivered) as redelivered, sum(processed) as processed, sum(duplicate) as duplicate,
        sum(skipped_rows) as skipped_rows, sum(dead_lettered) as dead_lettered, sum(reserved) as reserved
    from old
    group by consumer_id, living, topic_id, incarnation, partition
), ranges as (
    -- The exact union: a position that was never delivered must not count as seen, its event may still come. Batches without positions have no ranges.
    select consumer_id, living, topic_id, incarnation, partition, range_agg(r) as seen
    from old cross join lateral unnest(old.seen) r
    group by consumer_id, living, topic_id, incarnation, partition
)
insert into batch
select m.consumer_id, m.generation, m.topic_id, m.incarnation, m.partition, '', -1, 0, m.epoch, m.seq, null, m.first_seen, m.last_seen,
    coalesce(r.seen, '{}'::int8multirange), '{}', '{}', '{}',
    m.delivered, m.redelivered, m.processed, m.duplicate, m.skipped_rows, m.dead_lettered, m.reserved, m.committed_at
from merged m
left join ranges r using (consumer_id, living, topic_id, incarnation, partition);
$body$;
comment on function {schema}.merge_batches(timestamptz) is 'One record per partition in place of those up to that time: the union of what they saw, and the sums of their counts.';

revoke all on function {schema}.rotate_reservations() from public;
revoke all on function {schema}.purge_reservations(timestamptz) from public;
revoke all on function {schema}.merge_batches(timestamptz) from public;
