"""A trained network as files that others can read."""
