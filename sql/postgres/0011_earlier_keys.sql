-- A letter holds the keys that edits replaced as well as the one that it has: no purge frees them, and whoever looks keys up finds them.
-- Forward only.

alter table {schema}.letter_history add column payload_hash bigint;
comment on column {schema}.letter_history.key is
    'What an edit replaced. While its letter is open, blocked or discarded, and holds its key, it holds this one, too.';
comment on column {schema}.letter_history.payload_hash is 'Of the payload that the replaced key was reserved with. Null: that of the letter. Of several rows of one key the first counts.';
create index letter_history_key on {schema}.letter_history (key) where key is not null;
