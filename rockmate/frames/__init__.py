"""A budget without a captured graph: calls of submodules whose saved tensors are dropped late.

A frame is one call of a chosen submodule. What autograd saves in it can be dropped when memory is
short, and is recomputed by a second run of the call when the backward reads it.
"""
