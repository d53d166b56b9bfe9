-- Keep the consumers of one schema apart: a login writes only rows of consumers that are assigned to it. For who wants it.
-- Run by the owner of the schema or a superuser after `dedup migrate` and the script of the roles, and again after each migration.
-- Safe to repeat. Rename the roles by search and replace. Assign consumers afterwards; before that only the owner and dedup_operate can write:
--     insert into {schema}.consumer_writer (role, consumer) values ('orders_app', 'orders');
-- Take it back:
--     drop function {schema}.refuse_other_consumers() cascade; drop table {schema}.consumer_writer cascade;
--
-- Triggers, once a statement, and not policies of row level security: PostgreSQL refuses COPY into a table with policies. They ask who has logged in
-- (session_user), which no SET ROLE and no function changes. Reservations name no consumer, and are not kept apart.

begin;

-- Everything below belongs to the owner of the other tables.
do $owner$
begin
    execute format('set local role %s', (select c.relowner::regrole from pg_class c where c.oid = '{schema}.consumer'::regclass));
end
$owner$;

create table if not exists {schema}.consumer_writer (
    role text not null,
    consumer text not null,
    primary key (consumer, role)
);
comment on table {schema}.consumer_writer is
    'Which consumers'' rows a login may write, or who is a member of a role. Only the owner assigns them.';
revoke all on {schema}.consumer_writer from public, dedup_run;

create or replace function {schema}.refuse_other_consumers() returns trigger
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    names text[] := '{}'; -- of the consumers whose rows were written; '' for a row of none
    refused text;
begin
    if tg_op <> 'DELETE' then
        if tg_argv[0] = 'consumer_id' then
            names := array(select distinct coalesce(c.name, '') from new_rows r left join consumer c on c.id = r.consumer_id);
        elsif tg_argv[0] = 'consumer' then
            names := array(select distinct r.consumer from new_rows r);
        elsif tg_argv[0] = 'letter_id' then
            -- A replay leaves a row of no letter, and of no consumer.
            names := array(
                select distinct coalesce(d.consumer, '') from new_rows r left join dead_letter d on d.id = r.letter_id
                where not (tg_op = 'INSERT' and starts_with(r.letter_id, 'replay '))
            );
        else
            names := array(select distinct r.name from new_rows r);
        end if;
    end if;
    if tg_op <> 'INSERT' then
        if tg_argv[0] = 'consumer_id' then
            names := names || array(select distinct coalesce(c.name, '') from old_rows r left join consumer c on c.id = r.consumer_id);
        elsif tg_argv[0] = 'consumer' then
            names := names || array(select distinct r.consumer from old_rows r);
        elsif tg_argv[0] = 'letter_id' then
            names := names || array(select distinct coalesce(d.consumer, '') from old_rows r left join dead_letter d on d.id = r.letter_id);
        else
            names := names || array(select distinct r.name from old_rows r);
        end if;
    end if;
    select n into refused from unnest(names) n
    where not exists (
        select from consumer_writer w where w.consumer = n and pg_has_role(session_user, to_regrole(quote_ident(w.role)), 'member')
    )
    limit 1;
    if refused is null then
        return null;
    elsif pg_has_role(session_user, (select c.relowner from pg_class c where c.oid = 'consumer_writer'::regclass), 'member') -- also a superuser
        or pg_has_role(session_user, to_regrole('dedup_operate'), 'member')
    then
        return null;
    elsif refused = '' then
        raise exception 'permission denied for a row of no consumer in table %', tg_table_name using errcode = 'insufficient_privilege';
    end if;
    raise exception 'permission denied for consumer % in table %: it is not assigned to role %', quote_ident(refused), tg_table_name, session_user
        using errcode = 'insufficient_privilege', hint = format(
            'Let the owner run: insert into %I.consumer_writer (role, consumer) values (%L, %L);', tg_table_schema, session_user, refused
        );
end
$body$;
comment on function {schema}.refuse_other_consumers() is
    'Fail a statement that writes, changes or deletes a row of a consumer that is not assigned to who has logged in.';
revoke all on function {schema}.refuse_other_consumers() from public;

-- Every table that says whose its rows are, but those that no runtime role can write. Looked up, so that no table of a later migration is left out.
create or replace function {schema}.keep_apart() returns void
    language plpgsql set search_path = {schema}, pg_temp
as $body$
declare
    one record;
begin
    for one in
        select c.relname as place, (
            array_agg(a.attname order by array_position(array['consumer_id', 'consumer', 'letter_id', 'name'], a.attname::text))
        )[1] as given
        from pg_class c join pg_attribute a on a.attrelid = c.oid and not a.attisdropped
        where c.relnamespace = (select t.relnamespace from pg_class t where t.oid = 'consumer_writer'::regclass) and c.relkind in ('r', 'p')
            and (a.attname in ('consumer_id', 'consumer', 'letter_id') or (c.relname, a.attname) = ('consumer', 'name'))
            and c.relname not in ('consumer_writer', 'letter_count', 'consumer_deletion')
        group by c.relname
    loop
        execute format('create or replace trigger own_inserted after insert on %I referencing new table as new_rows '
            'for each statement execute function refuse_other_consumers(%L)', one.place, one.given);
        execute format('create or replace trigger own_updated after update on %I referencing old table as old_rows new table as new_rows '
            'for each statement execute function refuse_other_consumers(%L)', one.place, one.given);
        execute format('create or replace trigger own_deleted after delete on %I referencing old table as old_rows '
            'for each statement execute function refuse_other_consumers(%L)', one.place, one.given);
    end loop;
end
$body$;
select {schema}.keep_apart();
drop function {schema}.keep_apart();

commit;
