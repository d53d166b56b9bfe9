"""A deterministic world in which the real pipeline and planning code run against model stores, one seeded schedule after another.

Instances of a consumer move one at a time; at every `on_step` the schedule says who goes on, who dies, who sleeps while another takes
over, whose call fails, which Spark checkpoint is reset, and when the tables are restored. People reprocess and discard letters meanwhile.
Two model stores: `transactional` (one database transaction, row locks, takeover ends older backends) and `ledger` (compare-and-swap on
a sequence of commits, sinks published afterwards). What the models promise, the contract, kill and race tests show for the real stores.

`python -m simulation 100000` runs so many; `--seed N` replays one and tells what happens in it, step by step.
"""
