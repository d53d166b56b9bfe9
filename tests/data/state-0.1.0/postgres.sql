SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
CREATE SCHEMA dedup;
CREATE TYPE dedup.letter_change AS (
	consumer text,
	fingerprint text,
	kind text,
	status text,
	failed_on date,
	letters bigint
);
COMMENT ON TYPE dedup.letter_change IS 'A row for letter_count; no row of it, so that the table may get more columns.';
CREATE FUNCTION dedup.add_letter_counts(changes dedup.letter_change[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
with added as (
    insert into letter_count (consumer, fingerprint, kind, status, failed_on, letters) select * from unnest(changes) returning *
), many as materialized (
    -- Of one count in sixteen, few rows are made of many. A fixed snapshot could meet rows that are gone, so only at READ COMMITTED.
    select * from added where random() < 0.0625 and current_setting('transaction_isolation') = 'read committed'
), mine as (
    -- Rows that somebody else is at are left to them.
    select c.ctid as place
    from letter_count c join many using (fingerprint, kind, consumer, status, failed_on)
    for update of c skip locked
), old as (
    delete from letter_count where ctid = any(array(select place from mine)) returning *
)
insert into letter_count
select consumer, fingerprint, kind, status, failed_on, sum(letters) from old group by 1, 2, 3, 4, 5 having sum(letters) <> 0;
$$;
COMMENT ON FUNCTION dedup.add_letter_counts(changes dedup.letter_change[]) IS 'Append to letter_count and, now and then, make one row of the many of a count: what is deleted and what is added is one statement.';
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE dedup.partition_owner (
    namespace text NOT NULL,
    hub text NOT NULL,
    consumer_group text NOT NULL,
    partition_id text NOT NULL,
    owner_id text NOT NULL,
    owner_number bigint NOT NULL,
    etag text NOT NULL,
    modified_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE dedup.partition_owner IS 'One row per partition of a consumer group: the processor that owns it, if any. A renewal changes etag and modified_at only.';
COMMENT ON COLUMN dedup.partition_owner.owner_id IS 'The processor''s own id; empty when it gave the partition back.';
COMMENT ON COLUMN dedup.partition_owner.owner_number IS 'Raised whenever owner_id changes, never by a renewal, never used twice. It is a key, so that FOR KEY SHARE keeps it from changing to the end of a transaction and lets renewals pass.';
COMMENT ON COLUMN dedup.partition_owner.etag IS 'Made by the processor for each claim; the next claim has to name it.';
CREATE FUNCTION dedup.claim_unowned(of_namespace text, of_hub text, of_group text, partitions text[], owners text[], etags text[]) RETURNS SETOF dedup.partition_owner
    LANGUAGE plpgsql
    SET search_path TO 'dedup', 'pg_temp'
    SET lock_timeout TO '100ms'
    AS $$
begin
    for number in 1 .. cardinality(partitions) loop
        begin
            return query
                insert into partition_owner (namespace, hub, consumer_group, partition_id, owner_id, etag)
                values (of_namespace, of_hub, of_group, partitions[number], owners[number], etags[number])
                on conflict do nothing returning *;
        exception when lock_not_available then
            null;
        end;
    end loop;
end
$$;
COMMENT ON FUNCTION dedup.claim_unowned(of_namespace text, of_hub text, of_group text, partitions text[], owners text[], etags text[]) IS 'Claims partitions that have no row yet, each by itself: one that somebody else is claiming at this moment is lost, and stops no other.';
CREATE FUNCTION dedup.close_reservations() RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
begin
    if pg_try_advisory_xact_lock(reservation_lock()) then
        update reservation_generation set closed_at = clock_timestamp(), closing = false
        where closing and closed_at is null and not older_phase_is_open(phase);
    end if;
    return not exists (select from reservation_generation where closing and closed_at is null);
end
$$;
COMMENT ON FUNCTION dedup.close_reservations() IS 'Close the table that is closing, if nobody is left who writes it alone; returns whether none is closing now. Never waits. Batches call it.';
CREATE FUNCTION dedup.count_letters() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
declare
    changes letter_change[];
begin
    if tg_op = 'TRUNCATE' then
        delete from letter_count;
        return null;
    elsif tg_op = 'INSERT' then
        select array_agg(g::letter_change) into changes from (
            select consumer, fingerprint, kind, status, (last_failed_at at time zone 'UTC')::date, count(*) from new_letters group by 1, 2, 3, 4, 5
        ) g;
    elsif tg_op = 'DELETE' then
        select array_agg(g::letter_change) into changes from (
            select consumer, fingerprint, kind, status, (last_failed_at at time zone 'UTC')::date, -count(*) from old_letters group by 1, 2, 3, 4, 5
        ) g;
    else
        select array_agg(g::letter_change) into changes from (
            select consumer, fingerprint, kind, status, (last_failed_at at time zone 'UTC')::date, sum(n)::bigint
            from (
                select consumer, fingerprint, kind, status, last_failed_at, 1 as n from new_letters
                union all
                select consumer, fingerprint, kind, status, last_failed_at, -1 from old_letters
            ) u
            group by 1, 2, 3, 4, 5
            having sum(n) <> 0
        ) g;
    end if;
    perform add_letter_counts(changes);
    return null;
end
$$;
COMMENT ON FUNCTION dedup.count_letters() IS 'Append to letter_count what a statement changed.';
CREATE FUNCTION dedup.drop_purged_reservations() RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    SET lock_timeout TO '50ms'
    AS $$
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
$$;
COMMENT ON FUNCTION dedup.drop_purged_reservations() IS 'Drop one table that purge_reservations has given up and that nobody is left to ask; returns its name, null where there is none. Who counts or frees reservations waits for it, 50 ms at most.';
CREATE FUNCTION dedup.guard_transaction(token uuid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
declare
    place tid;
begin
    insert into open_transaction (token) values (guard_transaction.token) returning ctid into place;
    delete from open_transaction where ctid = place;
end
$$;
COMMENT ON FUNCTION dedup.guard_transaction(token uuid) IS 'From now on this transaction commits only where the setting dedup.commit is this token.';
CREATE FUNCTION dedup.is_reserved(number integer, key uuid) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $_$
declare
    child text := 'reservation_' || lpad(number::text, 6, '0');
    has_it boolean := false;
begin
    if to_regclass(child) is not null then
        execute format('select exists (select from only %I r where r.key = $1)', child) into has_it using key;
    end if;
    return has_it;
end
$_$;
COMMENT ON FUNCTION dedup.is_reserved(number integer, key uuid) IS 'Whether the table of that number has the key. Asks that table alone: all of them would be locked.';
CREATE FUNCTION dedup.merge_batches(name text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
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
$$;
COMMENT ON FUNCTION dedup.merge_batches(name text) IS 'Of one consumer: one record per partition, or one of half a megabyte of positions, in place of those whose reservations were purged: the union of what they saw, and the sums of their counts. Takes no lock that a batch needs. Returns whether there were any.';
CREATE FUNCTION dedup.next_reservation_phase() RETURNS integer
    LANGUAGE sql
    SET search_path TO 'dedup', 'pg_temp'
    AS $$ update reservation_phase set number = number + 1 returning number $$;
COMMENT ON FUNCTION dedup.next_reservation_phase() IS 'Begin a phase, with the transaction that changes the tables. Under reservation_lock.';
CREATE FUNCTION dedup.older_phase_is_open(phase integer) RETURNS boolean
    LANGUAGE sql
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
select exists (
    select from pg_catalog.pg_locks l
    where l.locktype = 'advisory' and l.objsubid = 2 and l.classid = 'reservation'::regclass::oid and l.objid::bigint < phase
        and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
)
$$;
COMMENT ON FUNCTION dedup.older_phase_is_open(phase integer) IS 'Whether a transaction is open that began before this phase. One that takes its number later reads everything else later, too.';
CREATE FUNCTION dedup.purge_bounds(before timestamp with time zone) RETURNS TABLE(consumer text, read_to timestamp with time zone, bound timestamp with time zone)
    LANGUAGE sql STABLE
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
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
$$;
COMMENT ON FUNCTION dedup.purge_bounds(before timestamp with time zone) IS 'For each consumer: up to which time of the log it has decided, and what may be purged when everything before that time is asked for: the retention is counted back from where the consumer is. A partition without an event in the last hour of its consumer counts as read to its end.';
CREATE FUNCTION dedup.purge_reservations(before timestamp with time zone, although_behind text[] DEFAULT '{}'::text[]) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
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
$$;
COMMENT ON FUNCTION dedup.purge_reservations(before timestamp with time zone, although_behind text[]) IS 'Give the tables up that were closed before that time, or before the earliest of purge_bounds: from the next transaction on nobody asks them. Consumers that are named wait for nothing. Keys held by letters stay held. Takes no lock that a batch needs. merge_batches and drop_purged_reservations do the rest. Returns how many.';
CREATE FUNCTION dedup.refuse_commit() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
declare
    writer xid;
    place tid;
begin
    if current_setting('dedup.commit', true) is not distinct from new.token::text then
        return null;
    end if;
    -- SET CONSTRAINTS ALL IMMEDIATE asks, too, and inside a savepoint: there the row gets the number of the savepoint, and is asked again.
    -- At COMMIT and PREPARE TRANSACTION no savepoint is left.
    set constraints refuse_commit deferred;
    insert into open_transaction (token) values (new.token) returning xmin, ctid into writer, place;
    delete from open_transaction where ctid = place;
    if writer = pg_current_xact_id()::xid then
        raise exception 'dedup commits this transaction by itself, together with its checkpoint' using
            errcode = 'invalid_transaction_termination', hint = 'Leave COMMIT out. A part that may fail can be a savepoint.';
    end if;
    return null;
end
$$;
COMMENT ON FUNCTION dedup.refuse_commit() IS 'Fail a COMMIT that the handler of a batch has sent: what the batch wrote is then rolled back.';
CREATE FUNCTION dedup.reservation_lock() RETURNS bigint
    LANGUAGE sql STABLE
    SET search_path TO 'dedup', 'pg_temp'
    AS $$ select (1684366448::bigint << 32) | 'reservation'::regclass::oid::bigint $$;
COMMENT ON FUNCTION dedup.reservation_lock() IS 'The advisory lock of whoever begins, closes, purges or drops tables of reservations. No batch takes it.';
CREATE FUNCTION dedup.rotate_reservations() RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'dedup', 'pg_temp'
    SET lock_timeout TO '10s'
    AS $$
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
$$;
COMMENT ON FUNCTION dedup.rotate_reservations() IS 'Begin a new child of reservation; returns its name. Waits for no batch. While batches are open that began before the last rotation there is nothing to begin: the name is that of the newest one.';
CREATE FUNCTION dedup.share_reservations() RETURNS integer
    LANGUAGE sql
    SET search_path TO 'dedup', 'pg_temp'
    AS $$
select number from reservation_phase, lateral pg_advisory_xact_lock_shared('reservation'::regclass::oid::int, number)
$$;
COMMENT ON FUNCTION dedup.share_reservations() IS 'To the end of this transaction: what it reads of floors and tables from now on stays as good. Never waits, and nobody waits behind it.';
CREATE TABLE dedup.batch (
    consumer_id integer NOT NULL,
    generation integer NOT NULL,
    topic_id integer NOT NULL,
    incarnation integer NOT NULL,
    partition integer NOT NULL,
    query_id text NOT NULL,
    batch_id bigint NOT NULL,
    chunk integer NOT NULL,
    epoch bigint NOT NULL,
    seq bigint NOT NULL,
    attempt uuid,
    first_seen bigint,
    last_seen bigint,
    seen int8multirange NOT NULL,
    duplicates int8multirange NOT NULL,
    skipped int8multirange NOT NULL,
    late int8multirange NOT NULL,
    delivered bigint NOT NULL,
    redelivered bigint NOT NULL,
    processed bigint NOT NULL,
    duplicate bigint NOT NULL,
    skipped_rows bigint NOT NULL,
    dead_lettered bigint NOT NULL,
    reserved bigint NOT NULL,
    committed_at timestamp with time zone NOT NULL,
    id bigint NOT NULL
);
COMMENT ON TABLE dedup.batch IS 'What was decided about positions: per chunk and partition the positions seen, and which were duplicates, skipped or late. Below retention merged to one row, or to few with very many ranges, with query_id '''' and batch_id -1.';
ALTER TABLE dedup.batch ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.batch_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.blocked_sequence (
    sequence uuid NOT NULL,
    consumer text NOT NULL,
    letter text NOT NULL,
    kind text NOT NULL
);
COMMENT ON TABLE dedup.blocked_sequence IS 'One row per sequence with open or blocked letters: the last one of them. Locked by whoever parks behind it or releases it.';
CREATE TABLE dedup.dead_letter (
    id text NOT NULL,
    consumer text NOT NULL,
    generation integer NOT NULL,
    source text NOT NULL,
    topic text NOT NULL,
    incarnation integer NOT NULL,
    partition integer NOT NULL,
    sequence_number bigint NOT NULL,
    part bigint NOT NULL,
    event_offset text,
    enqueued_time timestamp with time zone,
    event_key bytea,
    key uuid,
    holds_key boolean NOT NULL,
    idempotence_key text,
    payload_hash bigint,
    body bytea,
    body_size bigint,
    body_sha256 bytea,
    property_names text[],
    property_values bytea[],
    kind text NOT NULL,
    reason text NOT NULL,
    error_type text,
    error_message text,
    stack text,
    fingerprint text NOT NULL,
    attempts integer NOT NULL,
    first_failed_at timestamp with time zone NOT NULL,
    last_failed_at timestamp with time zone NOT NULL,
    status text NOT NULL,
    sequence_key text,
    blocked_by text,
    duplicates bigint DEFAULT 0 NOT NULL,
    sequence uuid,
    extras bytea,
    CONSTRAINT dead_letter_status_check CHECK ((status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text, 'REPROCESSED'::text, 'DUPLICATE'::text, 'DISCARDED'::text, 'LOST'::text])))
);
COMMENT ON TABLE dedup.dead_letter IS 'Events that could not be processed, with their exact bytes. An open, blocked or discarded one holds its key.';
COMMENT ON COLUMN dedup.dead_letter.blocked_by IS 'The letter right before it in its sequence, while that one is open or blocked.';
COMMENT ON COLUMN dedup.dead_letter.sequence IS 'Hash of consumer, partition and sequence key: letters with the same one keep their order. Null: no order.';
COMMENT ON COLUMN dedup.dead_letter.extras IS 'The other columns of the input: an Arrow IPC stream of one row.';
CREATE VIEW dedup.blocked_by_letter AS
 SELECT b.consumer,
    d.source,
    d.topic,
    d.partition,
    d.sequence_key,
    b.sequence,
    d.id AS open_letter,
    d.kind,
    d.reason,
    d.first_failed_at,
    (( SELECT count(*) AS count
           FROM dedup.dead_letter w
          WHERE ((w.sequence = b.sequence) AND (w.status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text])))) - 1) AS behind
   FROM (dedup.blocked_sequence b
     CROSS JOIN LATERAL ( SELECT d_1.id,
            d_1.consumer,
            d_1.generation,
            d_1.source,
            d_1.topic,
            d_1.incarnation,
            d_1.partition,
            d_1.sequence_number,
            d_1.part,
            d_1.event_offset,
            d_1.enqueued_time,
            d_1.event_key,
            d_1.key,
            d_1.holds_key,
            d_1.idempotence_key,
            d_1.payload_hash,
            d_1.body,
            d_1.body_size,
            d_1.body_sha256,
            d_1.property_names,
            d_1.property_values,
            d_1.kind,
            d_1.reason,
            d_1.error_type,
            d_1.error_message,
            d_1.stack,
            d_1.fingerprint,
            d_1.attempts,
            d_1.first_failed_at,
            d_1.last_failed_at,
            d_1.status,
            d_1.sequence_key,
            d_1.blocked_by,
            d_1.duplicates,
            d_1.sequence,
            d_1.extras
           FROM dedup.dead_letter d_1
          WHERE ((d_1.sequence = b.sequence) AND (d_1.status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text])))
          ORDER BY d_1.incarnation, d_1.sequence_number, d_1.part
         LIMIT 1) d);
COMMENT ON VIEW dedup.blocked_by_letter IS 'Blocked sequences: the letter that has to be dealt with first, and how many wait behind it.';
CREATE TABLE dedup.checkpoint (
    consumer_id integer NOT NULL,
    topic_id integer NOT NULL,
    partition integer NOT NULL,
    sequence_number bigint NOT NULL,
    event_offset text,
    enqueued_time timestamp with time zone,
    query_id text DEFAULT ''::text NOT NULL,
    passed bigint,
    log_time boolean DEFAULT false NOT NULL
);
COMMENT ON TABLE dedup.checkpoint IS 'The low watermark per partition: every position up to it is decided.';
COMMENT ON COLUMN dedup.checkpoint.event_offset IS 'The broker''s own offset of that event: handed back as it is, never compared.';
COMMENT ON COLUMN dedup.checkpoint.passed IS 'A person decided to go on behind this position: those up to it that no batch has seen are absent, an accepted gap.';
COMMENT ON COLUMN dedup.checkpoint.log_time IS 'Whether enqueued_time is when the broker took the event (Event Hubs, LogAppendTime of Kafka). That alone goes forward in a partition; what a producer said (CreateTime of Kafka) may be any time.';
CREATE TABLE dedup.consumer (
    id integer NOT NULL,
    name text NOT NULL,
    generation integer DEFAULT 0 NOT NULL,
    keyspace integer DEFAULT 0 NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    holder_host text,
    holder_pid integer,
    holder_started text,
    holder_run_id text,
    taken_at timestamp with time zone,
    joint boolean DEFAULT false NOT NULL
);
COMMENT ON TABLE dedup.consumer IS 'One row per consumer: the epoch that may commit, and who holds it. Every batch share-locks its row; a takeover updates it.';
COMMENT ON COLUMN dedup.consumer.joint IS 'The epoch belongs to all runner processes in member, not to one holder.';
CREATE TABLE dedup.consumer_action (
    id bigint NOT NULL,
    consumer_id integer NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    by text NOT NULL,
    reason text NOT NULL,
    before jsonb NOT NULL,
    after jsonb NOT NULL
);
COMMENT ON TABLE dedup.consumer_action IS 'What people decided about the state: who, when, why, and the head before and after.';
ALTER TABLE dedup.consumer_action ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.consumer_action_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
ALTER TABLE dedup.consumer ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.consumer_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.crash_marker (
    consumer_id integer NOT NULL,
    marker text,
    at timestamp with time zone NOT NULL,
    scope text DEFAULT ''::text NOT NULL
);
COMMENT ON TABLE dedup.crash_marker IS 'What a consumer was about to try: the next process reads from it what this one died of.';
COMMENT ON COLUMN dedup.crash_marker.scope IS 'The partition that a runner process has claimed; empty for a consumer that holds its epoch alone.';
CREATE TABLE dedup.heartbeat (
    consumer_id integer NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    beats bigint DEFAULT 0 NOT NULL,
    beat_at timestamp with time zone,
    backend_pid integer,
    backend_start timestamp with time zone
);
COMMENT ON TABLE dedup.heartbeat IS 'Signs of life outside any batch, and the database session of the instance that holds the epoch.';
CREATE TABLE dedup.outbox_page (
    page bigint NOT NULL,
    consumer_id integer NOT NULL,
    topic text NOT NULL,
    lane smallint NOT NULL,
    messages integer NOT NULL,
    size bigint NOT NULL,
    keys bytea[] NOT NULL,
    ids text[] NOT NULL,
    bodies bytea[] NOT NULL,
    header_ends integer[],
    header_names text[],
    header_values bytea[],
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    sent_at timestamp with time zone,
    CONSTRAINT outbox_page_messages_check CHECK (((messages >= 1) AND (messages <= 1000)))
);
ALTER TABLE ONLY dedup.outbox_page ALTER COLUMN keys SET COMPRESSION lz4;
ALTER TABLE ONLY dedup.outbox_page ALTER COLUMN ids SET STORAGE EXTERNAL;
ALTER TABLE ONLY dedup.outbox_page ALTER COLUMN bodies SET COMPRESSION lz4;
ALTER TABLE ONLY dedup.outbox_page ALTER COLUMN header_names SET COMPRESSION lz4;
ALTER TABLE ONLY dedup.outbox_page ALTER COLUMN header_values SET COMPRESSION lz4;
COMMENT ON TABLE dedup.outbox_page IS 'Messages to send, in order: those of one topic and lane in one transaction. The n-th has the number 1000 * page + n - 1.';
COMMENT ON COLUMN dedup.outbox_page.size IS 'Bytes of the bodies.';
COMMENT ON COLUMN dedup.outbox_page.header_ends IS 'Where in header_names and header_values those of each message end; null where none has any.';
COMMENT ON COLUMN dedup.outbox_page.sent_at IS 'When all of them were marked as sent; null: all of them wait.';
ALTER TABLE dedup.outbox_page ALTER COLUMN page ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.outbox_page_page_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE VIEW dedup.last_page AS
 SELECT outbox_page_page_seq.last_value AS page
   FROM dedup.outbox_page_page_seq;
COMMENT ON VIEW dedup.last_page IS 'How far pages of messages were numbered, for roles that may not read sequences.';
CREATE TABLE dedup.letter_count (
    consumer text NOT NULL,
    fingerprint text NOT NULL,
    kind text NOT NULL,
    status text NOT NULL,
    failed_on date NOT NULL,
    letters bigint NOT NULL
);
ALTER TABLE ONLY dedup.letter_count REPLICA IDENTITY FULL;
COMMENT ON TABLE dedup.letter_count IS 'How many letters there are, as sums of rows that each statement appends: nobody waits for a counter. failed_on: day of the last failure, UTC.';
CREATE VIEW dedup.letter_age AS
 SELECT letter_count.consumer,
    letter_count.status,
    letter_count.failed_on,
    (sum(letter_count.letters))::bigint AS letters
   FROM dedup.letter_count
  GROUP BY letter_count.consumer, letter_count.status, letter_count.failed_on
 HAVING (sum(letter_count.letters) > (0)::numeric);
COMMENT ON VIEW dedup.letter_age IS 'Letters by consumer, status and the day (UTC) on which they failed last.';
CREATE TABLE dedup.letter_duplicate (
    letter_id text NOT NULL,
    duplicates bigint NOT NULL
);
ALTER TABLE ONLY dedup.letter_duplicate REPLICA IDENTITY FULL;
COMMENT ON TABLE dedup.letter_duplicate IS 'Duplicates that came while somebody was at work on the letter: they count beside dead_letter.duplicates, and nobody waits.';
CREATE VIEW dedup.letter_group AS
 SELECT g.consumer,
    g.fingerprint,
    g.kind,
    g.status,
    g.letters,
    f.first_failed_at,
    l.last_failed_at,
    l.id AS example,
    l.reason
   FROM ((( SELECT letter_count.consumer,
            letter_count.fingerprint,
            letter_count.kind,
            letter_count.status,
            (sum(letter_count.letters))::bigint AS letters
           FROM dedup.letter_count
          GROUP BY letter_count.consumer, letter_count.fingerprint, letter_count.kind, letter_count.status
         HAVING (sum(letter_count.letters) > (0)::numeric)) g
     CROSS JOIN LATERAL ( SELECT LEAST(( SELECT min(d.last_failed_at) AS min
                   FROM dedup.dead_letter d
                  WHERE ((d.fingerprint = g.fingerprint) AND (d.kind = g.kind) AND (d.consumer = g.consumer) AND (d.status = g.status))), ( SELECT min(d.first_failed_at) AS min
                   FROM dedup.dead_letter d
                  WHERE ((d.fingerprint = g.fingerprint) AND (d.kind = g.kind) AND (d.consumer = g.consumer) AND (d.status = g.status) AND (d.first_failed_at <> d.last_failed_at)))) AS first_failed_at) f)
     CROSS JOIN LATERAL ( SELECT d.last_failed_at,
            d.id,
            d.reason
           FROM dedup.dead_letter d
          WHERE ((d.fingerprint = g.fingerprint) AND (d.kind = g.kind) AND (d.consumer = g.consumer) AND (d.status = g.status))
          ORDER BY d.last_failed_at DESC
         LIMIT 1) l);
COMMENT ON VIEW dedup.letter_group IS 'Letters by consumer, fingerprint, kind and status: how many, when first and last, the letter that failed last.';
CREATE TABLE dedup.letter_history (
    id bigint NOT NULL,
    letter_id text NOT NULL,
    at timestamp with time zone NOT NULL,
    action text NOT NULL,
    by text,
    reason text,
    error_type text,
    error_message text,
    stack text,
    body bytea,
    key uuid,
    idempotence_key text,
    reserved bigint NOT NULL
);
COMMENT ON TABLE dedup.letter_history IS 'What happened to letters: attempts, edits (with what they replaced), discards. Appended only; a letter without rows has failed once.';
ALTER TABLE dedup.letter_history ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.letter_history_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.member (
    consumer_id integer NOT NULL,
    run_id text NOT NULL,
    epoch bigint NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    started text NOT NULL,
    beats bigint DEFAULT 0 NOT NULL,
    backend_pid integer NOT NULL,
    backend_start timestamp with time zone,
    joined_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE dedup.member IS 'The runner processes that have joined the epoch, their signs of life, and the database session of each one''s batches.';
CREATE VIEW dedup.open_letter AS
 SELECT dead_letter.id,
    dead_letter.consumer,
    dead_letter.source,
    dead_letter.topic,
    dead_letter.incarnation,
    dead_letter.partition,
    dead_letter.sequence_number,
    dead_letter.part,
    dead_letter.enqueued_time,
    dead_letter.idempotence_key,
    dead_letter.kind,
    dead_letter.reason,
    dead_letter.error_type,
    dead_letter.error_message,
    dead_letter.fingerprint,
    dead_letter.attempts,
    dead_letter.first_failed_at,
    dead_letter.last_failed_at,
    dead_letter.status,
    dead_letter.sequence_key,
    dead_letter.sequence,
    dead_letter.blocked_by,
    dead_letter.body_size,
    dead_letter.duplicates
   FROM dedup.dead_letter
  WHERE (dead_letter.status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text]));
COMMENT ON VIEW dedup.open_letter IS 'Letters that wait for somebody, without their bodies. Fast by position, by last_failed_at, by fingerprint and by id.';
CREATE UNLOGGED TABLE dedup.open_transaction (
    token uuid NOT NULL
);
COMMENT ON TABLE dedup.open_transaction IS 'Always empty. Each batch writes one row and deletes it, so that the trigger refuse_commit is asked at its COMMIT.';
CREATE TABLE dedup.outbox (
    number bigint NOT NULL,
    consumer_id integer NOT NULL,
    topic text NOT NULL,
    key bytea,
    id text NOT NULL,
    body bytea,
    header_names text[],
    header_values bytea[],
    lane smallint NOT NULL,
    state smallint DEFAULT 0 NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    flight bigint,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    changed_at timestamp with time zone,
    error_type text,
    error_message text,
    set_by text,
    set_reason text
);
ALTER TABLE ONLY dedup.outbox REPLICA IDENTITY FULL;
COMMENT ON TABLE dedup.outbox IS 'Messages to send. State 0 waiting, 1 sent, 2 dead, 3 behind a dead one of its key, 4 discarded, 5 handed to a Kafka transaction.';
COMMENT ON COLUMN dedup.outbox.id IS 'What the receiver knows the message by: minted once, the same however often it is sent.';
COMMENT ON COLUMN dedup.outbox.lane IS 'Bucket of the destination key: what a dispatcher locks, so that one key is never in two hands.';
COMMENT ON COLUMN dedup.outbox.flight IS 'The Kafka transaction that it was handed to, where messages are sent exactly once.';
COMMENT ON COLUMN dedup.outbox.set_by IS 'The person who let it be sent again or gave it up; set_reason says why.';
CREATE TABLE dedup.outbox_flight (
    consumer_id integer NOT NULL,
    flight bigint NOT NULL
);
COMMENT ON TABLE dedup.outbox_flight IS 'How many Kafka transactions of messages were begun.';
CREATE VIEW dedup.outbox_message AS
 SELECT outbox.number,
    outbox.consumer_id,
    outbox.topic,
    outbox.key,
    outbox.id,
    outbox.body,
    outbox.header_names,
    outbox.header_values,
    outbox.lane,
    outbox.state,
    outbox.attempts,
    outbox.flight,
    outbox.created_at,
    outbox.changed_at,
    outbox.error_type,
    outbox.error_message,
    outbox.set_by,
    outbox.set_reason,
    NULL::bigint AS page
   FROM dedup.outbox
UNION ALL
 SELECT (((1000 * p.page) + m.place) - 1) AS number,
    p.consumer_id,
    p.topic,
    m.key,
    m.id,
    m.body,
    p.header_names[(COALESCE(p.header_ends[((m.place)::integer - 1)], 0) + 1):p.header_ends[(m.place)::integer]] AS header_names,
    p.header_values[(COALESCE(p.header_ends[((m.place)::integer - 1)], 0) + 1):p.header_ends[(m.place)::integer]] AS header_values,
    p.lane,
    (
        CASE
            WHEN (p.sent_at IS NULL) THEN 0
            ELSE 1
        END)::smallint AS state,
    0 AS attempts,
    NULL::bigint AS flight,
    p.created_at,
    p.sent_at AS changed_at,
    NULL::text AS error_type,
    NULL::text AS error_message,
    NULL::text AS set_by,
    NULL::text AS set_reason,
    p.page
   FROM (dedup.outbox_page p
     CROSS JOIN LATERAL UNNEST(p.keys, p.ids, p.bodies) WITH ORDINALITY m(key, id, body, place));
COMMENT ON VIEW dedup.outbox_message IS 'All messages of the outbox, one a row.';
ALTER TABLE dedup.outbox ALTER COLUMN number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.outbox_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.partition_claim (
    consumer_id integer NOT NULL,
    topic_id integer NOT NULL,
    partition integer NOT NULL,
    number bigint NOT NULL,
    run_id text NOT NULL,
    claimed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE dedup.partition_claim IS 'The fence of a partition among runner processes: a batch locks its row and compares the number, each claim raises it.';
ALTER TABLE dedup.partition_owner ALTER COLUMN owner_number ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.partition_owner_owner_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.processor_checkpoint (
    namespace text NOT NULL,
    hub text NOT NULL,
    consumer_group text NOT NULL,
    partition_id text NOT NULL,
    sequence_number bigint NOT NULL,
    event_offset text,
    modified_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    set_by text,
    set_reason text
);
COMMENT ON TABLE dedup.processor_checkpoint IS 'Where event processors resume: after the event with this sequence number. Never goes back by itself. No relation to checkpoint, which is what a consumer has decided.';
COMMENT ON COLUMN dedup.processor_checkpoint.event_offset IS 'The broker''s own offset of that event: handed back as it is, never compared. Null where a person knew the sequence number only.';
COMMENT ON COLUMN dedup.processor_checkpoint.set_by IS 'The person who set it last, if one did; set_reason says why.';
CREATE TABLE dedup.progress (
    consumer_id integer,
    seq bigint DEFAULT 0 NOT NULL,
    attempt uuid,
    settings jsonb,
    query_id text,
    batch_id bigint,
    batch_ended boolean DEFAULT true NOT NULL,
    gap_accepted boolean DEFAULT false NOT NULL,
    spent jsonb DEFAULT '{}'::jsonb NOT NULL,
    written_by xid8,
    epoch bigint DEFAULT 0 NOT NULL,
    generation integer DEFAULT 0 NOT NULL,
    recorded bigint,
    reserved uuid,
    reserved_in integer,
    page bigint,
    CONSTRAINT progress_consumer CHECK ((consumer_id IS NOT NULL))
);
ALTER TABLE ONLY dedup.progress REPLICA IDENTITY FULL;
COMMENT ON TABLE dedup.progress IS 'What the last decision left: apart from consumer, because a batch updates it while others share-lock the consumer.';
COMMENT ON COLUMN dedup.progress.batch_ended IS 'False: of batch_id some chunks are decided, and not the last one.';
COMMENT ON COLUMN dedup.progress.spent IS 'By kind of dead letter, what is used of its budget. decided: events that came to where they may fail in this way, the clock; failures: values of that clock that failed, the last ones; lifted: up to this value a person has admitted all failures.';
COMMENT ON COLUMN dedup.progress.written_by IS 'The transaction that wrote this row. The row''s own xmin says the same, unless the row was loaded from a dump or another copy.';
COMMENT ON COLUMN dedup.progress.epoch IS 'The epoch of the last decision.';
COMMENT ON COLUMN dedup.progress.generation IS 'The generation of the last decision.';
COMMENT ON COLUMN dedup.progress.recorded IS 'The last decision with batch records.';
COMMENT ON COLUMN dedup.progress.reserved IS 'One of the keys that were reserved last, of an event that was processed: nothing but a purge takes it away.';
COMMENT ON COLUMN dedup.progress.reserved_in IS 'The table of reservations that has it.';
COMMENT ON COLUMN dedup.progress.page IS 'How far pages of messages were numbered.';
CREATE TABLE dedup.publish_destination (
    id integer NOT NULL,
    source text NOT NULL,
    topic text NOT NULL
);
COMMENT ON TABLE dedup.publish_destination IS 'The event hubs and topics that publishers send to. Message ids are known for each of them.';
ALTER TABLE dedup.publish_destination ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.publish_destination_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.published_id (
    destination_id integer NOT NULL,
    message_id text NOT NULL,
    payload_hash bigint NOT NULL,
    publisher_id integer NOT NULL,
    partition integer NOT NULL,
    sequence bigint NOT NULL,
    stored_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE dedup.published_id IS 'Ids that callers gave: a second event with one of them is not sent. Kept until they are purged.';
CREATE TABLE dedup.publisher (
    id integer NOT NULL,
    destination_id integer NOT NULL,
    name text NOT NULL,
    epoch bigint DEFAULT 0 NOT NULL,
    partitions integer NOT NULL,
    run_id text,
    holder_host text,
    holder_pid integer,
    holder_started text,
    taken_at timestamp with time zone,
    set_by text,
    set_reason text
);
COMMENT ON TABLE dedup.publisher IS 'One row per producer group and destination: the owner level that may store and confirm. Every writer locks its row first.';
COMMENT ON COLUMN dedup.publisher.partitions IS 'Over how many partitions keys are spread: as the topic had when the group began, until a person says another number.';
CREATE TABLE dedup.publisher_event (
    publisher_id integer NOT NULL,
    partition integer NOT NULL,
    sequence bigint NOT NULL,
    message_id text NOT NULL,
    event_key text,
    content_type text,
    properties text NOT NULL,
    body bytea NOT NULL,
    stored_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);
COMMENT ON TABLE dedup.publisher_event IS 'Events that are stored and not confirmed yet, as they are sent, however often that has to be.';
ALTER TABLE dedup.publisher ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.publisher_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE dedup.publisher_lane (
    publisher_id integer NOT NULL,
    partition integer NOT NULL,
    next_sequence bigint NOT NULL,
    confirmed bigint NOT NULL,
    CONSTRAINT publisher_lane_check CHECK ((confirmed < next_sequence))
);
COMMENT ON TABLE dedup.publisher_lane IS 'Sequence numbers of a producer group in one partition: the next to be given, and the last the broker has confirmed. Partition -1: the broker chooses.';
CREATE TABLE dedup.reservation (
    key uuid NOT NULL,
    payload_hash bigint NOT NULL
);
ALTER TABLE ONLY dedup.reservation REPLICA IDENTITY FULL;
COMMENT ON TABLE dedup.reservation IS 'Keys that were decided: hash of consumer, scope and key, and of the payload. Rows are in the children, each with a unique index of its own.';
CREATE TABLE dedup.reservation_000001 (
)
INHERITS (dedup.reservation);
CREATE TABLE dedup.reservation_floor (
    consumer_id integer NOT NULL,
    keyspace integer NOT NULL,
    topic_id integer NOT NULL,
    incarnation integer NOT NULL,
    partition integer NOT NULL,
    floor bigint NOT NULL
);
COMMENT ON TABLE dedup.reservation_floor IS 'Reservations of positions at or below may have been purged. Apart from checkpoint, whose rows a batch keeps locked while its handler runs. A reset and a new incarnation of the topic leave their old floors behind: they no longer count.';
CREATE TABLE dedup.reservation_generation (
    id integer NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    closed_at timestamp with time zone,
    purged_at timestamp with time zone,
    closing boolean DEFAULT false NOT NULL,
    phase integer DEFAULT 0 NOT NULL,
    dropped_at timestamp with time zone
);
COMMENT ON TABLE dedup.reservation_generation IS 'Number n is table reservation_00000n. The one that is neither closed nor closing takes new reservations. While another one is closing, a reservation is written to both: whoever began before that writes the closing one alone.';
COMMENT ON COLUMN dedup.reservation_generation.purged_at IS 'From then on nobody asks this table: the floors say what is forgotten.';
COMMENT ON COLUMN dedup.reservation_generation.closing IS 'The next table is there. This one is closed when nobody is left who writes it alone.';
COMMENT ON COLUMN dedup.reservation_generation.phase IS 'The phase that began when this table became closing, or was purged.';
COMMENT ON COLUMN dedup.reservation_generation.dropped_at IS 'The table itself is dropped later, when nobody is left who asks it.';
CREATE TABLE dedup.reservation_phase (
    one boolean DEFAULT true NOT NULL,
    number integer NOT NULL,
    CONSTRAINT reservation_phase_one_check CHECK (one)
);
COMMENT ON TABLE dedup.reservation_phase IS 'One row: how often the tables of reservations have changed.';
CREATE TABLE dedup.topic (
    id integer NOT NULL,
    consumer_id integer NOT NULL,
    source text NOT NULL,
    topic text NOT NULL,
    incarnation integer DEFAULT 0 NOT NULL,
    incarnation_id text
);
COMMENT ON TABLE dedup.topic IS 'The topics of a consumer, and in which life each of them is. Empty names: key-only mode.';
COMMENT ON COLUMN dedup.topic.incarnation_id IS 'The broker''s own id of that incarnation (Kafka: topic id; Event Hubs: when it was created). Null: not known yet, or nothing can tell.';
CREATE VIEW dedup.restored AS
 SELECT p.consumer_id,
    'the row of `progress` was loaded from a copy'::text AS what
   FROM dedup.progress p
  WHERE ((p.written_by)::xid <> p.xmin)
UNION ALL
 SELECT c.id AS consumer_id,
    format('the row of `consumer` is of epoch %s and generation %s, the last decision of epoch %s and generation %s'::text, c.epoch, c.generation, p.epoch, p.generation) AS what
   FROM (dedup.consumer c
     JOIN dedup.progress p ON ((p.consumer_id = c.id)))
  WHERE ((c.epoch < p.epoch) OR (c.generation < p.generation))
UNION ALL
 SELECT t.consumer_id,
    format('`topic` has incarnation %s of %s, a batch record is of incarnation %s'::text, t.incarnation, t.topic, b.incarnation) AS what
   FROM (dedup.topic t
     CROSS JOIN LATERAL ( SELECT b_1.incarnation
           FROM dedup.batch b_1
          WHERE ((b_1.consumer_id = t.consumer_id) AND (b_1.topic_id = t.id) AND (b_1.incarnation > t.incarnation))
         LIMIT 1) b)
UNION ALL
 SELECT p.consumer_id,
    format('`batch` lacks the record of decision %s'::text, p.recorded) AS what
   FROM dedup.progress p
  WHERE ((p.recorded IS NOT NULL) AND (NOT (EXISTS ( SELECT
           FROM dedup.batch b
          WHERE ((b.consumer_id = p.consumer_id) AND (b.seq = p.recorded))))))
UNION ALL
 SELECT p.consumer_id,
    '`reservation` lacks a key that was reserved'::text AS what
   FROM dedup.progress p
  WHERE
        CASE
            WHEN (p.reserved IS NULL) THEN false
            WHEN (EXISTS ( SELECT
               FROM dedup.reservation_generation g
              WHERE ((g.id = p.reserved_in) AND (g.purged_at IS NOT NULL)))) THEN false
            ELSE (NOT dedup.is_reserved(p.reserved_in, p.reserved))
        END
UNION ALL
 SELECT p.consumer_id,
    format('`reservation_generation` lacks table %s'::text, p.reserved_in) AS what
   FROM dedup.progress p
  WHERE (p.reserved_in > ( SELECT max(g.id) AS max
           FROM dedup.reservation_generation g))
UNION ALL
 SELECT p.consumer_id,
    format('`outbox_page` is at page %s, page %s was numbered'::text, s.page, p.page) AS what
   FROM (dedup.progress p
     JOIN dedup.last_page s ON ((s.page < p.page)));
COMMENT ON VIEW dedup.restored IS 'What shows that tables of a consumer were restored to an older time. Empty where nothing does.';
CREATE TABLE dedup.schema_version (
    version integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    compatible_with integer NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    applied_by text DEFAULT CURRENT_USER NOT NULL
);
CREATE TABLE dedup.sink (
    consumer_id integer NOT NULL,
    name text NOT NULL,
    generation integer NOT NULL,
    relation oid NOT NULL
);
COMMENT ON TABLE dedup.sink IS 'The tables that a consumer has written to in a generation: one that was dropped and loaded again has another oid.';
ALTER TABLE dedup.topic ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME dedup.topic_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.latest (
    id text NOT NULL,
    amount bigint
);
CREATE TABLE public.orders (
    id text NOT NULL,
    amount bigint
);
INSERT INTO dedup.batch OVERRIDING SYSTEM VALUE VALUES (1, 0, 1, 0, 0, 'q1', 0, 0, 1, 1, 'f20f8f81-61ad-4515-9e6b-dd4bd0907bac', 0, 8, '{[0,9)}', '{[5,6)}', '{}', '{}', 9, 0, 5, 1, 0, 3, 6, '2026-11-26 01:43:18.488332+00', 1);
INSERT INTO dedup.batch OVERRIDING SYSTEM VALUE VALUES (1, 0, 1, 0, 0, 'q2', 0, 0, 2, 2, '6294b7c5-dced-4dd4-94a0-9cc1408b8a77', 9, 9, '{[9,10)}', '{}', '{}', '{}', 4, 3, 0, 0, 0, 1, 1, '2026-11-26 01:43:18.585569+00', 2);
INSERT INTO dedup.batch OVERRIDING SYSTEM VALUE VALUES (1, 0, 1, 0, 1, 'q2', 0, 0, 2, 2, '6294b7c5-dced-4dd4-94a0-9cc1408b8a77', 0, 3, '{[0,4)}', '{}', '{}', '{}', 4, 0, 4, 0, 0, 0, 4, '2026-11-26 01:43:18.585786+00', 3);
INSERT INTO dedup.blocked_sequence VALUES ('3edda3dc-4104-ada9-4a1d-2a8abf33869d', 'shop', 'f047b34d017e83aec272247dfb725ea0', 'REJECTED');
INSERT INTO dedup.blocked_sequence VALUES ('923f9ce5-6be2-4464-8e08-345f72c2cfa0', 'shop', 'b034a750ad155013d5ffa9676abd78d2', 'KEY_CONFLICT');
INSERT INTO dedup.checkpoint VALUES (1, 1, 0, 9, '@9', NULL, 'q2', NULL, false);
INSERT INTO dedup.checkpoint VALUES (1, 1, 1, 3, '@3', NULL, 'q2', NULL, false);
INSERT INTO dedup.consumer OVERRIDING SYSTEM VALUE VALUES (1, 'shop', 0, 0, 2, 'host', 24406, 'e2397b61-3e17-42b0-949d-b4facdb3ff47/pid:[4026531836]/526407', '7f701c64eed245bd83361e3138f2c854', '2026-11-26 01:43:18.512252+00', false);
INSERT INTO dedup.crash_marker VALUES (1, NULL, '2026-11-26 01:43:18.551738+00', '');
INSERT INTO dedup.dead_letter VALUES ('b034a750ad155013d5ffa9676abd78d2', 'shop', 0, 'broker', 'orders', 0, 0, 8, 0, '@8', NULL, NULL, NULL, false, 'o6', -342871508836800004, '\x7b226964223a20226f36222c2022616d6f756e74223a20387d', 25, NULL, '{}', '{}', 'KEY_CONFLICT', 'the idempotence key was decided before with another payload', NULL, NULL, NULL, 'bafa219d72487b3a', 1, '2026-11-26 01:43:18.471756+00', '2026-11-26 01:43:18.471756+00', 'BLOCKED', 'o6', 'cf6428eeecc44e859b819ef0382c7266', 0, '923f9ce5-6be2-4464-8e08-345f72c2cfa0', NULL);
INSERT INTO dedup.dead_letter VALUES ('cf6428eeecc44e859b819ef0382c7266', 'shop', 0, 'broker', 'orders', 0, 0, 6, 0, '@6', NULL, NULL, 'ff29f4dc-2e53-f852-c7a0-ffa9f5baa385', true, 'o6', -375649414023513670, '\x7b226964223a20226f36222c2022616d6f756e74223a202d317d', 26, NULL, '{}', '{}', 'REJECTED', 'negative amount', NULL, NULL, NULL, '96e88e2be7aea65a', 2, '2026-11-26 01:43:18.471756+00', '2026-11-26 01:43:18.620592+00', 'OPEN', 'o6', NULL, 0, '923f9ce5-6be2-4464-8e08-345f72c2cfa0', NULL);
INSERT INTO dedup.dead_letter VALUES ('f047b34d017e83aec272247dfb725ea0', 'shop', 0, 'broker', 'orders', 0, 0, 9, 0, '@9', NULL, NULL, '5d39535b-e02b-70ca-8fd9-e41af92f9fd1', true, 'o9', -7061129477936675809, '\x7b226964223a20226f39222c2022616d6f756e74223a202d397d', 26, NULL, '{}', '{}', 'REJECTED', 'negative amount', NULL, NULL, NULL, '96e88e2be7aea65a', 2, '2026-11-26 01:43:18.572831+00', '2026-11-26 01:43:18.620592+00', 'OPEN', 'o9', NULL, 0, '3edda3dc-4104-ada9-4a1d-2a8abf33869d', NULL);
INSERT INTO dedup.dead_letter VALUES ('67ba162b510ee74d3031083044405d14', 'shop', 0, 'broker', 'orders', 0, 0, 7, 0, '@7', NULL, NULL, NULL, false, NULL, 8929066415373255649, '\x7b', 1, NULL, '{}', '{}', 'UNDECODABLE', 'the body is not JSON: Expecting property name enclosed in double quotes, at character 1 of 1', NULL, NULL, NULL, '4f0fe91c49a361d5', 1, '2026-11-26 01:43:18.471756+00', '2026-11-26 01:43:18.471756+00', 'DISCARDED', NULL, NULL, 0, NULL, NULL);
INSERT INTO dedup.heartbeat VALUES (1, 2, 2, '2026-11-26 01:43:18.513474+00', 24464, '2026-11-26 01:43:18.495798+00');
INSERT INTO dedup.letter_count VALUES ('shop', '96e88e2be7aea65a', 'REJECTED', 'OPEN', '2026-11-26', 1);
INSERT INTO dedup.letter_count VALUES ('shop', 'bafa219d72487b3a', 'KEY_CONFLICT', 'BLOCKED', '2026-11-26', 1);
INSERT INTO dedup.letter_count VALUES ('shop', '4f0fe91c49a361d5', 'UNDECODABLE', 'OPEN', '2026-11-26', 1);
INSERT INTO dedup.letter_count VALUES ('shop', '96e88e2be7aea65a', 'REJECTED', 'OPEN', '2026-11-26', 1);
INSERT INTO dedup.letter_count VALUES ('shop', '4f0fe91c49a361d5', 'UNDECODABLE', 'DISCARDED', '2026-11-26', 1);
INSERT INTO dedup.letter_count VALUES ('shop', '4f0fe91c49a361d5', 'UNDECODABLE', 'OPEN', '2026-11-26', -1);
INSERT INTO dedup.letter_history OVERRIDING SYSTEM VALUE VALUES (1, 'cf6428eeecc44e859b819ef0382c7266', '2026-11-26 01:43:18.471756+00', 'FAILED', NULL, NULL, NULL, 'negative amount', NULL, NULL, NULL, NULL, 0);
INSERT INTO dedup.letter_history OVERRIDING SYSTEM VALUE VALUES (2, 'cf6428eeecc44e859b819ef0382c7266', '2026-11-26 01:43:18.620592+00', 'FAILED', 'root', NULL, NULL, 'negative amount', NULL, NULL, NULL, NULL, 0);
INSERT INTO dedup.letter_history OVERRIDING SYSTEM VALUE VALUES (3, 'f047b34d017e83aec272247dfb725ea0', '2026-11-26 01:43:18.572831+00', 'FAILED', NULL, NULL, NULL, 'negative amount', NULL, NULL, NULL, NULL, 0);
INSERT INTO dedup.letter_history OVERRIDING SYSTEM VALUE VALUES (4, 'f047b34d017e83aec272247dfb725ea0', '2026-11-26 01:43:18.620592+00', 'FAILED', 'root', NULL, NULL, 'negative amount', NULL, NULL, NULL, NULL, 0);
INSERT INTO dedup.letter_history OVERRIDING SYSTEM VALUE VALUES (5, '67ba162b510ee74d3031083044405d14', '2026-11-26 01:43:18.636417+00', 'DISCARDED', 'ann', 'a test', NULL, NULL, NULL, NULL, NULL, NULL, 0);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (1, 1, 'shipments', 8, 1, 4, '{"\\x70302d30"}', '{b127ff154a78b7d773fa88cf408fcbb7}', '{"\\x70302d30"}', NULL, NULL, NULL, '2026-11-26 01:43:18.425803+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (2, 1, 'shipments', 17, 1, 4, '{"\\x70302d34"}', '{9db1297e050937a0e42f65c41365fa44}', '{"\\x70302d34"}', NULL, NULL, NULL, '2026-11-26 01:43:18.425803+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (3, 1, 'shipments', 30, 1, 4, '{"\\x70302d31"}', '{1dd17edce5e3694b550ff062d9f60b88}', '{"\\x70302d31"}', NULL, NULL, NULL, '2026-11-26 01:43:18.425803+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (4, 1, 'shipments', 36, 1, 4, '{"\\x70302d32"}', '{9c9c50876323adceeae0c3e4689babce}', '{"\\x70302d32"}', NULL, NULL, NULL, '2026-11-26 01:43:18.425803+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (5, 1, 'shipments', 50, 1, 4, '{"\\x70302d33"}', '{2afe7881b9351fc6f7905a6758a550c2}', '{"\\x70302d33"}', NULL, NULL, NULL, '2026-11-26 01:43:18.425803+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (6, 1, 'shipments', 5, 1, 4, '{"\\x70312d33"}', '{512d4d3bd7c0b5202ce9e68179bda22f}', '{"\\x70312d33"}', NULL, NULL, NULL, '2026-11-26 01:43:18.521881+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (7, 1, 'shipments', 19, 1, 4, '{"\\x70312d32"}', '{5716fbf7a47e76460de31bb516a410ab}', '{"\\x70312d32"}', NULL, NULL, NULL, '2026-11-26 01:43:18.521881+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (8, 1, 'shipments', 41, 1, 4, '{"\\x70312d31"}', '{7b28969eabb4cf1267284a70dd34de79}', '{"\\x70312d31"}', NULL, NULL, NULL, '2026-11-26 01:43:18.521881+00', NULL);
INSERT INTO dedup.outbox_page OVERRIDING SYSTEM VALUE VALUES (9, 1, 'shipments', 63, 1, 4, '{"\\x70312d30"}', '{50dd2a4d5500f889cd88141b8eb1949c}', '{"\\x70312d30"}', NULL, NULL, NULL, '2026-11-26 01:43:18.521881+00', NULL);
INSERT INTO dedup.progress VALUES (1, 2, '6294b7c5-dced-4dd4-94a0-9cc1408b8a77', '{"part": "", "source": "", "null_key": "dead_letter", "key_scope": "topic", "positions": "auto", "key_columns": "[\"data.id\"]", "key_payload": "[]", "key_encoding": "1", "sequence_key": "[\"data.id\"]"}', 'q2', 0, true, false, '{"NO_KEY": {"lifted": 0, "decided": 13, "failures": []}, "REJECTED": {"lifted": 0, "decided": 11, "failures": []}, "UNDECODABLE": {"lifted": 0, "decided": 14, "failures": [8]}, "KEY_CONFLICT": {"lifted": 0, "decided": 13, "failures": [8]}, "HANDLER_ERROR": {"lifted": 0, "decided": 11, "failures": []}}', '745', 2, 0, 2, '042dbe7c-5738-63a6-5004-d80660bb32d5', 1, 9);
INSERT INTO dedup.reservation_000001 VALUES ('02c0a293-80b9-4eae-f7cd-1376de8b14d4', 9104807617809215257);
INSERT INTO dedup.reservation_000001 VALUES ('5366afa9-2c58-31b0-9955-bc6fdc90b7e5', -3570515298501027116);
INSERT INTO dedup.reservation_000001 VALUES ('9131c550-6a34-6b3c-35d2-79a2dac2b423', 579894589708390377);
INSERT INTO dedup.reservation_000001 VALUES ('f1976708-7f88-c553-df2d-b40d87d0befb', -8026574087677092487);
INSERT INTO dedup.reservation_000001 VALUES ('f4b5d428-4044-b03d-95f3-706c15525736', 7151742133800385793);
INSERT INTO dedup.reservation_000001 VALUES ('ff29f4dc-2e53-f852-c7a0-ffa9f5baa385', -375649414023513670);
INSERT INTO dedup.reservation_000001 VALUES ('042dbe7c-5738-63a6-5004-d80660bb32d5', -1169590809738120724);
INSERT INTO dedup.reservation_000001 VALUES ('1795e384-6551-44ac-33ea-abcf30b594ec', 437788767332564872);
INSERT INTO dedup.reservation_000001 VALUES ('5d39535b-e02b-70ca-8fd9-e41af92f9fd1', -7061129477936675809);
INSERT INTO dedup.reservation_000001 VALUES ('752c6f9b-0ac7-bc45-cde9-78e083f5f886', -8808074352698615392);
INSERT INTO dedup.reservation_000001 VALUES ('eb8dc0a0-a267-6f6e-e6aa-5bab3104ce6d', -5188201723765583742);
INSERT INTO dedup.reservation_generation VALUES (1, '2026-11-26 01:43:18.333315+00', NULL, NULL, false, 0, NULL);
INSERT INTO dedup.reservation_phase VALUES (true, 1);
INSERT INTO dedup.schema_version VALUES (1, 'state', '0db351d182952eded73643055c71d48060a82ca4ddb43fae4e675b91da4fccc9', 1, '2026-11-26 01:43:18.32494+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (2, 'reservations', '363601ead3474e31bb2f60b0565b3fa81619a34e0ecaf678c627c095aa2e36bd', 2, '2026-11-26 01:43:18.338482+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (3, 'dead_letters', '4ccb9e153e90f825aeba375a9b4758350ba41a19e79c7e7e23eafa958b5265ba', 3, '2026-11-26 01:43:18.364211+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (4, 'event_processors', 'c6c5f6196fd965aa185dbec0d27dba4080ab843424e2038131830d676a9bcef3', 4, '2026-11-26 01:43:18.370982+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (5, 'outbox', '4a4b7b13587adeb31fc3cc43c9482b41ab702254bf166e45a0fd25dbbf283f8e', 5, '2026-11-26 01:43:18.381716+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (6, 'publishers', '6ae5ad2154fcc3ee0a0b036e944e73eb1484338c36d32268c6c11165a4441d76', 6, '2026-11-26 01:43:18.394521+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (7, 'transaction_guard', '48fb111d0ed5eea1374ed02488a5a68219fba78c24c10da201ab01ad58063e16', 7, '2026-11-26 01:43:18.398202+00', 'postgres');
INSERT INTO dedup.schema_version VALUES (8, 'restored', 'a60b3a80fec710f063ee6e0e19d988e95f5e722f499dc1eb2f0e51cd6e396880', 8, '2026-11-26 01:43:18.402554+00', 'postgres');
INSERT INTO dedup.sink VALUES (1, 'public.orders', 0, 16384);
INSERT INTO dedup.sink VALUES (1, 'public.latest', 0, 16389);
INSERT INTO dedup.topic OVERRIDING SYSTEM VALUE VALUES (1, 1, 'broker', 'orders', 0, NULL);
INSERT INTO public.latest VALUES ('p0-0', 0);
INSERT INTO public.latest VALUES ('p0-1', 1);
INSERT INTO public.latest VALUES ('p0-2', 2);
INSERT INTO public.latest VALUES ('p0-3', 3);
INSERT INTO public.latest VALUES ('p0-4', 4);
INSERT INTO public.latest VALUES ('p1-0', 0);
INSERT INTO public.latest VALUES ('p1-1', 1);
INSERT INTO public.latest VALUES ('p1-2', 2);
INSERT INTO public.latest VALUES ('p1-3', 3);
INSERT INTO public.orders VALUES ('p0-0', 0);
INSERT INTO public.orders VALUES ('p0-1', 1);
INSERT INTO public.orders VALUES ('p0-2', 2);
INSERT INTO public.orders VALUES ('p0-3', 3);
INSERT INTO public.orders VALUES ('p0-4', 4);
INSERT INTO public.orders VALUES ('p1-0', 0);
INSERT INTO public.orders VALUES ('p1-1', 1);
INSERT INTO public.orders VALUES ('p1-2', 2);
INSERT INTO public.orders VALUES ('p1-3', 3);
SELECT pg_catalog.setval('dedup.batch_id_seq', 3, true);
SELECT pg_catalog.setval('dedup.consumer_action_id_seq', 1, false);
SELECT pg_catalog.setval('dedup.consumer_id_seq', 2, true);
SELECT pg_catalog.setval('dedup.letter_history_id_seq', 5, true);
SELECT pg_catalog.setval('dedup.outbox_number_seq', 1, false);
SELECT pg_catalog.setval('dedup.outbox_page_page_seq', 9, true);
SELECT pg_catalog.setval('dedup.partition_owner_owner_number_seq', 1, false);
SELECT pg_catalog.setval('dedup.publish_destination_id_seq', 1, false);
SELECT pg_catalog.setval('dedup.publisher_id_seq', 1, false);
SELECT pg_catalog.setval('dedup.topic_id_seq', 1, true);
ALTER TABLE ONLY dedup.batch
    ADD CONSTRAINT batch_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.blocked_sequence
    ADD CONSTRAINT blocked_sequence_pkey PRIMARY KEY (sequence);
ALTER TABLE ONLY dedup.checkpoint
    ADD CONSTRAINT checkpoint_pkey PRIMARY KEY (consumer_id, topic_id, partition);
ALTER TABLE ONLY dedup.consumer_action
    ADD CONSTRAINT consumer_action_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.consumer
    ADD CONSTRAINT consumer_name_key UNIQUE (name);
ALTER TABLE ONLY dedup.consumer
    ADD CONSTRAINT consumer_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.crash_marker
    ADD CONSTRAINT crash_marker_pkey PRIMARY KEY (consumer_id, scope);
ALTER TABLE ONLY dedup.dead_letter
    ADD CONSTRAINT dead_letter_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.heartbeat
    ADD CONSTRAINT heartbeat_pkey PRIMARY KEY (consumer_id);
ALTER TABLE ONLY dedup.letter_history
    ADD CONSTRAINT letter_history_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.member
    ADD CONSTRAINT member_pkey PRIMARY KEY (consumer_id, run_id);
ALTER TABLE ONLY dedup.outbox_flight
    ADD CONSTRAINT outbox_flight_pkey PRIMARY KEY (consumer_id);
ALTER TABLE ONLY dedup.outbox_page
    ADD CONSTRAINT outbox_page_pkey PRIMARY KEY (page);
ALTER TABLE ONLY dedup.partition_claim
    ADD CONSTRAINT partition_claim_pkey PRIMARY KEY (consumer_id, topic_id, partition);
ALTER TABLE ONLY dedup.partition_owner
    ADD CONSTRAINT partition_owner_owner_number_key UNIQUE (owner_number);
ALTER TABLE ONLY dedup.partition_owner
    ADD CONSTRAINT partition_owner_pkey PRIMARY KEY (namespace, hub, consumer_group, partition_id);
ALTER TABLE ONLY dedup.processor_checkpoint
    ADD CONSTRAINT processor_checkpoint_pkey PRIMARY KEY (namespace, hub, consumer_group, partition_id);
ALTER TABLE ONLY dedup.progress
    ADD CONSTRAINT progress_consumer_id UNIQUE (consumer_id);
ALTER TABLE ONLY dedup.publish_destination
    ADD CONSTRAINT publish_destination_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.publish_destination
    ADD CONSTRAINT publish_destination_source_topic_key UNIQUE (source, topic);
ALTER TABLE ONLY dedup.published_id
    ADD CONSTRAINT published_id_pkey PRIMARY KEY (destination_id, message_id);
ALTER TABLE ONLY dedup.publisher
    ADD CONSTRAINT publisher_destination_id_name_key UNIQUE (destination_id, name);
ALTER TABLE ONLY dedup.publisher_event
    ADD CONSTRAINT publisher_event_pkey PRIMARY KEY (publisher_id, partition, sequence);
ALTER TABLE ONLY dedup.publisher_lane
    ADD CONSTRAINT publisher_lane_pkey PRIMARY KEY (publisher_id, partition);
ALTER TABLE ONLY dedup.publisher
    ADD CONSTRAINT publisher_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.reservation_000001
    ADD CONSTRAINT reservation_000001_key_key UNIQUE (key);
ALTER TABLE ONLY dedup.reservation_000001 REPLICA IDENTITY USING INDEX reservation_000001_key_key;
ALTER TABLE ONLY dedup.reservation_floor
    ADD CONSTRAINT reservation_floor_pkey PRIMARY KEY (consumer_id, keyspace, topic_id, incarnation, partition);
ALTER TABLE ONLY dedup.reservation_generation
    ADD CONSTRAINT reservation_generation_pkey PRIMARY KEY (id);
ALTER TABLE ONLY dedup.reservation_phase
    ADD CONSTRAINT reservation_phase_pkey PRIMARY KEY (one);
ALTER TABLE ONLY dedup.schema_version
    ADD CONSTRAINT schema_version_pkey PRIMARY KEY (version);
ALTER TABLE ONLY dedup.sink
    ADD CONSTRAINT sink_pkey PRIMARY KEY (consumer_id, name);
ALTER TABLE ONLY dedup.topic
    ADD CONSTRAINT topic_consumer_id_source_topic_key UNIQUE (consumer_id, source, topic);
ALTER TABLE ONLY dedup.topic
    ADD CONSTRAINT topic_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.latest
    ADD CONSTRAINT latest_pkey PRIMARY KEY (id);
CREATE INDEX batch_seen ON dedup.batch USING btree (consumer_id, topic_id, incarnation, partition, last_seen);
CREATE INDEX batch_seq ON dedup.batch USING btree (consumer_id, seq);
CREATE INDEX dead_letter_age ON dedup.dead_letter USING btree (last_failed_at) WHERE (status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text]));
CREATE INDEX dead_letter_done ON dedup.dead_letter USING btree (consumer, source, topic, incarnation, partition, sequence_number, part) WHERE (status <> ALL (ARRAY['OPEN'::text, 'BLOCKED'::text]));
CREATE INDEX dead_letter_fingerprint ON dedup.dead_letter USING btree (fingerprint, consumer, source, topic, incarnation, partition, sequence_number, part) WHERE (status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text]));
CREATE INDEX dead_letter_first ON dedup.dead_letter USING btree (fingerprint, kind, consumer, status, first_failed_at) WHERE (first_failed_at <> last_failed_at);
CREATE UNIQUE INDEX dead_letter_key ON dedup.dead_letter USING btree (key) WHERE (holds_key AND (status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text, 'DISCARDED'::text])));
CREATE INDEX dead_letter_last ON dedup.dead_letter USING btree (fingerprint, kind, consumer, status, last_failed_at);
CREATE INDEX dead_letter_name ON dedup.dead_letter USING btree ("left"(idempotence_key, 100));
CREATE INDEX dead_letter_sequence ON dedup.dead_letter USING btree (sequence, incarnation, sequence_number, part) WHERE ((sequence IS NOT NULL) AND (status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text])));
CREATE INDEX dead_letter_sequence_name ON dedup.dead_letter USING btree ("left"(sequence_key, 100)) WHERE (sequence_key IS NOT NULL);
CREATE INDEX dead_letter_waiting ON dedup.dead_letter USING btree (consumer, source, topic, incarnation, partition, sequence_number, part) WHERE (status = ANY (ARRAY['OPEN'::text, 'BLOCKED'::text]));
CREATE INDEX letter_count_group ON dedup.letter_count USING btree (fingerprint, kind, consumer, status, failed_on);
CREATE INDEX letter_duplicate_letter ON dedup.letter_duplicate USING btree (letter_id);
CREATE INDEX letter_history_letter ON dedup.letter_history USING btree (letter_id, at);
CREATE INDEX letter_history_reserved ON dedup.letter_history USING btree (reserved) WHERE (reserved <> 0);
CREATE INDEX outbox_number ON dedup.outbox USING brin (number) WITH (pages_per_range='32', autosummarize='on');
CREATE INDEX outbox_page_waiting ON dedup.outbox_page USING btree (consumer_id, lane, page) WHERE (sent_at IS NULL);
CREATE INDEX outbox_stopped ON dedup.outbox USING btree (consumer_id, lane, number) WHERE (state = ANY (ARRAY[2, 3, 5]));
CREATE INDEX outbox_waiting ON dedup.outbox USING btree (consumer_id, lane, number) WHERE (state = 0);
CREATE INDEX published_id_stored_at ON dedup.published_id USING brin (stored_at);
CREATE UNIQUE INDEX reservation_generation_current ON dedup.reservation_generation USING btree (closing) WHERE (closed_at IS NULL);
CREATE TRIGGER count_deleted AFTER DELETE ON dedup.dead_letter REFERENCING OLD TABLE AS old_letters FOR EACH STATEMENT EXECUTE FUNCTION dedup.count_letters();
CREATE TRIGGER count_inserted AFTER INSERT ON dedup.dead_letter REFERENCING NEW TABLE AS new_letters FOR EACH STATEMENT EXECUTE FUNCTION dedup.count_letters();
CREATE TRIGGER count_truncated AFTER TRUNCATE ON dedup.dead_letter FOR EACH STATEMENT EXECUTE FUNCTION dedup.count_letters();
CREATE TRIGGER count_updated AFTER UPDATE ON dedup.dead_letter REFERENCING OLD TABLE AS old_letters NEW TABLE AS new_letters FOR EACH STATEMENT EXECUTE FUNCTION dedup.count_letters();
CREATE CONSTRAINT TRIGGER refuse_commit AFTER INSERT ON dedup.open_transaction DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION dedup.refuse_commit();
ALTER TABLE dedup.open_transaction ENABLE ALWAYS TRIGGER refuse_commit;
ALTER TABLE ONLY dedup.batch
    ADD CONSTRAINT batch_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.batch
    ADD CONSTRAINT batch_topic_id_fkey FOREIGN KEY (topic_id) REFERENCES dedup.topic(id);
ALTER TABLE ONLY dedup.checkpoint
    ADD CONSTRAINT checkpoint_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.checkpoint
    ADD CONSTRAINT checkpoint_topic_id_fkey FOREIGN KEY (topic_id) REFERENCES dedup.topic(id);
ALTER TABLE ONLY dedup.consumer_action
    ADD CONSTRAINT consumer_action_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.crash_marker
    ADD CONSTRAINT crash_marker_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.heartbeat
    ADD CONSTRAINT heartbeat_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.member
    ADD CONSTRAINT member_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.outbox_flight
    ADD CONSTRAINT outbox_flight_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.partition_claim
    ADD CONSTRAINT partition_claim_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.partition_claim
    ADD CONSTRAINT partition_claim_topic_id_fkey FOREIGN KEY (topic_id) REFERENCES dedup.topic(id);
ALTER TABLE ONLY dedup.progress
    ADD CONSTRAINT progress_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.published_id
    ADD CONSTRAINT published_id_destination_id_fkey FOREIGN KEY (destination_id) REFERENCES dedup.publish_destination(id);
ALTER TABLE ONLY dedup.published_id
    ADD CONSTRAINT published_id_publisher_id_fkey FOREIGN KEY (publisher_id) REFERENCES dedup.publisher(id);
ALTER TABLE ONLY dedup.publisher
    ADD CONSTRAINT publisher_destination_id_fkey FOREIGN KEY (destination_id) REFERENCES dedup.publish_destination(id);
ALTER TABLE ONLY dedup.publisher_event
    ADD CONSTRAINT publisher_event_publisher_id_fkey FOREIGN KEY (publisher_id) REFERENCES dedup.publisher(id);
ALTER TABLE ONLY dedup.publisher_lane
    ADD CONSTRAINT publisher_lane_publisher_id_fkey FOREIGN KEY (publisher_id) REFERENCES dedup.publisher(id);
ALTER TABLE ONLY dedup.reservation_floor
    ADD CONSTRAINT reservation_floor_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.reservation_floor
    ADD CONSTRAINT reservation_floor_topic_id_fkey FOREIGN KEY (topic_id) REFERENCES dedup.topic(id);
ALTER TABLE ONLY dedup.sink
    ADD CONSTRAINT sink_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
ALTER TABLE ONLY dedup.topic
    ADD CONSTRAINT topic_consumer_id_fkey FOREIGN KEY (consumer_id) REFERENCES dedup.consumer(id);
