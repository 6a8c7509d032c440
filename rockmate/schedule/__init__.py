"""Schedules: the order in which ops run, and the liveness, peak and time that follow from it."""
