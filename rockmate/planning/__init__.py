"""The search for the fastest schedule within a budget."""
