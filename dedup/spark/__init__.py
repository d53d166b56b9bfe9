"""What needs Spark: frames, columns, and a local session. The only place that imports pyspark."""
