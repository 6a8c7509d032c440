"""Insides of frames that can be captured: each of their calls runs one of several schedules."""
