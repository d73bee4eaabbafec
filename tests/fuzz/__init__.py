"""Fuzzing of everything that reads files from strangers; `python -m tests.fuzz --help`."""
