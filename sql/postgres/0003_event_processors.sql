-- What azure-eventhub's event processors keep in place of blobs: who owns a partition, and where each consumer group is.
-- Forward only. Names are kept in lower case, as Event Hubs compares them.

create table {schema}.partition_owner (
    namespace text not null,
    hub text not null,
    consumer_group text not null,
    partition_id text not null,
    owner_id text not null,
    owner_number bigint generated always as identity unique,
    etag text not null,
    modified_at timestamptz not null default clock_timestamp(),
    primary key (namespace, hub, consumer_group, partition_id)
);
comment on table {schema}.partition_owner is
    'One row per partition of a consumer group: the processor that owns it, if any. A renewal changes etag and modified_at only.';
comment on column {schema}.partition_owner.owner_id is 'The processor''s own id; empty when it gave the partition back.';
comment on column {schema}.partition_owner.owner_number is
    'Raised whenever owner_id changes, never by a renewal, never used twice. It is a key, so that FOR KEY SHARE keeps it from changing '
    'to the end of a transaction and lets renewals pass.';
comment on column {schema}.partition_owner.etag is 'Made by the processor for each claim; the next claim has to name it.';

create table {schema}.processor_checkpoint (
    namespace text not null,
    hub text not null,
    consumer_group text not null,
    partition_id text not null,
    sequence_number bigint not null,
    event_offset text,
    modified_at timestamptz not null default clock_timestamp(),
    set_by text,
    set_reason text,
    primary key (namespace, hub, consumer_group, partition_id)
);
comment on table {schema}.processor_checkpoint is
    'Where event processors resume: after the event with this sequence number. Never goes back by itself. No relation to checkpoint, '
    'which is what a consumer has decided.';
comment on column {schema}.processor_checkpoint.event_offset is
    'The broker''s own offset of that event: handed back as it is, never compared. Null where a person knew the sequence number only.';
comment on column {schema}.processor_checkpoint.set_by is 'The person who set it last, if one did; set_reason says why.';

alter table {schema}.checkpoint add column passed bigint;
comment on column {schema}.checkpoint.passed is
    'A person decided to go on behind this position: those up to it that no batch has seen are absent, an accepted gap.';

create function {schema}.grant_new_tables() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
declare
    permission record;
begin
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'checkpoint'::regclass and a.grantee <> c.relowner and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE')
    loop
        execute format('grant %s on partition_owner, processor_checkpoint to %s', permission.what, permission.who);
    end loop;
end
$body$;
-- Roles that run consumers of the older version can run event processors as well.
select {schema}.grant_new_tables();
drop function {schema}.grant_new_tables();
