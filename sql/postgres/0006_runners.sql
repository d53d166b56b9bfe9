-- Runner processes that share one epoch: who they are, and who of them has claimed which partition.
-- Forward only.

alter table {schema}.consumer add column joint boolean not null default false;
comment on column {schema}.consumer.joint is 'The epoch belongs to all runner processes in member, not to one holder.';

alter table {schema}.checkpoint drop column owner;

create table {schema}.member (
    consumer_id int not null references {schema}.consumer (id),
    run_id text not null,
    epoch bigint not null,
    host text not null,
    pid int not null,
    started text not null,
    beats bigint not null default 0,
    backend_pid int not null,
    backend_start timestamptz,
    joined_at timestamptz not null default clock_timestamp(),
    primary key (consumer_id, run_id)
);
comment on table {schema}.member is 'The runner processes that have joined the epoch, their signs of life, and the database session of each one''s batches.';

create table {schema}.partition_claim (
    consumer_id int not null references {schema}.consumer (id),
    topic_id int not null references {schema}.topic (id),
    partition int not null,
    number bigint not null,
    run_id text not null,
    claimed_at timestamptz not null default clock_timestamp(),
    primary key (consumer_id, topic_id, partition)
);
comment on table {schema}.partition_claim is
    'The fence of a partition among runner processes: a batch locks its row and compares the number, each claim raises it.';

alter table {schema}.trial add column scope text not null default '', drop constraint trial_pkey, add primary key (consumer_id, scope);
comment on column {schema}.trial.scope is 'The partition that a runner process has claimed; empty for a consumer that holds its epoch alone.';

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
        execute format('grant %s on member, partition_claim to %s', permission.what, permission.who);
        if permission.what = 'INSERT' then
            execute format('grant delete on member to %s', permission.who);
        end if;
    end loop;
end
$body$;
-- Roles that run consumers of the older version can run runner processes as well.
select {schema}.grant_new_tables();
drop function {schema}.grant_new_tables();
