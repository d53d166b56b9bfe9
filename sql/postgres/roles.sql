-- Four roles, none of which can log in: grant them to those that do ("grant dedup_run to orders_app").
-- Run by a superuser, or by who owns the database and may create roles: once before `dedup migrate`, and again after each one.
-- Safe to repeat. Rename the roles by search and replace.

do $roles$
declare
    wanted text;
begin
    foreach wanted in array array['dedup_owner', 'dedup_run', 'dedup_read', 'dedup_operate'] loop
        if not exists (select from pg_roles where rolname = wanted) then
            execute format('create role %I nologin', wanted);
        end if;
    end loop;
    -- dedup_operate is for people: all that dedup_run may, and deleting consumers.
    if not pg_has_role('dedup_operate', 'dedup_run', 'member') then
        grant dedup_run to dedup_operate;
    end if;
end
$roles$;

-- dedup_owner owns the schema and migrates it: `dedup migrate` with "options=-c role=dedup_owner" in its DSN.
create schema if not exists {schema} authorization dedup_owner;
revoke all on schema {schema} from public;
revoke all on all tables in schema {schema} from public;
grant usage on schema {schema} to dedup_run, dedup_read;

-- dedup_run runs consumers, reprocess, and what people do to letters. It neither creates, alters nor drops anything, and reads no other schema.
grant select on all tables in schema {schema} to dedup_run;
grant insert, update on all tables in schema {schema} to dedup_run;
grant usage on all sequences in schema {schema} to dedup_run;

-- dedup_read is for dashboards: no bodies, no headers, no messages, no history of edits. What a migration gave it is taken back.
revoke all on all tables in schema {schema} from dedup_read;

do $rights$
declare
    pages regclass;
begin
    if to_regclass('{schema}.checkpoint') is not null then
        revoke insert, update on {schema}.schema_version, {schema}.reservation_generation, {schema}.reservation_phase,
            {schema}.letter_count, {schema}.open_letter, {schema}.letter_group, {schema}.letter_age, {schema}.blocked_by_letter, {schema}.outbox_message,
            {schema}.open_transaction, {schema}.restored, {schema}.last_page,
            {schema}.reservation_page, {schema}.reservation_freed, {schema}.reservation_filter, {schema}.reservation_filter_part,
            {schema}.reservation_key, {schema}.consumer_deletion from dedup_run;
        grant execute on function {schema}.begin_deletion(int, text, text), {schema}.delete_portion(int, int) to dedup_operate;
        -- Packed keys are freed by free_reservations alone.
        revoke delete on {schema}.reservation from dedup_run;
        for pages in select i.inhrelid from pg_inherits i where i.inhparent = to_regclass('{schema}.reservation_page') loop
            execute format('revoke insert, update on %s from dedup_run', pages);
        end loop;
        grant delete on {schema}.checkpoint, {schema}.blocked_sequence, {schema}.member, {schema}.outbox,
            {schema}.outbox_page,
            {schema}.publisher_lane, {schema}.publisher_event, {schema}.published_id to dedup_run;
        revoke execute on function {schema}.rotate_reservations(), {schema}.purge_reservations(timestamptz, text[]),
            {schema}.drop_purged_reservations() from public;
        -- All that dedup_run calls, by name: a database may grant no function to everybody by default.
        grant execute on function {schema}.rotate_reservations(), {schema}.purge_reservations(timestamptz, text[]), {schema}.reservation_lock(),
            {schema}.close_reservations(), {schema}.drop_purged_reservations(), {schema}.pack_reservations(bigint), {schema}.keep_filter(int, text, bigint, bigint, int),
            {schema}.keep_filter_part(int, int, bytea), {schema}.filter_is_whole(int), {schema}.free_reservations(uuid[]),
            {schema}.hash_in_page(bytea, bytea, uuid), {schema}.key_head(uuid), {schema}.share_reservations(), {schema}.is_reserved(int, uuid),
            {schema}.merge_batches(text), {schema}.purge_bounds(timestamptz), {schema}.guard_transaction(uuid),
            {schema}.claim_unowned(text, text, text, text[], text[], text[]) to dedup_run;
        grant select on {schema}.consumer, {schema}.progress, {schema}.heartbeat, {schema}.member, {schema}.topic, {schema}.checkpoint,
            {schema}.partition_claim, {schema}.batch, {schema}.reservation_generation, {schema}.reservation_phase, {schema}.reservation_floor, {schema}.blocked_sequence, {schema}.letter_count,
            {schema}.publish_destination, {schema}.publisher, {schema}.publisher_lane, {schema}.consumer_action, {schema}.partition_owner, {schema}.processor_checkpoint, {schema}.schema_version,
            {schema}.sink, {schema}.consumer_deletion, {schema}.restored, {schema}.open_letter, {schema}.letter_group, {schema}.letter_age, {schema}.blocked_by_letter to dedup_read;
        grant execute on function {schema}.is_reserved(int, uuid), {schema}.purge_bounds(timestamptz) to dedup_read;
    end if;
end
$rights$;
