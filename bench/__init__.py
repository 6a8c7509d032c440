"""Measurements of training inside a memory budget: which models, against which peers, measured how.

`models` builds the workloads, `peers` the other ways to train them, `measure` the clocks and the two
memory meters, `run` the command line; `plan_quality` holds plans against bounds and other planners, `knapsack`
among them. Nothing here is imported by the packages that are measured.
"""
