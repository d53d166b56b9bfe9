-- Five roles, none of which can log in: grant them to those that do ("grant dedup_run to orders_app").
-- Run by a superuser, or by who owns the database and may create roles: once before `dedup migrate`, and again after each one.
-- Safe to repeat. Rename the roles by search and replace.

do $roles$
declare
    wanted text;
begin
    foreach wanted in array array['dedup_owner', 'dedup_run', 'dedup_operate', 'dedup_read', 'dedup_inspect'] loop
        if not exists (select from pg_roles where rolname = wanted) then
            execute format('create role %I nologin', wanted);
        end if;
    end loop;
    -- dedup_operate is for people and for `dedup upkeep`: all that dedup_run may, and forgetting and deleting.
    if not pg_has_role('dedup_operate', 'dedup_run', 'member') then
        grant dedup_run to dedup_operate;
    end if;
    -- dedup_inspect is for people who look at letters: all that dedup_read sees, and keys, reasons and error texts.
    if not pg_has_role('dedup_inspect', 'dedup_read', 'member') then
        grant dedup_read to dedup_inspect;
    end if;
end
$roles$;

-- dedup_owner owns the schema and migrates it: `dedup migrate` with "options=-c role=dedup_owner" in its DSN.
create schema if not exists {schema} authorization dedup_owner;
revoke all on schema {schema} from public;
revoke all on all tables in schema {schema} from public;
grant usage on schema {schema} to dedup_run, dedup_read;

-- One statement, and so one transaction: nobody has more rights while it runs.
do $rights$
declare
    child regclass;
begin
    -- dedup_run runs consumers, reprocess, and what people do to letters. It neither creates, alters nor drops anything, and reads no other schema.
    grant select, insert, update on all tables in schema {schema} to dedup_run;
    grant usage on all sequences in schema {schema} to dedup_run;
    -- What a migration gave to those who only read is taken back.
    revoke all on all tables in schema {schema} from dedup_read, dedup_inspect;
    if to_regclass('{schema}.checkpoint') is null then
        return;
    end if;

    revoke insert, update on {schema}.schema_version, {schema}.reservation_generation, {schema}.reservation_phase, {schema}.reservation_floor,
        {schema}.letter_count, {schema}.open_letter, {schema}.letter_group, {schema}.letter_age, {schema}.blocked_by_letter, {schema}.outbox_message,
        {schema}.open_transaction, {schema}.restored, {schema}.last_page,
        {schema}.reservation_page, {schema}.reservation_freed, {schema}.reservation_filter, {schema}.reservation_filter_part,
        {schema}.reservation_key, {schema}.consumer_deletion from dedup_run;
    -- These are only appended to. Reservations are freed by free_reservations alone, batch records are merged by merge_batches alone.
    revoke update on {schema}.batch, {schema}.consumer_action, {schema}.letter_duplicate from dedup_run;
    revoke update, delete on {schema}.reservation from dedup_run;
    for child in select i.inhrelid from pg_inherits i where i.inhparent = to_regclass('{schema}.reservation') loop
        execute format('revoke update, delete on %s from dedup_run', child);
    end loop;
    for child in select i.inhrelid from pg_inherits i where i.inhparent = to_regclass('{schema}.reservation_page') loop
        execute format('revoke insert, update on %s from dedup_run', child);
    end loop;
    -- Checkpoints are written anew, sequences are released, members leave, messages change from pages to rows, events are confirmed.
    grant delete on {schema}.checkpoint, {schema}.blocked_sequence, {schema}.member, {schema}.outbox, {schema}.outbox_page,
        {schema}.publisher_event to dedup_run;
    if to_regclass('{schema}.consumer_writer') is not null then -- what `dedup migrate --separate` prints made it
        revoke all on {schema}.consumer_writer from dedup_run;
    end if;
    -- An older script granted these.
    revoke delete on {schema}.publisher_lane, {schema}.published_id from dedup_run;

    -- All that forgets what was decided, and all work on tables of reservations, is for dedup_operate.
    grant delete on {schema}.publisher_lane, {schema}.published_id to dedup_operate;
    revoke execute on function {schema}.rotate_reservations(), {schema}.purge_reservations(timestamptz, text[]),
        {schema}.drop_purged_reservations(), {schema}.merge_batches(text), {schema}.pack_reservations(bigint),
        {schema}.keep_filter(int, text, bigint, bigint, int), {schema}.keep_filter_part(int, int, bytea),
        {schema}.free_reservations(uuid[]) from public, dedup_run;
    grant execute on function {schema}.rotate_reservations(), {schema}.purge_reservations(timestamptz, text[]),
        {schema}.drop_purged_reservations(), {schema}.merge_batches(text), {schema}.pack_reservations(bigint),
        {schema}.keep_filter(int, text, bigint, bigint, int), {schema}.keep_filter_part(int, int, bytea),
        {schema}.free_reservations(uuid[]), {schema}.begin_deletion(int, text, text), {schema}.delete_portion(int, int) to dedup_operate;
    -- These act with the rights of the owner, too.
    revoke execute on function {schema}.close_reservations(), {schema}.guard_transaction(uuid), {schema}.refuse_commit() from public;
    -- All that dedup_run calls, by name: a database may grant no function to everybody by default.
    grant execute on function {schema}.reservation_lock(), {schema}.close_reservations(), {schema}.filter_is_whole(int),
        {schema}.hash_in_page(bytea, bytea, uuid), {schema}.key_head(uuid), {schema}.share_reservations(), {schema}.is_reserved(int, uuid),
        {schema}.purge_bounds(timestamptz), {schema}.common_retention(), {schema}.upkeep_lock(), {schema}.guard_transaction(uuid),
        {schema}.claim_unowned(text, text, text, text[], text[], text[]) to dedup_run;

    -- dedup_read is for dashboards: no keys, no reasons, no texts of errors, no bodies, no headers, no messages, no history of edits.
    grant select on {schema}.consumer, {schema}.heartbeat, {schema}.member, {schema}.topic, {schema}.checkpoint,
        {schema}.partition_claim, {schema}.batch, {schema}.reservation_generation, {schema}.reservation_phase, {schema}.reservation_floor, {schema}.letter_count,
        {schema}.publish_destination, {schema}.publisher_lane, {schema}.partition_owner, {schema}.schema_version,
        {schema}.sink, {schema}.consumer_retention, {schema}.letter_age to dedup_read;
    grant select (consumer_id, seq, attempt, settings, query_id, batch_id, batch_ended, gap_accepted, spent, written_by, epoch, generation, recorded,
        reserved_in, page) on {schema}.progress to dedup_read;
    grant select (id, consumer, source, topic, incarnation, partition, sequence_number, part, enqueued_time, kind, error_type, fingerprint, attempts,
        first_failed_at, last_failed_at, status, blocked_by, body_size, duplicates) on {schema}.open_letter to dedup_read;
    grant select (consumer, fingerprint, kind, status, letters, first_failed_at, last_failed_at, example) on {schema}.letter_group to dedup_read;
    grant select (consumer, source, topic, partition, open_letter, kind, first_failed_at, behind) on {schema}.blocked_by_letter to dedup_read;
    grant select (consumer, letter, kind) on {schema}.blocked_sequence to dedup_read;
    grant select (id, consumer_id, at, by) on {schema}.consumer_action to dedup_read;
    grant select (consumer_id, name, epoch, generation, reserved, by, decided_at, ended_at) on {schema}.consumer_deletion to dedup_read;
    grant select (id, destination_id, name, epoch, partitions, run_id, holder_host, holder_pid, holder_started, taken_at, set_by)
        on {schema}.publisher to dedup_read;
    grant select (namespace, hub, consumer_group, partition_id, sequence_number, event_offset, modified_at, set_by)
        on {schema}.processor_checkpoint to dedup_read;
    grant execute on function {schema}.purge_bounds(timestamptz), {schema}.common_retention() to dedup_read;
    -- Whoever may ask whether a key is reserved can try keys that he guesses.
    revoke execute on function {schema}.is_reserved(int, uuid) from public, dedup_read;

    grant select on {schema}.progress, {schema}.open_letter, {schema}.letter_group, {schema}.blocked_by_letter, {schema}.blocked_sequence,
        {schema}.consumer_action, {schema}.consumer_deletion, {schema}.publisher, {schema}.processor_checkpoint, {schema}.restored to dedup_inspect;
    -- What `dedup status` and `dedup metrics` read, and the history of letters: not what an event carried, nor the body that an edit replaced.
    grant select (id, consumer, generation, source, topic, incarnation, partition, sequence_number, part, event_offset, enqueued_time, holds_key,
        idempotence_key, payload_hash, body_size, body_sha256, kind, reason, error_type, error_message, stack, fingerprint, attempts,
        first_failed_at, last_failed_at, status, sequence_key, blocked_by, duplicates, sequence) on {schema}.dead_letter to dedup_inspect;
    grant select (id, letter_id, at, action, by, reason, error_type, error_message, stack, idempotence_key, reserved)
        on {schema}.letter_history to dedup_inspect;
    grant select (number, consumer_id, topic, lane, state, attempts, flight, created_at, changed_at, error_type, error_message, set_by, set_reason)
        on {schema}.outbox to dedup_inspect;
    grant select (page, consumer_id, topic, lane, messages, size, created_at, sent_at) on {schema}.outbox_page to dedup_inspect;
    grant execute on function {schema}.is_reserved(int, uuid) to dedup_inspect;
end
$rights$;
