-- name: schema_versions
-- The migrations that were applied, with the checksum of each file.
-- Read under the migration lock before anything is applied, so that two migrations at once do the work once.
select version, checksum, compatible_with from {schema}.schema_version order by version;

-- name: make_schema
-- Create the schema.
-- Runs under the migration lock: "if not exists" alone can fail when two sessions create at once.
create schema if not exists {schema};

-- name: make_schema_version
-- Create the list of migrations.
-- Runs under the migration lock, like `make_schema`.
create table if not exists {schema}.schema_version (
    version int primary key,
    name text not null,
    checksum text not null,
    compatible_with int not null,
    applied_at timestamptz not null default clock_timestamp(),
    applied_by text not null default current_user
);

-- name: add_schema_version
-- Note that a migration was applied.
-- In the transaction of the migration itself: either both are true or neither.
insert into {schema}.schema_version (version, name, checksum, compatible_with)
values (%(version)s, %(name)s, %(checksum)s, %(compatible_with)s);

-- name: schema_state
-- Whether the schema and its list of migrations exist, and whether this role may create or change them.
-- Only advice: the migration itself asks again under its lock.
select s.oid is not null, t.oid is not null,
    case when s.oid is null then has_database_privilege(current_database(), 'CREATE') else pg_has_role(s.nspowner, 'USAGE') end,
    s.oid is null or has_schema_privilege(s.oid, 'USAGE'),
    current_setting('server_version_num')::int
from (values (%(schema)s::text)) wanted (name)
left join pg_namespace s on s.nspname = wanted.name
left join pg_class t on t.relnamespace = s.oid and t.relname = 'schema_version';

-- name: migration_lock
-- Wait for any other migration of this schema.
-- Held to the end of the transaction, so the list of migrations read after it is complete.
select pg_advisory_xact_lock(1684366448, hashtext(%(schema)s));

-- name: ensure_consumer
-- Create the rows of a consumer if it is new, and its signs of life where somebody has emptied that table.
-- The unique name lets one of two newcomers insert; the other one finds the rows.
with made as (
    insert into {schema}.consumer (name) values (%(consumer)s) on conflict (name) do nothing returning id
), progress as (
    insert into {schema}.progress (consumer_id, written_by) select id, pg_current_xact_id() from made
)
insert into {schema}.heartbeat (consumer_id)
select id from made union all select c.id from {schema}.consumer c where c.name = %(consumer)s
on conflict do nothing;

-- name: holder
-- Who holds a consumer, its signs of life, whether its database session is known to have ended, what shows that tables were restored, and who deletes it.
-- Reads only; a session of another role hides its start time and counts as alive.
select c.id, c.epoch, c.joint, c.holder_host as host, c.holder_pid as pid, c.holder_started as started, c.holder_run_id as run_id, c.taken_at,
    p.seq, h.beats, h.backend_pid, h.backend_start,
    h.backend_pid > 0 and not exists (
        select from pg_stat_activity a where a.pid = h.backend_pid and coalesce(a.backend_start, h.backend_start) = h.backend_start
    ) as backend_gone,
    (select string_agg(r.what, '; ') from {schema}.restored r where r.consumer_id = c.id) as restored,
    (select format('%%s at %%s UTC', d.by, to_char(d.decided_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
        from {schema}.consumer_deletion d where d.consumer_id = c.id) as deleted_by
from {schema}.consumer c
join {schema}.progress p on p.consumer_id = c.id
join {schema}.heartbeat h on h.consumer_id = c.id
where c.name = %(consumer)s;

-- name: present
-- The processes that hold a consumer's epoch or share it, and whether their database sessions go on: null behind a pooler.
-- Reads only; a session of another role hides its start time and counts as alive.
select host, pid, started, case when backend_pid > 0 then exists (
    select from pg_stat_activity a where a.pid = s.backend_pid and coalesce(a.backend_start, s.backend_start) = s.backend_start
) end as connected
from (
    select m.host, m.pid, m.started, m.backend_pid, m.backend_start
    from {schema}.consumer c join {schema}.member m on m.consumer_id = c.id and m.epoch = c.epoch
    where c.name = %(consumer)s and c.joint
    union all
    select c.holder_host, c.holder_pid, c.holder_started, h.backend_pid, h.backend_start
    from {schema}.consumer c join {schema}.heartbeat h on h.consumer_id = c.id
    where c.name = %(consumer)s and not c.joint and c.holder_host is not null
) s order by host, pid;

-- name: take_epoch
-- Raise the epoch and name the new holder, unless somebody else did since `holder` was read. Epoch and life go on above those of a deleted consumer.
-- Waits for every open batch, which share-locks this row; a batch that begins afterwards sees the new epoch. A deletion changes the epoch, too.
update {schema}.consumer c
set epoch = greatest(c.epoch, (select max(d.epoch) from {schema}.consumer_deletion d where d.name = c.name)) + 1,
    generation = greatest(c.generation, (select max(d.generation) + 1 from {schema}.consumer_deletion d where d.name = c.name)),
    keyspace = greatest(c.keyspace, (select max(d.generation) from {schema}.consumer_deletion d where d.name = c.name)),
    holder_host = %(host)s, holder_pid = %(pid)s, holder_started = %(started)s, holder_run_id = %(run_id)s,
    taken_at = clock_timestamp(), joint = %(joint)s
where c.id = %(id)s and c.epoch = %(epoch)s
returning c.epoch;

-- name: register_session
-- Record this database session as the one of the epoch's holder; 0 behind a pooler, which told the client another number: it may be anybody's next.
-- Outside any batch, so that others see it while a batch runs; an older epoch changes nothing.
update {schema}.heartbeat
set epoch = %(epoch)s, beats = beats + 1, beat_at = clock_timestamp(),
    backend_pid = case when pg_backend_pid() = %(session)s then pg_backend_pid() else 0 end,
    backend_start = (select a.backend_start from pg_stat_activity a where a.pid = pg_backend_pid())
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s and epoch = %(epoch)s);

-- name: beat
-- Show a sign of life.
-- A row of its own that no batch locks; an older epoch changes nothing.
update {schema}.heartbeat h set beats = beats + 1, beat_at = clock_timestamp()
from {schema}.consumer c
where c.id = h.consumer_id and c.name = %(consumer)s and c.epoch = %(epoch)s;

-- name: members
-- The runner processes of a consumer's epoch, their signs of life, and whether their database sessions are known to have ended.
-- Reads only; a session of another role hides its start time and counts as alive.
select m.run_id, m.host, m.pid, m.started, m.beats, m.backend_pid, m.backend_start,
    m.backend_pid > 0 and not exists (
        select from pg_stat_activity a where a.pid = m.backend_pid and coalesce(a.backend_start, m.backend_start) = m.backend_start
    ) as backend_gone
from {schema}.member m join {schema}.consumer c on c.id = m.consumer_id and c.epoch = m.epoch
where m.consumer_id = %(id)s
order by m.joined_at, m.run_id;

-- name: enter
-- Record a runner process, and the database session of its batches, under a shared epoch; nothing where that epoch is over.
-- Share-locks the consumer: a takeover comes before or after it, and drops those of older epochs.
insert into {schema}.member as m (consumer_id, run_id, epoch, host, pid, started, backend_pid, backend_start)
select f.id, %(run_id)s, f.epoch, %(host)s, %(pid)s, %(started)s, case when pg_backend_pid() = %(session)s then pg_backend_pid() else 0 end,
    (select a.backend_start from pg_stat_activity a where a.pid = pg_backend_pid())
from (select id, epoch from {schema}.consumer where name = %(consumer)s and epoch = %(epoch)s and joint for share) f
on conflict (consumer_id, run_id) do update
set epoch = excluded.epoch, beats = m.beats + 1, backend_pid = excluded.backend_pid, backend_start = excluded.backend_start
returning epoch;

-- name: enter_task
-- Record a process that runs tasks of the driver that holds the epoch, and the database session of its slices; nothing where that epoch is over.
-- Share-locks the consumer: a takeover comes before or after it, and drops those of older epochs.
insert into {schema}.member as m (consumer_id, run_id, epoch, host, pid, started, backend_pid, backend_start)
select f.id, %(run_id)s, f.epoch, %(host)s, %(pid)s, %(started)s, case when pg_backend_pid() = %(session)s then pg_backend_pid() else 0 end,
    (select a.backend_start from pg_stat_activity a where a.pid = pg_backend_pid())
from (select id, epoch from {schema}.consumer where name = %(consumer)s and epoch = %(epoch)s and not joint for share) f
on conflict (consumer_id, run_id) do update
set epoch = excluded.epoch, beats = m.beats + 1, backend_pid = excluded.backend_pid, backend_start = excluded.backend_start;

-- name: forget_tasks
-- Forget processes of tasks whose database sessions have ended, and those behind a pooler, whose rows identify no session.
-- Rows of their own; what fences a slice is the epoch, whoever is on record.
delete from {schema}.member m using {schema}.consumer c
where c.id = m.consumer_id and c.name = %(consumer)s and c.epoch = %(epoch)s and not c.joint and not exists (
    select from pg_stat_activity a where a.pid = m.backend_pid and coalesce(a.backend_start, m.backend_start) = m.backend_start
);

-- name: lock_slice
-- Take the turn of one partition's slice, if nobody has it.
-- To the end of the transaction, also for a partition that has no checkpoint yet: two tasks of one slice come one after the other.
select pg_try_advisory_xact_lock(
    hashint8({schema}.reservation_lock() + %(id)s) & 2147483647,
    hashtext(%(source)s::text || '/' || %(topic)s::text || '/' || %(partition)s::text) & 2147483647
);

-- name: slice_holder
-- Who has the turn of a slice, and for how many seconds that session has waited for its client inside the transaction.
-- Reads only; a session of another role hides what it does.
select a.pid as backend_pid, a.backend_start, m.host, m.pid, m.started,
    case when a.state like 'idle in transaction%%' then extract(epoch from clock_timestamp() - a.state_change)::float8 end as idle
from pg_locks l
join pg_stat_activity a on a.pid = l.pid
left join {schema}.member m on m.consumer_id = %(id)s and m.backend_pid = a.pid and m.backend_start = a.backend_start
where l.locktype = 'advisory' and l.granted and l.objsubid = 2
    and l.database = (select oid from pg_database where datname = current_database())
    and l.classid::bigint = hashint8({schema}.reservation_lock() + %(id)s) & 2147483647
    and l.objid::bigint = hashtext(%(source)s::text || '/' || %(topic)s::text || '/' || %(partition)s::text) & 2147483647
limit 1;

-- name: slice_end
-- Whether a chunk of this query, batch and partition ended here.
-- Inside the slice's turn: another task that committed chunks of it did so before.
select exists (
    select from {schema}.batch
    where consumer_id = %(id)s and topic_id = %(topic_id)s and incarnation = %(incarnation)s and partition = %(partition)s
        and last_seen = %(last)s and query_id = %(query_id)s and batch_id = %(batch_id)s
);

-- name: room
-- How many connections this role may have for the tasks of a consumer: what server, database and role allow, less what others use.
-- One snapshot. Sessions of this consumer's own tasks count as room: a task has up to two, and the register of members names one of them.
with session as (
    select a.datname, a.usename, exists (
        select from {schema}.member m join {schema}.consumer c on c.id = m.consumer_id
        where c.name = %(consumer)s and not c.joint and m.backend_pid = a.pid
    ) as own
    from pg_stat_activity a where a.backend_type = 'client backend'
),
used as (
    select greatest(0, count(*) - 2 * count(*) filter (where own)) as sessions,
        greatest(0, count(*) filter (where usename = session_user) - 2 * count(*) filter (where own)) as of_role,
        greatest(0, count(*) filter (where datname = current_database()) - 2 * count(*) filter (where own)) as of_database
    from session
)
select greatest(0, least(
    current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
        - coalesce(nullif(current_setting('reserved_connections', true), ''), '0')::int - used.sessions,
    (select case when rolconnlimit < 0 then 1000000 else rolconnlimit - used.of_role end from pg_roles where rolname = session_user),
    (select case when datconnlimit < 0 then 1000000 else datconnlimit - used.of_database end
     from pg_database where datname = current_database())
))
from used;

-- name: drop_members
-- Forget runner processes of older epochs.
-- In the transaction that raises the epoch: whoever is dropped is fenced.
delete from {schema}.member where consumer_id = %(id)s and epoch < %(epoch)s;

-- name: leave
-- Forget one runner process.
-- A row of its own; its partitions are fenced by their numbers, whoever is on record.
delete from {schema}.member m using {schema}.consumer c where c.id = m.consumer_id and c.name = %(consumer)s and m.run_id = %(run_id)s;

-- name: beat_member
-- Show a sign of life of a runner process.
-- A row of its own that no batch locks.
update {schema}.member m set beats = m.beats + 1
from {schema}.consumer c
where c.id = m.consumer_id and c.name = %(consumer)s and c.epoch = %(epoch)s and m.run_id = %(run_id)s;

-- name: claim
-- Raise the number of a partition.
-- Waits for an open batch of it, which locks this row; a batch that begins afterwards with the old number stops there.
insert into {schema}.partition_claim as p (consumer_id, topic_id, partition, number, run_id)
values (%(id)s, %(topic_id)s, %(partition)s, 1, %(run_id)s)
on conflict (consumer_id, topic_id, partition) do update
set number = p.number + 1, run_id = excluded.run_id, claimed_at = clock_timestamp()
returning number;

-- name: claimant
-- The runner process that claimed a partition last.
-- Reads only.
select p.number, m.run_id, m.host, m.pid, m.started, m.beats, m.backend_pid, m.backend_start
from {schema}.partition_claim p
join {schema}.topic t on t.id = p.topic_id
left join {schema}.member m on m.consumer_id = p.consumer_id and m.run_id = p.run_id
where p.consumer_id = %(id)s and t.source = %(source)s and t.topic = %(topic)s and p.partition = %(partition)s;

-- name: lock_claim
-- Lock the claim of one partition and read its number.
-- A claim waits for this batch, and this batch can commit only under the number that it read here. One batch of a partition at a time.
select p.number from {schema}.partition_claim p join {schema}.topic t on t.id = p.topic_id
where p.consumer_id = %(id)s and t.source = %(source)s and t.topic = %(topic)s and p.partition = %(partition)s
for no key update of p;

-- name: lock_checkpoint
-- Lock the checkpoint of one partition.
-- Under `lock_claim`, which also covers a partition that has none; this keeps out whoever locks them all.
select from {schema}.checkpoint c join {schema}.topic t on t.id = c.topic_id
where c.consumer_id = %(id)s and t.source = %(source)s and t.topic = %(topic)s and c.partition = %(partition)s
for update of c;

-- name: lock_claims
-- Lock the claims of all partitions in one order.
-- Runner processes wait at their next batch, as a single instance does at `lock_checkpoints`.
select from {schema}.partition_claim where consumer_id = %(id)s order by topic_id, partition for no key update;

-- name: end_session
-- End the database session that a fenced instance left behind: a stopped process keeps its locks for ever.
-- Process number and start time must both match, so a newer session with the same number is safe.
select pg_terminate_backend(a.pid) from pg_stat_activity a where a.pid = %(pid)s and a.backend_start = %(start)s;

-- name: end_transaction
-- End the database session that still has the transaction of this id open.
-- Behind a pooler a session that has ended its transaction is somebody else's.
select pg_terminate_backend(a.pid) from pg_stat_activity a
where a.pid = %(pid)s and a.backend_start = %(start)s and a.backend_xid = (%(xid)s::text::xid8)::xid;

-- name: lock_timeout
-- How long a statement of this session waits for a lock at most.
-- Reads a setting.
select current_setting('lock_timeout');

-- name: set_local
-- Change a setting until the end of the transaction.
-- Local: a pooled session never carries it into somebody else's transaction.
select set_config(%(name)s, %(value)s, true);

-- name: transaction_facts
-- What the transaction runs under, and the guard that lets nobody commit it who does not know the token.
-- The transaction id is compared before the commit: another one means that somebody ended the transaction in between. Before floors and tables are read.
select pg_current_xact_id()::text as xid, current_setting('synchronous_commit') as synchronous_commit,
    current_setting('session_replication_role') as replication_role,
    {schema}.guard_transaction(%(token)s) as guarded, {schema}.share_reservations() as phase,
    pg_backend_pid() as backend_pid, (select a.backend_start from pg_stat_activity a where a.pid = pg_backend_pid()) as backend_start;

-- name: own_settings
-- What our own statements depend on: a handler that takes long is no forgotten session, but a host that is gone for a minute leaves no locks.
-- To the end of the transaction: a pooled session never carries it into another one, nor brings us another client's path. Plans cost more than probes.
set local search_path to default;
select set_config('datestyle', 'ISO', true), set_config('array_nulls', 'on', true), set_config('jit', 'off', true),
    set_config('idle_in_transaction_session_timeout', '0', true), set_config('tcp_keepalives_idle', '30', true),
    set_config('tcp_keepalives_interval', '10', true), set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '60000', true),
    case when current_setting('server_version_num')::int >= 170000 then set_config('transaction_timeout', '0', true) end;

-- name: forget_settings
-- Undo what a handler has set: roles first, because the right to reset the rest may hang on them.
-- Inside the transaction; an attempt that is undone takes its settings back by itself.
reset session authorization; reset role; reset all;

-- name: handler_session
-- Under which path and roles a handler left the session, and which table a name is there.
-- Asked under the handler's settings, so that a name is the table that the handler's own statements would find.
select current_setting('search_path') as search_path, current_setting('role') as role,
    nullif(current_setting('session_authorization'), (select usename from pg_stat_activity where pid = pg_backend_pid())) as login,
    (select format('%%I.%%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where c.oid = to_regclass(%(table)s)) as sink;

-- name: handler_aside
-- Undo of what a handler has set all that our COPY and our statements depend on; its other settings stay, which triggers and defaults may read.
-- Roles first, because the right to set the rest may hang on them.
reset session authorization; reset role;
select set_config(name, reset_val, true) from pg_settings where setting <> reset_val and name in (
    'client_encoding', 'DateStyle', 'IntervalStyle', 'TimeZone', 'standard_conforming_strings', 'backslash_quote', 'bytea_output',
    'extra_float_digits', 'xmloption', 'xmlbinary', 'transform_null_equals', 'statement_timeout', 'lock_timeout',
    'session_replication_role', 'row_security', 'synchronous_commit');

-- name: handler_again
-- The path and the roles that `handler_session` has read.
-- To the end of the transaction; the session is cleaned after it.
select case when %(login)s::text is not null then set_config('session_authorization', %(login)s::text, true) end,
    set_config('role', %(role)s, true), set_config('search_path', %(search_path)s, true);

-- name: transaction_check
-- The transaction id and the durability of the coming commit, which is allowed by naming the token.
-- Asked right before the commit, after everything a handler could have done.
select coalesce(pg_current_xact_id_if_assigned()::text, '') as xid, current_setting('synchronous_commit') as synchronous_commit,
    set_config('dedup.commit', %(token)s, true) as allowed;

-- name: fence
-- Share-lock the consumer and read its epoch, and what shows that its tables were restored.
-- A takeover updates the row: it waits for this batch, and this batch can commit only under the epoch that it read here.
select c.id, c.epoch, c.holder_host as host, c.holder_pid as pid, c.taken_at,
    (select string_agg(r.what, '; ') from {schema}.restored r where r.consumer_id = c.id) as restored
from {schema}.consumer c where c.name = %(consumer)s for share of c;

-- name: last_deletion
-- Who has deleted a consumer of this name last, and the epoch that no instance of it is above; no row where none was deleted.
-- Asked after `fence`: what it says there is true for as long as that transaction is open.
select d.epoch, format('%%s at %%s UTC', d.by, to_char(d.decided_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS')) as deleted_by
from {schema}.consumer_deletion d where d.name = %(consumer)s order by d.epoch desc limit 1;

-- name: deletion_under_way
-- The number of a consumer that is being deleted; no row where that was not decided, or everything is gone.
-- Reads only.
select d.consumer_id from {schema}.consumer_deletion d where d.name = %(consumer)s and d.ended_at is null;

-- name: deletion_contents
-- How much there is of a consumer.
-- One snapshot. Before a deletion the consumer is locked by `lock_consumer`, so that nothing comes meanwhile.
select (select count(*) from {schema}.checkpoint p where p.consumer_id = c.id) as checkpoints,
    (select count(*) from {schema}.batch b where b.consumer_id = c.id) as batches,
    (select coalesce(sum(l.letters), 0)::bigint from {schema}.letter_count l where l.consumer = c.name) as letters,
    (select coalesce(sum(l.letters), 0)::bigint from {schema}.letter_count l where l.consumer = c.name and l.status in ('OPEN', 'BLOCKED')) as waiting,
    (select count(*) from {schema}.outbox o where o.consumer_id = c.id)
        + (select coalesce(sum(p.messages), 0)::bigint from {schema}.outbox_page p where p.consumer_id = c.id) as messages,
    (select count(*) from {schema}.outbox o where o.consumer_id = c.id and o.state in (0, 2, 3, 5))
        + (select coalesce(sum(p.messages), 0)::bigint from {schema}.outbox_page p where p.consumer_id = c.id and p.sent_at is null) as unsent,
    (select count(*) from {schema}.consumer_action a where a.consumer_id = c.id) as actions
from {schema}.consumer c where c.name = %(consumer)s;

-- name: begin_deletion
-- Decide that a consumer is deleted.
-- Under `lock_consumer`: no batch is open, and none begins that could commit.
select {schema}.begin_deletion(%(id)s, %(by)s, %(reason)s);

-- name: delete_portion
-- One step of a deletion; null where nothing is left.
-- A transaction of its own. Of two who delete one consumer, one waits for the other at each step.
select {schema}.delete_portion(%(id)s, %(most)s);

-- name: epoch_now
-- The epoch and its holder, without a lock.
-- Used after a lost connection to tell a takeover from an outage.
select id, epoch, holder_host as host, holder_pid as pid, taken_at from {schema}.consumer where name = %(consumer)s;

-- name: lock_checkpoints
-- Lock the checkpoints of the consumer in one order.
-- Waits for a commit whose answer was lost; what is read afterwards includes it. Partitions that it added are caught by `advance`.
select from {schema}.checkpoint where consumer_id = %(id)s order by topic_id, partition for update;

-- name: head
-- The state of a consumer apart from its topics and checkpoints, and who deletes it.
-- Inside a batch it is read after the locks were granted, never in the same statement.
select c.id, c.generation, c.keyspace, c.epoch, p.seq, p.settings, p.query_id, p.batch_id, p.batch_ended, p.gap_accepted, p.spent,
    (select format('%%s at %%s UTC', d.by, to_char(d.decided_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS'))
        from {schema}.consumer_deletion d where d.consumer_id = c.id) as deleted_by
from {schema}.consumer c join {schema}.progress p on p.consumer_id = c.id
where c.name = %(consumer)s;

-- name: topics
-- The topics of a consumer.
-- Inside a batch the consumer is share-locked, and only `amend`, which updates it, changes an incarnation.
select id, source, topic, incarnation, incarnation_id from {schema}.topic where consumer_id = %(id)s;

-- name: add_topic
-- Make a topic known.
-- Two transactions that bring the same topic: one inserts, the other one waits and finds it.
insert into {schema}.topic (consumer_id, source, topic, incarnation) values (%(id)s, %(source)s, %(topic)s, %(incarnation)s)
on conflict (consumer_id, source, topic) do update set incarnation = excluded.incarnation where topic.incarnation <> excluded.incarnation;

-- name: set_incarnation_id
-- Set what the broker calls a topic's present life, or forget it.
-- A person's decision, which has the consumer to itself.
update {schema}.topic set incarnation_id = %(told)s where consumer_id = %(id)s and source = %(source)s and topic = %(topic)s;

-- name: learn_incarnation_id
-- Keep what the broker calls a topic's present life, where that is not known yet.
-- No row comes back where another batch has learnt another id meanwhile.
update {schema}.topic set incarnation_id = %(told)s where id = %(topic_id)s and coalesce(incarnation_id, %(told)s) = %(told)s returning id;

-- name: checkpoints
-- The checkpoints of a consumer.
-- Inside a batch they are locked before they are read, and read before all else: a commit that comes between has moved one, which `advance` sees.
select t.source, t.topic, c.partition, c.sequence_number, c.event_offset, c.enqueued_time, c.query_id, c.log_time, f.floor, c.passed
from {schema}.consumer o
join {schema}.checkpoint c on c.consumer_id = o.id
join {schema}.topic t on t.id = c.topic_id
left join {schema}.reservation_floor f
    on (f.consumer_id, f.keyspace, f.topic_id, f.incarnation, f.partition) = (o.id, o.keyspace, t.id, t.incarnation, c.partition)
where o.name = %(consumer)s;

-- name: seen
-- The positions between first and last that were seen, for each partition asked about.
-- Read after the fence: whoever recorded positions of this consumer has committed or is fenced.
select w.number, lower(r), upper(r) - 1
from unnest(%(topics)s::int[], %(incarnations)s::int[], %(partitions)s::int[], %(firsts)s::bigint[], %(lasts)s::bigint[])
    with ordinality w (topic_id, incarnation, partition, first, last, number)
join {schema}.batch b on b.consumer_id = %(id)s and b.generation >= %(keyspace)s and b.topic_id = w.topic_id
    and b.incarnation = w.incarnation and b.partition = w.partition and b.last_seen >= w.first and b.first_seen <= w.last
cross join lateral unnest(b.seen * int8multirange(int8range(w.first, w.last, '[]'))) r;

-- name: current_reservations
-- The table that takes new reservations, the one that takes them as well, those to be asked, packed or not, and what tells this state from another copy's.
-- Read after `transaction_facts`: as long as that transaction is open, none of these is dropped, and none that it leaves out is written alone.
select g.id, c.id, asked.rows, asked.pages, asked.shifts, asked.filters,
    concat_ws(' ', extract(epoch from g.created_at), g.xmin, extract(epoch from pg_postmaster_start_time()))
from {schema}.reservation_generation g left join {schema}.reservation_generation c on c.closing and c.closed_at is null
cross join lateral (
    select coalesce(array_agg(a.id order by a.id desc) filter (where a.packed_at is null), '{}') as rows,
        coalesce(array_agg(a.id order by a.id desc) filter (where a.packed_at is not null), '{}') as pages,
        coalesce(array_agg(a.page_shift order by a.id desc) filter (where a.packed_at is not null), '{}') as shifts,
        coalesce(array_agg(f.made::text order by a.id desc) filter (where a.packed_at is not null), '{}') as filters
    from {schema}.reservation_generation a left join {schema}.reservation_filter f on f.generation = a.id
    where a.dropped_at is null and (a.purged_at is null or a.phase > %(phase)s)
) asked
where g.closed_at is null and not g.closing;

-- name: filters
-- The filters of these packed tables: name, number of the table, kind, keys, words of a half, parts.
-- One snapshot. A filter that a purge deletes meanwhile has no parts any more.
select f.made::text, f.generation, f.kind, f.keys, f.words, f.parts from {schema}.reservation_filter f where f.made::text = any(%(made)s::text[]);

-- name: filter_parts
-- Some parts of one filter, in their order.
-- One that is gone since, or was stored anew under another name, has none.
select p.words from {schema}.reservation_filter_part p join {schema}.reservation_filter f on f.generation = p.generation and f.made = p.made
where f.made::text = %(made)s and p.part >= %(first)s and p.part < %(last)s order by p.part;

-- name: without_filter
-- The packed tables without a filter, or with one that lacks parts, the oldest first.
-- One snapshot.
select g.id from {schema}.reservation_generation g
where g.packed_at is not null and g.purged_at is null and not coalesce({schema}.filter_is_whole(g.id), false)
order by g.id;

-- name: filtered
-- The stored filters: name, packed table, about the number of its last page, whether all parts are there.
-- One snapshot. The width of a page's number follows from its shift.
select f.made::text, g.id, (2147483647::bigint >> g.page_shift)::int, {schema}.filter_is_whole(g.id)
from {schema}.reservation_filter f join {schema}.reservation_generation g on g.id = f.generation
where g.purged_at is null order by g.id;

-- name: keep_filter
-- Begin to store the filter of a packed table: "begun", "waiting" (somebody packs), "not wanted" (there is one, or the table was purged).
-- In one transaction with its parts: a reader sees all of them or none.
select {schema}.keep_filter(%(number)s, %(kind)s, %(keys)s, %(words)s, %(parts)s);

-- name: keep_filter_part
-- Store one part of a filter.
-- In the transaction of `keep_filter`.
select {schema}.keep_filter_part(%(number)s, %(part)s, %(content)s);

-- name: reservations_about
-- How many reservations these tables have, by their size: 52 bytes a row, 27 a packed key.
-- An estimate, for how much memory a filter of them takes.
select coalesce(sum(pg_relation_size(to_regclass(t.name)) / t.width), 0)::bigint
from unnest(%(tables)s::text[], %(widths)s::int[]) t (name, width);

-- name: table_now
-- Which file a table is in, and how many pages it has.
-- Another file afterwards: the table was rewritten, and its rows may have moved to pages that were read before.
select pg_relation_filenode(%(table)s::regclass), pg_relation_size(%(table)s::regclass) / current_setting('block_size')::int;

-- name: keys_of_pages
-- The keys in some pages of one table of reservations, 16 bytes each.
-- Rows do not move within a file: keys are inserted and deleted, never updated.
select coalesce(string_agg(uuid_send(key), ''::bytea), ''::bytea) from only {child} where ctid >= %(first)s::tid and ctid < %(last)s::tid;

-- name: packed_keys
-- The keys of some pages of one packed table, 16 bytes each, and the number of the last page.
-- By numbers, which never change: a page itself moves when one of its keys is freed.
select coalesce(string_agg(p.keys, ''::bytea), ''::bytea), max(p.page)
from (
    select page, keys from only {child} where page > %(after)s order by page limit %(pages)s
) p;

-- name: held_keys
-- The keys that letters hold, those that edits replaced as well, 16 bytes each.
-- Read after the reservations: a key whose reservation a purge drops in between is held here, or free.
select coalesce(string_agg(uuid_send(d.key), ''::bytea), ''::bytea) from (
    select d.key from {schema}.dead_letter d where d.key is not null and d.holds_key and d.status in ('OPEN', 'BLOCKED', 'DISCARDED')
    union all
    select h.key from {schema}.letter_history h join {schema}.dead_letter d on d.id = h.letter_id
    where h.key is not null and d.holds_key and d.status in ('OPEN', 'BLOCKED', 'DISCARDED')
) d;

-- name: keys_of_letters
-- Of these keys those that letters hold, those that edits replaced as well, and are reserved nowhere: a part of the two statements below.
-- Their snapshot is one: a key that an edit replaces meanwhile is in one of the halves. It was reserved with the payload of the first time.
select d.key, int8send(coalesce(
    (select h.payload_hash from {schema}.letter_history h where h.key = d.key and h.letter_id = d.id order by h.id limit 1), d.payload_hash, 0
))
from {schema}.dead_letter d
where d.key = any(%(keys)s::uuid[]) and d.holds_key and d.status in ('OPEN', 'BLOCKED', 'DISCARDED')
    and not exists (select from {reserved_d} r)
union all
select d.key, int8send(d.payload_hash)
from (
    select distinct on (h.key) h.key, coalesce(h.payload_hash, l.payload_hash, 0) as payload_hash
    from unnest(%(keys)s::uuid[]) k (key) join {schema}.letter_history h on h.key = k.key
    join {schema}.dead_letter l on l.id = h.letter_id and l.key is distinct from h.key
    where h.key is not null and l.holds_key and l.status in ('OPEN', 'BLOCKED', 'DISCARDED')
    order by h.key, h.id
) d
where not exists (select from {reserved_d} r);

-- name: known_keys
-- Which of these keys are reserved, or held by a letter (also since an edit replaced them), as 16 bytes of key and 8 of payload hash each.
-- Asks the tables that are not given up, by name: asking their parent would lock all. "limit 1" keeps it one index probe per key and table.
select coalesce(string_agg(uuid_send(f.key) || f.hash, ''::bytea), ''::bytea)
from (
    select k.key, r.hash
    from unnest(%(keys)s::uuid[], %(heads)s::bigint[]) k (key, head)
    cross join lateral (select r.hash from {reserved_k} r limit 1) r
    {apart}
    union all
    {held}
) f;

-- name: likely_keys
-- As `known_keys`, of keys most of which are known: the current table is asked first.
-- Most duplicates come soon after the first, and the indexes of the older tables are on disk. "limit 1" ends at the first table that has the key.
select coalesce(string_agg(uuid_send(f.key) || f.hash, ''::bytea), ''::bytea)
from (
    select k.key, r.hash
    from unnest(%(keys)s::uuid[], %(heads)s::bigint[]) k (key, head)
    cross join lateral (
        select int8send(c.payload_hash) as hash from {child} c where c.key = k.key
        union all
        select r.hash from {reserved_k} r
        limit 1
    ) r
    {apart}
    union all
    {held}
) f;

-- name: reserve_one_by_one
-- Reserve the keys that nobody has; returns those that were new, 16 bytes each.
-- Waits where another transaction holds a key: if that one commits, the key is not returned, if it fails, the key is ours. Sorted, so nobody waits in a circle.
with mine as (
    insert into {child} (key, payload_hash)
    select k.key, k.payload_hash from unnest(%(keys)s::uuid[], %(hashes)s::bigint[]) k (key, payload_hash) order by k.key
    on conflict (key) do nothing
    returning key
)
select coalesce(string_agg(uuid_send(key), ''::bytea), ''::bytea) from mine;

-- name: sink
-- A table as the handler named it: name, kind, whether an earlier transaction left it, what of its partitions does not last, which table it was before.
-- Looked up inside the transaction, so a table that the handler has just made is found. A row about a system column tells when its table was made.
select c.oid::bigint, n.nspname, c.relname, c.relkind, c.relpersistence,
    c.relpersistence = 't' and exists (
        select from pg_attribute a where a.attrelid = c.oid and a.attname = 'tableoid' and age(a.xmin) > 0
    ) as left_behind,
    (
        select min(format('%%I.%%I', m.nspname, q.relname) || case when q.relkind = 'f' then ' is a foreign table' else ' is UNLOGGED' end)
        from pg_class q join pg_namespace m on m.oid = q.relnamespace
        where q.oid in (select relid from pg_partition_tree(c.oid) where c.relkind = 'p' union all select c.oid)
            and (q.relkind = 'f' or q.relpersistence = 'u')
    ) as fleeting,
    (
        select s.relation::bigint from {schema}.sink s
        where s.consumer_id = %(consumer)s and s.generation = %(generation)s and s.name = format('%%I.%%I', n.nspname, c.relname)
    ) as before
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where c.oid = to_regclass(%(table)s);

-- name: sinks_apart
-- Whether these names are of as many tables, none of which has a trigger (a foreign key has some, on both sides), a rule or partitions.
-- Looked up as the handler's session finds names. A trigger that somebody adds afterwards sees rows of a batch in another order, and all of them.
select count(distinct c.oid) = cardinality(%(tables)s::text[])
from pg_class c where c.oid in (select to_regclass(t) from unnest(%(tables)s::text[]) t)
    and c.relkind = 'r' and not c.relhastriggers and not c.relhasrules;

-- name: note_sink
-- Note which table a consumer writes to under a name.
-- In the batch's transaction. Two that come at once wait for each other, once per sink.
insert into {schema}.sink as s (consumer_id, name, generation, relation)
select %(consumer)s, format('%%I.%%I', n.nspname, c.relname), %(generation)s, c.oid
from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = %(oid)s::bigint::oid
on conflict (consumer_id, name) do update set generation = excluded.generation, relation = excluded.relation
where (s.generation, s.relation) is distinct from (excluded.generation, excluded.relation);

-- name: sinks_of
-- The names of the tables that a consumer has written to, and which table has each name now.
-- Reads only. A batch that writes to another table meanwhile is not among them.
select name, to_regclass(name)::oid::bigint from {schema}.sink where consumer_id = %(consumer)s order by name;

-- name: accept_sink
-- Take the table that is under a name now for the one that a consumer writes to.
-- Under `lock_consumer`: no batch is open.
update {schema}.sink s set generation = %(generation)s, relation = %(oid)s::bigint::oid
where s.consumer_id = %(consumer)s
    and s.name = (select format('%%I.%%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
                  where c.oid = %(oid)s::bigint::oid);

-- name: sink_columns
-- The columns of a sink with all that decides whether a row fits; domains, domains over them and arrays are followed to the types below.
-- The COPY that follows locks the table. It is asked again behind that: an ALTER TABLE may have ended between the two.
with recursive below (number, type, modifier, dimensions, is_element, is_plain) as (
    select attnum, atttypid, atttypmod, attndims::int, false, true
    from pg_attribute where attrelid = %(oid)s::bigint::oid and attnum > 0 and not attisdropped
    union all
    select u.number, case when t.typtype = 'd' then t.typbasetype else t.typelem end,
        case when t.typtype = 'd' then t.typtypmod else u.modifier end,
        case when t.typtype = 'd' and not u.is_element then t.typndims else u.dimensions end,
        u.is_element or t.typtype <> 'd', t.typtype <> 'd'
    from below u join pg_type t on t.oid = u.type
    where t.typtype = 'd' or (t.typcategory = 'A' and t.typelem <> 0 and not u.is_element)
)
select a.attname as name, format_type(a.atttypid, a.atttypmod) as type, b.typname as base, b.typtype as kind, e.typname as element,
    coalesce(le.modifier, lb.modifier) as modifier,
    a.attnotnull as not_null, a.atthasdef or a.attidentity <> '' as has_default, a.attgenerated <> '' as generated,
    coalesce(le.is_plain, true) as plain_element, greatest(lb.dimensions, 1) as dimensions
from pg_attribute a
join (below lb join pg_type b on b.oid = lb.type and b.typtype <> 'd') on lb.number = a.attnum and not lb.is_element
left join (below le join pg_type e on e.oid = le.type and e.typtype <> 'd') on le.number = a.attnum and le.is_element
where a.attrelid = %(oid)s::bigint::oid
order by a.attnum;

-- name: sink_keys
-- The columns of each unique index that ON CONFLICT can go by.
-- Looked up inside the transaction; an index that is dropped in between makes the INSERT fail, never write wrongly.
select array(
    select a.attname::text from unnest(i.indkey::int2[]) with ordinality k (number, place)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.number where k.place <= i.indnkeyatts
) as columns
from pg_index i
where i.indrelid = %(oid)s::bigint::oid and i.indisunique and i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null;

-- name: merge_stage
-- A place for rows that are to be merged, with the types of the sink and none of its rules.
-- Of this session alone, and gone at the end of the transaction.
create temporary table {staged} on commit drop as select {columns} from {sink} with no data;

-- name: merge_ranks
-- In which order this table's column has these texts: equal values have one rank.
-- The part without rows gives the others the column's type and collation.
select dense_rank() over (order by v) from (
    select null::bigint n, {column} v from {sink} where false
    union all select n, x::{type} from unnest(%(texts)s::text[]) with ordinality u (x, n)
) r order by n;

-- name: merge_rows
-- Insert or update by key.
-- Waits for another transaction with the same key, and compares with what that one committed. In the order of keys: nobody waits in a circle.
insert into {sink} as t ({columns}) overriding system value select {columns} from {staged} order by {keys}
on conflict ({keys}) do {update};

-- name: merge_delete
-- Delete by key.
-- Compares with the row as it is once its lock is granted.
delete from {sink} t using {staged} excluded where {same} and {newer};

-- name: merge_end
-- Let the next merge of the same transaction begin with an empty place.
-- Of this session alone.
drop table {staged};

-- name: parked
-- Which of these letters are kept already, and their keys.
-- A letter parked by somebody else in the meantime fails the COPY, and the batch is planned again. "limit 1": one index probe each.
select k.id, uuid_send(d.key) as key, d.holds_key
from unnest(%(ids)s::text[]) k (id)
cross join lateral (select d.key, d.holds_key from {schema}.dead_letter d where d.id = k.id limit 1) d;

-- name: note
-- Count duplicates on the letters that hold these keys.
-- A letter that somebody is at work on is not waited for: its duplicates are appended to letter_duplicate.
with wanted as materialized (
    select d.id, k.count
    from unnest(%(keys)s::uuid[], %(counts)s::bigint[]) k (key, count)
    join {schema}.dead_letter d on d.key = k.key and d.holds_key and d.status in ('OPEN', 'BLOCKED', 'DISCARDED')
), free as materialized (
    select d.id from {schema}.dead_letter d where d.id = any(array(select id from wanted)) order by d.id for no key update skip locked
), counted as (
    update {schema}.dead_letter d set duplicates = d.duplicates + w.count from wanted w join free f using (id) where d.id = w.id
)
insert into {schema}.letter_duplicate (letter_id, duplicates) select id, count from wanted where id not in (select id from free);

-- name: fence_letters
-- Keep a person's decision about the state, a reset above all, from coming between, and read what shows that the tables were restored.
-- The weakest row lock: a takeover and the stream go on; only `lock_consumer` waits for it, and it for that.
select c.id, (select string_agg(r.what, '; ') from {schema}.restored r where r.consumer_id = c.id) as restored
from {schema}.consumer c where c.name = %(consumer)s for key share of c;

-- name: lock_letters
-- Of these letters those that nobody else is at work on; now nobody else can change them.
-- Never waits, so two who send letters through again share them out. What the stream does to letters does not need this lock.
select {columns} from {schema}.dead_letter d where d.id = any(%(ids)s) order by d.id for update skip locked;

-- name: change_letters
-- Set some columns of letters that are locked.
-- The letters are ours since `lock_letters`; their sequences are locked before, their neighbours in the sequence afterwards.
update {schema}.dead_letter d set {assignments} from (select * from unnest({arrays}) u ({names})) u where d.id = u.id;

-- name: erase_letters
-- Erase what letters that are locked hold of their events. Position, kind, status, counts, times and hashes stay.
-- One that waits for somebody stays as it is: who erases has seen under the lock that none of these does.
update {schema}.dead_letter d
set event_key = null, idempotence_key = null, body = null, body_size = null, body_sha256 = null, property_names = null, property_values = null,
    reason = %(reason)s, error_message = null, stack = null, sequence_key = null, extras = null
where d.id = any(%(ids)s) and d.status not in ('OPEN', 'BLOCKED');

-- name: erase_history
-- Erase what the history of letters tells of their events. What was done, when and by whom stays, and the hashes of keys.
-- In the transaction of `erase_letters`: the letters are locked, so nobody appends to their history meanwhile.
update {schema}.letter_history h
set error_message = null, stack = null, body = null, idempotence_key = null, reason = %(reason)s
where h.letter_id = any(%(ids)s) and (h.reason is distinct from %(reason)s) and h.action <> 'FORGOTTEN';

-- name: named
-- Letters of a consumer that show this idempotence key, or that before an edit showed it or had one of these hashes.
-- One snapshot. The first half is found by an index; edits are few, and the second half reads the history for them.
select d.id from {schema}.dead_letter d
where d.consumer = %(consumer)s and d.idempotence_key = %(key)s and left(d.idempotence_key, 100) = left(%(key)s, 100)
union
select d.id from {schema}.letter_history h join {schema}.dead_letter d on d.id = h.letter_id
where (h.idempotence_key = %(key)s or h.key = any(%(hashes)s::uuid[])) and d.consumer = %(consumer)s
order by id;

-- name: keep_keys
-- Reserve again what reprocessed letters held, keys that edits replaced as well, where a purge has dropped the reservation.
-- From now on the reservation alone says that a key is decided. After `change_letters`; where two tables take reservations, once for each.
insert into {child} (key, payload_hash)
select d.key, d.payload_hash from (
    select c.key, coalesce(c.payload_hash, 0) as payload_hash, null::bigint as replaced
    from {schema}.dead_letter c where c.id = any(%(ids)s) and c.status in ('REPROCESSED', 'DUPLICATE')
    union all
    select h.key, coalesce(h.payload_hash, c.payload_hash, 0), h.id
    from {schema}.letter_history h join {schema}.dead_letter c on c.id = h.letter_id
    where h.letter_id = any(%(ids)s) and c.status in ('REPROCESSED', 'DUPLICATE')
) d
where d.key is not null and not exists (select from {reserved_d} r)
order by d.key, d.replaced
on conflict (key) do nothing;

-- name: note_payloads
-- Keep with the keys that an edit has just replaced which payload they were reserved with: another attempt gives the letter another one.
-- The letters are locked, and this transaction has written these rows of their history.
update {schema}.letter_history h set payload_hash = d.payload_hash
from {schema}.dead_letter d
where h.letter_id = any(%(ids)s) and d.id = h.letter_id and h.key is not null and h.payload_hash is null;

-- name: blocked
-- Which of these sequences are blocked, and the last letter of each.
-- Locks the rows in one order: one that is being released is waited for, and then gone or about its next letter.
select uuid_send(sequence) as sequence, letter, kind from {schema}.blocked_sequence
where sequence = any(%(sequences)s::uuid[]) order by sequence for update;

-- name: sequences_of
-- The sequences of these letters.
-- Of letters that this transaction has locked or written.
select distinct sequence from {schema}.dead_letter where id = any(%(ids)s) and sequence is not null order by sequence;

-- name: lock_sequences
-- Make sure that each of these sequences has its row, and lock it; returns those that had one.
-- Whoever is at work on a sequence holds its row, so what is read in the next statement stays true. In one order: nobody waits in a circle.
insert into {schema}.blocked_sequence as b (sequence, consumer, letter, kind)
select s.sequence, %(consumer)s, '', '' from unnest(%(sequences)s::uuid[]) s (sequence) order by s.sequence
on conflict (sequence) do update set letter = b.letter
returning case when b.letter <> '' then b.sequence end;

-- name: link_letters
-- Put these letters, and those right behind them, in order: the first waiting letter of a sequence is open, each other one blocked by the one before.
-- Under `lock_sequences`, and after these letters have their new status. By position, so a late event finds its place.
with touched as materialized (
    select sequence, incarnation, sequence_number, part, id from {schema}.dead_letter where id = any(%(ids)s) and sequence is not null
), affected as materialized (
    select d.sequence, d.incarnation, d.sequence_number, d.part, d.id
    from touched t join {schema}.dead_letter d on d.id = t.id and d.status in ('OPEN', 'BLOCKED')
    union
    select n.* from touched t cross join lateral (
        select d.sequence, d.incarnation, d.sequence_number, d.part, d.id from {schema}.dead_letter d
        where d.sequence = t.sequence and d.status in ('OPEN', 'BLOCKED')
            and (d.incarnation, d.sequence_number, d.part, d.id) > (t.incarnation, t.sequence_number, t.part, t.id)
        order by d.incarnation, d.sequence_number, d.part, d.id limit 1
    ) n
)
update {schema}.dead_letter d set status = case when c.before is null then 'OPEN' else 'BLOCKED' end, blocked_by = c.before
from (
    select a.id, (
        select p.id from {schema}.dead_letter p where p.sequence = a.sequence and p.status in ('OPEN', 'BLOCKED')
            and (p.incarnation, p.sequence_number, p.part, p.id) < (a.incarnation, a.sequence_number, a.part, a.id)
        order by p.incarnation desc, p.sequence_number desc, p.part desc, p.id desc limit 1
    ) as before from affected a
) c
where d.id = c.id and (d.status, d.blocked_by) is distinct from (case when c.before is null then 'OPEN' else 'BLOCKED' end, c.before);

-- name: reorder_sequences
-- Note the last waiting letter of each of these sequences; a sequence without one is free.
-- Under `lock_sequences`. Whoever waits for a row that is deleted here finds that nothing blocks any more.
with last as materialized (
    select s.sequence, l.id, l.kind, l.consumer from unnest(%(sequences)s::uuid[]) s (sequence)
    left join lateral (
        select d.id, d.kind, d.consumer from {schema}.dead_letter d where d.sequence = s.sequence and d.status in ('OPEN', 'BLOCKED')
        order by d.incarnation desc, d.sequence_number desc, d.part desc, d.id desc limit 1
    ) l on true
), free as (
    delete from {schema}.blocked_sequence b using last l where b.sequence = l.sequence and l.id is null
)
update {schema}.blocked_sequence b set letter = l.id, kind = l.kind, consumer = l.consumer
from last l where b.sequence = l.sequence and l.id is not null and (b.letter, b.kind) is distinct from (l.id, l.kind);

-- name: free_keys
-- Forget reservations; one that view `restored` looks for is looked for no more.
-- In the transaction that takes the key from its letter: the key is held, or free, never neither and never both.
with unmarked as (
    update {schema}.progress set reserved = null, written_by = pg_current_xact_id() where reserved = any(%(keys)s::uuid[])
)
select {schema}.free_reservations(%(keys)s::uuid[]);

-- name: transaction_status
-- What became of a transaction: in progress, committed or aborted.
-- Read from the server's own record of its commits, for a transaction that leaves no other trace of itself.
select pg_xact_status(%(xid)s::text::xid8);

-- name: crash_marker
-- What a consumer was about to try.
-- One row, one snapshot.
select t.marker from {schema}.crash_marker t join {schema}.consumer c on c.id = t.consumer_id where c.name = %(consumer)s and t.scope = %(scope)s;

-- name: crash_markers
-- What slices of a consumer were about to try, and no batch of theirs was recorded since.
-- One snapshot, while none of them runs.
select t.scope, t.marker from {schema}.crash_marker t join {schema}.consumer c on c.id = t.consumer_id
where c.name = %(consumer)s and t.marker is not null and t.scope not in ('', %(note)s);

-- name: set_crash_marker
-- Note what a consumer is about to try.
-- Outside the batch, so that it outlives it, and without waiting for the disk: it need not outlive the server.
with fast as materialized (
    select set_config('synchronous_commit', 'off', true) as lazy, set_config('lock_timeout', '10s', true) as impatient
)
insert into {schema}.crash_marker as t (consumer_id, scope, marker, at)
select c.id, %(scope)s, %(marker)s, clock_timestamp() from {schema}.consumer c, fast where c.name = %(consumer)s and fast.lazy <> '' and fast.impatient <> ''
on conflict (consumer_id, scope) do update set marker = excluded.marker, at = excluded.at;

-- name: bump
-- Count one more decision, say by which attempt, and read what the commits before this one used of the budget; leave what view `restored` looks for.
-- The row stays locked until the commit: an instance that asks what became of a lost commit waits for the answer, and nobody else uses of the budget.
update {schema}.progress p
set seq = p.seq + 1, attempt = %(attempt)s, written_by = pg_current_xact_id(), epoch = %(epoch)s, generation = %(generation)s,
    recorded = case when %(recorded)s then p.seq + 1 else p.recorded end,
    reserved = coalesce(%(reserved)s::uuid, p.reserved), reserved_in = coalesce(%(reserved_in)s::int, p.reserved_in),
    page = (select page from {schema}.last_page)
where p.consumer_id = %(id)s returning p.seq, p.spent;

-- name: record
-- Keep what a batch leaves: its settings, query and batch, and what is used of the budget. What was being tried is done, if anything was.
-- In the batch's transaction, after `bump`: `spent` is what that returned and what this batch uses beyond it, as runners commit side by side.
with tried as (
    update {schema}.crash_marker set marker = null where consumer_id = %(id)s and scope = %(scope)s and marker is not null and %(tried)s
)
update {schema}.progress p
set settings = %(settings)s, query_id = %(query_id)s, batch_id = %(batch_id)s, batch_ended = %(batch_ended)s,
    gap_accepted = p.gap_accepted and %(joined)s,
    spent = %(spent)s
where p.consumer_id = %(id)s;

-- name: add_batch
-- Keep the record of one chunk and partition.
-- In the batch's transaction, after the fence: ranges of two records never overlap.
insert into {schema}.batch (
    consumer_id, generation, topic_id, incarnation, partition, query_id, batch_id, chunk, epoch, seq, attempt, first_seen, last_seen,
    seen, duplicates, skipped, late, delivered, redelivered, processed, duplicate, skipped_rows, dead_lettered, reserved, committed_at
) values (
    %(id)s, %(generation)s, %(topic_id)s, %(incarnation)s, %(partition)s, %(query_id)s, %(batch_id)s, %(chunk)s, %(epoch)s, %(seq)s, %(attempt)s,
    lower(%(seen)s::int8multirange), upper(%(seen)s::int8multirange) - 1,
    %(seen)s, %(duplicates)s, %(skipped)s, %(late)s, %(delivered)s, %(redelivered)s, %(processed)s, %(duplicate)s, %(skipped_rows)s,
    %(dead_lettered)s, %(reserved)s, clock_timestamp()
);

-- name: advance
-- Set a checkpoint, if it stands where the batch has read it.
-- No row comes back where it stands elsewhere: another transaction was first, and the batch is planned again.
insert into {schema}.checkpoint as c (consumer_id, topic_id, partition, sequence_number, event_offset, enqueued_time, query_id, log_time)
values (%(id)s, %(topic_id)s, %(partition)s, %(sequence_number)s, %(offset)s, %(enqueued_time)s, %(query_id)s, %(log_time)s)
on conflict (consumer_id, topic_id, partition) do update
set sequence_number = excluded.sequence_number, event_offset = excluded.event_offset, enqueued_time = excluded.enqueued_time,
    query_id = excluded.query_id, log_time = excluded.log_time
where c.sequence_number = %(expected)s and c.sequence_number <= excluded.sequence_number
returning partition;

-- name: committed_attempt
-- What became of a commit whose answer was lost: whether the last decision is this attempt's, or a batch record names it.
-- Read after `lock_progress`: by then that transaction has ended one way or the other.
select coalesce(p.attempt = %(attempt)s, false)
    or exists (select from {schema}.batch b where b.consumer_id = p.consumer_id and b.attempt = %(attempt)s)
from {schema}.progress p where p.consumer_id = %(id)s;

-- name: lock_progress
-- Wait until the transaction that updated this row last has ended.
-- A statement of its own: the one after it sees what that transaction committed.
select from {schema}.progress where consumer_id = %(id)s for update;

-- name: lock_consumer
-- Lock a consumer for a person's decision, and read what shows that its tables were restored.
-- Waits for open batches and open transactions of letters, and makes new ones wait: the decision is between two, never inside one.
select c.id, (select string_agg(r.what, '; ') from {schema}.restored r where r.consumer_id = c.id) as restored
from {schema}.consumer c where c.name = %(consumer)s for update of c;

-- name: amend_consumer
-- Set the lives of a consumer; an epoch that was given already is not given again.
-- Under `lock_consumer`.
update {schema}.consumer
set generation = %(generation)s, keyspace = %(keyspace)s,
    epoch = greatest(epoch, (select p.epoch from {schema}.progress p where p.consumer_id = consumer.id))
where id = %(id)s;

-- name: amend_progress
-- Set what the last decision left.
-- Under `lock_consumer`. What view `restored` looks for is as it is here: a person has decided to go on from it.
update {schema}.progress p
set seq = p.seq + 1, written_by = pg_current_xact_id(), epoch = c.epoch, generation = c.generation, settings = %(settings)s,
    query_id = %(query_id)s, batch_id = %(batch_id)s, gap_accepted = %(gap_accepted)s, spent = %(spent)s,
    recorded = case when %(anew)s then null else p.recorded end, reserved = case when %(anew)s then null else p.reserved end,
    reserved_in = case when %(anew)s then null else p.reserved_in end,
    page = case when %(anew)s then (select page from {schema}.last_page) else p.page end
from {schema}.consumer c
where p.consumer_id = %(id)s and c.id = p.consumer_id;

-- name: drop_checkpoints
-- Forget all checkpoints of a consumer; those that stay are written again.
-- Under `lock_consumer`.
delete from {schema}.checkpoint where consumer_id = %(id)s;

-- name: put_checkpoint
-- Write a checkpoint as a person decided it.
-- Under `lock_consumer`, after `drop_checkpoints`.
insert into {schema}.checkpoint (
    consumer_id, topic_id, partition, sequence_number, event_offset, enqueued_time, query_id, log_time, passed
) values (
    %(id)s, %(topic_id)s, %(partition)s, %(sequence_number)s, %(offset)s, %(enqueued_time)s, %(query_id)s, %(log_time)s, %(passed)s
);

-- name: put_floor
-- Say up to where reservations of a partition may have been purged.
-- Under `lock_consumer`. A purge, which raises floors, may wait for this row, and this for that: no command of a person changes floors.
insert into {schema}.reservation_floor (consumer_id, keyspace, topic_id, incarnation, partition, floor)
select c.id, c.keyspace, t.id, t.incarnation, %(partition)s, %(floor)s
from {schema}.consumer c join {schema}.topic t on t.id = %(topic_id)s where c.id = %(id)s
on conflict (consumer_id, keyspace, topic_id, incarnation, partition) do update set floor = excluded.floor;

-- name: add_action
-- Keep who changed the state, and why.
-- In the transaction of the change.
insert into {schema}.consumer_action (consumer_id, by, reason, before, after) values (%(id)s, %(by)s, %(reason)s, %(before)s, %(after)s);

-- name: consumers
-- The names of all consumers.
-- One snapshot.
select name from {schema}.consumer order by name collate "C";

-- name: batches
-- Batch records of a consumer, all or those of some decisions and positions, with their ranges as two arrays of bounds each.
-- One snapshot.
select t.source, t.topic, b.incarnation, b.partition, b.query_id, b.batch_id, b.chunk,
    array(select lower(r) from unnest(b.seen) r) as seen_first, array(select upper(r) - 1 from unnest(b.seen) r) as seen_last,
    array(select lower(r) from unnest(b.duplicates) r) as duplicates_first, array(select upper(r) - 1 from unnest(b.duplicates) r) as duplicates_last,
    array(select lower(r) from unnest(b.skipped) r) as skipped_first, array(select upper(r) - 1 from unnest(b.skipped) r) as skipped_last,
    array(select lower(r) from unnest(b.late) r) as late_first, array(select upper(r) - 1 from unnest(b.late) r) as late_last,
    b.delivered, b.redelivered, b.processed, b.duplicate, b.skipped_rows, b.dead_lettered, b.reserved,
    b.generation, b.epoch, b.seq, b.committed_at
from {schema}.batch b
join {schema}.topic t on t.id = b.topic_id
join {schema}.consumer c on c.id = b.consumer_id
where c.name = %(consumer)s and b.seq > %(after)s and b.seq <= %(until)s
    and (%(topic)s::text is null or (t.source = %(source)s and t.topic = %(topic)s and b.partition = %(partition)s
        and b.last_seen >= %(first)s and b.first_seen <= %(last)s))
order by b.seq, t.source, t.topic, b.partition;

-- name: letter_place
-- Where a letter stands in position order.
-- One row; a letter never moves.
select consumer, source, topic, incarnation, partition, sequence_number, part, id from {schema}.dead_letter where id = %(after)s;

-- name: letters
-- Dead letters in position order: {found} are those that match, of each half and each place no more than a page.
-- One snapshot.
select {columns} from ({found}) d
order by d.consumer, d.source, d.topic, d.incarnation, d.partition, d.sequence_number, d.part, d.id
limit %(limit)s;

-- name: letters_of_half
-- Letters of one status half that match; {half} is the condition of that half's index by position, {chosen} are the others.
-- Part of `letters`. Pages begin behind a place, so a page costs the same wherever it is.
select {needed} from {schema}.dead_letter d
where {half} and {chosen}
order by d.consumer, d.source, d.topic, d.incarnation, d.partition, d.sequence_number, d.part, d.id
limit %(limit)s

-- name: letters_of_places
-- The same where no leading column of the index is given: its topics are found one probe each, then each topic's letters.
-- Part of `letters`. {places} are the conditions of the topics.
select d.* from (
    with recursive place as (
        (
            select d.consumer, d.source, d.topic, d.incarnation from {schema}.dead_letter d
            where {half} order by d.consumer, d.source, d.topic, d.incarnation limit 1
        )
        union all
        select n.* from place p cross join lateral (
            select d.consumer, d.source, d.topic, d.incarnation from {schema}.dead_letter d
            where {half} and (d.consumer, d.source, d.topic, d.incarnation) > (p.consumer, p.source, p.topic, p.incarnation)
            order by d.consumer, d.source, d.topic, d.incarnation limit 1
        ) n
    )
    select * from place
) p
cross join lateral (
    select {needed} from {schema}.dead_letter d
    where (d.consumer, d.source, d.topic, d.incarnation) = (p.consumer, p.source, p.topic, p.incarnation) and {half} and {chosen}
    order by d.partition, d.sequence_number, d.part, d.id
    limit %(limit)s
) d
where {places}

-- name: groups
-- Letters by fingerprint, of consumers, kinds and statuses as a whole: counts from letter_count, the rest by one index probe each.
-- One snapshot: a statement's letters and what it appended to letter_count become visible together.
with counted as (
    select d.fingerprint, d.kind, d.consumer, d.status, sum(d.letters)::bigint as letters from {schema}.letter_count d
    where {chosen}
    group by d.fingerprint, d.kind, d.consumer, d.status having sum(d.letters) > 0
), largest as (
    select fingerprint, kind, sum(letters)::bigint as letters from counted group by fingerprint, kind order by 3 desc, 1, 2 limit %(limit)s
)
select g.fingerprint, g.kind, g.letters, min(f.first_failed_at) as first_failed_at, max(l.last_failed_at) as last_failed_at,
    (array_agg(l.id order by l.last_failed_at desc, l.id))[1] as example, (array_agg(l.reason order by l.last_failed_at desc, l.id))[1] as reason
from largest g
join counted c using (fingerprint, kind)
cross join lateral (
    select least(
        (select min(d.last_failed_at) from {schema}.dead_letter d where (d.fingerprint, d.kind, d.consumer, d.status) = (c.fingerprint, c.kind, c.consumer, c.status)),
        (select min(d.first_failed_at) from {schema}.dead_letter d where (d.fingerprint, d.kind, d.consumer, d.status) = (c.fingerprint, c.kind, c.consumer, c.status)
            and d.first_failed_at <> d.last_failed_at)
    ) as first_failed_at
) f
cross join lateral (
    select d.last_failed_at, d.id, d.reason from {schema}.dead_letter d
    where (d.fingerprint, d.kind, d.consumer, d.status) = (c.fingerprint, c.kind, c.consumer, c.status) order by d.last_failed_at desc limit 1
) l
group by g.fingerprint, g.kind, g.letters
order by g.letters desc, g.fingerprint, g.kind;

-- name: groups_by_reading
-- Letters by fingerprint, whatever the selection: reads all that match.
-- One snapshot.
with chosen as materialized (
    select d.id, d.fingerprint, d.kind, d.first_failed_at, d.last_failed_at from {schema}.dead_letter d
    where {chosen}
), largest as (
    select fingerprint, kind, count(*) as letters, min(first_failed_at) as first_failed_at, max(last_failed_at) as last_failed_at
    from chosen group by fingerprint, kind order by 3 desc, 1, 2 limit %(limit)s
), example as (
    select c.fingerprint, c.kind, min(c.id) as id from chosen c join largest g using (fingerprint, kind, last_failed_at) group by 1, 2
)
select g.fingerprint, g.kind, g.letters, g.first_failed_at, g.last_failed_at, e.id as example, d.reason
from largest g join example e using (fingerprint, kind) join {schema}.dead_letter d on d.id = e.id
order by g.letters desc, g.fingerprint, g.kind;

-- name: history
-- What happened to letters, to each of them oldest first.
-- One snapshot.
select letter_id, at, action, by, reason, error_type, error_message, stack, body, uuid_send(key) as key, idempotence_key, reserved
from {schema}.letter_history where letter_id = any(%(ids)s) order by letter_id, at, id;

-- name: count_reservations
-- How many keys are reserved, and how many of them are in tables that never took reservations at one time.
-- One snapshot; reads all of them. While a table is closing a reservation is in it and in the next one.
select count(*), count(*) filter (where k.last > k.first + 1)
from (select min(r.generation) as first, max(r.generation) as last from {schema}.reservation_key r group by r.key) k;

-- name: expected_reservations
-- How many reservations the batch records and the letters' histories of all consumers tell of, and whether some were purged.
-- One snapshot with `count_reservations` when both run in one repeatable-read transaction.
select (select coalesce(sum(reserved), 0)::bigint from {schema}.batch)
        + (select coalesce(sum(reserved), 0)::bigint from {schema}.letter_history where reserved <> 0)
        + (select coalesce(sum(reserved), 0)::bigint from {schema}.consumer_deletion),
    exists (select from {schema}.reservation_generation where purged_at is not null),
    (select count(*) from {schema}.consumer) + (select count(*) from {schema}.consumer_deletion d where d.ended_at is not null);

-- name: lock_reservations
-- Keep tables of reservations from being dropped to the end of the transaction.
-- Before its snapshot is taken: in one that is older rows are gone, and the pages in their place are not there yet.
lock table {schema}.reservation, {schema}.reservation_page in access share mode;

-- name: contradictions
-- Records that cannot be: decided after the last decision, or under an epoch that was never taken; letters whose held key is not reserved.
-- Every decision leaves a batch record, an empty chunk's too, or is a person's; a purge merges records. One snapshot.
select 'batch record with seq ' || b.seq || ', but the last decision is ' || p.seq
from {schema}.batch b join {schema}.progress p using (consumer_id) join {schema}.consumer c on c.id = b.consumer_id
where c.name = %(consumer)s and b.seq > p.seq
union all
select 'batch record with epoch ' || b.epoch || ', but the newest epoch is ' || c.epoch
from {schema}.batch b join {schema}.consumer c on c.id = b.consumer_id
where c.name = %(consumer)s and b.epoch > c.epoch
union all
select p.seq || ' decisions were made, ' || r.known || ' are on record'
from {schema}.consumer c join {schema}.progress p on p.consumer_id = c.id
cross join lateral (
    select (select count(distinct b.seq) from {schema}.batch b where b.consumer_id = c.id)
        + (select count(*) from {schema}.consumer_action a where a.consumer_id = c.id) as known
) r
where c.name = %(consumer)s and p.seq <> r.known and not exists (select from {schema}.reservation_generation where purged_at is not null)
union all
select 'letter ' || d.id || ' holds a key that is not reserved'
from {schema}.dead_letter d
where d.consumer = %(consumer)s and d.holds_key and d.status in ('OPEN', 'BLOCKED', 'DISCARDED')
    and not exists (
        select from {schema}.reservation r where r.key = d.key
        union all
        select from {schema}.reservation_generation g where g.packed_at is not null and {schema}.is_reserved(g.id, d.key)
    )
    and not exists (select from {schema}.reservation_generation where purged_at is not null);

-- name: restore_contradictions
-- What shows that tables of a consumer were restored to an older time: all of them, or some.
-- One snapshot with the other checks.
select 'the tables were restored: ' || r.what
from {schema}.restored r join {schema}.consumer c on c.id = r.consumer_id
where c.name = %(consumer)s
union all
select 'letter ' || d.id || ' is ' || d.status || ', but it is on record as ' || h.action
from {schema}.dead_letter d
cross join lateral (select h.action from {schema}.letter_history h where h.letter_id = d.id order by h.id desc limit 1) h
where d.consumer = %(consumer)s and d.status in ('OPEN', 'BLOCKED') and h.action in ('REPROCESSED', 'DUPLICATE', 'DISCARDED');

-- name: order_contradictions
-- Sequences whose letters are not in order, or that are noted as blocked by another letter than their last one.
-- One snapshot with the other checks.
with waiting as (
    select d.id, d.status, d.blocked_by, d.sequence, lag(d.id) over w as before, last_value(d.id) over w as last, row_number() over w as place
    from {schema}.dead_letter d
    where d.consumer = %(consumer)s and d.status in ('OPEN', 'BLOCKED') and d.sequence is not null
    window w as (partition by d.sequence order by d.incarnation, d.sequence_number, d.part, d.id
        rows between unbounded preceding and unbounded following)
)
select 'letter ' || id || ' is ' || status || coalesce(' behind ' || blocked_by, '') || ', but the one before it in its sequence is '
    || coalesce(before, 'none')
from waiting
where (status, blocked_by) is distinct from (case when before is null then 'OPEN' else 'BLOCKED' end, before)
union all
select 'sequence ' || coalesce(b.sequence, w.sequence) || ' is noted as blocked by ' || coalesce(b.letter, 'none') || ', but its last letter is '
    || coalesce(w.last, 'none')
from (select sequence, letter from {schema}.blocked_sequence where consumer = %(consumer)s) b
full join (select sequence, last from waiting where place = 1) w using (sequence)
where b.letter is distinct from w.last
union all
select 'letter ' || d.id || ' is blocked, but has no sequence'
from {schema}.dead_letter d where d.consumer = %(consumer)s and d.status = 'BLOCKED' and d.sequence is null;

-- name: count_contradictions
-- Counts of letters that are not what there is.
-- One snapshot: a statement's letters and what it appended become visible together.
select 'letter_count says ' || coalesce(c.letters, 0) || ' letters are ' || coalesce(c.status, d.status) || ' with fingerprint '
    || coalesce(c.fingerprint, d.fingerprint) || ' on ' || coalesce(c.failed_on, d.failed_on) || ', there are ' || coalesce(d.letters, 0)
from (
    select fingerprint, kind, status, failed_on, sum(letters) as letters from {schema}.letter_count where consumer = %(consumer)s
    group by 1, 2, 3, 4
) c
full join (
    select fingerprint, kind, status, (last_failed_at at time zone 'UTC')::date as failed_on, count(*) as letters
    from {schema}.dead_letter where consumer = %(consumer)s group by 1, 2, 3, 4
) d using (fingerprint, kind, status, failed_on)
where coalesce(c.letters, 0) <> coalesce(d.letters, 0);

-- name: rotate
-- Begin a new table of reservations, beside open batches.
-- Those that began before it write the old table alone, new ones both: of two that want one key one waits for the other.
select {schema}.rotate_reservations();

-- name: close_reservations
-- Close the table that was current before, if nobody is left who writes it alone; returns whether none is closing.
-- After a commit, and after `rotate`: at once where no batch is open.
select {schema}.close_reservations();

-- name: purge
-- Give up the tables of reservations that were closed before that time.
-- First of all the floors, in one transaction with it: a batch that does not ask a table knows what it cannot know. Keys held by letters stay known.
select {schema}.purge_reservations(%(before)s, %(although_behind)s::text[]);

-- name: purge_bounds
-- For each consumer up to which time of the log it has decided, and up to when a purge may go.
-- One snapshot; one look at an index for each partition.
select consumer, read_to, bound from {schema}.purge_bounds(%(before)s) order by consumer collate "C";

-- name: purgeable
-- How many tables of reservations `purge` would give up.
-- One snapshot.
select count(*)::int from {schema}.reservation_generation
where purged_at is null and closed_at < least(%(before)s, (
    select min(b.bound) from {schema}.purge_bounds(%(before)s) b where b.consumer <> all (%(although_behind)s::text[])
));

-- name: pack
-- One step of packing the tables of reservations that take no new ones; returns what was done, null where nothing is left.
-- A transaction of its own, which no batch waits for.
select {schema}.pack_reservations(%(portion)s);

-- name: packable
-- How many tables of reservations are closed, not packed, and not to be purged.
-- One snapshot.
select count(*)::int from {schema}.reservation_generation
where closed_at is not null and purged_at is null and rows_dropped_at is null and not coalesce(closed_at < least(%(before)s, (
    select min(b.bound) from {schema}.purge_bounds(%(before)s) b where b.consumer <> all (%(although_behind)s::text[])
)), false);

-- name: rotation_due
-- Whether the current table of reservations is older than its share of the retention, or of the time for which a closed table could not be purged.
-- One snapshot; none is due while another one is closing.
select (
    count(*) filter (where closed_at is null) = 1
    and clock_timestamp() - max(created_at) filter (where closed_at is null) > greatest(%(retention)s, clock_timestamp() - min(closed_at)) / %(tables)s
)::int
from {schema}.reservation_generation where purged_at is null;

-- name: ago
-- The time so long before now, by the server's clock.
-- One snapshot; without a zone a day has 24 hours.
select (clock_timestamp() at time zone 'utc' - %(age)s) at time zone 'utc';

-- name: merge_batches
-- Merge the batch records of a consumer whose reservations were given up.
-- A transaction for each consumer; a reader sees the records before or after.
select {schema}.merge_batches(%(consumer)s);

-- name: reserved_since
-- When the oldest table of reservations was begun that a purge has not given up.
-- Reads only; of a purge beside it all is seen or nothing.
select min(created_at) from {schema}.reservation_generation where purged_at is null;

-- name: drop_purged
-- Drop one table of reservations that was given up, and that no open transaction may ask.
-- Alone in its transaction, and with a lock that it waits for 50 ms at most: who reads the parent of the tables waits behind it.
select {schema}.drop_purged_reservations();

-- name: purged_left
-- How many tables were given up, and not dropped yet.
-- One snapshot.
select count(*) from {schema}.reservation_generation where purged_at is not null and dropped_at is null;

-- name: tell_retention
-- Note how long a consumer needs its reservations, where it has told another time before.
-- Its own row, which no batch locks. Shares the key of the consumer's row, as a batch does.
insert into {schema}.consumer_retention as r (consumer_id, retention, upkeep)
select id, %(retention)s, %(upkeep)s from {schema}.consumer where name = %(consumer)s
on conflict (consumer_id) do update set retention = excluded.retention, upkeep = excluded.upkeep, told_at = clock_timestamp()
where (r.retention, r.upkeep) is distinct from (excluded.retention, excluded.upkeep);

-- name: common_retention
-- The longest retention of all consumers (s), the time that it goes back to by the server's clock, and the names of those that have told none.
-- One snapshot. Without a zone a day has 24 hours. Seconds, because no driver reads every IntervalStyle.
select extract(epoch from retention)::float8, (clock_timestamp() at time zone 'utc' - retention) at time zone 'utc', unsaid from {schema}.common_retention();

-- name: holding_up
-- Consumers that have told no retention, while another one's own upkeep waits for that.
-- One snapshot.
select unnest(unsaid) from {schema}.common_retention() where exists (select from {schema}.consumer_retention where upkeep);

-- name: take_upkeep
-- Lock a portion of a consumer's own upkeep; returns whether nobody else has one in hand.
-- Never waits. It ends with the transaction: a pooler gives the session to others then.
select pg_try_advisory_xact_lock({schema}.upkeep_lock());

-- name: outbox_purge_some
-- Delete some messages that were sent or discarded so long ago, by the server's clock; how many.
-- Nobody looks at these any more. A row that a purge beside it deletes is waited for, and then skipped.
with old as (
    select id, (clock_timestamp() at time zone 'utc' - %(age)s) at time zone 'utc' as before from {schema}.consumer where name = %(consumer)s
), rows as (
    delete from {schema}.outbox where state in (1, 4) and ctid = any(array(
        select o.ctid from {schema}.outbox o
        where o.consumer_id = (select id from old) and o.state in (1, 4) and o.changed_at < (select before from old)
        limit %(most)s
    ))
    returning number
), pages as (
    delete from {schema}.outbox_page where page = any(array(
        select p.page from {schema}.outbox_page p
        where p.consumer_id = (select id from old) and p.sent_at < (select before from old)
        limit %(most)s / 100
    ))
    returning messages
)
select (select count(*) from rows) + (select coalesce(sum(messages), 0)::int8 from pages);

-- name: partition_owners
-- Who owns the partitions of a consumer group, and since when.
-- One snapshot; a claim names the etag that it saw here.
select partition_id, owner_id, owner_number, etag, extract(epoch from modified_at)::float8 as last_modified_time
from {schema}.partition_owner
where (namespace, hub, consumer_group) = (%(namespace)s, %(hub)s, %(group)s)
order by length(partition_id), partition_id;

-- name: claim_partitions
-- Claim each partition whose row has the etag that the claimant saw, or that has no row where it saw none; those that were won come back.
-- Hardly waits for a row that somebody else claims, or whose owner a transaction keeps: that one is lost. A repeated claim finds its etag once the first is through.
with claim as (
    select %(namespace)s::text as namespace, %(hub)s::text as hub, %(group)s::text as consumer_group, c.*
    from unnest(%(partitions)s::text[], %(owners)s::text[], %(seen)s::text[], %(etags)s::text[]) as c (partition_id, owner_id, seen, etag)
), same as (
    select o.ctid, c.* from {schema}.partition_owner o join claim c using (namespace, hub, consumer_group, partition_id)
    where o.owner_id = c.owner_id and o.etag in (c.seen, c.etag) for no key update of o skip locked
), other as (
    select o.ctid, c.* from {schema}.partition_owner o join claim c using (namespace, hub, consumer_group, partition_id)
    where o.owner_id <> c.owner_id and o.etag = c.seen for update of o skip locked
), renewed as (
    update {schema}.partition_owner o set etag = c.etag, modified_at = clock_timestamp() from same c where o.ctid = c.ctid returning o.*
), taken as (
    update {schema}.partition_owner o set owner_id = c.owner_id, owner_number = default, etag = c.etag, modified_at = clock_timestamp()
    from other c where o.ctid = c.ctid returning o.*
), made as (
    select m.* from (
        select array_agg(partition_id) as partitions, array_agg(owner_id) as owners, array_agg(etag) as etags
        from (select * from claim where seen is null order by partition_id) fresh having count(*) > 0
    ) f, {schema}.claim_unowned(%(namespace)s, %(hub)s, %(group)s, f.partitions, f.owners, f.etags) m
)
select partition_id, owner_id, owner_number, etag, extract(epoch from modified_at)::float8 as last_modified_time
from (select * from renewed union all select * from taken union all select * from made) won;

-- name: processor_checkpoints
-- Where the event processors of a consumer group resume.
-- One snapshot.
select partition_id, sequence_number, event_offset
from {schema}.processor_checkpoint
where (namespace, hub, consumer_group) = (%(namespace)s, %(hub)s, %(group)s)
order by length(partition_id), partition_id;

-- name: advance_processors
-- Move checkpoints of event processors forward; what comes back says for each whether it moved, and where it stands.
-- The row decides under its lock: a processor that lost its partition and is late with an earlier event changes nothing.
with given as (
    select * from unnest(%(partitions)s::text[], %(numbers)s::int8[], %(offsets)s::text[]) as n (partition_id, sequence_number, event_offset)
), moved as (
    insert into {schema}.processor_checkpoint as c
        (namespace, hub, consumer_group, partition_id, sequence_number, event_offset, set_by, set_reason)
    select %(namespace)s, %(hub)s, %(group)s, partition_id, sequence_number, event_offset, %(by)s::text, %(reason)s::text
    from given order by partition_id
    on conflict (namespace, hub, consumer_group, partition_id) do update
    set sequence_number = excluded.sequence_number, event_offset = excluded.event_offset, modified_at = clock_timestamp(),
        set_by = excluded.set_by, set_reason = excluded.set_reason
    where c.sequence_number < excluded.sequence_number
    returning partition_id
)
select g.partition_id, m.partition_id is not null as moved, coalesce(c.sequence_number, g.sequence_number) as stood
from given g
left join moved m using (partition_id)
left join {schema}.processor_checkpoint c
    on (c.namespace, c.hub, c.consumer_group, c.partition_id) = (%(namespace)s, %(hub)s, %(group)s, g.partition_id);
-- name: set_processor
-- Set a checkpoint of event processors as a person decided, forward or back, if it still stands where that person saw it.
-- No row comes back where it has moved since.
insert into {schema}.processor_checkpoint as c
    (namespace, hub, consumer_group, partition_id, sequence_number, event_offset, set_by, set_reason)
values (%(namespace)s, %(hub)s, %(group)s, %(partition)s, %(number)s, %(offset)s, %(by)s, %(reason)s)
on conflict (namespace, hub, consumer_group, partition_id) do update
set sequence_number = excluded.sequence_number, event_offset = excluded.event_offset, modified_at = clock_timestamp(),
    set_by = excluded.set_by, set_reason = excluded.set_reason
where c.sequence_number = %(seen)s
returning partition_id;

-- name: outbox_lanes
-- Those of these lanes in which messages wait, or, where dead ones may be overtaken, were put aside.
-- Only advice: who has locked a lane looks again.
select l.lane::int4 from unnest(%(lanes)s::int4[]) l (lane)
where exists (
    select from {schema}.outbox_page p
    where p.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and p.lane = l.lane and p.sent_at is null
        and (cardinality(%(topics)s::text[]) = 0 or p.topic = any(%(topics)s::text[])) and p.topic <> all(%(resting)s::text[])
) or exists (
    select from {schema}.outbox o
    where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = l.lane and o.state = 0
        and (cardinality(%(topics)s::text[]) = 0 or o.topic = any(%(topics)s::text[])) and o.topic <> all(%(resting)s::text[])
) or (%(aside)s::boolean and exists (
    select from {schema}.outbox o
    where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = l.lane and o.state = 3
));

-- name: outbox_odd_lanes
-- Those of these lanes whose messages have to be looked at one by one: rows wait or block there, or a page is larger than a turn.
-- Under the locks of the lanes, in a statement of its own, so that it sees what who had them before has committed.
select l.lane::int4 from unnest(%(lanes)s::int4[]) l (lane)
where exists (
    select from {schema}.outbox o
    where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = l.lane and o.state = 0
) or exists (
    select from {schema}.outbox o
    where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = l.lane
        and (o.state = 3 or o.state = 2 and o.key is not null)
) or exists (
    select from {schema}.outbox_page p
    where p.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and p.lane = l.lane and p.sent_at is null
        and p.messages > %(most)s
);

-- name: outbox_pages
-- The first waiting pages of these lanes, up to so many messages and about so many bytes.
-- Under the locks of the lanes, in a statement of its own, so that it sees the marks of who had them before.
select page, topic, keys, ids, bodies, header_ends, header_names, header_values
from (
    select p.*, sum(messages) over w as messages_to_here, sum(size) over w - size as size_before
    from (
        select * from {schema}.outbox_page
        where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and lane = any(%(lanes)s::int4[])
            and sent_at is null and (cardinality(%(topics)s::text[]) = 0 or topic = any(%(topics)s::text[])) and topic <> all(%(resting)s::text[])
        order by page limit %(most)s
    ) p
    window w as (order by page)
) p
where messages_to_here <= %(most)s and size_before < %(bytes)s
order by page;

-- name: outbox_pages_sent
-- Mark all messages of these pages as sent.
-- Under the locks of their lanes; whoever unpacks a page waits for the same locks.
update {schema}.outbox_page set sent_at = clock_timestamp() where page = any(%(pages)s::int8[]) and sent_at is null;

-- name: outbox_first_pages
-- The first waiting pages of these lanes with so many messages, but one page at least.
-- Under the locks of the lanes.
select page from (
    select page, sum(messages) over (order by page) - messages as before
    from {schema}.outbox_page
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and lane = any(%(lanes)s::int4[])
        and sent_at is null and (cardinality(%(topics)s::text[]) = 0 or topic = any(%(topics)s::text[])) and topic <> all(%(resting)s::text[])
) p where before < %(most)s;

-- name: outbox_unpack
-- Turn waiting pages into rows, one a message, that wait.
-- Under the locks of their lanes: nobody has them in hand.
with unpacked as (
    insert into {schema}.outbox (number, consumer_id, topic, key, id, body, header_names, header_values, lane, created_at)
    overriding system value
    select number, consumer_id, topic, key, id, body, header_names, header_values, lane, created_at
    from {schema}.outbox_message where page = any(%(pages)s::int8[]) and state = 0
    order by number
)
delete from {schema}.outbox_page where page = any(%(pages)s::int8[]) and sent_at is null;

-- name: outbox_lock
-- Lock so many of these lanes as nobody else has, to the end of the transaction.
-- The lock ends after the marks are visible: what is read under it by a later statement is not in anybody's hands.
select lane::int4 from unnest(%(lanes)s::int4[]) l (lane)
where pg_try_advisory_xact_lock(hashtext(%(space)s), lane) limit %(most)s;

-- name: outbox_lock_of
-- Lock the lanes of these messages, waiting for dispatchers that have them.
-- In the order of the lanes, as everybody who waits does.
select l.lane::int4, pg_advisory_xact_lock(hashtext(%(space)s), l.lane) is null
from (
    select lane from {schema}.outbox
    where number = any(%(numbers)s::int8[]) and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
    union
    select lane from {schema}.outbox_page
    where page = any(%(pages)s::int8[]) and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
    order by lane
) l;

-- name: outbox_own_pages
-- Those of these pages that are this consumer's and wait.
-- Under the locks of their lanes.
select page from {schema}.outbox_page
where page = any(%(pages)s::int8[]) and sent_at is null and consumer_id = (select id from {schema}.consumer where name = %(consumer)s);

-- name: outbox_hold
-- Put messages aside that wait behind a dead one.
-- Under the locks of their lanes: whoever lets them go on holds the same ones.
update {schema}.outbox o set state = 3
from {schema}.outbox d
where d.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and d.lane = any(%(lanes)s::int4[])
    and d.state = 2 and d.key is not null
    and o.consumer_id = d.consumer_id and o.lane = d.lane and o.state = 0 and o.topic = d.topic and o.key = d.key and o.number > d.number;

-- name: outbox_overtake
-- Let messages that were put aside go on although a dead one of their key is there.
-- Under the locks of their lanes.
update {schema}.outbox o set state = 0
where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = any(%(lanes)s::int4[]) and o.state = 3;

-- name: outbox_take
-- The first waiting messages of each of these lanes, about so many bytes, but those whose key rests or is behind a page not unpacked.
-- Under the locks of the lanes, in a statement of its own, so that it sees the marks of who had them before.
select number, topic, key, id, body, header_names, header_values, attempts, place::text
from (
    select o.*, sum(coalesce(length(o.body), 0)) over (order by o.number) - coalesce(length(o.body), 0) as size_before
    from unnest(%(lanes)s::int4[]) l (lane)
    cross join lateral (
        select w.*, w.ctid as place from {schema}.outbox w
        where w.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and w.lane = l.lane and w.state = 0
            and (cardinality(%(topics)s::text[]) = 0 or w.topic = any(%(topics)s::text[])) and w.topic <> all(%(resting)s::text[])
            and not exists (
                select from unnest(%(resting_topics)s::text[], %(resting_keys)s::bytea[]) r (topic, key) where r.topic = w.topic and r.key = w.key
            )
            and w.number <> all(%(resting_numbers)s::int8[])
            and not exists (
                select from {schema}.outbox_page p
                where p.consumer_id = w.consumer_id and p.lane = w.lane and p.sent_at is null and p.topic = w.topic
                    and 1000 * p.page < w.number
            )
        order by w.number limit %(each)s
    ) o
) o
where size_before < %(bytes)s
order by number;

-- name: outbox_sent
-- Mark messages as sent.
-- Under the locks of their lanes; a message that somebody has discarded meanwhile was waiting for the same locks.
update {schema}.outbox set state = 1, changed_at = clock_timestamp() where ctid = any(%(places)s::tid[]);

-- name: outbox_sent_numbers
-- Mark messages as sent whose pages have just been unpacked.
-- Under the locks of their lanes.
update {schema}.outbox set state = 1, changed_at = clock_timestamp() where number = any(%(numbers)s::int8[]) and state = 0;

-- name: outbox_failed
-- Note a failed attempt: of messages that are given up, or tried again.
-- Under the locks of their lanes.
update {schema}.outbox o
set state = %(state)s, attempts = o.attempts + 1, changed_at = clock_timestamp(), error_type = f.type, error_message = f.message
from unnest(%(numbers)s::int8[], %(types)s::text[], %(messages)s::text[]) f (number, type, message)
where o.number = f.number;

-- name: outbox_entries
-- Messages without their bodies, ascending.
-- One snapshot, no locks.
select number, topic, key, id, state, attempts, length(body), created_at, changed_at, error_type, error_message, set_by, set_reason
from (
    select * from {schema}.outbox_message
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and page is null
    union all
    select * from {schema}.outbox_message
    where page in (
        select page from {schema}.outbox_page
        where consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
            and (cardinality(%(states)s::int4[]) = 0 or case when sent_at is null then 0 else 1 end = any(%(states)s::int4[]))
            and (%(topic)s::text is null or topic = %(topic)s::text)
            and (cardinality(%(numbers)s::int8[]) = 0 or page = any(%(pages)s::int8[]))
        order by page limit %(most)s
    )
) m
where (cardinality(%(states)s::int4[]) = 0 or state = any(%(states)s::int4[]))
    and (%(topic)s::text is null or topic = %(topic)s::text)
    and (cardinality(%(numbers)s::int8[]) = 0 or number = any(%(numbers)s::int8[]))
order by number limit %(most)s;

-- name: outbox_message
-- One message with its body.
-- One snapshot, no locks.
select number, topic, key, id, body, header_names, header_values, attempts
from {schema}.outbox_message
where number = %(number)s and (page is null or page = %(number)s / 1000)
    and consumer_id = (select id from {schema}.consumer where name = %(consumer)s);

-- name: outbox_lag
-- How many messages wait, since when, how many are dead, and how many wait behind those.
-- One snapshot, no locks; reads only what is not sent.
select coalesce(sum(messages) filter (where state in (0, 5)), 0)::int8, min(created_at),
    count(*) filter (where state = 2), count(*) filter (where state = 3)
from (
    select 0 as state, messages, created_at, topic from {schema}.outbox_page
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and sent_at is null
    union all
    select state, 1, created_at, topic from {schema}.outbox
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state = 0
    union all
    select state, 1, created_at, topic from {schema}.outbox
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state in (2, 3, 5)
) o
where cardinality(%(topics)s::text[]) = 0 or topic = any(%(topics)s::text[]);

-- name: outbox_topics
-- The topics of all messages that are stored, sent ones included.
-- One snapshot, no locks.
select topic from {schema}.outbox where consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
union
select topic from {schema}.outbox_page where consumer_id = (select id from {schema}.consumer where name = %(consumer)s);

-- name: outbox_retry
-- Let dead messages wait again, as if they had never been tried.
-- Under the locks of their lanes.
update {schema}.outbox set state = 0, attempts = 0, changed_at = clock_timestamp(), set_by = %(by)s::text, set_reason = %(reason)s::text
where number = any(%(numbers)s::int8[]) and state = 2
    and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
returning number;

-- name: outbox_discard
-- Give up messages that are not sent.
-- Under the locks of their lanes: none of them is in anybody's hands.
update {schema}.outbox set state = 4, changed_at = clock_timestamp(), set_by = %(by)s::text, set_reason = %(reason)s::text
where number = any(%(numbers)s::int8[]) and state in (0, 2, 3)
    and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
returning number;

-- name: outbox_release
-- Let messages that were put aside wait again where no dead one of their key is left before them.
-- Under the locks of their lanes, after what was dead has changed.
update {schema}.outbox o set state = 0
where o.consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and o.lane = any(%(lanes)s::int4[]) and o.state = 3
    and not exists (
        select from {schema}.outbox d
        where d.consumer_id = o.consumer_id and d.lane = o.lane and d.state = 2 and d.topic = o.topic and d.key = o.key and d.number < o.number
    )
returning o.number;

-- name: outbox_about
-- Messages with one of these ids, and those whose ids were made of one of these incoming keys, which their first 32 digits are.
-- One snapshot, no locks. No index has ids: it reads those of all messages that are kept of the consumer.
select number from {schema}.outbox
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
    and (id = any(%(ids)s::text[]) or left(id, 32) = any(%(keys)s::text[]))
union all
select 1000 * p.page + m.place - 1 from {schema}.outbox_page p cross join lateral unnest(p.ids) with ordinality m (id, place)
where p.consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
    and (m.id = any(%(ids)s::text[]) or left(m.id, 32) = any(%(keys)s::text[]))
order by number;

-- name: outbox_lock_sent_pages
-- Those of these pages that are this consumer's and sent, locked.
-- Whoever purges or unpacks them waits.
select page from {schema}.outbox_page
where page = any(%(pages)s::int8[]) and sent_at is not null and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
order by page for update;

-- name: outbox_unpack_sent
-- Turn sent pages into rows, one a message, that are sent.
-- After `outbox_lock_sent_pages`: they are as that statement saw them.
with unpacked as (
    insert into {schema}.outbox (number, consumer_id, topic, key, id, body, header_names, header_values, lane, state, created_at, changed_at)
    overriding system value
    select number, consumer_id, topic, key, id, body, header_names, header_values, lane, state, created_at, changed_at
    from {schema}.outbox_message where page = any(%(pages)s::int8[]) and state = 1
    order by number
)
delete from {schema}.outbox_page where page = any(%(pages)s::int8[]) and sent_at is not null;

-- name: outbox_erase
-- Erase what messages that were sent or discarded hold. Number, topic, id, state and times stay.
-- Nobody looks at these any more, but a purge: one of the two comes first.
update {schema}.outbox
set key = null, body = null, header_names = null, header_values = null, error_message = null, changed_at = clock_timestamp(),
    set_by = %(by)s::text, set_reason = %(reason)s::text
where number = any(%(numbers)s::int8[]) and state in (1, 4) and not starts_with(coalesce(set_reason, ''), %(mark)s)
    and consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
returning number;

-- name: outbox_old
-- How many messages a purge would delete.
-- One snapshot, no locks.
select (
    select count(*) from {schema}.outbox
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state in (1, 4) and changed_at < %(before)s
) + (
    select coalesce(sum(messages), 0)::int8 from {schema}.outbox_page
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and sent_at < %(before)s
);

-- name: outbox_purge
-- Delete messages that were sent or discarded before a time; how many.
-- Nobody looks at these any more.
with rows as (
    delete from {schema}.outbox
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state in (1, 4) and changed_at < %(before)s
    returning number
), pages as (
    delete from {schema}.outbox_page
    where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and sent_at < %(before)s
    returning messages
)
select (select count(*) from rows) + (select coalesce(sum(messages), 0)::int8 from pages);

-- name: open_publisher
-- Make a producer group if it is new, raise its owner level, and name the new owner.
-- Waits for a writer of the older owner, which is one statement; whatever that one writes afterwards finds another level.
with place as (
    insert into {schema}.publish_destination (source, topic) values (%(source)s, %(topic)s)
    on conflict (source, topic) do update set topic = excluded.topic returning id
)
insert into {schema}.publisher as p (destination_id, name, epoch, partitions, run_id, holder_host, holder_pid, holder_started, taken_at)
select id, %(name)s, 1, %(partitions)s, %(run)s, %(host)s, %(pid)s, %(started)s, clock_timestamp() from place
on conflict (destination_id, name) do update
set epoch = p.epoch + 1, run_id = excluded.run_id, holder_host = excluded.holder_host, holder_pid = excluded.holder_pid,
    holder_started = excluded.holder_started, taken_at = excluded.taken_at
returning id, destination_id, epoch, partitions, current_setting('synchronous_commit') as synchronous_commit;

-- name: close_publisher
-- Nobody owns the group any more.
-- A newer owner stays.
update {schema}.publisher set holder_host = null, holder_pid = null, holder_started = null where id = %(id)s and epoch = %(epoch)s;

-- name: publisher_epoch
-- The owner level, and who has it.
-- Asked before something is sent that was stored a while ago, and where a writer found another level.
select epoch, taken_at, holder_host as host, holder_pid as pid, holder_started as started from {schema}.publisher where id = %(id)s;

-- name: publisher_lanes
-- Which sequence numbers are given and confirmed, and since when the oldest event that is not confirmed is stored.
-- One snapshot.
select l.partition, l.next_sequence, l.confirmed,
    (select e.stored_at from {schema}.publisher_event e
     where e.publisher_id = l.publisher_id and e.partition = l.partition order by e.sequence limit 1) as waiting_since
from {schema}.publisher_lane l where l.publisher_id = %(id)s order by l.partition;

-- name: known_ids
-- Which of these ids are known at the destination, and whether the broker has confirmed them.
-- Without a lock: two that find nothing and insert the same id meet at its primary key.
select i.message_id, i.payload_hash, i.publisher_id, i.partition, i.sequence, i.sequence <= l.confirmed as confirmed
from {schema}.published_id i
join {schema}.publisher_lane l using (publisher_id, partition)
where i.destination_id = %(destination)s and i.message_id = any(%(ids)s::text[]);

-- name: store_events
-- Store events before they are sent, with their sequence numbers, and the ids that callers gave: all of it or nothing.
-- Locks the publisher's row and writes under its own owner level only, and only behind the numbers that it knows of.
with mine as (
    select id, destination_id from {schema}.publisher where id = %(id)s and epoch = %(epoch)s for no key update
), given as (
    select * from unnest(%(partitions)s::int4[], %(sequences)s::int8[], %(message_ids)s::text[], %(chosen)s::bool[], %(hashes)s::int8[],
        %(keys)s::text[], %(content_types)s::text[], %(properties)s::text[], %(bodies)b::bytea[])
        as g (partition, sequence, message_id, chosen, payload_hash, event_key, content_type, properties, body)
), heads as (
    select partition, min(sequence) as first, max(sequence) as last from given group by partition
), ready as (
    select m.* from mine m where not exists (select from heads h left join {schema}.publisher_lane l
        on l.publisher_id = m.id and l.partition = h.partition where coalesce(l.next_sequence, 1) <> h.first)
), lanes as (
    insert into {schema}.publisher_lane (publisher_id, partition, next_sequence, confirmed)
    select r.id, h.partition, h.last + 1, 0 from heads h, ready r order by h.partition
    on conflict (publisher_id, partition) do update set next_sequence = excluded.next_sequence
), ids as (
    insert into {schema}.published_id (destination_id, message_id, payload_hash, publisher_id, partition, sequence)
    select r.destination_id, message_id, payload_hash, r.id, partition, sequence from given, ready r where chosen order by message_id
), events as (
    insert into {schema}.publisher_event (publisher_id, partition, sequence, message_id, event_key, content_type, properties, body)
    select r.id, partition, sequence, message_id, event_key, content_type, properties, body from given, ready r
)
select (select count(*) from mine) as owned, (select count(*) from ready) as fitted;

-- name: waiting_events
-- A page of events of one partition that are stored and not confirmed, oldest first: at most so many, and so many bytes of bodies.
-- At least one, however large; one snapshot.
select partition, sequence, message_id, event_key as key, content_type, properties, body
from (
    select e.*, sum(octet_length(e.body)) over (order by e.sequence) - octet_length(e.body) as before
    from (
        select * from {schema}.publisher_event
        where publisher_id = %(id)s and partition = %(partition)s and sequence > %(after)s order by sequence limit %(most)s
    ) e
) e where before < %(bytes)s order by sequence;

-- name: confirm_events
-- The broker has everything of these partitions up to these numbers: the events are not sent again.
-- Locks the publisher's row and writes under its own owner level only; a partition whose numbers are not given here does not move.
with mine as (
    select id from {schema}.publisher where id = %(id)s and epoch = %(epoch)s for no key update
), given as (
    select * from unnest(%(partitions)s::int4[], %(sequences)s::int8[]) as g (partition, sequence)
), moved as (
    update {schema}.publisher_lane l set confirmed = greatest(l.confirmed, g.sequence) from given g, mine m
    where l.publisher_id = m.id and l.partition = g.partition and g.sequence < l.next_sequence
    returning l.partition
), gone as (
    delete from {schema}.publisher_event e using given g, mine m
    where e.publisher_id = m.id and e.partition = g.partition and e.sequence <= g.sequence
)
select (select count(*) from mine) as owned, (select count(*) from moved) as fitted;

-- name: publisher_name
-- The name of a producer group.
-- For messages.
select name from {schema}.publisher where id = %(id)s;

-- name: publishers
-- The producer groups of every destination: owner level, owner, spread, and what waits to be confirmed.
-- One snapshot.
select p.id, d.source, d.topic, p.name as "group", p.epoch as owner_level, p.partitions, p.holder_host as host, p.holder_pid as pid,
    p.taken_at, p.set_by, p.set_reason, coalesce(w.waiting, 0) as waiting, w.waiting_since
from {schema}.publisher p
join {schema}.publish_destination d on d.id = p.destination_id
left join lateral (
    select count(*) as waiting, min(stored_at) as waiting_since from {schema}.publisher_event e where e.publisher_id = p.id
) w on true
order by d.source, d.topic, p.name;

-- name: spread_publisher
-- Say over how many partitions a group spreads its keys, unless events wait in a partition that is not among them.
-- Raises the owner level: a publisher that runs is fenced.
update {schema}.publisher p
set partitions = %(partitions)s, epoch = epoch + 1, holder_host = null, set_by = %(by)s, set_reason = %(reason)s
where id = %(id)s and not exists (
    select from {schema}.publisher_event e where e.publisher_id = p.id and e.partition >= %(partitions)s
)
returning epoch;

-- name: discard_events
-- Give up events that wait to be confirmed; their ids are unknown again.
-- Raises the owner level first: a publisher that runs is fenced, so that it does not send what is given up here.
with mine as (
    update {schema}.publisher set epoch = epoch + 1, holder_host = null, set_by = %(by)s, set_reason = %(reason)s where id = %(id)s
    returning id, destination_id
), gone as (
    delete from {schema}.publisher_event e using mine m
    where e.publisher_id = m.id and e.partition = coalesce(%(partition)s::int4, e.partition)
        and e.sequence = coalesce(%(sequence)s::int8, e.sequence)
    returning e.message_id
), free as (
    delete from {schema}.published_id i using gone g, mine m where (i.destination_id, i.message_id) = (m.destination_id, g.message_id)
)
select count(*) as discarded from gone;

-- name: waiting_of_publisher
-- Events that wait to be confirmed, oldest first, without their bodies.
-- One snapshot.
select partition, sequence, message_id, event_key as key, octet_length(body) as bytes, stored_at from {schema}.publisher_event
where publisher_id = %(id)s and partition = coalesce(%(partition)s::int4, partition) and sequence = coalesce(%(sequence)s::int8, sequence)
order by stored_at, partition, sequence limit %(most)s;

-- name: purge_published_ids
-- Forget ids that were published before a time and are confirmed; what is not confirmed is kept.
-- An id that is published again in the meantime is known, or new: both are right.
delete from {schema}.published_id i using {schema}.publisher_lane l
where (l.publisher_id, l.partition) = (i.publisher_id, i.partition) and i.sequence <= l.confirmed and i.stored_at < %(before)s
returning i.message_id;

-- name: count_purgeable_ids
-- How many ids `purge_published_ids` would forget.
-- One snapshot.
select count(*) as ids from {schema}.published_id i join {schema}.publisher_lane l using (publisher_id, partition)
where i.sequence <= l.confirmed and i.stored_at < %(before)s;

-- name: copy_publisher
-- The state of a producer group as JSON: its lanes, its events that wait, the ids that it published.
-- One snapshot.
select 'lane' as kind, to_jsonb(l) - 'publisher_id' as row from {schema}.publisher_lane l where publisher_id = %(id)s
union all
select 'event', to_jsonb(e) - 'publisher_id' from {schema}.publisher_event e where publisher_id = %(id)s
union all
select 'id', to_jsonb(i) - 'publisher_id' - 'destination_id' from {schema}.published_id i where publisher_id = %(id)s;

-- name: restore_publisher
-- Make a producer group from a copy, or take an existing one over for it.
-- Raises the owner level above both: whoever runs is fenced.
with place as (
    insert into {schema}.publish_destination (source, topic) values (%(source)s, %(topic)s)
    on conflict (source, topic) do update set topic = excluded.topic returning id
)
insert into {schema}.publisher as p (destination_id, name, epoch, partitions, set_by, set_reason)
select id, %(group)s, %(owner_level)s + 1, %(partitions)s, %(by)s, %(reason)s from place
on conflict (destination_id, name) do update
set epoch = greatest(p.epoch, %(owner_level)s) + 1, partitions = excluded.partitions, holder_host = null,
    set_by = excluded.set_by, set_reason = excluded.set_reason
returning id, destination_id;

-- name: empty_publisher
-- Take away what a copy replaces: events that wait, ids, lanes.
-- In the transaction of `restore_publisher`, which locks the publisher's row.
with events as (delete from {schema}.publisher_event where publisher_id = %(id)s),
ids as (delete from {schema}.published_id where publisher_id = %(id)s)
delete from {schema}.publisher_lane where publisher_id = %(id)s;

-- name: restore_lanes
-- The lanes of a copy.
-- In the transaction of `restore_publisher`.
insert into {schema}.publisher_lane select %(id)s, r.* from jsonb_to_recordset(%(rows)s::jsonb)
    as r (partition int4, next_sequence int8, confirmed int8);

-- name: restore_events
-- The events of a copy that wait to be confirmed.
-- In the transaction of `restore_publisher`.
insert into {schema}.publisher_event select %(id)s, r.* from jsonb_to_recordset(%(rows)s::jsonb)
    as r (partition int4, sequence int8, message_id text, event_key text, content_type text, properties text, body bytea,
          stored_at timestamptz);

-- name: restore_ids
-- The ids of a copy; one that another group has published since stays that group's.
-- In the transaction of `restore_publisher`.
insert into {schema}.published_id (destination_id, message_id, payload_hash, publisher_id, partition, sequence, stored_at)
select %(destination)s, r.message_id, r.payload_hash, %(id)s, r.partition, r.sequence, r.stored_at from jsonb_to_recordset(%(rows)s::jsonb)
    as r (message_id text, payload_hash int8, partition int4, sequence int8, stored_at timestamptz)
on conflict (destination_id, message_id) do nothing;

-- name: outbox_flight
-- The number of the last Kafka transaction of messages, locked.
-- Of two dispatchers the second one sees what the first has noted.
insert into {schema}.outbox_flight as f (consumer_id, flight)
select id, 0 from {schema}.consumer where name = %(consumer)s
on conflict (consumer_id) do update set flight = f.flight
returning flight;

-- name: outbox_flying
-- The messages of the Kafka transaction that is not settled.
-- There is one at a time.
select number, topic, key, id, body, header_names, header_values, attempts, ctid::text from {schema}.outbox
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state = 5
order by number;

-- name: outbox_flying_number
-- The number of the Kafka transaction that is not settled.
-- The number of the outbox is higher if somebody has taken that transaction over since it was noted.
select max(flight) from {schema}.outbox
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state = 5;

-- name: outbox_fly
-- Note messages as handed to a Kafka transaction, and its number.
-- Under the locks of their lanes and of the number.
with noted as (
    update {schema}.outbox set state = 5, flight = %(flight)s, changed_at = clock_timestamp() where ctid = any(%(places)s::tid[])
)
update {schema}.outbox_flight set flight = %(flight)s
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s)
returning flight;

-- name: outbox_land
-- Mark the messages of a Kafka transaction that was committed as sent.
-- Who comes second changes nothing.
update {schema}.outbox set state = 1, changed_at = clock_timestamp()
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state = 5
    and flight = %(flight)s
returning number;

-- name: outbox_ground
-- Let the messages of a Kafka transaction that was aborted wait again.
-- Who comes second changes nothing.
update {schema}.outbox set state = 0, flight = null
where consumer_id = (select id from {schema}.consumer where name = %(consumer)s) and state = 5
    and flight = %(flight)s
returning number;
