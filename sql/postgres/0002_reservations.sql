-- Which keys are decided: tables of reservations, which are begun, closed, given up and dropped beside open batches.
-- Forward only.
--
-- Each change of the tables begins a phase. A transaction share-locks the number of the phase that it finds, before it reads floors and
-- tables; so whoever waits until nobody has a lower number knows that all have read what the phase began with, or something newer.

create table {schema}.reservation_phase (
    one boolean primary key default true check (one),
    number int not null
);
comment on table {schema}.reservation_phase is 'One row: how often the tables of reservations have changed.';
insert into {schema}.reservation_phase (number) values (1);

create table {schema}.reservation_generation (
    id int primary key,
    created_at timestamptz not null default clock_timestamp(),
    closed_at timestamptz,
    purged_at timestamptz,
    closing boolean not null default false,
    phase int not null default 0,
    dropped_at timestamptz
);
comment on table {schema}.reservation_generation is
    'Number n is table reservation_00000n. The one that is neither closed nor closing takes new reservations. While another one is closing, a '
    'reservation is written to both: whoever began before that writes the closing one alone.';
comment on column {schema}.reservation_generation.closing is 'The next table is there. This one is closed when nobody is left who writes it alone.';
comment on column {schema}.reservation_generation.phase is 'The phase that began when this table became closing, or was purged.';
comment on column {schema}.reservation_generation.purged_at is 'From then on nobody asks this table: the floors say what is forgotten.';
comment on column {schema}.reservation_generation.dropped_at is 'The table itself is dropped later, when nobody is left who asks it.';
create unique index reservation_generation_current on {schema}.reservation_generation (closing) where closed_at is null;

create table {schema}.reservation (key uuid not null, payload_hash bigint not null);
comment on table {schema}.reservation is
    'Keys that were decided: hash of consumer, scope and key, and of the payload. Rows are in the children, each with a unique index of its own.';
alter table {schema}.reservation replica identity full;

create table {schema}.reservation_000001 (unique (key)) inherits ({schema}.reservation);
alter table {schema}.reservation_000001 replica identity using index reservation_000001_key_key;
insert into {schema}.reservation_generation (id) values (1);

create table {schema}.reservation_floor (
    consumer_id int not null references {schema}.consumer (id),
    keyspace int not null,
    topic_id int not null references {schema}.topic (id),
    incarnation int not null,
    partition int not null,
    floor bigint not null,
    primary key (consumer_id, keyspace, topic_id, incarnation, partition)
);
comment on table {schema}.reservation_floor is
    'Reservations of positions at or below may have been purged. Apart from checkpoint, whose rows a batch keeps locked while its handler '
    'runs. A reset and a new incarnation of the topic leave their old floors behind: they no longer count.';

create function {schema}.reservation_lock() returns bigint
    language sql stable set search_path = {schema}, pg_temp
as $body$ select (1684366448::bigint << 32) | 'reservation'::regclass::oid::bigint $body$;
comment on function {schema}.reservation_lock() is 'The advisory lock of whoever begins, closes, purges or drops tables of reservations. No batch takes it.';

create function {schema}.share_reservations() returns int
    language sql volatile set search_path = {schema}, pg_temp
as $body$
select number from reservation_phase, lateral pg_advisory_xact_lock_shared('reservation'::regclass::oid::int, number)
$body$;
comment on function {schema}.share_reservations() is
    'To the end of this transaction: what it reads of floors and tables from now on stays as good. Never waits, and nobody waits behind it.';

create function {schema}.older_phase_is_open(phase int) returns boolean
    language sql volatile set search_path = {schema}, pg_temp
as $body$
select exists (
    select from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.classid = 'reservation'::regclass::oid and l.objid::bigint < phase
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
)
$body$;
comment on function {schema}.older_phase_is_open(int) is
    'Whether a transaction is open that began before this phase. One that takes its number later reads everything else later, too.';

create function {schema}.next_reservation_phase() returns int
    language sql volatile set search_path = {schema}, pg_temp
as $body$ update reservation_phase set number = number + 1 returning number $body$;
comment on function {schema}.next_reservation_phase() is 'Begin a phase, with the transaction that changes the tables. Under reservation_lock.';

create function {schema}.rotate_reservations() returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '10s'
as $body$
declare
    next int;
    child text;
    permission record;
begin
    perform pg_advisory_xact_lock(reservation_lock());
    perform close_reservations();
    select max(id) into next from reservation_generation;
    if exists (select from reservation_generation where closing and closed_at is null) then
        return 'reservation_' || lpad(next::text, 6, '0');
    end if;
    next := next + 1;
    child := 'reservation_' || lpad(next::text, 6, '0');
    execute format('create table %I (unique (key)) inherits (reservation)', child);
    execute format('alter table %I replica identity using index %I', child, child || '_key_key');
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'reservation'::regclass and a.grantee <> c.relowner
    loop
        execute format('grant %s on %I to %s', permission.what, child, permission.who);
    end loop;
    update reservation_generation set closing = true, phase = next_reservation_phase() where closed_at is null;
    insert into reservation_generation (id) values (next);
    return child;
end
$body$;
comment on function {schema}.rotate_reservations() is
    'Begin a new child of reservation; returns its name. Waits for no batch. While batches are open that began before the last rotation there is '
    'nothing to begin: the name is that of the newest one.';

create function {schema}.close_reservations() returns boolean
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    if pg_try_advisory_xact_lock(reservation_lock()) then
        update reservation_generation set closed_at = clock_timestamp(), closing = false
        where closing and closed_at is null and not older_phase_is_open(phase);
    end if;
    return not exists (select from reservation_generation where closing and closed_at is null);
end
$body$;
comment on function {schema}.close_reservations() is
    'Close the table that is closing, if nobody is left who writes it alone; returns whether none is closing now. Never waits. Batches call it.';

create function {schema}.purge_bounds(before timestamptz)
    returns table (consumer text, read_to timestamptz, bound timestamptz)
    language sql stable set search_path = {schema}, pg_temp
as $body$
with decided as (
    -- Of each partition the record with its newest positions: the log's newest time that is decided, and when that was.
    select p.consumer_id, p.enqueued_time, newest.at
    from checkpoint p join topic t on t.id = p.topic_id
    cross join lateral (
        select b.committed_at as at from batch b
        where (b.consumer_id, b.topic_id, b.incarnation, b.partition) = (p.consumer_id, p.topic_id, t.incarnation, p.partition)
            and b.last_seen is not null
        order by b.last_seen desc limit 1
    ) newest
), last as (
    select o.id, o.name, coalesce(
        (select max(d.at) from decided d where d.consumer_id = o.id),
        (select b.committed_at from batch b where b.consumer_id = o.id order by b.seq desc limit 1)
    ) as at
    from consumer o
), reached as (
    select l.name, least(l.at, (
        select min(d.enqueued_time) from decided d where d.consumer_id = l.id and d.at >= l.at - interval '1 hour'
    )) as at
    from last l where l.at is not null
)
select name, at, least(before, at - greatest(clock_timestamp() - before, interval '0'))
from reached
$body$;
comment on function {schema}.purge_bounds(timestamptz) is
    'For each consumer: up to which time of the log it has decided, and what may be purged when everything before that time is asked for: the '
    'retention is counted back from where the consumer is. A partition without an event in the last hour of its consumer counts as read to its end.';

create function {schema}.purge_reservations(before timestamptz, although_behind text[] default '{}') returns int
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    horizon timestamptz;
    begun int;
    given_up int;
begin
    perform pg_advisory_xact_lock(reservation_lock());
    perform close_reservations();
    select max(closed_at) into horizon from reservation_generation
    where purged_at is null
        and closed_at < least(before, (select min(b.bound) from purge_bounds(before) b where b.consumer <> all (although_behind)));
    if horizon is null then
        return 0;
    end if;
    -- Everything that was reserved in these tables alone was recorded before they were closed.
    insert into reservation_floor as f (consumer_id, keyspace, topic_id, incarnation, partition, floor)
    select r.consumer_id, o.keyspace, r.topic_id, r.incarnation, r.partition, max(r.last_seen)
    from batch r
    join topic t on t.id = r.topic_id and t.incarnation = r.incarnation
    join consumer o on o.id = r.consumer_id and r.generation >= o.keyspace
    where r.committed_at <= horizon and r.last_seen is not null
    group by r.consumer_id, o.keyspace, r.topic_id, r.incarnation, r.partition
    on conflict (consumer_id, keyspace, topic_id, incarnation, partition) do update set floor = greatest(f.floor, excluded.floor);
    begun := next_reservation_phase();
    update reservation_generation set purged_at = clock_timestamp(), phase = begun where closed_at <= horizon and purged_at is null;
    get diagnostics given_up = row_count;
    return given_up;
end
$body$;
comment on function {schema}.purge_reservations(timestamptz, text[]) is
    'Give the tables up that were closed before that time, or before the earliest of purge_bounds: from the next transaction on nobody asks them. '
    'Consumers that are named wait for nothing. Keys held by letters stay held. Takes no lock that a batch needs. merge_batches and '
    'drop_purged_reservations do the rest. Returns how many.';

create function {schema}.drop_purged_reservations() returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '50ms'
as $body$
declare
    old record;
    child text;
begin
    if not pg_try_advisory_xact_lock(reservation_lock()) then
        return null;
    end if;
    for old in select id, phase from reservation_generation where purged_at is not null and dropped_at is null order by id loop
        continue when older_phase_is_open(old.phase);
        child := 'reservation_' || lpad(old.id::text, 6, '0');
        begin
            execute format('drop table if exists %I', child);
            update reservation_generation set dropped_at = clock_timestamp() where id = old.id;
            return child;
        exception when lock_not_available then
            return null;
        end;
    end loop;
    return null;
end
$body$;
comment on function {schema}.drop_purged_reservations() is
    'Drop one table that purge_reservations has given up and that nobody is left to ask; returns its name, null where there is none. '
    'Who counts or frees reservations waits for it, 50 ms at most.';

create function {schema}.merge_batches(name text) returns boolean
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    number int := (select c.id from consumer c where c.name = merge_batches.name);
    horizon timestamptz := (select max(closed_at) from reservation_generation where purged_at is not null);
    full_from constant int := 500000;
begin
    if not exists (select from batch b where b.consumer_id = number and b.committed_at <= horizon and (b.query_id, b.batch_id) <> ('', -1)) then
        return false;
    end if;
    with taken as (
        -- Records since the last reset count together, whatever generation they are of. A merged one with very many ranges stays as it is: each
        -- marker of a Kafka transaction leaves a hole, and a value has 1 GB at most.
        delete from batch b using consumer c
        where c.id = number and b.consumer_id = c.id and b.committed_at <= horizon
            and ((b.query_id, b.batch_id) <> ('', -1) or pg_column_size(b.seen) < full_from)
        returning b.*, b.generation >= c.keyspace as living
    ), old as (
        select t.*, sum(pg_column_size(t.seen)) over (
            partition by consumer_id, living, topic_id, incarnation, partition order by first_seen, id
        ) / full_from as part
        from taken t
    ), merged as (
        select consumer_id, living, part, max(generation) as generation, topic_id, incarnation, partition,
            max(epoch) as epoch, max(seq) as seq, max(committed_at) as committed_at,
            min(first_seen) as first_seen, max(last_seen) as last_seen,
            sum(delivered) as delivered, sum(redelivered) as redelivered, sum(processed) as processed, sum(duplicate) as duplicate,
            sum(skipped_rows) as skipped_rows, sum(dead_lettered) as dead_lettered, sum(reserved) as reserved
        from old
        group by consumer_id, living, part, topic_id, incarnation, partition
    ), ranges as (
        -- The exact union: a position that was never delivered must not count as seen, its event may still come. Batches without positions have no ranges.
        select consumer_id, living, part, topic_id, incarnation, partition, range_agg(r) as seen
        from old cross join lateral unnest(old.seen) r
        group by consumer_id, living, part, topic_id, incarnation, partition
    )
    insert into batch
    select m.consumer_id, m.generation, m.topic_id, m.incarnation, m.partition, '', -1, 0, m.epoch, m.seq, null, m.first_seen, m.last_seen,
        coalesce(r.seen, '{}'::int8multirange), '{}', '{}', '{}',
        m.delivered, m.redelivered, m.processed, m.duplicate, m.skipped_rows, m.dead_lettered, m.reserved, m.committed_at
    from merged m
    left join ranges r using (consumer_id, living, part, topic_id, incarnation, partition);
    return true;
end
$body$;
comment on function {schema}.merge_batches(text) is
    'Of one consumer: one record per partition, or one of half a megabyte of positions, in place of those whose reservations were purged: the union of '
    'what they saw, and the sums of their counts. Takes no lock that a batch needs. Returns whether there were any.';

create function {schema}.is_reserved(number int, key uuid) returns boolean
    language plpgsql stable security definer set search_path = {schema}, pg_temp
as $body$
declare
    child text := 'reservation_' || lpad(number::text, 6, '0');
    has_it boolean := false;
begin
    if to_regclass(child) is not null then
        execute format('select exists (select from only %I r where r.key = $1)', child) into has_it using key;
    end if;
    return has_it;
end
$body$;
comment on function {schema}.is_reserved(int, uuid) is 'Whether the table of that number has the key. Asks that table alone: all of them would be locked.';

revoke all on function {schema}.rotate_reservations() from public;
revoke all on function {schema}.purge_bounds(timestamptz) from public;
revoke all on function {schema}.purge_reservations(timestamptz, text[]) from public;
revoke all on function {schema}.drop_purged_reservations() from public;
revoke all on function {schema}.merge_batches(text) from public;
