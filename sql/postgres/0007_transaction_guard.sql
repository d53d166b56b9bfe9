-- A guard inside every transaction that a handler runs in: it cannot be committed but by who began it.
-- Forward only. Every row is deleted in the transaction that wrote it: the table stays empty.

-- Unlogged: never published, for the trigger would fail on the other side; and nothing to write to the log, for a table that stays empty.
create unlogged table {schema}.open_transaction (token uuid not null);
comment on table {schema}.open_transaction is
    'Always empty. Each batch writes one row and deletes it, so that the trigger refuse_commit is asked at its COMMIT.';

create function {schema}.refuse_commit() returns trigger
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    writer xid;
    place tid;
begin
    if current_setting('dedup.commit', true) is not distinct from new.token::text then
        return null;
    end if;
    -- SET CONSTRAINTS ALL IMMEDIATE asks, too, and inside a savepoint: there the row gets the number of the savepoint, and is asked again.
    -- At COMMIT and PREPARE TRANSACTION no savepoint is left.
    set constraints refuse_commit deferred;
    insert into open_transaction (token) values (new.token) returning xmin, ctid into writer, place;
    delete from open_transaction where ctid = place;
    if writer = pg_current_xact_id()::xid then
        raise exception 'dedup commits this transaction by itself, together with its checkpoint' using
            errcode = 'invalid_transaction_termination', hint = 'Leave COMMIT out. A part that may fail can be a savepoint.';
    end if;
    return null;
end
$body$;
comment on function {schema}.refuse_commit() is 'Fail a COMMIT that the handler of a batch has sent: what the batch wrote is then rolled back.';

create constraint trigger refuse_commit after insert on {schema}.open_transaction
    deferrable initially deferred for each row execute function {schema}.refuse_commit();
alter table {schema}.open_transaction enable always trigger refuse_commit;

create function {schema}.guard_transaction(token uuid) returns void
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    place tid;
begin
    insert into open_transaction (token) values (guard_transaction.token) returning ctid into place;
    delete from open_transaction where ctid = place;
end
$body$;
comment on function {schema}.guard_transaction(uuid) is
    'From now on this transaction commits only where the setting dedup.commit is this token.';
