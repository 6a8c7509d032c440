"""What a planner returns: a schedule and what it promises, as data, as text and in words."""
