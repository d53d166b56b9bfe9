"""What both stores and every way of running share: rules without I/O, and what is asked of a store."""
