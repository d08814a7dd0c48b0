"""Bugs for the tests to notice (mutations.py), a file for each method: by file, (name, test, text, replaced)."""
