-- The broker's own id of a topic's present life, beside our number of it: a topic that was created again is told by it at once.
-- Forward only. Adds a column without a default: no table is rewritten.

alter table {schema}.topic add column incarnation_id text;
comment on column {schema}.topic.incarnation_id is
    'The broker''s own id of that incarnation (Kafka: topic id; Event Hubs: when it was created). Null: not known yet, or nothing can tell.';
