"""`python -m dedup`: the same as the command `dedup`."""

from dedup.cli import program

if __name__ == "__main__":
    program()
