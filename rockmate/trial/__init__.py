"""A trial holds a step against eager: the same call, the same state, all that it leaves behind."""
