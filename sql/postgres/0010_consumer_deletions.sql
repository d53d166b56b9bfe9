-- Deleting a consumer: who decided it, how far it is, and above which epoch and life a new consumer of that name begins.
-- Forward only.
--
-- One transaction decides: it raises the epoch, so no instance of the consumer commits from then on, and notes the deletion. Then its rows go, a
-- portion in each transaction. The last one takes the consumer's own row. The note stays: an instance of the old consumer that is still there
-- meets it, or an epoch that is above its own.

create table {schema}.consumer_deletion (
    consumer_id int primary key, -- without a foreign key: the consumer's row goes
    name text not null,
    epoch bigint not null,
    generation int not null,
    reserved bigint not null default 0,
    by text not null,
    reason text not null,
    decided_at timestamptz not null default clock_timestamp(),
    ended_at timestamptz
);
comment on table {schema}.consumer_deletion is
    'Consumers that were deleted: who decided it, when and why. Kept for ever: a consumer that gets the same name begins above what stands here.';
comment on column {schema}.consumer_deletion.epoch is 'The last epoch of that consumer: no instance of it has a higher one.';
comment on column {schema}.consumer_deletion.generation is
    'The keyspace of a consumer that gets the name: keys are hashed with it, so reservations of the deleted consumer do not count for it.';
comment on column {schema}.consumer_deletion.reserved is 'How many reservations its batch records and letters told of. They stay until they are purged.';
comment on column {schema}.consumer_deletion.ended_at is 'When the last row was gone. Null: call delete_portion again.';
create index consumer_deletion_name on {schema}.consumer_deletion (name);

create function {schema}.begin_deletion(number int, by text, reason text) returns void
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    insert into consumer_deletion (consumer_id, name, epoch, generation, by, reason)
    select c.id, c.name, greatest(c.epoch, p.epoch) + 1, greatest(c.generation, p.generation) + 1, begin_deletion.by, begin_deletion.reason
    from consumer c join progress p on p.consumer_id = c.id where c.id = number;
    update consumer c
    set epoch = d.epoch, holder_host = null, holder_pid = null, holder_started = null, holder_run_id = null, joint = false,
        taken_at = clock_timestamp()
    from consumer_deletion d where c.id = number and d.consumer_id = c.id;
    delete from member m where m.consumer_id = number;
end
$body$;
comment on function {schema}.begin_deletion(int, text, text) is
    'Decide that a consumer is deleted: no instance of it commits from now on. Under a lock of its row that waits for open batches.';

create function {schema}.delete_letters(consumer text, most int) returns bigint
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    gone text[] := array(
        select l.id from dead_letter l where l.consumer = delete_letters.consumer and l.status in ('OPEN', 'BLOCKED') limit most
    );
    told bigint;
begin
    if cardinality(gone) = 0 then -- another index has these
        gone := array(
            select l.id from dead_letter l where l.consumer = delete_letters.consumer and l.status not in ('OPEN', 'BLOCKED') limit most
        );
    end if;
    if cardinality(gone) = 0 then
        return null;
    end if;
    delete from letter_duplicate t where t.letter_id = any(gone);
    with history as (
        delete from letter_history h where h.letter_id = any(gone) returning h.reserved
    )
    select coalesce(sum(reserved), 0) into told from history;
    delete from dead_letter l where l.id = any(gone);
    return told;
end
$body$;
comment on function {schema}.delete_letters(text, int) is
    'Delete some letters of a consumer with their history; returns how many reservations that told of, null where no letter was left.';

create function {schema}.delete_portion(whose int, most int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    goal record;
    told bigint;
begin
    select * into goal from consumer_deletion d where d.consumer_id = whose and d.ended_at is null for update;
    if not found then
        return null;
    end if;
    told := delete_letters(goal.name, most);
    if told is not null then
        update consumer_deletion d set reserved = d.reserved + told where d.consumer_id = whose;
        return 'letters';
    end if;
    with gone as (
        delete from batch b
        where b.ctid = any(array(select r.ctid from batch r where r.consumer_id = whose limit most)) and b.consumer_id = whose
        returning b.reserved
    )
    select sum(reserved) into told from gone;
    if told is not null then
        update consumer_deletion d set reserved = d.reserved + told where d.consumer_id = whose;
        return 'batch records';
    end if;
    delete from outbox o
    where o.ctid = any(array(select r.ctid from outbox r where r.consumer_id = whose limit most)) and o.consumer_id = whose;
    if found then
        return 'messages';
    end if;
    -- A page has up to a thousand messages.
    delete from outbox_page p
    where p.page = any(array(select r.page from outbox_page r where r.consumer_id = whose limit greatest(1, most / 1000)));
    if found then
        return 'messages';
    end if;
    -- Whoever notes something about the consumer without a fence, such as a crash marker, comes before this lock, or finds no consumer.
    perform from consumer c where c.id = whose for update;
    delete from blocked_sequence s where s.consumer = goal.name;
    delete from letter_count c where c.consumer = goal.name;
    delete from crash_marker t where t.consumer_id = whose;
    delete from outbox_flight f where f.consumer_id = whose;
    delete from reservation_floor f where f.consumer_id = whose;
    delete from sink s where s.consumer_id = whose;
    delete from partition_claim p where p.consumer_id = whose;
    delete from checkpoint p where p.consumer_id = whose;
    delete from consumer_action a where a.consumer_id = whose;
    delete from member m where m.consumer_id = whose;
    delete from topic t where t.consumer_id = whose;
    delete from heartbeat h where h.consumer_id = whose;
    delete from progress p where p.consumer_id = whose;
    delete from consumer c where c.id = whose;
    update consumer_deletion d set ended_at = clock_timestamp() where d.consumer_id = whose;
    return 'consumer';
end
$body$;
comment on function {schema}.delete_portion(int, int) is
    'One step of a deletion that was begun: some letters, batch records or messages; at last everything else, and the consumer. Returns what went, '
    'null where nothing is left. Each call is a transaction of its own. Reservations stay: they name no consumer.';

revoke all on function {schema}.begin_deletion(int, text, text) from public;
revoke all on function {schema}.delete_letters(text, int) from public;
revoke all on function {schema}.delete_portion(int, int) from public;
