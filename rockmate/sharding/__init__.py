"""Sharding a model's parameters over ranks, gathered where the forward reads them."""
