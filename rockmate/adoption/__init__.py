"""Plans for models where they stand, and for those of scripts that do not know of it."""
