"""Functions that replace ATen ops in a graph. They know nothing of graphs or plans."""
