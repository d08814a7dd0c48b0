"""The contract every network keeps, usable by anyone who adds one, and the mutations that keep its tests honest."""
