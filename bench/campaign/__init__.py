"""The cases of `bench.cuda` and its page."""
