-- What tells state that was restored, in whole or in part, from state that was written here: view `restored` says what contradicts it.
-- Forward only.

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
where case -- in this order: a table that is purged must not be locked any more
    when p.reserved is null then false
    when exists (select from {schema}.reservation_generation g where g.id = p.reserved_in and g.purged_at is not null) then false
    else not {schema}.is_reserved(p.reserved_in, p.reserved)
end
union all
select p.consumer_id, format('`reservation_generation` lacks table %s', p.reserved_in)
from {schema}.progress p where p.reserved_in > (select max(g.id) from {schema}.reservation_generation g)
union all
select p.consumer_id, format('`outbox_page` is at page %s, page %s was numbered', s.page, p.page)
from {schema}.progress p join {schema}.last_page s on s.page < p.page;
comment on view {schema}.restored is 'What shows that tables of a consumer were restored to an older time. Empty where nothing does.';
