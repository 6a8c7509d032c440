"""Rewrites a region of a joint graph in chunks of its rows, before planning."""
