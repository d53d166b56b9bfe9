"""Side by side with the usual ways: `make bench`. How each number comes about is in README.md."""
