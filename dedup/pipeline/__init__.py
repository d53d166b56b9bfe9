"""One batch, from its rows to its commit."""
