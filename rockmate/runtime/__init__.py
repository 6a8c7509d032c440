"""Schedule -> generated code -> autograd. It imports no solver: a saved plan runs without one."""
