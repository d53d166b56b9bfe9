-- Retention is counted in the time of the log: how far each consumer has read it bounds a purge.
-- Forward only.

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

alter function {schema}.purge_reservations(timestamptz) rename to give_up_reservations;

create function {schema}.purge_reservations(before timestamptz, although_behind text[] default '{}') returns int
    language sql volatile security definer set search_path = {schema}, pg_temp
as $body$
select give_up_reservations(least(before, (select min(b.bound) from purge_bounds(before) b where b.consumer <> all (although_behind))))
$body$;
comment on function {schema}.purge_reservations(timestamptz, text[]) is
    'Give the tables up that were closed before that time, or before the earliest of purge_bounds: from the next transaction on nobody asks them. '
    'Consumers that are named wait for nothing. Keys held by letters stay held. Takes no lock that a batch needs. merge_batches and '
    'drop_purged_reservations do the rest. Returns how many.';
comment on function {schema}.give_up_reservations(timestamptz) is 'For purge_reservations alone: gives up what was closed before that time.';

revoke all on function {schema}.purge_bounds(timestamptz) from public;
revoke all on function {schema}.give_up_reservations(timestamptz) from public;
revoke all on function {schema}.purge_reservations(timestamptz, text[]) from public;
