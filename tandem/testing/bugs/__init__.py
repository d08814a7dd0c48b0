"""Bugs for the tests to notice (mutations.py), a file a part or method: by file, (name, test, text, replaced)."""
