-- The state of dedup: who may commit, where we are, which positions and keys are decided, what failed.
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
    taken_at timestamptz
);
comment on table {schema}.consumer is
    'One row per consumer: the epoch that may commit, and who holds it. Every batch share-locks its row; a takeover updates it.';

create table {schema}.progress (
    consumer_id int primary key references {schema}.consumer (id),
    seq bigint not null default 0,
    attempt uuid,
    settings jsonb,
    query_id text,
    batch_id bigint,
    gap_accepted boolean not null default false
);
comment on table {schema}.progress is
    'What the last decision left: apart from consumer, because a batch updates it while others share-lock the consumer.';

create table {schema}.heartbeat (
    consumer_id int primary key references {schema}.consumer (id),
    epoch bigint not null default 0,
    beats bigint not null default 0,
    beat_at timestamptz,
    backend_pid int,
    backend_start timestamptz
);
comment on table {schema}.heartbeat is
    'Signs of life outside any batch, and the database session of the copy that holds the epoch.';

create table {schema}.topic (
    id int generated always as identity primary key,
    consumer_id int not null references {schema}.consumer (id),
    source text not null,
    topic text not null,
    incarnation int not null default 0,
    unique (consumer_id, source, topic)
);
comment on table {schema}.topic is 'The topics of a consumer, and in which life each of them is. Empty names: key-only mode.';

create table {schema}.checkpoint (
    consumer_id int not null references {schema}.consumer (id),
    topic_id int not null references {schema}.topic (id),
    partition int not null,
    sequence_number bigint not null,
    event_offset text,
    enqueued_time timestamptz,
    query_id text not null default '',
    floor bigint,
    owner bigint not null default 0,
    primary key (consumer_id, topic_id, partition)
);
comment on table {schema}.checkpoint is 'The low watermark per partition: every position up to it is decided.';
comment on column {schema}.checkpoint.event_offset is 'The broker''s own offset of that event: handed back as it is, never compared.';
comment on column {schema}.checkpoint.floor is 'Reservations of positions at or below may have been purged.';
comment on column {schema}.checkpoint.owner is 'Number of the claim on this partition; 0 for Spark.';

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

create table {schema}.dead_letter (
    id text primary key,
    consumer text not null,
    generation int not null,
    source text not null,
    topic text not null,
    incarnation int not null,
    partition int not null,
    sequence_number bigint not null,
    part bigint not null,
    event_offset text,
    enqueued_time timestamptz,
    event_key bytea,
    key uuid,
    holds_key boolean not null,
    idempotence_key text,
    payload_hash bigint,
    body bytea,
    body_size bigint,
    body_sha256 bytea,
    property_names text[],
    property_values bytea[],
    kind text not null,
    reason text not null,
    error_type text,
    error_message text,
    stack text,
    fingerprint text not null,
    attempts int not null,
    first_failed_at timestamptz not null,
    last_failed_at timestamptz not null,
    status text not null check (status in ('OPEN', 'BLOCKED', 'REPROCESSED', 'DUPLICATE', 'DISCARDED', 'LOST')),
    sequence_key text,
    blocked_by text,
    duplicates bigint not null default 0
);
comment on table {schema}.dead_letter is 'Events that could not be processed, with their exact bytes. An open, blocked or discarded one holds its key.';
create unique index dead_letter_key on {schema}.dead_letter (key) where holds_key and status in ('OPEN', 'BLOCKED', 'DISCARDED');
create index dead_letter_position on {schema}.dead_letter (consumer, source, topic, incarnation, partition, sequence_number, part);
create index dead_letter_fingerprint on {schema}.dead_letter (fingerprint);

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
