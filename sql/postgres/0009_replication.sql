-- Every table can be published by logical replication: for a replica, change data capture, or an upgrade with a second server.
-- Forward only. PostgreSQL refuses updates and deletes of a published table whose rows nothing identifies.

-- Unlogged: never published, for the trigger would fail on the other side; and nothing to write to the log, for a table that stays empty.
alter table {schema}.open_transaction set unlogged;

alter table {schema}.batch add column id bigint generated always as identity primary key;

alter table {schema}.reservation replica identity full;
create function {schema}.identify_reservations() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
declare
    child record;
begin
    for child in
        select i.inhrelid::regclass as name, c.relname as identity
        from pg_inherits i join pg_index x on x.indrelid = i.inhrelid and x.indisunique join pg_class c on c.oid = x.indexrelid
        where i.inhparent = 'reservation'::regclass
    loop
        execute format('alter table %s replica identity using index %I', child.name, child.identity);
    end loop;
end
$body$;
select {schema}.identify_reservations();
drop function {schema}.identify_reservations();

-- Few rows are deleted from these, or updated.
alter table {schema}.letter_count replica identity full;
alter table {schema}.letter_duplicate replica identity full;
alter table {schema}.outbox replica identity full;
