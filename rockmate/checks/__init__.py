"""Small steps, eager and planned, that show on a machine what this package promises."""
