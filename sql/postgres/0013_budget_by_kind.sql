-- A budget for each kind of dead letter. What was counted before is forgotten, and counting begins anew.

alter table {schema}.progress
    drop column decided,
    drop column failures,
    drop column lifted,
    add column spent jsonb not null default '{}';
comment on column {schema}.progress.spent is
    'By kind of dead letter, what is used of its budget. decided: events that came to where they may fail in this way, the clock; '
    'failures: values of that clock that failed, the last ones; lifted: up to this value a person has admitted all failures.';
