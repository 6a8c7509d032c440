"""The cases of `bench.cuda`."""
