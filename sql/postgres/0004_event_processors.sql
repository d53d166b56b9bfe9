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

create function {schema}.claim_unowned(
    of_namespace text, of_hub text, of_group text, partitions text[], owners text[], etags text[]
) returns setof {schema}.partition_owner
    language plpgsql set search_path = {schema}, pg_temp set lock_timeout = '100ms'
as $body$
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
$body$;
comment on function {schema}.claim_unowned is
    'Claims partitions that have no row yet, each by itself: one that somebody else is claiming at this moment is lost, and stops no other.';
