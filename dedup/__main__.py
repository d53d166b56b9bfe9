"""`python -m dedup`: the same as the command `dedup`."""

from dedup.cli import main

if __name__ == "__main__":
    main()
