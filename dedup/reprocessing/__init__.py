"""Events that run through the handler again: dead letters, positions of the log, unsent messages."""
