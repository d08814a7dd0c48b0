"""Bugs for the tests to notice, a file for each part and method: by file, (name, test, text, replaced)."""
