-- How long each consumer needs its reservations: what a consumer's own upkeep goes by, since the tables have the keys of all.
-- Forward only.

create table {schema}.consumer_retention (
    consumer_id int primary key references {schema}.consumer (id) on delete cascade,
    retention interval,
    upkeep boolean not null,
    told_at timestamptz not null default clock_timestamp()
);
comment on table {schema}.consumer_retention is
    'What the settings of a consumer said when it last started. Apart from consumer, whose row a batch keeps locked.';
comment on column {schema}.consumer_retention.retention is
    'Limits(retention=): how long it needs its reservations. Null: for ever. A consumer without a row has not said it.';
comment on column {schema}.consumer_retention.upkeep is 'Limits(upkeep=): whether its processes carry retentions out.';

create function {schema}.common_retention() returns table (retention interval, unsaid text[])
    language sql stable set search_path = {schema}, pg_temp
as $body$
select max(r.retention), coalesce(array_agg(o.name order by o.name) filter (where r.retention is null), '{}')
from consumer o left join consumer_retention r on r.consumer_id = o.id
$body$;
comment on function {schema}.common_retention() is
    'The longest retention of all consumers, and those that have said none: while there are any, no consumer''s own upkeep purges.';

create function {schema}.upkeep_lock() returns bigint
    language sql stable set search_path = {schema}, pg_temp
as $body$ select (1684366450::bigint << 32) | 'reservation'::regclass::oid::bigint $body$;
comment on function {schema}.upkeep_lock() is
    'The advisory lock of a portion of a consumer''s own upkeep. Taken before all others, without waiting. No batch takes it.';
