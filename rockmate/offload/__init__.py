"""Another memory tier for values of a step: host memory or a disk, and the copies to it."""
