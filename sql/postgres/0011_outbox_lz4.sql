-- Bodies, keys and headers of messages are compressed where the server has lz4: a third less is written to table and log.
-- Forward only. Pages that are there stay as they are. Ids are random: they stay uncompressed.

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
