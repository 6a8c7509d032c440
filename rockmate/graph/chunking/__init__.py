"""Runs a region of the joint graph in chunks of its rows: a rewrite before planning."""
