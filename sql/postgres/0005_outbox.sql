-- Outgoing messages: written in the transaction of the batch that made them, sent after it, each row marked when the broker has it.
-- Forward only. The identity must not cache: a later transaction has to get higher numbers, or order per key is lost.

create table {schema}.outbox (
    number bigint generated always as identity,
    consumer_id int not null, -- without a foreign key: it would be checked for each message
    topic text not null,
    key bytea,
    id text not null,
    body bytea,
    header_names text[],
    header_values bytea[],
    lane smallint not null,
    state smallint not null default 0,
    attempts int not null default 0,
    flight bigint,
    created_at timestamptz not null default now(),
    changed_at timestamptz,
    error_type text,
    error_message text,
    set_by text,
    set_reason text
);
comment on table {schema}.outbox is
    'Messages to send. State 0 waiting, 1 sent, 2 dead, 3 behind a dead one of its key, 4 discarded, 5 handed to a Kafka transaction.';
alter table {schema}.outbox replica identity full;
comment on column {schema}.outbox.id is 'What the receiver knows the message by: minted once, the same however often it is sent.';
comment on column {schema}.outbox.lane is 'Bucket of the destination key: what a dispatcher locks, so that one key is never in two hands.';
comment on column {schema}.outbox.flight is 'The Kafka transaction that it was handed to, where messages are sent exactly once.';
comment on column {schema}.outbox.set_by is 'The person who let it be sent again or gave it up; set_reason says why.';
-- A tree of all numbers would cost each message twice, when it comes and when it is marked.
create index outbox_number on {schema}.outbox using brin (number) with (pages_per_range = 32, autosummarize = on);
create index outbox_waiting on {schema}.outbox (consumer_id, lane, number) where state = 0;
create index outbox_stopped on {schema}.outbox (consumer_id, lane, number) where state in (2, 3, 5);

create table {schema}.outbox_flight (consumer_id int primary key references {schema}.consumer (id), flight bigint not null);
comment on table {schema}.outbox_flight is 'How many Kafka transactions of messages were begun.';

-- Messages that nothing has happened to lie in pages: many of one lane in a row, so that storing and marking them costs next to nothing.
-- Where something happens to a single message its page is unpacked into rows of `outbox`, in the same transaction.
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
-- Without lz4, compressing them would take longer than everything else together.
alter table {schema}.outbox_page alter keys set storage external, alter ids set storage external, alter bodies set storage external,
    alter header_names set storage external, alter header_values set storage external;
create index outbox_page_waiting on {schema}.outbox_page (consumer_id, lane, page) where sent_at is null;

create view {schema}.outbox_message as
select number, consumer_id, topic, key, id, body, header_names, header_values, lane, state, attempts, flight, created_at, changed_at,
    error_type, error_message, set_by, set_reason, null::bigint as page
from {schema}.outbox
union all
select 1000 * p.page + m.place - 1, p.consumer_id, p.topic, m.key, m.id, m.body,
    p.header_names[coalesce(p.header_ends[m.place::int - 1], 0) + 1 : p.header_ends[m.place::int]],
    p.header_values[coalesce(p.header_ends[m.place::int - 1], 0) + 1 : p.header_ends[m.place::int]],
    p.lane, case when p.sent_at is null then 0 else 1 end::smallint, 0, null, p.created_at, p.sent_at, null, null, null, null, p.page
from {schema}.outbox_page p cross join lateral unnest(p.keys, p.ids, p.bodies) with ordinality m (key, id, body, place);
comment on view {schema}.outbox_message is 'All messages of the outbox, one a row.';

-- Bodies, keys and headers of messages are compressed where the server has lz4: a third less is written to table and log.
-- Ids are random: they stay uncompressed.
create function {schema}.compress_pages() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
begin
    execute 'alter table outbox_page alter keys set compression lz4, alter bodies set compression lz4, '
        'alter header_names set compression lz4, alter header_values set compression lz4';
    execute 'alter table outbox_page alter keys set storage extended, alter bodies set storage extended, '
        'alter header_names set storage extended, alter header_values set storage extended';
exception
    when feature_not_supported then null; -- a server built without lz4: pages stay uncompressed, for pglz takes longer than everything else
end
$body$;
select {schema}.compress_pages();
drop function {schema}.compress_pages();
