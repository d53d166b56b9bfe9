"""The demo: a real stream of real flights that is killed in mid-run, and a count of what arrived."""
