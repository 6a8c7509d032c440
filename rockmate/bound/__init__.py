"""Lower bounds on the time of every schedule within a budget."""
