"""Training scripts of other projects, unchanged, in eager and under `rockmate run`."""
