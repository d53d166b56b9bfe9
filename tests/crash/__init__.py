"""Real crash loops: processes, database servers, connections and disks are broken at random moments, and every row is counted afterwards.

`make crash N=1000` runs so many more iterations and goes on where the last run ended; docs/explanation/crash.md has what was found.
"""
