"""Moves to another memory tier: the parts of `bench.offload`.

`simulated` plans large models for GPUs, `measured` trains small ones with a disk.
"""
