"""Module and sample -> joint forward and backward graph, with a role for each of its ends."""
