-- A partition that had nothing for an hour is not taken for read to its end where the consumer may not have asked it since it went on.
-- Budgets know events that ran out of time. Forward only.

create or replace function {schema}.purge_bounds(before timestamptz)
    returns table (consumer text, read_to timestamptz, bound timestamptz)
    language sql stable set search_path = {schema}, pg_temp set jit = off -- to compile it takes longer than to run it
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
    select o.id, o.name, coalesce(s.batch_ended, true) and not o.joint as asked_all, s.batch_ended, s.query_id, s.batch_id, coalesce(
        (select max(d.at) from decided d where d.consumer_id = o.id),
        (select b.committed_at from batch b where b.consumer_id = o.id order by b.seq desc limit 1)
    ) as at
    from consumer o left join progress s on s.consumer_id = o.id
), earlier as (
    -- In the middle of a batch of Spark, and among processes of a runner: the newest decision of another batch more than an hour ago. A
    -- partition without one since then was read to its end by then.
    select l.*, case when not l.asked_all then coalesce((
        select b.committed_at from batch b
        where b.consumer_id = l.id and b.committed_at < l.at - interval '1 hour'
            and (l.batch_ended or (b.query_id, b.batch_id) is distinct from (l.query_id, l.batch_id))
        order by b.seq desc limit 1
    ), '-infinity') end as before
    from last l
), reached as (
    select e.name, least(e.at, (
        select min(case when e.asked_all or d.at > e.before then d.enqueued_time else e.before end)
        from decided d where d.consumer_id = e.id and (not e.asked_all or d.at >= e.at - interval '1 hour')
    )) as at
    from earlier e where e.at is not null
)
select name, at, least(before, at - greatest(clock_timestamp() - before, interval '0'))
from reached
$body$;
comment on function {schema}.purge_bounds(timestamptz) is
    'For each consumer: up to which time of the log it has decided, and what may be purged when everything before that time is asked for: the '
    'retention is counted back from where the consumer is. A partition without an event in the last hour of its consumer counts as read to its '
    'end; in the middle of a batch, and of a runner, only up to the last decision before that hour, because it may not have been asked since.';

comment on column {schema}.progress.spent is
    'By kind of dead letter, what is used of its budget. decided: events that came to where they may fail in this way, the clock; '
    'failures: values of that clock that failed, the last ones; lifted: up to this value a person has admitted all failures; '
    'out_of_time: events that ran out of time since one passed.';
