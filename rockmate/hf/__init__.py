"""Hugging Face: Trainer, length buckets, models from a name and synthetic samples."""
