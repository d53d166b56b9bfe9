-- Messages that nothing has happened to lie in pages: many of one lane in a row, so that storing and marking them costs next to nothing.
-- Forward only. Where something happens to a single message its page is unpacked into rows of `outbox`, in the same transaction.

create table {schema}.outbox_page (
    page bigint generated always as identity primary key, -- must not cache, as outbox.number
    consumer_id int not null, -- without a foreign key, as in outbox
    topic text not null,
    lane smallint not null,
    messages int not null check (messages between 1 and 1000),
    size bigint not null,
    keys bytea[] not null,
    ids text[] not null,
    bodies bytea[] not null,
    header_ends int[],
    header_names text[],
    header_values bytea[],
    created_at timestamptz not null default now(),
    sent_at timestamptz
);
comment on table {schema}.outbox_page is
    'Messages to send, in order: those of one topic and lane in one transaction. The n-th has the number 1000 * page + n - 1.';
comment on column {schema}.outbox_page.size is 'Bytes of the bodies.';
comment on column {schema}.outbox_page.header_ends is 'Where in header_names and header_values those of each message end; null where none has any.';
comment on column {schema}.outbox_page.sent_at is 'When all of them were marked as sent; null: all of them wait.';
-- Compressing them would take longer than everything else together.
alter table {schema}.outbox_page alter keys set storage external, alter ids set storage external, alter bodies set storage external,
    alter header_names set storage external, alter header_values set storage external;
create index outbox_page_waiting on {schema}.outbox_page (consumer_id, lane, page) where sent_at is null;
create function {schema}.number_pages() returns void
    language sql set search_path = {schema}, pg_temp
as $body$
select setval(pg_get_serial_sequence('outbox_page', 'page'), 1 + coalesce(max(number), 0) / 1000) from outbox;
$body$;
-- Later messages have higher numbers than those that are in the outbox already.
select {schema}.number_pages();
drop function {schema}.number_pages();

create view {schema}.outbox_message as
select number, consumer_id, topic, key, id, body, header_names, header_values, lane, state, attempts, flight, created_at, changed_at,
    error_type, error_message, null::bigint as page
from {schema}.outbox
union all
select 1000 * p.page + m.place - 1, p.consumer_id, p.topic, m.key, m.id, m.body,
    p.header_names[coalesce(p.header_ends[m.place::int - 1], 0) + 1 : p.header_ends[m.place::int]],
    p.header_values[coalesce(p.header_ends[m.place::int - 1], 0) + 1 : p.header_ends[m.place::int]],
    p.lane, case when p.sent_at is null then 0 else 1 end::smallint, 0, null, p.created_at, p.sent_at, null, null, p.page
from {schema}.outbox_page p cross join lateral unnest(p.keys, p.ids, p.bodies) with ordinality m (key, id, body, place);
comment on view {schema}.outbox_message is 'All messages of the outbox, one a row.';

create function {schema}.grant_new_tables() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
declare
    permission record;
begin
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'outbox'::regclass and a.grantee <> c.relowner and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    loop
        execute format('grant %s on outbox_page to %s', permission.what, permission.who);
        if permission.what = 'SELECT' then
            execute format('grant select on outbox_message to %s', permission.who);
        end if;
    end loop;
end
$body$;
-- Roles that run consumers of the older version can send messages as well.
select {schema}.grant_new_tables();
drop function {schema}.grant_new_tables();
