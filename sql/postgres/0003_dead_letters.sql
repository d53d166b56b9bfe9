-- Dead letters that people work with: order behind a letter, history, counts, the marker of what is being tried.
-- A letter is in one of two indexes by position, and in that of first failures only if it failed again: a flood is parked at the price of few.
-- Forward only.

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
    duplicates bigint not null default 0,
    sequence uuid,
    extras bytea
);
comment on table {schema}.dead_letter is 'Events that could not be processed, with their exact bytes. An open, blocked or discarded one holds its key.';
create unique index dead_letter_key on {schema}.dead_letter (key) where holds_key and status in ('OPEN', 'BLOCKED', 'DISCARDED');
comment on column {schema}.dead_letter.sequence is 'Hash of consumer, partition and sequence key: letters with the same one keep their order. Null: no order.';
comment on column {schema}.dead_letter.blocked_by is 'The letter right before it in its sequence, while that one is open or blocked.';
comment on column {schema}.dead_letter.extras is 'The other columns of the input: an Arrow IPC stream of one row.';

create index dead_letter_waiting on {schema}.dead_letter (consumer, source, topic, incarnation, partition, sequence_number, part)
    where status in ('OPEN', 'BLOCKED');
create index dead_letter_done on {schema}.dead_letter (consumer, source, topic, incarnation, partition, sequence_number, part)
    where status not in ('OPEN', 'BLOCKED');
create index dead_letter_sequence on {schema}.dead_letter (sequence, incarnation, sequence_number, part)
    where sequence is not null and status in ('OPEN', 'BLOCKED');
create index dead_letter_age on {schema}.dead_letter (last_failed_at) where status in ('OPEN', 'BLOCKED');
create index dead_letter_name on {schema}.dead_letter ((left(idempotence_key, 100)));
create index dead_letter_sequence_name on {schema}.dead_letter ((left(sequence_key, 100))) where sequence_key is not null;
create index dead_letter_fingerprint on {schema}.dead_letter
    (fingerprint, consumer, source, topic, incarnation, partition, sequence_number, part) where status in ('OPEN', 'BLOCKED');
create index dead_letter_last on {schema}.dead_letter (fingerprint, kind, consumer, status, last_failed_at);
create index dead_letter_first on {schema}.dead_letter (fingerprint, kind, consumer, status, first_failed_at)
    where first_failed_at <> last_failed_at;

create table {schema}.letter_history (
    id bigint generated always as identity primary key,
    letter_id text not null,
    at timestamptz not null,
    action text not null,
    by text,
    reason text,
    error_type text,
    error_message text,
    stack text,
    body bytea,
    key uuid,
    idempotence_key text,
    reserved bigint not null
);
comment on table {schema}.letter_history is
    'What happened to letters: attempts, edits (with what they replaced), discards. Appended only; a letter without rows has failed once.';
create index letter_history_letter on {schema}.letter_history (letter_id, at);
create index letter_history_reserved on {schema}.letter_history (reserved) where reserved <> 0;

create table {schema}.letter_duplicate (letter_id text not null, duplicates bigint not null);
comment on table {schema}.letter_duplicate is
    'Duplicates that came while somebody was at work on the letter: they count beside dead_letter.duplicates, and nobody waits.';
alter table {schema}.letter_duplicate replica identity full;
create index letter_duplicate_letter on {schema}.letter_duplicate (letter_id);

create table {schema}.blocked_sequence (
    sequence uuid primary key,
    consumer text not null,
    letter text not null,
    kind text not null
);
comment on table {schema}.blocked_sequence is
    'One row per sequence with open or blocked letters: the last one of them. Locked by whoever parks behind it or releases it.';

create table {schema}.crash_marker (
    consumer_id int references {schema}.consumer (id),
    marker text,
    at timestamptz not null,
    scope text not null default '',
    primary key (consumer_id, scope)
);
comment on table {schema}.crash_marker is 'What a consumer was about to try: the next process reads from it what this one died of.';
comment on column {schema}.crash_marker.scope is 'The partition that a runner process has claimed; empty for a consumer that holds its epoch alone.';

create table {schema}.letter_count (
    consumer text not null,
    fingerprint text not null,
    kind text not null,
    status text not null,
    failed_on date not null,
    letters bigint not null
);
comment on table {schema}.letter_count is
    'How many letters there are, as sums of rows that each statement appends: nobody waits for a counter. failed_on: day of the last failure, UTC.';
alter table {schema}.letter_count replica identity full;
create index letter_count_group on {schema}.letter_count (fingerprint, kind, consumer, status, failed_on);

create type {schema}.letter_change as (consumer text, fingerprint text, kind text, status text, failed_on date, letters bigint);
comment on type {schema}.letter_change is 'A row for letter_count; no row of it, so that the table may get more columns.';

create function {schema}.count_letters() returns trigger
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
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
$body$;
comment on function {schema}.count_letters() is 'Append to letter_count what a statement changed.';

create function {schema}.add_letter_counts(changes {schema}.letter_change[]) returns void
    language sql set search_path = {schema}, pg_temp
as $body$
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
$body$;
comment on function {schema}.add_letter_counts({schema}.letter_change[]) is
    'Append to letter_count and, now and then, make one row of the many of a count: what is deleted and what is added is one statement.';

create trigger count_inserted after insert on {schema}.dead_letter
    referencing new table as new_letters for each statement execute function {schema}.count_letters();
create trigger count_updated after update on {schema}.dead_letter
    referencing old table as old_letters new table as new_letters for each statement execute function {schema}.count_letters();
create trigger count_deleted after delete on {schema}.dead_letter
    referencing old table as old_letters for each statement execute function {schema}.count_letters();
create trigger count_truncated after truncate on {schema}.dead_letter for each statement execute function {schema}.count_letters();

create view {schema}.open_letter as
select id, consumer, source, topic, incarnation, partition, sequence_number, part, enqueued_time, idempotence_key, kind, reason, error_type,
    error_message, fingerprint, attempts, first_failed_at, last_failed_at, status, sequence_key, sequence, blocked_by, body_size, duplicates
from {schema}.dead_letter
where status in ('OPEN', 'BLOCKED');
comment on view {schema}.open_letter is 'Letters that wait for somebody, without their bodies. Fast by position, by last_failed_at, by fingerprint and by id.';

create view {schema}.letter_group as
select g.consumer, g.fingerprint, g.kind, g.status, g.letters, f.first_failed_at, l.last_failed_at, l.id as example, l.reason
from (
    select consumer, fingerprint, kind, status, sum(letters)::bigint as letters
    from {schema}.letter_count group by consumer, fingerprint, kind, status having sum(letters) > 0
) g
cross join lateral (
    -- Of letters that failed once, the first is that with the earliest last failure; any other with an earlier one is found by its first.
    select least(
        (
            select min(d.last_failed_at) from {schema}.dead_letter d
            where d.fingerprint = g.fingerprint and d.kind = g.kind and d.consumer = g.consumer and d.status = g.status
        ),
        (
            select min(d.first_failed_at) from {schema}.dead_letter d
            where d.fingerprint = g.fingerprint and d.kind = g.kind and d.consumer = g.consumer and d.status = g.status
                and d.first_failed_at <> d.last_failed_at
        )
    ) as first_failed_at
) f
cross join lateral (
    select d.last_failed_at, d.id, d.reason from {schema}.dead_letter d
    where d.fingerprint = g.fingerprint and d.kind = g.kind and d.consumer = g.consumer and d.status = g.status
    order by d.last_failed_at desc limit 1
) l;
comment on view {schema}.letter_group is 'Letters by consumer, fingerprint, kind and status: how many, when first and last, the letter that failed last.';

create view {schema}.letter_age as
select consumer, status, failed_on, sum(letters)::bigint as letters
from {schema}.letter_count group by consumer, status, failed_on having sum(letters) > 0;
comment on view {schema}.letter_age is 'Letters by consumer, status and the day (UTC) on which they failed last.';

create view {schema}.blocked_by_letter as
select b.consumer, d.source, d.topic, d.partition, d.sequence_key, b.sequence, d.id as open_letter, d.kind, d.reason, d.first_failed_at,
    (select count(*) from {schema}.dead_letter w where w.sequence = b.sequence and w.status in ('OPEN', 'BLOCKED')) - 1 as behind
from {schema}.blocked_sequence b
cross join lateral (
    select d.* from {schema}.dead_letter d
    where d.sequence = b.sequence and d.status in ('OPEN', 'BLOCKED') order by d.incarnation, d.sequence_number, d.part limit 1
) d;
comment on view {schema}.blocked_by_letter is 'Blocked sequences: the letter that has to be dealt with first, and how many wait behind it.';

revoke all on function {schema}.count_letters() from public;
revoke all on function {schema}.add_letter_counts({schema}.letter_change[]) from public;
