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
    error_message text
);
comment on table {schema}.outbox is
    'Messages to send. State 0 waiting, 1 sent, 2 dead, 3 behind a dead one of its key, 4 discarded, 5 handed to a Kafka transaction.';
comment on column {schema}.outbox.id is 'What the receiver knows the message by: minted once, the same however often it is sent.';
comment on column {schema}.outbox.lane is 'Bucket of the destination key: what a dispatcher locks, so that one key is never in two hands.';
comment on column {schema}.outbox.flight is 'The Kafka transaction that it was handed to, where messages are sent exactly once.';
-- A tree of all numbers would cost each message twice, when it comes and when it is marked.
create index outbox_number on {schema}.outbox using brin (number) with (pages_per_range = 32, autosummarize = on);
create index outbox_waiting on {schema}.outbox (consumer_id, lane, number) where state = 0;
create index outbox_stopped on {schema}.outbox (consumer_id, lane, number) where state in (2, 3, 5);

create table {schema}.outbox_flight (consumer_id int primary key references {schema}.consumer (id), flight bigint not null);
comment on table {schema}.outbox_flight is 'How many Kafka transactions of messages were begun.';

create function {schema}.grant_new_tables() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
declare
    permission record;
begin
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'checkpoint'::regclass and a.grantee <> c.relowner and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    loop
        execute format('grant %s on outbox, outbox_flight to %s', permission.what, permission.who);
    end loop;
end
$body$;
-- Roles that run consumers of the older version can send messages as well.
select {schema}.grant_new_tables();
drop function {schema}.grant_new_tables();
