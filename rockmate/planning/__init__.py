"""Planning: the search for the fastest schedule within a budget.

`session` turns a captured step into plans. `chunk_variants` decides whether the step runs in
chunks, `strategies` names the searches. Solvers (`knapsack_family`, `rotor_family`,
`checkmate_strategy`) propose schedules, the simulator judges them, and `local_search` improves
them.
"""
