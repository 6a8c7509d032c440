"""Costs: time and workspace of each op, measured on the device or estimated for a machine."""
