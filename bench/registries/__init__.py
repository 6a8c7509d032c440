"""The models of `bench.zoo`: tiny builds of registered architectures, their trial, its page."""
