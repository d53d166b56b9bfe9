-- Whether the last chunk of the last batch is decided: a state restored to between two chunks of a batch is told by it.
-- Forward only. A constant default: no table is rewritten.

alter table {schema}.progress add column batch_ended boolean not null default true;
comment on column {schema}.progress.batch_ended is 'False: of batch_id some chunks are decided, and not the last one.';
