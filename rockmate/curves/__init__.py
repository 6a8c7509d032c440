"""Plans at many points of one axis: budgets, or the sizes that a memory holds."""
