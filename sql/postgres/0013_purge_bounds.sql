-- While a batch is decided in part, no partition counts as read to its end. Budgets know events that ran out of time.
-- Forward only.

create or replace function {schema}.purge_bounds(before timestamptz)
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
    select o.id, o.name, coalesce(s.batch_ended, true) as batch_ended, coalesce(
        (select max(d.at) from decided d where d.consumer_id = o.id),
        (select b.committed_at from batch b where b.consumer_id = o.id order by b.seq desc limit 1)
    ) as at
    from consumer o left join progress s on s.consumer_id = o.id
), reached as (
    select l.name, least(l.at, (
        select min(d.enqueued_time) from decided d where d.consumer_id = l.id and (d.at >= l.at - interval '1 hour' or not l.batch_ended)
    )) as at
    from last l where l.at is not null
)
select name, at, least(before, at - greatest(clock_timestamp() - before, interval '0'))
from reached
$body$;
comment on function {schema}.purge_bounds(timestamptz) is
    'For each consumer: up to which time of the log it has decided, and what may be purged when everything before that time is asked for: the '
    'retention is counted back from where the consumer is. Between two batches a partition without an event in the last hour of its consumer '
    'counts as read to its end. In the middle of a batch it does not: its events may come last.';

comment on column {schema}.progress.spent is
    'By kind of dead letter, what is used of its budget. decided: events that came to where they may fail in this way, the clock; '
    'failures: values of that clock that failed, the last ones; lifted: up to this value a person has admitted all failures; '
    'out_of_time: events that ran out of time since one passed.';
