"""The door: what users call, and the road from a call to the plan that serves it."""
