"""Calls that stand in for ATen ops in a graph. They know nothing of graphs or plans."""
