-- What tells state that was restored, in whole or in part, from state that was written here: view `restored` says what contradicts it.
-- Forward only. No table is rewritten; a consumer is protected from its next decision on.

alter table {schema}.progress
    add column written_by xid8,
    add column epoch bigint not null default 0,
    add column generation int not null default 0,
    add column recorded bigint,
    add column reserved uuid,
    add column reserved_in int,
    add column page bigint;
comment on column {schema}.progress.written_by is
    'The transaction that wrote this row. The row''s own xmin says the same, unless the row was loaded from a dump or another copy.';
comment on column {schema}.progress.epoch is 'The epoch of the last decision.';
comment on column {schema}.progress.generation is 'The generation of the last decision.';
comment on column {schema}.progress.recorded is 'The last decision with batch records.';
comment on column {schema}.progress.reserved is 'One of the keys that were reserved last, of an event that was processed: nothing but a purge takes it away.';
comment on column {schema}.progress.reserved_in is 'The table of reservations that has it.';
comment on column {schema}.progress.page is 'How far pages of messages were numbered.';

-- Tools that write the rows of a whole database anew choose tables by a unique index of columns that are not null (pg_repack does:
-- https://reorg.github.io/pg_repack/, Restrictions): this row's xmin is to stay as it is.
alter table {schema}.progress drop constraint progress_pkey, alter consumer_id drop not null;
alter table {schema}.progress add constraint progress_consumer_id unique (consumer_id),
    add constraint progress_consumer check (consumer_id is not null), replica identity full;

create table {schema}.sink (
    consumer_id int not null references {schema}.consumer (id),
    name text not null,
    generation int not null,
    relation oid not null,
    primary key (consumer_id, name)
);
comment on table {schema}.sink is 'The tables that a consumer has written to in a generation: one that was dropped and loaded again has another oid.';

create view {schema}.last_page as select last_value as page from {schema}.outbox_page_page_seq;
comment on view {schema}.last_page is 'How far pages of messages were numbered, for roles that may not read sequences.';

create view {schema}.restored as
select p.consumer_id, 'the row of `progress` was loaded from a copy' as what
from {schema}.progress p where p.written_by::xid <> p.xmin
union all
select c.id, format('the row of `consumer` is of epoch %s and generation %s, the last decision of epoch %s and generation %s',
    c.epoch, c.generation, p.epoch, p.generation)
from {schema}.consumer c join {schema}.progress p on p.consumer_id = c.id
where c.epoch < p.epoch or c.generation < p.generation
union all
select t.consumer_id, format('`topic` has incarnation %s of %s, a batch record is of incarnation %s', t.incarnation, t.topic, b.incarnation)
from {schema}.topic t
cross join lateral (
    select b.incarnation from {schema}.batch b where b.consumer_id = t.consumer_id and b.topic_id = t.id and b.incarnation > t.incarnation limit 1
) b
union all
select p.consumer_id, format('`batch` lacks the record of decision %s', p.recorded)
from {schema}.progress p
where p.recorded is not null and not exists (select from {schema}.batch b where b.consumer_id = p.consumer_id and b.seq = p.recorded)
union all
select p.consumer_id, '`reservation` lacks a key that was reserved'
from {schema}.progress p
where p.reserved is not null and not exists (select from {schema}.reservation r where r.key = p.reserved)
    and not exists (select from {schema}.reservation_generation g where g.id = p.reserved_in and g.purged_at is not null)
union all
select p.consumer_id, format('`reservation_generation` lacks table %s', p.reserved_in)
from {schema}.progress p where p.reserved_in > (select max(g.id) from {schema}.reservation_generation g)
union all
select p.consumer_id, format('`outbox_page` is at page %s, page %s was numbered', s.page, p.page)
from {schema}.progress p join {schema}.last_page s on s.page < p.page;
comment on view {schema}.restored is 'What shows that tables of a consumer were restored to an older time. Empty where nothing does.';

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
        execute format('grant %s on sink to %s', permission.what, permission.who);
        if permission.what = 'SELECT' then
            execute format('grant select on restored, last_page to %s', permission.who);
        end if;
    end loop;
end
$body$;
-- Roles that run consumers of the older version go on running them.
select {schema}.grant_new_tables();
drop function {schema}.grant_new_tables();
