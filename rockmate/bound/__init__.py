"""Lower bounds: the time that no schedule within a budget beats."""
