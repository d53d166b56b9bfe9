-- Reservations at rest: a table that takes no new keys is packed into pages of keys, and its rows are dropped.
-- Forward only.
--
-- A key takes 94 bytes as a row with its index, and 30 at most in a page. The first bits of a key say in which page it is: keys are hashes, so
-- pages have about the same size, and one look at an index of whole numbers finds a page. Packing goes in steps, each of them a transaction, and each begins
-- a phase where the next one has to wait until nobody is left who does not know of it:
--   PAGES     pages are written, one range of keys after another; only rows are asked. Who frees a key notes it in reservation_freed.
--   SETTLING  all pages are written. Once nobody is left who began before, what was freed meanwhile is taken out of the pages.
--   COUNTING  pages and rows are counted. The same number: the pages are asked from now on. Another one: packing begins again.
--   PACKED    once nobody is left who asks the rows, they are dropped.

alter table {schema}.reservation_generation
    add packing text check (packing in ('PAGES', 'SETTLING', 'COUNTING', 'PACKED')),
    add packing_phase int,
    add page_shift int,
    add ranges int,
    add ranges_packed int not null default 0,
    add packed_at timestamptz,
    add rows_dropped_at timestamptz;
comment on column {schema}.reservation_generation.packing is 'How far packing is. Null: not begun.';
comment on column {schema}.reservation_generation.packing_phase is 'The phase that began with the last step of packing.';
comment on column {schema}.reservation_generation.page_shift is 'The page of a key is its key_head without so many of the last bits.';
comment on column {schema}.reservation_generation.ranges is 'Into how many ranges of keys, of equal width, the pages are written.';
comment on column {schema}.reservation_generation.packed_at is 'From then on the pages are asked, and no longer the rows.';
comment on column {schema}.reservation_generation.rows_dropped_at is 'Table reservation_00000n is dropped; reservation_page_00000n has its keys.';

create table {schema}.reservation_page (
    page int not null,
    keys bytea not null,
    hashes bytea not null
);
-- Compressing hashes gains nothing. A page that is too large for a block, which random keys do not make, goes elsewhere.
alter table {schema}.reservation_page alter keys set storage external, alter hashes set storage external;
comment on table {schema}.reservation_page is
    'Packed reservations, 16 to 32 in most pages: keys of 16 bytes, sorted, and payload hashes of 8 bytes. Rows are in the children, one for each '
    'packed table. View reservation_key has them one by one.';
alter table {schema}.reservation_page replica identity full;

create table {schema}.reservation_freed (
    generation int not null references {schema}.reservation_generation (id),
    key uuid not null,
    primary key (generation, key)
);
comment on table {schema}.reservation_freed is 'Keys that were freed while their table was being packed: its pages may have them, and are not asked yet.';

create table {schema}.reservation_filter (
    generation int primary key references {schema}.reservation_generation (id),
    made uuid not null default gen_random_uuid(),
    kind text not null,
    keys bigint not null,
    words bigint not null,
    parts int not null
);
comment on table {schema}.reservation_filter is
    'A Bloom filter for each packed table: a key that it does not have is not in the pages. A process reads it in place of the pages.';
comment on column {schema}.reservation_filter.made is 'Names this filter in all copies of the database: a process keeps it under that name.';
comment on column {schema}.reservation_filter.kind is 'How the filter is computed. A process that does not know the kind asks the pages.';
comment on column {schema}.reservation_filter.keys is 'How many keys it was made of. Some may have been freed since.';
comment on column {schema}.reservation_filter.words is 'How many words of 64 bits each of its two halves has: a power of two.';

create table {schema}.reservation_filter_part (
    generation int not null references {schema}.reservation_filter (generation) on delete cascade,
    part int not null,
    made uuid not null,
    words bytea not null,
    primary key (generation, part)
);
alter table {schema}.reservation_filter_part alter words set storage external;
comment on table {schema}.reservation_filter_part is 'The words of a filter, little-endian, its first half before its second, so many bytes in a row.';
comment on column {schema}.reservation_filter_part.made is 'The filter whose part it is: a part of another copy of the database is none.';

create function {schema}.key_head(key uuid) returns bigint
    language sql immutable
as $body$ select ('x' || left(key::text, 8))::bit(32)::bigint >> 1 $body$;
comment on function {schema}.key_head(uuid) is 'The first 31 bits of a key, as a number.';

create function {schema}.least_key(head bigint) returns uuid
    language sql immutable
as $body$ select (lpad(to_hex(head << 1), 8, '0') || repeat('0', 24))::uuid $body$;
comment on function {schema}.least_key(bigint) is 'The least key with this head.';

create function {schema}.packing_lock() returns bigint
    language sql stable set search_path = {schema}, pg_temp
as $body$ select (1684366449::bigint << 32) | 'reservation'::regclass::oid::bigint $body$;
comment on function {schema}.packing_lock() is 'The advisory lock of whoever packs. Taken before reservation_lock. No batch takes it.';

create function {schema}.hash_in_page(keys bytea, hashes bytea, key uuid) returns bytea
    language sql immutable
as $body$
select substring(hashes from 8 * n + 1 for 8)
from generate_series(0, length(keys) / 16 - 1) n where substring(keys from 16 * n + 1 for 16) = uuid_send(key)
$body$;
comment on function {schema}.hash_in_page(bytea, bytea, uuid) is
    'The payload hash of a key in a page, null where it is not there. For the case that the bytes of a key are found across two others.';

create function {schema}.begin_packing(number int, portion bigint) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    child text := 'reservation_page_' || lpad(number::text, 6, '0');
    keys float := greatest(1, pg_relation_size(to_regclass('reservation_' || lpad(number::text, 6, '0'))) / 52.0);
    permission record;
begin
    execute format('create table %I (primary key (page)) inherits (reservation_page)', child);
    for permission in
        select case when a.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as who, a.privilege_type as what
        from pg_class c, aclexplode(c.relacl) a
        where c.oid = 'reservation_page'::regclass and a.grantee <> c.relowner
    loop
        execute format('grant %s on %I to %s', permission.what, child, permission.who);
    end loop;
    update reservation_generation set packing = 'PAGES', ranges_packed = 0, packing_phase = next_reservation_phase(),
        page_shift = 31 - least(26, greatest(0, floor(log(2, (keys / 16)::numeric)))), ranges = greatest(1, least(16, ceil(keys / portion)))
    where id = number;
    return 'begun';
end
$body$;
comment on function {schema}.begin_packing(int, bigint) is
    'Under packing_lock and reservation_lock: an empty table of pages. A row takes 52 bytes, and a page is to have 16 to 32 keys.';

create function {schema}.pack_range(number int, shift int, range int, ranges int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set work_mem = '64MB'
as $body$
declare
    -- Ranges end where pages do.
    least_head bigint := ((2147483648 * range / ranges) >> shift) << shift;
    next_head bigint := ((2147483648 * (range + 1) / ranges) >> shift) << shift;
begin
    execute format(
        'insert into %I (page, keys, hashes)
        select key_head(r.key) >> $1, string_agg(uuid_send(r.key), ''''::bytea order by r.key),
            string_agg(int8send(r.payload_hash), ''''::bytea order by r.key)
        from only %I r where r.key >= $2 and (r.key < $3 or $3 is null)
        group by 1 order by 1',
        'reservation_page_' || lpad(number::text, 6, '0'), 'reservation_' || lpad(number::text, 6, '0')
    ) using shift, least_key(least_head), case when range + 1 < ranges then least_key(next_head) end;
    update reservation_generation set ranges_packed = range + 1 where id = number;
    return 'range written';
end
$body$;
comment on function {schema}.pack_range(int, int, int, int) is 'Write the pages of one range of keys. Under packing_lock.';

create function {schema}.without_keys(part bytea, width int, keys bytea, gone bytea[]) returns bytea
    language sql immutable
as $body$
select coalesce(string_agg(substring(part from width * n + 1 for width), ''::bytea order by n), ''::bytea)
from generate_series(0, length(keys) / 16 - 1) n where substring(keys from 16 * n + 1 for 16) <> all(gone)
$body$;
comment on function {schema}.without_keys(bytea, int, bytea, bytea[]) is
    'What a page has of its keys, so many bytes of each, without those that are gone.';

create function {schema}.take_out(number int, shift int, gone uuid[]) returns void
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    -- Pages are locked in one order: nobody waits in a circle. Whoever had to wait for a page writes what was left of it: what is set depends on
    -- the page alone, which the server then reads anew. A key that the snapshot does not find was never there, or is taken out already.
    execute format(
        'with found as materialized (
            select q.page, array_agg(w.key) as gone
            from (select (key_head(k) >> $1)::int as page, uuid_send(k) as key from unnest($2) k) w join only %1$I q on q.page = w.page
            where position(w.key in q.keys) > 0
            group by q.page
        ), locked as materialized (
            select q.page, f.gone from found f join only %1$I q on q.page = f.page order by q.page for update of q
        )
        update only %1$I p set keys = without_keys(p.keys, 16, p.keys, l.gone), hashes = without_keys(p.hashes, 8, p.keys, l.gone)
        from locked l where p.page = l.page',
        'reservation_page_' || lpad(number::text, 6, '0')
    ) using shift, gone;
exception when undefined_table then
    null; -- Not made yet, or dropped since this was planned: nobody asks it.
end
$body$;
comment on function {schema}.take_out(int, int, uuid[]) is 'Take these keys out of the pages of one table. Waits for whoever takes a key out of the same page.';

create function {schema}.free_reservations(wanted uuid[]) returns void
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    with gone as (
        delete from reservation r where r.key = any(wanted) returning r.tableoid, r.key
    )
    insert into reservation_freed (generation, key)
    select g.id, gone.key
    from gone join pg_class c on c.oid = gone.tableoid
    join reservation_generation g on g.packing is not null and c.relname = 'reservation_' || lpad(g.id::text, 6, '0')
    on conflict do nothing;
    -- A statement of its own: it sees what was packed while the first one waited.
    perform take_out(g.id, g.page_shift, wanted)
    from reservation_generation g
    where g.packing is not null and g.dropped_at is null
        and to_regclass('reservation_page_' || lpad(g.id::text, 6, '0')) is not null
    order by g.id;
end
$body$;
comment on function {schema}.free_reservations(uuid[]) is 'Forget these reservations, wherever they are. In a transaction that has called share_reservations.';

create function {schema}.settle_packing(number int, shift int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    freed uuid[] := array(select f.key from reservation_freed f where f.generation = number order by f.key limit 1000);
begin
    perform take_out(number, shift, freed);
    delete from reservation_freed where generation = number and key = any(freed);
    if exists (select from reservation_freed where generation = number) then
        return 'partly settled';
    end if;
    update reservation_generation set packing = 'COUNTING' where id = number;
    return 'settled';
end
$body$;
comment on function {schema}.settle_packing(int, int) is
    'Take out of the pages what was freed while they were written. Who frees keys from now on finds all pages. Some keys at a time: who frees '
    'another key of these pages waits.';

create function {schema}.count_packed(number int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
declare
    pages text := 'reservation_page_' || lpad(number::text, 6, '0');
    same boolean;
begin
    execute format( -- one statement, one snapshot: who frees a key takes it out of both
        'select (select count(*) from only %I) = (select coalesce(sum(length(p.keys)), 0) / 16 from only %I p)',
        'reservation_' || lpad(number::text, 6, '0'), pages
    ) into same;
    if not pg_try_advisory_xact_lock(reservation_lock()) then
        return 'waiting';
    end if;
    if same then
        update reservation_generation set packing = 'PACKED', packed_at = clock_timestamp(), packing_phase = next_reservation_phase() where id = number;
        return 'packed';
    end if;
    execute format('drop table %I', pages);
    delete from reservation_freed where generation = number;
    update reservation_generation set packing = null, page_shift = null, ranges = null, ranges_packed = 0, packing_phase = null where id = number;
    return 'begins again';
end
$body$;
comment on function {schema}.count_packed(int) is
    'Let the pages be asked if they have as many keys as the rows. They do not where somebody wrote rows by hand: then packing begins again.';

create function {schema}.drop_packed_rows(number int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    execute format('drop table if exists %I', 'reservation_' || lpad(number::text, 6, '0'));
    delete from reservation_freed where generation = number;
    update reservation_generation set rows_dropped_at = clock_timestamp() where id = number;
    return 'dropped';
end
$body$;
comment on function {schema}.drop_packed_rows(int) is 'Drop the rows of a packed table. Nobody is left who asks them.';

create function {schema}.pack_reservations(portion bigint default 4000000) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '50ms'
as $body$
declare
    next record;
begin
    if not pg_try_advisory_xact_lock(packing_lock()) then
        return 'waiting';
    end if;
    select * into next from reservation_generation
    where closed_at is not null and purged_at is null and rows_dropped_at is null order by id limit 1;
    if not found then
        return null;
    elsif older_phase_is_open(next.packing_phase) then
        return 'waiting';
    elsif next.packing = 'PAGES' and next.ranges_packed < next.ranges then
        return pack_range(next.id, next.page_shift, next.ranges_packed, next.ranges);
    elsif next.packing = 'SETTLING' then
        return settle_packing(next.id, next.page_shift);
    elsif next.packing = 'COUNTING' then
        return count_packed(next.id);
    elsif not pg_try_advisory_xact_lock(reservation_lock()) then
        return 'waiting';
    elsif next.packing = 'PACKED' then
        return drop_packed_rows(next.id);
    elsif next.packing = 'PAGES' then
        update reservation_generation set packing = 'SETTLING', packing_phase = next_reservation_phase() where id = next.id;
        return 'written';
    end if;
    return begin_packing(next.id, portion);
exception when lock_not_available then
    return 'waiting';
end
$body$;
comment on function {schema}.pack_reservations(bigint) is
    'One step of packing the oldest closed table that is not packed. Returns what was done: "dropped" ends a table, "waiting" says that somebody else '
    'packs, or that open transactions have to end first, null that nothing is left. Neither waits for a batch, nor does a batch wait for it.';

create function {schema}.filter_is_whole(number int) returns boolean
    language sql stable security definer set search_path = {schema}, pg_temp
as $body$
select count(p.part) = f.parts and sum(length(p.words)) = 16 * f.words
from reservation_filter f left join reservation_filter_part p on p.generation = f.generation and p.made = f.made and p.part < f.parts
where f.generation = number
group by f.generation
$body$;
comment on function {schema}.filter_is_whole(int) is 'Whether all parts of the filter of that table are there, by their sizes. Null: it has none.';

create function {schema}.keep_filter(number int, how text, many bigint, width bigint, portions int) returns text
    language plpgsql security definer set search_path = {schema}, pg_temp
as $body$
begin
    if not pg_try_advisory_xact_lock(packing_lock()) then
        return 'waiting';
    end if;
    delete from reservation_filter where generation = number and not filter_is_whole(number);
    insert into reservation_filter (generation, kind, keys, words, parts)
    select g.id, how, many, width, portions
    from reservation_generation g where g.id = number and g.packed_at is not null and g.purged_at is null
    on conflict do nothing;
    return case when found then 'begun' else 'not wanted' end;
end
$body$;
comment on function {schema}.keep_filter(int, text, bigint, bigint, int) is
    'Begin to store the filter of a packed table, whose parts follow in the same transaction. "not wanted": there is one, or the table was purged. '
    'One that lacks parts is replaced.';

create function {schema}.keep_filter_part(number int, portion int, content bytea) returns void
    language sql security definer set search_path = {schema}, pg_temp
as $body$
insert into reservation_filter_part (generation, part, made, words)
select number, portion, f.made, content from reservation_filter f where f.generation = number
$body$;
comment on function {schema}.keep_filter_part(int, int, bytea) is 'Store one part of a filter, in the transaction that began it.';

create or replace function {schema}.drop_purged_reservations() returns text
    language plpgsql security definer set search_path = {schema}, pg_temp set lock_timeout = '50ms'
as $body$
declare
    old record;
    child text;
begin
    if not (pg_try_advisory_xact_lock(packing_lock()) and pg_try_advisory_xact_lock(reservation_lock())) then
        return null;
    end if;
    for old in
        select id, phase from reservation_generation where purged_at is not null and dropped_at is null order by id
    loop
        continue when older_phase_is_open(old.phase);
        child := 'reservation_' || lpad(old.id::text, 6, '0');
        begin
            execute format('drop table if exists %I, %I', child, 'reservation_page_' || lpad(old.id::text, 6, '0'));
            delete from reservation_freed where generation = old.id;
            delete from reservation_filter where generation = old.id;
            update reservation_generation set dropped_at = clock_timestamp() where id = old.id;
            return child;
        exception when lock_not_available then
            return null;
        end;
    end loop;
    return null;
end
$body$;

create function {schema}.dropped_by_now(number int, pages boolean) returns boolean
    language plpgsql volatile security definer set search_path = {schema}, pg_temp
as $body$
begin
    return exists (
        select from reservation_generation g where g.id = number and (g.dropped_at is not null or g.rows_dropped_at is not null and not pages)
    );
end
$body$;
comment on function {schema}.dropped_by_now(int, boolean) is
    'Whether we have dropped the rows of that table, or its pages, whatever the snapshot of the statement knows.';

create or replace function {schema}.is_reserved(number int, key uuid) returns boolean
    language plpgsql stable security definer set search_path = {schema}, pg_temp
as $body$
declare
    seen record;
    child text := 'reservation_' || lpad(number::text, 6, '0');
    has_it boolean;
begin
    select g.packed_at, g.page_shift, g.dropped_at into seen from reservation_generation g where g.id = number;
    if seen.packed_at is not null then
        child := 'reservation_page_' || lpad(number::text, 6, '0');
    end if;
    if to_regclass(child) is null then
        return seen.dropped_at is null and dropped_by_now(number, seen.packed_at is not null);
    elsif seen.packed_at is null then
        execute format('select exists (select from only %I r where r.key = $1)', child) into has_it using key;
    else
        execute format(
            'select exists (select from only %I p where p.page = key_head($1) >> $2 and hash_in_page(p.keys, p.hashes, $1) is not null)', child
        ) into has_it using key, seen.page_shift;
    end if;
    return has_it;
exception when undefined_table then -- dropped since it was found
    return dropped_by_now(number, seen.packed_at is not null);
end
$body$;
comment on function {schema}.is_reserved(int, uuid) is
    'Whether the table of that number has the key, packed or not. Asks that table alone: all of them would be locked. True where it was dropped '
    'after the snapshot was taken, which sees no pages that were written since.';

create view {schema}.reservation_key as
select g.id as generation, r.key, r.payload_hash
from {schema}.reservation r
join pg_catalog.pg_class c on c.oid = r.tableoid
left join {schema}.reservation_generation g on c.relname = 'reservation_' || lpad(g.id::text, 6, '0')
where g.packed_at is null and g.purged_at is null
union all
select g.id, encode(substring(p.keys from 16 * n.at + 1 for 16), 'hex')::uuid,
    ('x' || encode(substring(p.hashes from 8 * n.at + 1 for 8), 'hex'))::bit(64)::bigint
from {schema}.reservation_page p
join pg_catalog.pg_class c on c.oid = p.tableoid
join {schema}.reservation_generation g on c.relname = 'reservation_page_' || lpad(g.id::text, 6, '0')
cross join lateral generate_series(0, length(p.keys) / 16 - 1) n (at)
where g.packed_at is not null and g.purged_at is null;
comment on view {schema}.reservation_key is
    'Each reserved key with its payload hash and the number of its table, packed or not. Reads everything; without a number: written by hand.';

revoke all on function {schema}.dropped_by_now(int, boolean) from public;
revoke all on function {schema}.begin_packing(int, bigint) from public;
revoke all on function {schema}.pack_range(int, int, int, int) from public;
revoke all on function {schema}.take_out(int, int, uuid[]) from public;
revoke all on function {schema}.free_reservations(uuid[]) from public;
revoke all on function {schema}.settle_packing(int, int) from public;
revoke all on function {schema}.count_packed(int) from public;
revoke all on function {schema}.drop_packed_rows(int) from public;
revoke all on function {schema}.pack_reservations(bigint) from public;
revoke all on function {schema}.keep_filter(int, text, bigint, bigint, int) from public;
revoke all on function {schema}.keep_filter_part(int, int, bytea) from public;
revoke all on function {schema}.filter_is_whole(int) from public;
