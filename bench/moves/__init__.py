"""Moves to another memory tier: the parts of `bench.offload`.

`simulated` plans large models for GPUs, `measured` trains small ones with a disk, `peers` compares
them there with other ways to offload, and `batches` finds the largest batches. `page` writes the
page.
"""
