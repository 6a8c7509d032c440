"""What fits a device: the largest batch or the longest sequence, and what each size costs."""
