-- First claims of partitions, each by itself: one that hangs costs its own partition only. Forward only.

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
