"""What everything that speaks to PostgreSQL shares: the DSN, the SQL by name, migrations, and the driver's errors in our words."""
