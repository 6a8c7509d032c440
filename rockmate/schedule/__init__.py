"""The order in which ops run: what lives when, the peak and the time that follow from it."""
