"""Hugging Face: Trainer, models from a name and synthetic samples."""
