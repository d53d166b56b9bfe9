"""A year of a consumer in an hour: `python -m kit.year`, see __main__.py."""
